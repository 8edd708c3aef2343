"""Lines of JSON, whoever writes them: in a process of its own, because it takes the process over."""

import json
import subprocess
import sys
from typing import Any

import pytest

from ramify.actors.kit.console import wrapped

BEGIN = """
import sys
from ramify.actors.kit.console import json_console
from ramify.actors.kit.log import get_log
from ramify.protocol.config import LogConfig
json_console(LogConfig(format="json"))
"""


def run(program: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """The records on standard output and standard error, and the exit code."""
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, timeout=60)

    def records(data: bytes) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in data.decode().splitlines()]
        assert all(isinstance(record, dict) and "time" in record for record in found)
        return found

    return records(done.stdout), records(done.stderr), done.returncode


def test_prints_of_every_kind() -> None:
    out, err, code = run("""
import os, subprocess
print("plain"); print("two\\nlines")
sys.stderr.write("half"); sys.stderr.flush(); sys.stderr.write(" a line\\n")
sys.stderr.write("caf\\u00e9 \\udc00\\n")
os.write(2, b"from C \\xff\\n")
print('{"time": "t", "message": "is one already"}')
print('{no json}'); print('[1]')
subprocess.run([sys.executable, "-c", "print('a child'); import sys; sys.exit('its end')"])
print("no end", end="")
""")
    assert code == 0
    texts = ["plain", "two", "lines", "is one already", "{no json}", "[1]", "a child", "no end"]
    assert [r["message"] for r in out] == texts
    assert {"time": "t", "message": "is one already"} in out
    texts = ["half a line", "caf\u00e9 \\udc00", "from C \ufffd", "its end"]
    assert [(r["logger"], r["message"]) for r in err] == [("stderr", text) for text in texts]


def test_loggers_warnings_and_exceptions_keep_their_structure() -> None:
    out, err, code = run("""
import asyncio, logging, threading, warnings
get_log("ramify.x").info("ours", n=1, bad=float("nan"), odd=object())
logging.getLogger("foreign").warning("theirs")
logging.getLogger("foreign").info("not shown")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0, name="worker"); thread.start(); thread.join()
class Bad:
    def __del__(self): raise ValueError("unraisable")
Bad()
async def main():
    asyncio.get_running_loop().call_soon(lambda: [][1])
    await asyncio.sleep(0)
asyncio.run(main())
raise RuntimeError("the end")
""")
    assert (out, code) == ([], 1)
    by_message = {r["message"].split(":")[0].split("\n")[0]: r for r in err}
    assert by_message["ours"]["n"] in (1, "1")
    assert by_message["theirs"]["logger"] == "foreign"
    assert "not shown" not in by_message
    assert any("a warning" in r["message"] and r["logger"] == "py.warnings" for r in err)
    assert "ZeroDivisionError" in by_message["an uncaught exception ends thread worker"]["exception"]
    assert any("unraisable" in r.get("exception", "") for r in err)
    assert any("IndexError" in r.get("exception", "") and r["logger"] == "asyncio" for r in err)
    assert "the end" in by_message["an uncaught exception ends the process"]["exception"]
    assert [r for r in err if r["logger"] == "stderr"] == []


@pytest.mark.parametrize("line", [b"", b"x", b"{", b"[]", b'"s"', b"\xff", b'{"a": NaN'])
def test_what_is_no_object_is_wrapped(line: bytes) -> None:
    record = json.loads(wrapped(line, "stdout", "info"))
    assert record["message"] == line.decode(errors="replace")
    assert (record["logger"], record["level"]) == ("stdout", "info")


def test_an_object_stays() -> None:
    assert wrapped(b'{"a": 1}', "stdout", "info") == b'{"a": 1}\n'
