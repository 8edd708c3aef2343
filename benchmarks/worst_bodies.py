"""The worst body of each HTTP API, and the worst message of /v1/ai: how long is a request's own turn?

    python benchmarks/worst_bodies.py [--only TEXT] [--bytes 1048576] [--limit 20] [--json FILE]

Each body has as many entries of one kind as fit: messages, parts, calls, results, thoughts with good
signatures, items, free JSON, token ids, prompts that share a schema. It is handed to the API as the port
does it, whole; what is measured is the CPU time of the thread until there is a refusal or a dialogue
with its ops, the least of `--repeat` times, without pauses of the garbage collector. What sessions make
of the ops is `worst_frames.py`'s.

The exit code is 1 if one took over `--limit` milliseconds.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from report import headline, machine, write_json

from ramify.actors.gateway.apis.ai.chunks import ChatDialogue
from ramify.actors.gateway.apis.ai.requests import SendRequest
from ramify.actors.gateway.apis.anthropic.signatures import Signer
from ramify.actors.gateway.apis.openai.requests import decode
from ramify.actors.gateway.apis.registry import apis
from ramify.actors.gateway.port.http import HttpRequest, Response
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.config import Limits, ServerConfig
from ramify.protocol.errors import RamifyError
from ramify.protocol.json_value import OneFrame
from tests.actors.gateway.conftest import Harness

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, AI = "/v1/messages", "/api/chat", "/v1/ai"
HEADERS = {"anthropic-version": "2023-06-01"}
USER = {"role": "user", "content": "x"}
_json = json.JSONEncoder(separators=(",", ":")).encode


Entry = str | Callable[[int], str]


class Filler:
    """Makes bodies: a text in which `"#"` stands for as many entries as there is room for."""

    def __init__(self, room: int) -> None:
        self._room = room

    def __call__(self, whole: object, entry: Entry, most: int = 1 << 24) -> str:
        """`entry`: the JSON of one, or what gives it by its number."""
        text, made = _json(whole), list[str]()
        left = self._room - len(text)
        for number in range(most):
            made.append(entry if isinstance(entry, str) else entry(number))
            left -= len(made[-1]) + 1
            if left < 0:
                del made[-1]
                break
        return text.replace('"#"', ",".join(made), 1)


def holding(outer: object, count: int, inner: str) -> str:
    """The JSON of `outer` with so many of `inner` for its mark."""
    return _json(outer).replace('"#"', ",".join([inner] * count), 1)


def by_turns(*entries: object) -> Callable[[int], str]:
    texts = [_json(each) for each in entries]
    return lambda number: texts[number % len(texts)]


LISTS = holding({"a": ["#"]}, 20_000, "[]")
SCHEMA = {"type": "object", "properties": {f"p{i}": {"enum": [1] * 60} for i in range(900)}}


def of_chats(fill: Filler) -> Iterator[tuple[str, str, str]]:
    """What the APIs of chats have in common: paths, names and bodies."""
    answer = {"role": "assistant", "content": "x"}
    for path, key in (
        (CHAT, "messages"),
        (OLLAMA, "messages"),
        (RESPONSES, "input"),
        (MESSAGES, "messages"),
    ):
        base: dict[str, Any] = {"model": "m"} | ({"max_tokens": 9} if path == MESSAGES else {})
        yield path, "messages", fill(base | {key: ["#"]}, _json(USER), 1 << 14)
        yield path, "two roles", fill(base | {key: ["#"]}, by_turns(answer, USER), 1 << 14)
        tool: dict[str, Any] = {"name": "f", "parameters": {"enum": [1] * 60}}
        match path:
            case "/v1/responses":
                tool = {"type": "function", **tool}
            case "/v1/messages":
                tool = {"name": "f", "input_schema": tool["parameters"]}
            case _:
                tool = {"type": "function", "function": tool}
        yield path, "tools", fill(base | {key: [USER], "tools": ["#"]}, _json(tool), 1000)
    for path in (CHAT, OLLAMA):
        whole = {"model": "m", "messages": [USER, "#"]}
        calling = {"role": "assistant", "tool_calls": ["#"]}
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        yield path, "calls", fill(whole, holding(calling, 1000, _json(call)))
        call = {"function": {"name": "f", "arguments": "#"}}
        values = _json(calling).replace('"#"', _json(call).replace('"#"', LISTS))
        yield path, "values of calls", fill(whole, values)
    for path in (CHAT, MESSAGES):
        whole = {"model": "m", "max_tokens": 9, "messages": ["#", USER]}
        parts = {"role": "user", "content": ["#"]}
        yield path, "parts", fill(whole, holding(parts, 1000, '{"type":"text","text":""}'))
    read = {"role": "assistant", "content": "x", "parsed": "#"}
    yield CHAT, "parsed answers", fill({"messages": ["#"]}, _json(read).replace('"#"', LISTS))


def of_single_apis(fill: Filler, signer: Signer) -> Iterator[tuple[str, str, str]]:
    """What one API alone has: paths, names and bodies."""
    items = {"input": [USER, "#"]}
    called = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": ""}
    yield RESPONSES, "calls, outputs", fill(items, by_turns(called, output), 16_000)
    yield RESPONSES, "summaries", fill(items, _json({"type": "reasoning", "summary": [1] * 1000}))
    parts = holding({"role": "assistant", "content": ["#"]}, 1000, '{"type":"output_text","text":""}')
    yield RESPONSES, "parts", fill(items, parts)

    asked = {"model": "m", "max_tokens": 9, "messages": [USER, "#"]}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1"}
    said, told = {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}
    system = {"role": "system", "content": "x"}
    yield MESSAGES, "call, result, system", fill(asked, by_turns(said, told, system), 16_000 // 3 * 3)
    thought = _json({"type": "thinking", "thinking": "x", "signature": signer.sign("x")})
    thoughts = holding({"role": "assistant", "content": ["#"]}, 4, thought)
    yield MESSAGES, "thoughts", fill({**asked, "messages": [USER, "#", USER]}, thoughts)
    found = {"type": "tool_reference", "tool_name": "f"}
    results = {"role": "user", "content": [{**result, "content": [found] * 3000}]}
    yield MESSAGES, "references", fill(asked, by_turns(said, results))

    yield TEXT, "token ids", fill({"prompt": ["#"]}, "5")
    yield TEXT, "texts", fill({"prompt": ["#"]}, '""')
    yield TEXT, "one schema, 64 prompts", _json({"prompt": ["a"] * 64, "guided_json": SCHEMA})

    chat = {"requestId": "r", "id": "c", "trigger": "submit-message"}
    last = {"role": "user", "parts": [{"type": "text", "text": "x"}]}
    for name, role, part in (
        ("parts", "user", {"type": ""}),
        ("files", "user", {"type": "file", "mediaType": "text/x", "url": "data:,"}),
        ("steps", "assistant", {"type": "step-start"}),
        ("calls", "assistant", {"type": "tool-f", "state": "output-denied", "toolCallId": "1"}),
    ):
        message = holding({"role": role, "parts": ["#"]}, 1000, _json(part))
        yield AI, name, fill({**chat, "messages": ["#", last]}, message)


def answering(harness: Harness) -> Callable[[str, bytes], str]:
    """A function that hands a body to its API, and says why it was refused, if it was."""
    spoken, hub = apis(), harness.actor.hub

    def ask(path: str, body: bytes) -> str:
        with OneFrame():
            if path == AI:
                try:
                    ChatDialogue(decode(body, SendRequest), "msg")
                except RamifyError as error:
                    return error.message
                return ""
            api = spoken.at(path, HEADERS if path == MESSAGES else {})
            assert api is not None
            answer = api.respond(HttpRequest("POST", path, dict(HEADERS), body), hub)
        return (answer.body or b"").decode() if isinstance(answer, Response) else ""

    return ask


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose path or name has this in it")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of a body, at most")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limit", type=float, default=20.0, help="milliseconds of CPU")
    parser.add_argument("--json")
    options = parser.parse_args()
    most = 2**31 - 1
    rates = {"ops_per_second": most, "ops_burst": most}
    rates |= {"bytes_per_second": most, "bytes_burst": most}
    harness = Harness(ServerConfig(), Limits(**rates), None)
    info = {"model": {"model": "m", "context": 1 << 17}, "started": 0.0}
    harness.status.info = lambda: info  # type: ignore[method-assign]
    harness.actor.loaded((), Served(1 << 17, "</think>"))
    ask = answering(harness)
    rows: list[dict[str, Any]] = []
    fill, signer = Filler(options.bytes), Signer(harness.actor.hub.secret, "")
    for path, name, text in (*of_chats(fill), *of_single_apis(fill, signer)):
        if options.only not in path and options.only not in name:
            continue
        body = text.encode()
        least, refused = float("inf"), ""
        for _ in range(options.repeat):
            gc.collect()
            gc.disable()
            begin = time.thread_time()
            refused = ask(path, body)
            least = min(least, time.thread_time() - begin)
            gc.enable()
        row = {"path": path, "body": name, "bytes": len(body), "ms": round(least * 1e3, 1)}
        rows.append(row | {"refused": refused[:160]})
        print(f"{row['ms']:7} ms  {len(body):8} bytes  {path:22} {name:24} {refused[:90]}", flush=True)
    about = machine()
    over = [row for row in rows if row["ms"] > options.limit]
    print(headline(about))
    print(f"{len(over)} of {len(rows)} bodies took over {options.limit:g} ms of CPU")
    write_json(options.json, about, rows)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
