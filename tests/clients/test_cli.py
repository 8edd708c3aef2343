"""The console script: exit codes, one-line errors, `info`, and that torch stays out."""

import io
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ramify import __main__ as entry
from ramify.clients import cli
from ramify.clients.commands import engine, info, serve
from ramify.protocol.config import EngineConfig
from ramify.protocol.errors import Unauthorized


def run(*argv: str) -> int:
    return cli.main(list(argv))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("ramify ")


def test_a_missing_token_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> None:
        raise Unauthorized("this server needs a token")

    monkeypatch.setattr(info, "server_info", refused)
    assert run("info", "--url", "ws://127.0.0.1:5/v1/ws") == 1
    assert capsys.readouterr().err == "ramify: this server needs a token (here: --token TOKEN)\n"


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["nope"], ["serve", "--port", "x"]):
        with pytest.raises(SystemExit) as caught:
            run(*argv)
        assert caught.value.code == 2
    capsys.readouterr()
    assert run("serve", "--model", "m", "--host", "0.0.0.0") == 2
    error = capsys.readouterr().err
    assert error.startswith("ramify: --host 0.0.0.0")
    assert error.count("\n") == 1
    assert run("chat", "--session", "s") == 2
    assert run("chat", "--set", "heat=1", "--url", "localhost:9") == 2


def test_a_server_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert run("chat", "--url", "ws://127.0.0.1:9") == 1
    assert (
        "cannot connect to ws://127.0.0.1:9/v1/ws: nothing listens there (ramify serve"
        in capsys.readouterr().err
    )
    assert run("info", "--url", "ws://127.0.0.1:9") == 1
    assert "cannot read http://127.0.0.1:9/v1/info" in capsys.readouterr().err


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "serve", interrupted)
    monkeypatch.setattr(engine, "configure_log", lambda *_: None)
    assert run("serve", "--model", "m", "--port", "0") == 130  # 0: what else runs here is not looked for


def test_serve_shows_progress_and_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[EngineConfig] = []

    def scripted(config: EngineConfig, progress: engine.Progress) -> None:
        seen.append(config)
        progress("loading weights", 0.1)
        progress("loading weights", 0.6)
        progress("ready at ws://127.0.0.1:5/v1/ws", 1.0)

    monkeypatch.setattr(engine, "serve", scripted)
    monkeypatch.setattr(engine, "configure_log", lambda *_: None)
    assert run("serve", "--model", "./some/folder", "--port", "0") == 0
    out, err = capsys.readouterr()
    assert seen[0].server.port == 0
    assert out.startswith("model: folder\nready: ws://127.0.0.1:5/v1/ws\n")
    assert "page http://127.0.0.1:5/" in out
    assert err == "loading weights\n"


def test_announce(capsys: pytest.CaptureFixture[str]) -> None:
    serve.announce("ws://h:1/v1/ws")
    assert "ramify chat --url ws://h:1/v1/ws" in capsys.readouterr().out


def test_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    assert run("info", "--model", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "  num_hidden_layers: 2\n" in out
    assert "architectures: LlamaForCausalLM" in out
    assert "1 files, 1.0 MiB" in out
    assert "chat template: no" in out
    assert "  websockets: " in out
    (tmp_path / "config.json").write_text("{")
    assert run("info", "--model", str(tmp_path)) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert run("info", "--model", str(tmp_path / "none")) == 2
    assert run("info", "--tensor-parallel", "2") == 2
    assert "give --model too" in capsys.readouterr().err
    assert run("info", "--model", str(tmp_path), "--expert-parallel") == 2
    assert "give --tensor-parallel too" in capsys.readouterr().err


def test_info_of_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        assert run("info", "--url", f"ws://127.0.0.1:{silent.getsockname()[1]}") == 1
    assert "nothing listens there" in capsys.readouterr().err
    for started, shown in ((86400.0 * 366, "started: 1971-01-0"), (1e300, "started: 1e+300")):
        monkeypatch.setattr(info, "server_info", lambda *_, started=started: {"started": started})
        assert run("info", "--url", "ws://127.0.0.1:5") == 0
        assert shown in capsys.readouterr().out


def test_a_model_with_a_template(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert info.model_info(tmp_path)["chat template"] == "yes"


def test_clients_do_not_load_torch() -> None:
    code = (
        "import sys, ramify.clients.cli\n"
        "loaded = {'torch', 'transformers', 'ramify.actors', 'numpy'} & sys.modules.keys()\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("serve", "--modle", "x"), "--model"),
        (("chat", "--tokne=x"), "--token"),
        (("sevre",), "serve"),
        (("bench", "thoughput"), "throughput"),
        (("serve", "--quantization", "int9"), "int8"),
    ],
)
def test_a_misspelt_word_is_met_with_the_right_one(
    words: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(words)
    assert f"(did you mean {flag}?)" in capsys.readouterr().err


def test_info_tells_why_a_model_is_not_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoneForCausalLM"]}')
    assert run("info", "--model", str(tmp_path)) == 0
    assert "not served: " in (out := capsys.readouterr().out)
    assert "NoneForCausalLM" in out


def test_an_interrupt_is_quiet_while_commands_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "ramify.clients.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "ramify.clients.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert entry.main() == 130


def test_little_is_imported_before_interrupts_are_quiet() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = {*sys.modules}; import ramify.__main__;"
        "print(*sorted({*sys.modules} - before))"
    )
    source = str(Path(entry.__file__).parents[1])
    python = [sys.executable, "-I", "-S", "-c", code, source]
    found = subprocess.run(python, capture_output=True, text=True, check=True).stdout.split()
    assert found == ["ramify", "ramify.__main__"]
