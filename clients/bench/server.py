"""A `ramify serve` in a process of its own, to be measured, and what a server tells of itself."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec

from ramify.clients.bench.load_program import Target
from ramify.clients.bench.session import BenchFailed, seen
from ramify.clients.bench.shapes import write_model_folder

STOP_S = 60.0
_READY = re.compile(r'ready: ([^\s"]+)')  # also inside a line of JSON
_SAMPLE = re.compile(r"^(ramify_\w+) (\S+)$", re.MULTILINE)
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would be measured too


class RunningServer(msgspec.Struct, frozen=True):
    """A running server. `ready_s`: from the start of its process until /readyz said yes."""

    url: str
    ready_s: float
    pid: int = 0


@contextmanager
def served(
    flags: Sequence[str],
    shape: str | None,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "ramify.clients.cli", "serve"),
) -> Iterator[RunningServer]:
    """Start `ramify serve FLAGS` on a free port; stop it at the end of the block.

    `shape`: serve a config of this shape with random weights. `environment`: variables beside our
    own. `program`: what Python runs, with the flags behind it. Its log goes to our stderr.
    Raises BenchFailed if it ends before it is ready, or inside the block.
    """
    command = [sys.executable, *program, "--port", "0", "--log-level", "warning"]
    with _ended_by_sigterm(), tempfile.TemporaryDirectory() as folder:
        if shape is not None:
            write_model_folder(Path(folder), shape)
            command += ["--model", folder, "--name", shape, "--load-format", "dummy"]
        command += flags
        begin = time.perf_counter()
        variables = {**os.environ, **(environment or {})}
        variables.pop("RAMIFY_AUTH_TOKEN", None)  # it is the user's server that this one guards
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
        try:
            url = _announced(process)
            get(http_url(url) + "/readyz", None)
            try:
                yield RunningServer(url, time.perf_counter() - begin, process.pid)
            except (BenchFailed, OSError):
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.5)  # its sockets close a moment before it ends
                    raise BenchFailed(
                        f"the server ended with code {code} meanwhile: see above"
                    ) from None
                raise
        finally:
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
            finally:  # also where a second Ctrl-C ends the wait
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the block like an exception, so that our server does not outlive us."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _announced(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := _READY.match(line):
            return found[1]
    raise BenchFailed(f"the server ended with code {process.wait()} before it was ready: see above")


def http_url(url: str) -> str:
    """The root of a server's HTTP side, for its ws(s):// or http(s):// URL."""
    return re.sub("^ws", "http", url).removesuffix("/v1/ws").rstrip("/")


def get(url: str, token: str | None) -> bytes:
    """Get the body. Raises BenchFailed unless the answer is 200."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with _opener.open(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            body: bytes = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            raise BenchFailed(f"{url} answered HTTP {error.code}: {seen(error.read())}") from None
    except (OSError, ValueError, HTTPException) as error:
        why = getattr(error, "reason", error)  # a URLError is the reason in brackets
        raise BenchFailed(
            f"cannot read {url}: {why}: is this the address of a server that runs?"
        ) from None
    return body


def about(target: Target) -> dict[str, Any]:
    """Ask the server what it serves. Raises BenchFailed without an answer."""
    path = {"ramify": "/v1/info", "sglang": "/get_model_info", "openai": "/v1/models"}[target.kind]
    url = http_url(target.url) + path
    try:
        facts: dict[str, Any] = msgspec.json.decode(get(url, target.token), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BenchFailed(f"{url} is not JSON: {error}") from None
    return facts


def device_time(target: Target) -> tuple[float, int]:
    """Ask for the seconds that steps took on the device so far, and their count. Raises BenchFailed.

    From the histogram `ramify_step_seconds` of /metrics.
    """
    text = get(http_url(target.url) + "/metrics", target.token).decode("utf-8", "replace")
    samples = dict(_SAMPLE.findall(text))
    try:
        return float(samples["ramify_step_seconds_sum"]), int(
            float(samples["ramify_step_seconds_count"])
        )
    except (ValueError, OverflowError) as error:
        raise BenchFailed(f"/metrics has numbers that are none: {error}") from None
    except KeyError as error:
        raise BenchFailed(f"/metrics holds no {error}: is it a Ramify server?") from None
