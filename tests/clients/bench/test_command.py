"""`ramify bench` from its flags to its table, against a small HTTP server and a real one."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ramify.clients import cli
from ramify.clients.bench import measure
from ramify.clients.bench.server import RunningServer
from ramify.clients.commands import bench


def run(*argv: str) -> int:
    return cli.main(["bench", *argv])


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["chat", "--sglang", "http://x", "--append-ahead", "5"], "only a Ramify server"),
        (["tree", "--url", "ws://x", "--warm-prefix"], "needs no such help"),
        (["chat", "--openai", "http://x"], "--model NAME"),
        (["chat", "--url", "ws://x", "--shape", "tiny"], "--serve starts"),
        (["chat", "--url", "ws://x", "--", "--threads", "1"], "--serve starts"),
        (["chat", "--sglang", "x:1"], "give http://host:port"),
        (["overhead", "--sglang", "http://127.0.0.1:1"], "only a Ramify server tells"),
        (["latency", "--url", "ws://127.0.0.1:1", "--processes", "2"], "--processes 1"),
        (["chat", "--url", "ws://x", "--plot", "a.txt"], "a plot is one of"),
        (["chat", "--url", "ws://x", "--json", "/nowhere/a.json"], "there is no folder /nowhere"),
        (["latency", "--url", "ws://x", "--decode", "", "--prefill", ""], "nothing to measure"),
        (["throughput", "--url", "x", "--input-min", "9", "--input-max", "8"], "--input-min is more"),
    ],
)
def test_flags_that_do_not_go_together(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [["chat"], ["chat", "--url", "x", "--serve"], ["chat", "--url", "x", "--turns", "0"],
     ["chat", "--url", "x", "--turns", "x"], ["chat", "--url", "x", "--warmup", "-1"],
     ["latency", "--url", "x", "--decode", "8"], ["nothing"]],
)  # fmt: skip
def test_usage(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    assert caught.value.code == 2


def test_pairs() -> None:
    assert bench.pairs("8x2048,1x2048") == [(8, 2048), (1, 2048)]


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chat", "--url", "ws://127.0.0.1:1") == 1
    assert "cannot read http://127.0.0.1:1/v1/info" in capsys.readouterr().err


SMALL = ("--questions", "3", "--prefix", "20", "--branches", "4", "--first", "6", "--then", "4")


async def test_a_peer_with_and_without_help(
    http_serving: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tree.json"
    async with http_serving(cut=4096) as server:
        flags = ["tree", "--sglang", server.url, *SMALL, "--repeats", "2", "--json", str(file)]
        code = await asyncio.to_thread(run, *flags, "--token", "secret", "--warm-prefix")
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "3 trees, prefix 20, 4 x 6, 4 x 4" in out
    assert "run 2 of 2" in err
    made = json.loads(file.read_text())
    assert "secret" not in file.read_text()
    assert (made["workload"], made["label"]) == ("tree", "sglang tiny")
    assert made["engine"]["info"] == {"model_path": "/models/tiny"}
    assert made["options"]["ids"] == 10_000
    (case,) = made["cases"]
    assert len(case["runs"]) == 2
    for one in case["runs"]:
        assert one["requests"]["extra"].count(True) == 6
        assert sum(one["requests"]["output"]) == 3 * 4 * 10 + 6
        assert one["figures"]["output_tokens"] == 120
        # Two more than the optimum for each tree: the requests that warm its prefixes.
        assert one["figures"]["prompt_computed"] == one["figures"]["prompt_optimum"] + 6


async def test_a_fault_is_no_result(http_serving: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async with http_serving(fault="short") as server:
        flags = ("chat", "--openai", server.url, "--model", "tiny", "--sessions", "2", "--turns", "2")
        assert await asyncio.to_thread(run, *flags) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "63 tokens came of 64" in err


def test_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    @contextmanager
    def served(
        flags: list[str], shape: str | None, environment: dict[str, str]
    ) -> Iterator[RunningServer]:
        asked.append((flags, shape, environment))
        yield RunningServer("ws://x", float(len(asked)))

    monkeypatch.setattr(measure, "served", served)
    assert run("start", "--serve", "--shape", "tiny", "--", "--device", "cpu") == 0
    assert asked == [(["--device", "cpu"], "tiny", {})] * 4  # a warm-up and three
    out = capsys.readouterr().out
    assert "3.00 (2.00-4.00)" in out
    assert "warm" in out


def test_a_cold_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run has an empty cache of compiled kernels of its own, and nothing is left of it."""
    caches: list[Path] = []

    @contextmanager
    def served(
        flags: list[str], shape: str | None, environment: dict[str, str]
    ) -> Iterator[RunningServer]:
        cache = Path(environment["TRITON_CACHE_DIR"])
        assert list(cache.iterdir()) == []
        (cache / "kernel").touch()
        caches.append(cache)
        yield RunningServer("ws://x", 1.0)

    monkeypatch.setattr(measure, "served", served)
    assert run("start", "--serve", "--shape", "tiny", "--cold", "--warmup", "0") == 0
    assert len(set(caches)) == 3
    assert not any(cache.exists() for cache in caches)
    assert "process start to ready, cold" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_of_our_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "overhead.json"
    flags = ("overhead", "--serve", "--shape", "tiny", "--batch", "6", "--input", "24", "--output", "5")
    more = ("--repeats", "2", "--json", str(file), "--", "--device", "cpu", "--threads", "1")
    assert run(*flags, *more) == 0, capsys.readouterr().err
    assert "ready" in capsys.readouterr().out
    made = json.loads(file.read_text())
    assert made["ready_s"] > 0
    assert made["label"] == "ramify tiny"
    assert made["options"]["ids"] == 512  # the vocabulary
    for one in made["cases"][0]["runs"]:
        assert one["figures"]["steps"] >= 5
        assert one["figures"]["wall_over_device"] > 1
        assert sum(one["requests"]["output"]) == 30


@pytest.mark.parametrize(
    ("flags", "token"),
    [
        (["--url", "http://a"], "from the variable"),
        (["--url", "http://a", "--token", "given"], "given"),
        (["--openai", "http://b"], None),  # another server is told nothing of ours
        (["--sglang", "http://b", "--token", "given"], "given"),
    ],
)
def test_the_token_of_our_server(
    flags: list[str], token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMIFY_TOKEN", "from the variable")
    args = cli.build_parser().parse_args(["bench", "chat", *flags])
    with bench._target(args) as (target, _):
        assert target.token == token
