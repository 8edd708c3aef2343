"""The Python and the JavaScript client run the same cases (tests/clients/conformance.json).

A case is a list of steps, each a call of a client's API, with what must come of it (`want`): a part of
the outcome suffices, and `{"error": code}` wants that error. All that the two clients tell must be
equal. `{"$repeat": [text, times]}` stands for a long text.
"""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

import ramify
from ramify.clients.branch import Branch
from ramify.clients.generation import Generation
from ramify.clients.handles import Session
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Delta, Event, Ok, StateReply

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ROOT / "clients/web/test/conformance.js"
SOCKETS = "--experimental-websocket"  # what Node 20 needs, and later ones ignore
FACTS = ("max", "position", "pointer")  # of an error's details, what both tell
SECRET = "conformance-secret"
SERVERS: dict[str, dict[str, Any]] = {
    "open": {"fake": {"step_seconds": 0.002}},
    "guarded": {"server": {"tokens": (SECRET,)}},
}


def _repeated(value: dict[str, Any]) -> Any:
    text, times = value.get("$repeat", ("", 0))
    return text * times if "$repeat" in value else value


CASES: list[dict[str, Any]] = json.loads(
    (ROOT / "tests/clients/conformance.json").read_text(), object_hook=_repeated
)


def _node() -> bool:
    node = shutil.which("node")
    if node is None:
        return False
    probe = [node, SOCKETS, "-e", "new WebSocket('ws://127.0.0.1:9').onerror = () => {}"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


needs_node = pytest.mark.skipif(not _node(), reason="needs node with WebSocket")


async def outcome(awaitable: Awaitable[Any]) -> Any:
    """What came of a call."""
    try:
        return await awaitable
    except RamifyError as error:
        told = {"error": error.code, "kind": type(error).__name__}
        facts = {key: value for key, value in (error.details or {}).items() if key in FACTS}
        return told | ({"details": facts} if facts else {})


def ok(reply: Ok) -> dict[str, Any]:
    return {"branch": reply.branch, "position": reply.position, "result": reply.result}


async def read(generation: Generation) -> dict[str, Any]:
    """A generation, read to its end: its result, and the text that its deltas gave."""
    streamed = ""
    async for delta in generation:
        streamed = streamed[: len(streamed) - delta.cut] + delta.text
    done = await generation
    same = ("branch", "text", "reason", "position", "stop", "choice", "scores", "tokens", "content")
    return {
        **{name: getattr(done, name) for name in (*same, "reasoning", "notes")},
        "streamed": streamed,
        "calls": done.tool_calls and [call["function"] for call in done.tool_calls],
        "logprobs": done.logprobs and len(done.logprobs),
        "mean": done.mean_logprob is not None,
        "prompt": done.usage.prompt,
        "output": done.usage.output,
    }


def shown_tree(state: StateReply) -> dict[str, Any]:
    return {
        "branches": [
            {
                **{key: getattr(each, key) for key in ("branch", "position", "parent", "at", "reason")},
                "meta": each.meta,
                "turns": each.turns
                and [
                    {key: getattr(turn, key) for key in ("kind", "start", "end", "text", "tokens")}
                    for turn in each.turns
                ],
            }
            for each in state.branches
        ],
        "meta": state.meta,
    }


class Play:
    """One case. `clients`: by the name that an `attach` gave them; the first one is ""."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clients: dict[str, Session] = {}
        self.started: dict[str, Generation] = {}
        self.files: dict[str, bytes] = {}

    async def attach(self, fields: dict[str, Any]) -> Any:
        given = dict(fields)
        name, to, view = given.pop("as", ""), given.pop("to", None), given.pop("view", False)
        if to is not None:
            peer = self.clients[to]
            given["session"] = peer.id
            given.setdefault("key", peer.view_key if view else peer.key)
        if "imports" in given:
            given["imports"] = self.files[given["imports"]]
        session = await ramify.connect(self.url, **given)
        self.clients[name] = session
        heads = session.core.heads.by_name.items()
        branches = [{"branch": each, "position": head.position} for each, head in heads]
        return {"branches": branches}

    async def step(self, fields: dict[str, Any]) -> Any:
        given = {key: value for key, value in fields.items() if key != "want"}
        what, who = given.pop("do"), given.pop("who", "")
        if what == "attach":
            return await self.attach(given)
        session = self.clients[who]
        named = given.pop("as", None)
        branch = given.pop("branch", "main") if what != "tree" else "main"
        on = session.branch(branch)
        match what:
            case "append":
                return ok(await on.append(given.pop("text", None), **given))
            case "say":
                return ok(await on.say(given["text"]))
            case "chat":
                return await read(on.chat(given["text"], **given.get("options", {})))
            case "generate":
                return await read(on.generate(**given))
            case "many":
                every = on.generate(names=named, **given)
                return list(await asyncio.gather(*(read(each) for each in every)))
            case "select":
                return await read(on.select(given.pop("choices"), **given))
            case "start" | "some" | "leave" | "stop" | "result":
                return await self.generation(what, named, on, given)
            case "send":
                handles = await session.send(given["ops"])
                return list(await asyncio.gather(*(outcome(self.handle(each)) for each in handles)))
            case "refused":  # as a whole
                await session.send(given["ops"])
                raise AssertionError("the frame was sent")
            case "event" | "foreign":
                return await self.heard(session, what, given)
            case "over":
                async with asyncio.timeout(60):
                    async for _ in session.events():
                        pass
                return {"kind": type(session.error).__name__}
        return await self.change(what, session, on, named, given)

    async def change(
        self, what: str, session: Session, on: Branch, named: Any, given: dict[str, Any]
    ) -> Any:
        match what:
            case "fork":
                await on.fork(*named, **given)
            case "root":
                await session.root(*named)
            case "join":
                return ok(await on.join(*given.pop("from"), **given))
            case "prune":
                op = {"type": "prune", **given}
                (reply,) = await session.send([op])
                return await self.handle(reply)
            case "rollback":
                return ok(await on.rollback(**given))
            case "set":
                return ok(await on.set(**given))
            case "note":
                return ok(await session.set(**given))
            case "drop":
                return ok(await on.drop())
            case "cancel":
                return ok(await on.cancel(**given))
            case "tree":
                return shown_tree(await session.tree(**given))
            case "export":
                self.files[named] = await session.export()
            case "position":
                return {"position": on.position}
            case "credit":
                on.credit(given["upto"])
            case "break":
                for each in self.clients.values():
                    each.link.abort()
            case "close":
                await session.close(**given)
            case _:
                raise AssertionError(f"no such step: {what}")
        return None

    async def generation(self, what: str, named: str, on: Branch, given: dict[str, Any]) -> Any:
        if what == "start":
            self.started[named] = on.generate(**given)
            return None
        generation = self.started[named]
        match what:
            case "some":
                got = 0
                while got < given["characters"]:
                    got += len((await anext(generation)).text)
            case "leave":
                async for delta in generation:
                    if delta.text:
                        break
            case "stop":
                generation.cancel()
            case "result":
                done = await generation
                whole = {"position": done.position, "text": done.text} if given.get("whole") else {}
                return {"reason": done.reason, **whole}  # where it was stopped is a matter of time
        return None

    async def handle(self, handle: Any) -> Any:
        if isinstance(handle, list):
            return list(await asyncio.gather(*(outcome(read(each)) for each in handle)))
        if isinstance(handle, Generation):
            return await read(handle)
        replies = [ok(reply) for reply in await handle]
        return replies[0] if len(replies) == 1 else replies

    async def heard(self, session: Session, what: str, given: dict[str, Any]) -> Any:
        text = ""
        async with asyncio.timeout(60):
            async for note in session.events():
                if isinstance(note, Delta):
                    text += note.text
                elif isinstance(note, Event) and what == "event" and note.op == given["op"]:
                    return {"op": note.op, "branch": note.branch, "details": note.details}
                elif isinstance(note, Event) and what == "foreign" and note.op == "generate":
                    return {"text": text, "reason": (note.details or {})["reason"]}
        return None


async def python(url: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for case in cases:
        play = Play(url)
        if case.get("attach", True):
            await play.attach(case.get("open", {}))
        shown[case["name"]] = [await outcome(play.step(step)) for step in case["steps"]]
        for session in play.clients.values():
            await session.close()
    return shown


def javascript(url: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    command = ["node", SOCKETS, "--no-warnings", str(RUNNER), url]
    told = json.dumps(cases).encode()
    result = subprocess.run(command, input=told, capture_output=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr.decode()
    shown: dict[str, Any] = json.loads(result.stdout)
    return shown


def bare(value: Any) -> Any:
    """Without what is not there: one client says None, the other leaves it out."""
    if isinstance(value, dict):
        return {key: bare(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [bare(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def fits(want: Any, got: Any) -> bool:
    """Whether an outcome holds what is wanted. `"$any"` stands for anything that is there."""
    if want == "$any":
        return got is not None
    if isinstance(want, dict):
        return isinstance(got, dict) and all(fits(each, got.get(key)) for key, each in want.items())
    if isinstance(want, list):
        return isinstance(got, list) and len(want) == len(got) and all(map(fits, want, got))
    return bool(want == got)


def check(cases: list[dict[str, Any]], shown: dict[str, Any]) -> None:
    wrong = []
    for case in cases:
        for step, got in zip(case["steps"], shown[case["name"]], strict=True):
            failed = isinstance(got, dict) and "error" in got
            if failed if "want" not in step else not fits(bare(step["want"]), bare(got)):
                wrong.append(f"{case['name']}: {step} gave {got}")
    assert not wrong, "\n".join(wrong)


def cases_of(server: str) -> list[dict[str, Any]]:
    return [case for case in CASES if case.get("server", "open") == server]


def test_there_are_enough_cases_and_each_has_its_name() -> None:
    names = [case["name"] for case in CASES]
    assert len(names) == len(set(names)) >= 40
    assert {case.get("server", "open") for case in CASES} == set(SERVERS)


@pytest.mark.parametrize("server", sorted(SERVERS))
async def test_the_python_client(serving: Any, server: str) -> None:
    async with serving(**SERVERS[server]) as served:
        check(cases_of(server), await python(served.engine.url, cases_of(server)))


@needs_node
@pytest.mark.parametrize("server", sorted(SERVERS))
async def test_the_javascript_client_says_the_same(serving: Any, server: str) -> None:
    cases = cases_of(server)
    async with serving(**SERVERS[server]) as served:
        url = served.engine.url
        shown = await anyio.to_thread.run_sync(javascript, url, cases)
        check(cases, shown)
        expected = await python(url, cases)
    assert {name: bare(steps) for name, steps in shown.items()} == {
        name: bare(steps) for name, steps in expected.items()
    }
