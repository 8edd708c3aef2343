"""The worst frame of each op on the worst session: how long is the longest turn of the event loop?

    python benchmarks/worst_frames.py [--only TEXT] [--sessions many,deep] [--limit 20] [--json FILE]

The directory, sessions, cache and scheduler are the real ones, on one event loop, with a fake executor
and a store that takes everything. For each session that a client can make (by a file that it imports, as
far as servers accept it) and each op, one frame of at most `frame_bytes` is sent that makes as much work
as it can. Each callback of the loop is measured in CPU time of its thread, so other load on the machine
matters little. A row is the longest callback, the longest turn of the loop (all callbacks that run
before it looks for events again), the longest pause of the garbage collector (set up as a server's),
which the other columns do not count, and all the CPU time that the frame took. Nor does the fake
executor count.

The exit code is 1 if a callback took over `--limit` milliseconds. Decoding is measured too: a frame is
decoded by the codec in a callback of its own, as the gateway does.
"""

import argparse
import asyncio
import base64
import gc
import json
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))

from report import headline, machine, write_json

from ramify.actors.kit.clock import Clock
from ramify.actors.kit.collector import Collector
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.codec import Codec
from ramify.protocol.config import Limits
from ramify.protocol.errors import RamifyError
from ramify.protocol.saved import (
    EXPORT,
    FORMAT,
    HEAD,
    Exported,
    SavedBranch,
    SavedHead,
    SavedInput,
    SavedLabel,
    SavedOutput,
)
from tests.actors.session.conftest import World
from tests.conftest import write_tokenizer
from tests.manual_clock import ManualClock

CONTEXT, PAGES = 1 << 17, 1 << 18
MODEL = "fake ({} tokens)"
BRANCHES = 1000
_pack = msgspec.msgpack.Encoder().encode
_json = msgspec.json.Encoder().encode


# --- what callbacks cost ------------------------------------------------------------------------------


