"""What cannot be started ends at once with an error that says how to mend it, and leaves nothing."""

import asyncio
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify.protocol.errors import ConfigError, ModelError


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def short_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def other_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    config["model_type"] = "mamba"
    (folder / "config.json").write_text(json.dumps(config))


BROKEN = [
    (no_folder, "is not a folder"),
    (no_tokenizer, "tokenizer.json"),
    (broken_tokenizer, "tokenizer.json"),
    (no_config, "config.json"),
    (no_weights, "holds no weights"),
    (short_weights, "model.safetensors"),
    (other_architecture, "MambaForCausalLM"),
]


@pytest.mark.parametrize(("damage", "words"), BROKEN, ids=[damage.__name__ for damage, _ in BROKEN])
async def test_a_model_folder_that_cannot_be_served(
    starting: Any, llama_folder: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    damage(folder)
    error = await starting(ModelError, path=folder)
    assert words in error.message
    assert str(folder) in error.message or words in ("MambaForCausalLM",)


async def test_a_process_says_the_same(starting: Any, llama_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    no_weights(folder)
    error = await starting(ModelError, path=folder, executor="process")
    assert "holds no weights" in error.message


async def test_a_port_in_use(starting: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = await starting(ConfigError, port=port)
        assert f"127.0.0.1:{port}" in error.message
        assert "--port" in error.message


async def test_a_back_end_that_is_not_installed(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.actors.core.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"--grammar-backend outlines needs outlines-core.*pip install"
    ):
        async with serving(model={"grammar_backend": "outlines"}):
            pass


async def test_the_port_is_free_after_the_end(serving: Any) -> None:
    async with serving() as served:
        port = served.engine.port
        async with served.connect() as peer:
            await peer.open()
    async with serving(server={"port": port}) as served:
        assert served.engine.port == port
        async with served.connect() as peer:
            await peer.open()


async def test_the_end_says_bye_and_lets_generations_finish(serving: Any) -> None:
    finished: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def client(served: Any, begun: asyncio.Event) -> None:
        async with served.connect() as peer:
            await peer.open(peer.user(1, "last words"), peer.greedy(2, max_tokens=100))
            await peer.next("delta")
            begun.set()
            bye = await peer.next("bye")
            done = await peer.terminal(2)
            text = served.oracle.text(served.oracle.output(served.oracle.turn("last words"), 100))
            assert peer.text() == text
            finished.set_result((bye, done, await peer.closed()))

    settings = {"grace_s": 20}
    fake = {"step_seconds": 0.002}
    begun = asyncio.Event()
    async with serving(server=settings, fake=fake, idle_at_end=False) as served:
        task = asyncio.create_task(client(served, begun))
        await begun.wait()
    await task
    bye, done, code = finished.result()
    assert bye["after_ms"] > 0
    assert done["reason"] == "length"
    assert code == 1001
