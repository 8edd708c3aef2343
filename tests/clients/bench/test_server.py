"""A server of our own, and what servers tell of themselves."""

import asyncio
from typing import Any

import psutil
import pytest

from ramify.clients.bench import server
from ramify.clients.bench.load_program import Target
from ramify.clients.bench.session import BenchFailed


async def test_about(http_serving: Any) -> None:
    async with http_serving() as fake:
        found = await asyncio.to_thread(server.about, Target("sglang", fake.url))
        assert found == {"model_path": "/models/tiny"}
        models = await asyncio.to_thread(server.about, Target("openai", fake.url))
        assert models["data"][0]["id"] == "tiny"
        with pytest.raises(BenchFailed, match=r"ramify_step_seconds_sum.*Ramify server"):
            await asyncio.to_thread(server.device_time, Target("ramify", fake.url))


def test_nobody_there() -> None:
    with pytest.raises(BenchFailed, match=r"cannot read http://127\.0\.0\.1:1/v1/info"):
        server.about(Target("ramify", "ws://127.0.0.1:1/v1/ws"))


def test_addresses() -> None:
    assert server.http_url("ws://h:1/v1/ws") == "http://h:1"
    assert server.http_url("wss://h/v1/ws") == "https://h"
    assert server.http_url("http://ws:1") == "http://ws:1"


def test_a_server_that_does_not_start(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchFailed, match="ended with code 2 before it was ready"):
        with server.served(["--page-size", "0"], "tiny"):
            pass
    assert "--page-size is 0" in capfd.readouterr().err


@pytest.mark.slow
def test_a_server_that_dies_while_it_is_measured() -> None:
    with pytest.raises(BenchFailed, match="the server ended with code -9 meanwhile"):
        with server.served(["--device", "cpu"], "tiny"):
            (child,) = (own for own in psutil.Process().children() if "serve" in own.cmdline())
            child.kill()
            raise BenchFailed("the server closed the connection")