class CpuMeter:
    """CPU seconds of callbacks. `begin` a row, then read it."""

    def __init__(self) -> None:
        self.longest = self.total = self.turn = self.pause = 0.0
        self.who = ""
        self._turn = 0.0
        self._collecting = self._aside = 0.0
        self._collector = Collector(ManualClock())
        gc.callbacks.append(self._collects)
        handle: Any = asyncio.Handle
        run = handle._run
        loop: Any = asyncio.BaseEventLoop
        once = loop._run_once

        def measured(each: Any) -> None:
            begin, self._aside = time.thread_time(), 0.0
            run(each)
            spent = time.thread_time() - begin - self._aside
            if _name(each) == "measure" or "_at_once" in _name(each):  # ours; a thread's
                return
            self.total += spent
            self._turn += spent
            if spent > self.longest:
                self.longest, self.who = spent, _name(each)

        def turned(each: Any) -> None:
            once(each)
            self.turn, self._turn = max(self.turn, self._turn), 0.0

        handle._run, loop._run_once = measured, turned

    def collect(self, clock: Clock) -> None:
        """Collect garbage as a server does, from now on."""
        self._collector.end()
        self._collector = Collector(clock)
        self._collector.begin()

    def begin(self) -> None:
        gc.collect()
        self.longest = self.total = self.turn = self.pause = self._turn = 0.0
        self.who = ""

    def aside(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`function`, whose time does not count: a server has it done in another process."""

        def called(argument: Any) -> Any:
            begin, before = time.thread_time(), self._aside
            try:
                return function(argument)
            finally:
                self._aside = before + time.thread_time() - begin

        return called

    def _collects(self, phase: str, _: Any) -> None:
        """The garbage collector walks our objects too."""
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            spent = time.thread_time() - self._collecting
            self._aside += spent
            self.pause = max(self.pause, spent)


def _name(handle: Any) -> str:
    task = getattr(handle._callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return str(getattr(task.get_coro(), "__qualname__", task))
    return str(getattr(handle._callback, "__qualname__", handle._callback))


# --- sessions ---------------------------------------------------------------------------------------


class Maker:
    """A file of a session, part by part."""

    def __init__(self, model: str) -> None:
        self.segments: list[Any] = []
        self.ends: list[int] = [0]
        self.branches: list[SavedBranch] = []
        self.labels: list[SavedLabel] = []
        self._model = model

    def input(self, before: int, count: int = 1, **fields: Any) -> int:
        start = self.ends[before]
        values: dict[str, Any] = {
            "before": before, "start": start, "tokens": array("i", [5] * count).tobytes(),
            "text": "x" * count, "raw": None, "tail": "raw", "role": None, "op": None, "messages": [],
            "turn": 1, "chat": False, "history": None,
        }  # fmt: skip
        return self._add(SavedInput(**(values | fields)), start + count)

    def output(self, before: int, count: int = 1, **fields: Any) -> int:
        start = self.ends[before]
        values: dict[str, Any] = {
            "before": before, "start": start, "tokens": array("i", [5] * count).tobytes(),
            "ended": True, "counts": list(range(1, count + 1)), "sizes": [1] * count,
            "text": "7" * count, "labels": None,
            "logprobs": None, "spoken": None, "mean": -1.0, "op": None, "client": None, "quiet": False,
            "tail": "raw", "role": None, "lead": 0, "eos_text": "",
        }  # fmt: skip
        return self._add(SavedOutput(**(values | fields)), start + count)

    def _add(self, segment: Any, end: int) -> int:
        self.segments.append(segment)
        self.ends.append(end)
        return len(self.segments)

    def branch(self, name: str, top: int, of: int = -1, own: int = 0) -> int:
        place = len(self.labels)
        self.labels.append(SavedLabel(name, of, False))
        self.branches.append(
            SavedBranch(
                place + 1, top, place, of, min(own, self.ends[top]), own, 0, [], None, None, None, None
            )
        )
        return place

    def file(self) -> str:
        head = SavedHead(
            FORMAT, "", b"", b"", "", "", 0, False, self._model, 1, [], len(self.branches),
            len(self.segments), 0.0, None, "lazy", None, self.branches, self.labels, [], [], {},
        )  # fmt: skip
        items = {f"s{i}": _pack(each) for i, each in enumerate(self.segments, 1)} | {HEAD: _pack(head)}
        return base64.b64encode(_pack(Exported(EXPORT, FORMAT, "", "", items))).decode()


def _fill(make: Maker, step: Callable[[int], int], room: int = 700_000, most: int = 16_000) -> int:
    """Segments by `step(before)`, as many as a frame holds. Returns the last."""
    top, size = 0, 0
    while size < room and len(make.segments) < most:
        top = step(top)
        size += len(_pack(make.segments[-1])) + 8
    return top


def sessions(model: str) -> Iterator[tuple[str, str]]:
    """Names and files. Each has a branch `main` and, where it says so, 1,000 others `b0` to `b999`."""

    def fan(make: Maker, top: int) -> None:
        make.branch("main", top)
        for i in range(BRANCHES):
            make.branch(f"b{i}", top, of=0)

    make = Maker(model)
    make.branch("main", make.output(make.input(0, 10), 10))
    yield "small", make.file()
    make = Maker(model)
    fan(make, make.output(make.input(0, 10), 10))
    yield "many", make.file()
    make = Maker(model)
    fan(make, _fill(make, make.input, 650_000))
    yield "segments", make.file()
    make = Maker(model)
    fan(make, _fill(make, lambda before: make.input(before, 0), 650_000))
    yield "empty", make.file()
    make = Maker(model)
    fan(make, _fill(make, make.output, 650_000))
    yield "outputs", make.file()
    make = Maker(model)
    fan(make, _fill(make, lambda before: make.output(before, 1, quiet=True), 650_000))
    yield "quiet", make.file()
    make = Maker(model)
    fan(make, make.output(make.input(0, 10), 80_000))
    yield "long", make.file()
    make = Maker(model)
    make.branch("main", 0)
    top, of = 0, 0
    for i in range(BRANCHES):
        top = make.output(make.input(top, 10), 20)
        of = make.branch(f"b{i}", top, of=of, own=make.ends[top - 1])
    yield "deep", make.file()
    make = Maker(model)
    make.branch("main", 0)
    for i in range(BRANCHES):
        top = make.output(make.input(0, 5, tokens=array("i", [5 + i % 250] * 5).tobytes()), 60)
        make.branch(f"b{i}", top, of=0)
    yield "wide", make.file()
    turn = {"chat": True, "role": "user", "tail": "closed"}
    make = Maker(model)
    said = [w.ChatMessage(role="user", content="x")]
    make.branch("main", _fill(make, lambda before: make.input(before, messages=said, **turn)))
    yield "turns", make.file()
    make = Maker(model)
    make.branch(
        "main",
        _fill(make, lambda before: make.input(before, messages=said, history=(before, said), **turn)),
    )
    yield "histories", make.file()
    make = Maker(model)
    first = make.input(0, messages=said, history=(0, said), **turn)
    make.branch(
        "main",
        _fill(
            make,
            lambda before: make.input(before or first, messages=said, history=(first, said), **turn),
        ),
    )
    yield "old histories", make.file()
    make = Maker(model)
    make.branch(
        "main", _fill(make, lambda before: make.input(before, chat=False, tail="open", role="assistant"))
    )
    yield "open turns", make.file()


# --- frames -------------------------------------------------------------------------------------------

NAMES = [f"b{i}" for i in range(BRANCHES)]
FRAME = 1 << 20


def _many(op: dict[str, Any], most: int = 512, *, number: bool = True) -> list[dict[str, Any]]:
    """So many of an op as fit into a frame."""
    size = len(_json(op)) + 12
    return [op | ({"id": i} if number else {}) for i in range(2, 2 + min(most, (FRAME - 64) // size))]


def frames() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Names and ops of the worst frames."""
    for by in ("number", "vote", "logprob", "first"):
        yield f"prune {by}", _many({"type": "prune", "from": NAMES, "by": by, "keep": True, "k": 1})
    yield "prune k", _many({"type": "prune", "from": NAMES, "by": "number", "keep": True, "k": 1000})
    yield (
        "prune into",
        [{"type": "prune", "id": 2, "from": NAMES, "by": "number", "into": NAMES, "k": None}],
    )
    yield "prune drop", [{"type": "prune", "id": 2, "from": NAMES, "by": "number"}]
    yield "join keep", _many({"type": "join", "from": NAMES, "keep": True, "role": None})
    yield "join", [{"type": "join", "id": 2, "from": NAMES, "role": None}]
    yield "rollback turns", _many({"type": "rollback", "turns": 9000})
    yield "rollback to", [{"type": "rollback", "id": i, "to": 9000 - 7 * i} for i in range(2, 514)]
    yield (
        "rollback each",
        [{"type": "rollback", "id": i, "branch": f"b{i}", "to": i % 700} for i in range(2, 514)],
    )
    yield "fork at", [{"type": "fork", "id": i, "as": [f"n{i}"], "at": i * 3} for i in range(2, 514)]
    yield (
        "fork, drop",
        [
            {"type": kind, "id": 4 * i + j, **rest}
            for i in range(1, 40)
            for j, (kind, rest) in enumerate(
                [
                    ("fork", {"as": [f"n{k}" for k in range(20)]}),
                    ("drop", {"branch": [f"n{k}" for k in range(20)]}),
                ]
            )
        ],
    )
    yield "fork names", _many({"type": "fork", "as": [f"{i:04}" for i in range(1024)], "branch": "none"})
    yield "drop all", [{"type": "drop", "id": 2, "branch": NAMES}]
    yield "append all", [{"type": "append", "id": 2, "branch": NAMES, "text": "x" * 4000}]
    yield "append long all", [{"type": "append", "id": 2, "branch": NAMES, "text": "x y " * 24_000}]
    yield "append each", [{"type": "append", "id": i, "text": "x"} for i in range(2, 514)]
    yield "append text", [{"type": "append", "id": 2, "text": "x y " * 250_000}]
    yield "append texts", [{"type": "append", "id": i, "text": "x y " * 500} for i in range(2, 514)]
    for count, top in ((8000, 1), (780, 20)):  # 16,384 numbers at most
        yield (
            f"append scored {top}",
            [{"type": "append", "id": 2, "tokens": [5] * count, "logprobs": top}],
        )
    marks = "<|im_end|>" * 100_000  # control tokens, if they count
    for special in (True, False):
        how = "control" if special else "plain"
        yield f"append {how}", [{"type": "append", "id": 2, "text": marks, "special": special}]
        few = {"type": "append", "id": 2, "branch": NAMES, "text": marks[:90_000], "special": special}
        yield f"append {how} all", [few]
    yield "append tokens", [{"type": "append", "id": 2, "tokens": [5] * 500_000}]
    yield (
        "append messages",
        [{"type": "append", "id": 2, "messages": [{"role": "user", "content": "x"}] * 16_000}],
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": i}}} for i in range(1000)]
    yield (
        "append calls",
        [
            {
                "type": "append",
                "id": i,
                "messages": [{"role": "assistant", "content": "", "tool_calls": calls}],
            }
            for i in range(2, 12)  # 60,000 JSON values: no frame may hold more than 65,536
        ],
    )
    yield "generate all", [{"type": "generate", "id": 2, "branch": NAMES, "max_tokens": 2}]
    thinks = {"type": "generate", "branch": NAMES, "max_tokens": 4, "thought_tokens": 1}
    yield "generate thoughts", [{**thinks, "id": 2}]
    yield "generate n", [{"type": "generate", "id": i, "n": 20, "max_tokens": 1} for i in range(2, 50)]
    yield (
        "generate, cancel",
        [
            {"type": "generate", "id": 2, "branch": NAMES, "max_tokens": 9},
            *({"type": "cancel", "id": i, "branch": NAMES, "subtree": True} for i in range(3, 150)),
        ],
    )
    yield "cancel ids", _many({"type": "cancel", "ops": [i % 10 for i in range(1000)]})
    yield "select", [{"type": "select", "id": 2, "branch": NAMES, "choices": ["a", "b"]}]
    yield "select long", [{"type": "select", "id": 2, "choices": [f"{i} " * 25 for i in range(1000)]}]
    yield "set", [{"type": "set", "id": i, "retain_s": 60} for i in range(2, 514)]
    yield (
        "set meta",
        [{"type": "set", "id": i, "branch": f"b{i}", "meta": {"a": [1] * 900}} for i in range(2, 514)],
    )
    yield (
        "set name",
        [{"type": "set", "id": i, "branch": f"b{i}", "name": f"renamed{i}"} for i in range(2, 514)],
    )
    yield "tree", _many({"type": "tree", "text": True, "tokens": True})
    yield "export", _many({"type": "export"})
    yield "credit", _many({"type": "credit", "branch": "b1", "upto": 1}, number=False)
    yield "ping", _many({"type": "ping"}, number=False)
    schema = {"type": "object", "properties": {f"p{i}": {"enum": list(range(30))} for i in range(200)}}
    yield (
        "schemas",
        [
            {"type": "generate", "id": i, "branch": f"b{i}", "constraint": {"json_schema": schema}}
            for i in range(2, 11)  # 60,000 JSON values
        ],
    )


# --- a run --------------------------------------------------------------------------------------------


class TakingStore:
    """A store that has everything at once."""

    def __init__(self, world: World) -> None:
        self._world = world

    def tell(self, message: Any) -> None:
        if isinstance(message, m.Save):
            self._world.router.tell(message.session, m.Saved(message.ticket))


class WorstFrameRun:
    """One session in one engine, and a frame."""

    def __init__(self, tokenizer: Tokenizer, meter: CpuMeter) -> None:
        self.codec = Codec("json")
        self.meter = meter
        limits = Limits(ops_per_second=1 << 20)
        self.world = World(tokenizer, limits=limits, context=CONTEXT, pages=PAGES, room=1 << 19)
        self.world.settings["store"] = TakingStore(self.world)
        self.model = MODEL.format(self.world._info.vocab_size)
        executor: Any = self.world._executor.executor
        executor.launch = meter.aside(executor.launch)
        tell = self.world.tell

        def encoded(message: Any) -> None:
            if isinstance(message, m.Deliver):
                self.codec.encode(message.messages)
            tell(message)

        self.world.tell = encoded  # type: ignore[method-assign]

    async def frame(self, data: bytes, deliver: Callable[[list[Any]], None]) -> None:
        """Decode it in a callback, as the gateway does, and deliver it in that one."""
        done = asyncio.Event()

        def receive() -> None:
            try:
                deliver(self.codec.decode_client(data))
            finally:
                done.set()

        asyncio.get_running_loop().call_soon(receive)
        await done.wait()
        await self.settle()

    async def settle(self) -> None:
        """As `World.settle`, but for sessions that have much to do, whose turns nobody sees outside."""
        world, quiet, before = self.world, 0, None
        while quiet < 8:
            for _ in range(8):
                await asyncio.sleep(0)
            world.clock.advance(0.1)
            waits = [entry.actor.core.unfinished for _, entry in world.directory.entries.values()]
            now = (world.events, world.cache.free, world._executor.executor.counters.steps)
            waiting = (
                len(world.to_cache) + len(world.to_scheduler) + len(world.to_directory) + any(waits)
            )
            quiet = quiet + 1 if now == before and not waiting else 0
            before = now
            if world.events > 400_000:
                return

    async def answered(self, socket: int) -> None:
        """Return when an `open` has its answer."""
        for _ in range(100_000):
            if self.world.sockets.get(socket):
                break
            await asyncio.sleep(0)
        await self.settle()

    def open(self, fields: dict[str, Any]) -> Callable[[list[Any]], None]:
        def deliver(messages: list[Any]) -> None:
            self.world.sockets[len(self.world.sockets) + 1] = []
            socket = len(self.world.sockets)
            first = messages[0]
            self.world.to_directory.tell(m.OpenSession(socket, first, messages[1:], saves=True))

        return deliver


async def measure(
    tokenizer: Tokenizer, meter: CpuMeter, file: str, frame: list[dict[str, Any]] | str, template: str
) -> dict[str, Any]:
    """A row: an import, then a frame (or what its name says)."""
    run = WorstFrameRun(tokenizer, meter)
    async with run.world as world:
        meter.collect(world.clock)
        opened = {"type": "open", "client": "c", "template": template, "import": file}
        meter.begin()
        await run.frame(_json(opened), run.open(opened))
        await run.answered(1)
        if frame == "import":
            return row(meter, world, 1)
        replies = world.sockets[1]
        if not replies or not isinstance(replies[0], w.StateReply):
            return {"refused": str(getattr(replies[0], "message", "nothing") if replies else "nothing")}
        state = replies[0]
        if frame == "resume":
            have = {branch.branch: 0 for branch in state.branches}
            again = {
                "type": "open",
                "client": "d",
                "session": state.session,
                "key": state.key,
                "have": have,
            }
            meter.begin()
            await run.frame(_json(again), run.open(again))
            await run.answered(2)
            return row(meter, world, 2)
        if frame == "close":
            frame = [{"type": "close", "id": 2}]
        assert isinstance(frame, list)
        data = _json(frame)
        meter.begin()

        def deliver(messages: list[Any]) -> None:
            world.send(1, *messages, size=len(data))

        try:
            await run.frame(data, deliver)
        except RamifyError as error:
            return {"refused": error.message}
        return row(meter, world, 1)


def row(meter: CpuMeter, world: World, socket: int) -> dict[str, Any]:
    replies = world.sockets[socket]
    codes = [str(each.code) for each in replies if isinstance(each, w.Error)]
    found = {
        "callback_ms": round(meter.longest * 1e3, 2),
        "turn_ms": round(meter.turn * 1e3, 2),
        "gc_ms": round(meter.pause * 1e3, 2),
        "total_ms": round(meter.total * 1e3, 1),
        "who": meter.who,
        "replies": len(replies),
        "errors": len(codes),
    }
    return found | (
        {"first error": next(e.message for e in replies if isinstance(e, w.Error))[:90]} if codes else {}
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="frames whose name has this in it")
    parser.add_argument("--sessions", default="", help="names of sessions, with commas; all")
    parser.add_argument("--limit", type=float, default=20.0, help="milliseconds of a callback")
    parser.add_argument("--json")
    options = parser.parse_args()
    meter = CpuMeter()
    wanted = [name for name in options.sessions.split(",") if name]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = Tokenizer.load(Path(folder))
        model = MODEL.format(tokenizer.vocab_size)
        tried: list[tuple[str, Any]] = [
            ("import", "import"),
            ("resume", "resume"),
            ("close", "close"),
            *frames(),
        ]
        for session, file in sessions(model):
            if wanted and session not in wanted:
                continue
            for name, frame in tried:
                if options.only not in name:
                    continue
                template = "strict" if "turn" in session or "histories" in session else "append"
                found = asyncio.run(measure(tokenizer, meter, file, frame, template))
                rows.append({"session": session, "frame": name, **found})
                print(json.dumps(rows[-1]), flush=True)
                if "refused" in found and name in ("import", "resume"):
                    break
    over = [each for each in rows if each.get("callback_ms", 0.0) > options.limit]
    over.sort(key=lambda each: -each["callback_ms"])
    about = machine()
    print(headline(about))
    print(f"{len(over)} of {len(rows)} rows have a callback over {options.limit:g} ms of CPU")
    for each in over[:40]:
        print(f"  {each['callback_ms']:8} ms  {each['session']}: {each['frame']}  {each['who']}")
    write_json(options.json, about, rows)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
