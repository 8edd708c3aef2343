"""A model of a server: a few hundred lines that follow protocol.md, for tests of the client.

One FIFO of ops for the whole session; a token is its position and the seed of its generation, so
that lost, doubled or mixed text shows. It knows no sockets; the fixture `url` puts it on one.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from ramify.clients.handles import Session
from ramify.clients.session import ClientCore
from ramify.clients.stream import Ticket
from ramify.protocol.codec import Codec
from ramify.protocol.config import Limits
from ramify.protocol.errors import Code, RamifyError
from ramify.protocol.wire import (
    Append,
    BranchState,
    Cancel,
    ClientMessage,
    CloseSession,
    Credit,
    Delta,
    Done,
    Drop,
    Error,
    Fork,
    Generate,
    Join,
    Ok,
    Op,
    Open,
    Ping,
    Pong,
    Prune,
    Rollback,
    SegmentState,
    ServerInfo,
    ServerMessage,
    Set,
    StateReply,
    Tree,
    names,
)
from tests.messages import usage


class Piece:
    """Input (`op` None) or the output of op `op`: positions [start, start + len(texts))."""

    def __init__(self, start: int, texts: list[str], op: int | None, ended: bool) -> None:
        self.start, self.texts, self.op, self.ended = start, texts, op, ended
        self.hidden = False

    @property
    def end(self) -> int:
        return self.start + len(self.texts)


class ModelBranch:
    def __init__(self, parent: str | None = None, at: int = 0) -> None:
        self.parent, self.at = parent, at
        self.pieces: list[Piece] = []
        self.cuts: list[tuple[int, int]] = []

    @property
    def position(self) -> int:
        return self.pieces[-1].end if self.pieces else 0

    def cut(self, to: int) -> None:
        kept = [p for p in self.pieces if p.start < to]
        if kept and kept[-1].end > to:
            last = kept.pop()
            kept.append(Piece(last.start, last.texts[: to - last.start], last.op, True))
        self.pieces = kept


class Line:
    """What the model is to say next: words, and what the server finds in them."""

    def __init__(self, text: str, calls: list[dict[str, Any]] | None = None, **done: Any) -> None:
        self.texts = [f"{word} " for word in text.split()] or [""]
        self.done = {"reason": "tool" if calls else "stop", "tool_calls": calls, "content": text, **done}


class ModelServer:
    """`receive` takes frames, `step` does a little work, `out` holds the frames to deliver."""

    def __init__(self, limits: Limits | None = None, *, kept_text: bool = True) -> None:
        self.kept_text = kept_text  # a `done` that is sent again carries the text
        self.limits = limits or Limits()
        self.epoch = "e1"
        self.session: str | None = None
        self.branches: dict[str, ModelBranch] = {}
        self.revision = 0
        self.out: deque[list[ServerMessage]] = deque()
        self.runs: list[int] = []  # ids of ops, in the order they ran
        self.opens: list[Open] = []
        self.closing: int | None = None
        self.closes: list[bool] = []  # `keep` of each
        self._last = 0
        self._replies: dict[int, list[ServerMessage]] = {}
        self._queue: deque[tuple[Op, str | None, set[str]]] = deque()
        self._cursors: dict[str, int] = {}
        self._truncate: dict[str, int] = {}
        self._attached = False
        self.script: deque[Line] = deque()  # what generations say, one after the other
        self.line_of: Callable[[str], Line | None] = lambda text: None  # by what the branch holds
        self.ops: list[Op] = []
        self._lines: dict[int, Line] = {}

    # --- the connection ------------------------------------------------------------------------

    def receive(self, frame: list[ClientMessage]) -> None:
        failed: set[str] = set()
        for message in frame:
            if isinstance(message, Open):
                self._open(message)
            elif isinstance(message, Ping):
                self._send(Pong(n=message.n, load={}))
            elif isinstance(message, Op):
                self._op(message, failed)
            else:
                assert isinstance(message, Credit)

    def disconnect(self) -> None:
        self._attached = False
        self.out.clear()

    def _send(self, *messages: ServerMessage) -> None:
        if self._attached and messages:
            self.out.append(list(messages))

    def _open(self, message: Open) -> None:
        self.opens.append(message)
        self._attached = True
        if message.session is None:
            self.session = "s_1"
            self._last, self._replies, self.closing = 0, {}, None
            self.branches = {"main": ModelBranch()}
            self.revision = 1
        elif message.session != self.session:
            self._send(Error(code="no_session", message=f"there is no session {message.session}"))
            return
        self._cursors, self._truncate = {}, {}
        tools = [(each.get("function") or each)["name"] for each in message.tools or ()]
        self._send(self._state(None, resumed=message.session is not None, key="k_1", tools=tools))
        for name, branch in self.branches.items():
            self._resume(name, branch, message)

    def _resume(self, name: str, branch: ModelBranch, message: Open) -> None:
        have = message.have.get(name)
        if have is None:
            last = branch.pieces[-1] if branch.pieces else None
            running = last is not None and last.op is not None and not last.ended
            self._cursors[name] = last.start if running and last is not None else branch.position
            self._flush(name)
            return
        undercut = [to for at, to in branch.cuts if message.revision is None or at > message.revision]
        start = min([have, branch.position, *undercut])
        self._cursors[name] = start
        if start < have:
            self._truncate[name] = start
        for piece in list(branch.pieces):
            if piece.op is None or piece.end < start:
                continue
            self._flush(name, piece.end)
            if piece.ended:
                self._send(
                    *(r for r in self._replies.get(piece.op, ()) if getattr(r, "branch", "") == name)
                )
        if name in self._truncate:
            to = self._truncate.pop(name)
            self._send(Delta(branch=name, position=to, text="", truncate=to))

    def _flush(self, name: str, upto: int = 1 << 40) -> None:
        branch = self.branches.get(name)
        if branch is None or not self._attached:
            return
        cursor = self._cursors.setdefault(name, branch.position)
        for piece in branch.pieces:
            end = min(piece.end, upto)
            if piece.op is None or piece.hidden or end <= cursor or piece.start >= upto:
                continue
            first = max(cursor, piece.start)
            text = "".join(piece.texts[first - piece.start : end - piece.start])
            truncate = self._truncate.pop(name, None)
            self._send(Delta(branch=name, position=end, text=text, truncate=truncate))
            cursor = end
        self._cursors[name] = cursor

    def _state(self, ident: int | None, *, text: bool = False, **fields: Any) -> StateReply:
        shown = []
        for name, branch in self.branches.items():
            last = branch.pieces[-1] if branch.pieces else None
            running = last if last is not None and last.op is not None and not last.ended else None
            turns = [
                SegmentState(
                    kind="output" if p.op else "input", start=p.start, end=p.end, text="".join(p.texts)
                )
                for p in branch.pieces
            ]
            shown.append(
                BranchState(
                    branch=name,
                    position=branch.position,
                    parent=branch.parent,
                    at=branch.at if branch.parent else None,
                    running=running.op if running else None,
                    started_at=running.start if running else None,
                    turns=turns if text else None,
                )
            )
        assert self.session is not None
        return StateReply(
            session=self.session,
            op=self._last,
            revision=self.revision,
            branches=shown,
            limits=self.limits.wire(),
            server=ServerInfo(version=1, epoch=self.epoch, model="model"),
            id=ident,
            **fields,
        )

    # --- ops --------------------------------------------------------------------------------------

    def _op(self, op: Op, failed: set[str]) -> None:
        if op.id <= self._last:
            self._send(*self._replies.get(op.id, ()))
            return
        self._last = op.id
        self.runs.append(op.id)
        self.ops.append(op)
        match op:
            case Tree():
                self._reply(self._state(op.id, text=op.text))
            case Cancel():
                self._cancel(op)
            case CloseSession(keep=keep):
                self.closes.append(keep)
                self._reply(Ok(id=op.id))
                self.closing = 1000
            case Generate(as_=list() as children):
                self._queue.append(
                    (Fork(id=op.id, branch=str(op.branch), as_=children), "spawn", failed)
                )
                self._queue.extend((op, name, failed) for name in children)
            case Append() | Generate():
                self._queue.extend((op, name, failed) for name in names(op.branch))
            case Drop():
                self._queue.extend((op, name, failed) for name in names(op.branch))
            case _:
                self._queue.append((op, getattr(op, "branch", None), failed))

    def _reply(self, message: ServerMessage) -> None:
        ident = getattr(message, "id", None)
        assert ident is not None
        self._replies.setdefault(ident, []).append(message)
        self._send(message)

    def step(self) -> bool:
        """Do a little of the first op's work. False if there is nothing to do."""
        if not self._queue:
            return False
        op, name, failed = self._queue[0]
        branch = self.branches.get(name or "")
        if name is not None and name in failed:
            self._fail(op, name, "skipped", failed)
        elif name not in (None, "spawn") and branch is None:
            self._fail(op, name, "no_branch", failed)
        elif isinstance(op, Generate):
            assert branch is not None
            assert name is not None
            return self._generate(op, name, branch)
        else:
            reply = self._run(op, name, branch)
            if reply is not None and name != "spawn":
                self._reply(reply)
        self._queue.popleft()
        return True

    def _fail(self, op: Op, name: str | None, code: Code, failed: set[str]) -> None:
        if name is not None:
            failed.add(name)
        self._reply(Error(code=code, message=f"{code}: {name}", id=op.id, branch=name))

    def _run(self, op: Op, name: str | None, branch: ModelBranch | None) -> Ok | None:
        self.revision += 1
        match op:
            case Append():
                assert branch is not None
                text = op.text if op.text is not None else "".join(m.content for m in op.messages or ())
                branch.pieces.append(Piece(branch.position, list(text), None, True))
            case Fork():
                parent = self.branches.get(op.branch or "")
                at = 0 if parent is None else parent.position if op.at is None else op.at
                for child in op.as_:
                    made = ModelBranch(op.branch, at)
                    made.pieces = list(parent.pieces) if parent is not None else []
                    made.cut(at)
                    self.branches[child] = made
                    self._cursors[child] = at
                return Ok(id=op.id, branch=op.branch, position=at, revision=self.revision)
            case Rollback():
                assert branch is not None
                to = op.to
                if to is None:
                    starts = [p.start for p in branch.pieces if p.op is None]
                    to = starts[-(op.turns or 1)]
                branch.cut(to)
                branch.cuts.append((self.revision, to))
                self._cursors[name or ""] = min(self._cursors.get(name or "", 0), to)
            case Drop():
                assert name is not None
                del self.branches[name]
                return Ok(id=op.id, branch=name, revision=self.revision)
            case Join():
                assert branch is not None
                texts = [self._said(source) for source in op.from_]
                pieces = [op.each.replace("{text}", text) for text in texts]
                text = op.prefix + "".join(pieces) + op.suffix
                branch.pieces.append(Piece(branch.position, list(text), None, True))
                dropped = self._gone(op)
                return Ok(
                    id=op.id,
                    branch=name,
                    position=branch.position,
                    revision=self.revision,
                    result={"dropped": dropped},
                )
            case Prune():
                return self._prune(op)
            case Set(name=str() as new):
                assert name is not None
                self.branches[new] = self.branches.pop(name)
                self._cursors[new] = self._cursors.pop(name, 0)
                return Ok(
                    id=op.id, branch=new, position=self.branches[new].position, revision=self.revision
                )
            case _:
                return Ok(id=op.id, branch=name, revision=self.revision)
        return Ok(id=op.id, branch=name, position=branch.position, revision=self.revision)

    def _said(self, name: str) -> str:
        outputs = [piece for piece in self.branches[name].pieces if piece.op is not None]
        return "".join(outputs[-1].texts) if outputs else ""

    def _gone(self, op: Join | Prune, into: Sequence[str] = ()) -> list[str]:
        gone = [] if op.keep else [name for name in op.from_ if name not in into]
        for each in gone:
            del self.branches[each]
        return gone

    def _prune(self, op: Prune) -> Ok:
        """The longest texts win."""
        ranked = sorted(op.from_, key=lambda name: -len(self._said(name)))[: op.winners]
        into = op.targets or ranked
        held = {name: list(self.branches[name].pieces) for name in ranked}
        kept = []
        for source, name in zip(ranked, into, strict=True):
            branch = self.branches.setdefault(name, ModelBranch())
            before = branch.position
            branch.pieces = held[source]
            self._cursors[name] = branch.position
            assert before <= branch.position, "only its own children are moved into a branch here"
            kept.append({"from": source, "into": name, "position": branch.position})
        return Ok(
            id=op.id,
            branch=into[0],
            position=self.branches[into[0]].position,
            revision=self.revision,
            result={"kept": kept, "dropped": self._gone(op, into)},
        )

    def _generate(self, op: Generate, name: str, branch: ModelBranch) -> bool:
        last = branch.pieces[-1] if branch.pieces else None
        if last is None or last.op != op.id or last.ended:
            line = self.line_of("".join("".join(piece.texts) for piece in branch.pieces))
            if line is None and self.script:
                line = self.script.popleft()
            branch.pieces.append(Piece(branch.position, [], op.id, False))
            branch.pieces[-1].hidden = op.hidden
            if line is not None:
                self._lines[id(branch.pieces[-1])] = line
            return True
        line = self._lines.get(id(last))
        if line is not None:
            if len(last.texts) == len(line.texts):
                self._finish(op, name, last, **line.done)
                return True
            last.texts.append(line.texts[len(last.texts)])
            self._flush(name)
            return True
        if len(last.texts) < op.max_tokens:
            last.texts.append(f"<{last.end}:{op.seed}>")
            if not op.quiet:
                self._flush(name)
            return True
        self._finish(op, name, last, "length")
        return True

    def _finish(self, op: Generate, name: str, piece: Piece, reason: Any, **more: Any) -> None:
        piece.ended = True
        self._queue.popleft()
        self.revision += 1
        used = usage(
            prompt=piece.start,
            cached=max(0, piece.start - 1),
            computed=min(1, piece.start),
            output=len(piece.texts),
            ttft_ms=1.0,
            total_ms=2.0,
        )
        done = Done(
            id=op.id,
            branch=name,
            position=piece.end,
            reason=reason,
            usage=used,
            revision=self.revision,
            **more,
        )
        full = msgspec.structs.replace(done, text="".join(piece.texts))
        kept = full if op.quiet or (self.kept_text and not op.hidden) else done
        self._replies.setdefault(op.id, []).append(kept)
        self._send(full if op.quiet else done)

    def _cancel(self, op: Cancel) -> None:
        wanted = set(op.ops or ())
        where = names(op.branch) if op.branch is not None else None
        for entry in list(self._queue):
            task, name, _ = entry
            if not isinstance(task, Generate) or not (task.id in wanted or name in (where or ())):
                continue
            branch = self.branches.get(name or "")
            last = branch.pieces[-1] if branch is not None and branch.pieces else None
            if entry is self._queue[0] and last is not None and last.op == task.id:
                self._finish(task, name or "", last, "cancelled")
            else:
                self._queue.remove(entry)
                self._reply(Error(code="cancelled", message="before it ran", id=task.id, branch=name))
        self._reply(Ok(id=op.id))


class FakeLink:
    """Sends nothing: keeps the frames, and gives prepared answers, one for each wait."""

    notes_key = "notes"

    def __init__(self, *answers: ServerMessage) -> None:
        self.core = ClientCore(Open(client="client-7b"))
        self.core.connected()
        state = StateReply(
            session="s", op=0, revision=1, branches=[BranchState(branch="main", position=9)]
        )
        self.core.receive(state)
        self.attached = True
        self.notes: deque[Any] = deque()
        self.frames: list[list[Op]] = []
        self.credits: list[tuple[str, int]] = []
        self._answers = deque(answers)

    def submit(self, ops: list[Op]) -> list[Ticket]:
        tickets = self.core.submit(ops)
        self.frames.append(list(ops))
        return tickets

    def send(self) -> None:
        """What was submitted is on its way."""
        while self.core.next_frame() is not None:
            pass

    def credit(self, branch: str, upto: int) -> None:
        self.credits.append((branch, upto))

    def withdraw(self, ticket: Ticket, error: RamifyError) -> bool:
        return self.core.withdraw(ticket, error)

    async def changed(self, key: object) -> None:
        self.send()
        self.core.receive(self._answers.popleft())

    def unwatch(self) -> None:
        pass

    async def stop(self) -> None:
        self.attached = False


@pytest.fixture
def offline() -> Callable[..., tuple[Session, FakeLink]]:
    """A function from answers to a session without a connection, and what stands for its link."""

    def make(*answers: ServerMessage) -> tuple[Session, FakeLink]:
        link = FakeLink(*answers)
        return Session(link), link  # type: ignore[arg-type]

    return make


@pytest.fixture
def server() -> ModelServer:
    """A fresh model server."""
    return ModelServer()


@pytest.fixture
def line() -> type[Line]:
    """For tests that say what the model says."""
    return Line


@pytest.fixture
def server_type() -> type[ModelServer]:
    """For tests that need several."""
    return ModelServer


@pytest.fixture
def url(server: Any) -> Iterator[str]:
    """A model server on a socket, in a thread."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop: list[Callable[[], None]] = []
    urls: list[str] = []

    latest: list[ServerConnection] = []

    async def handle(socket: ServerConnection) -> None:
        codec = Codec("json")
        latest[:] = [socket]
        server.disconnect()  # nothing that was for an earlier connection reaches this one
        server.closing = None

        async def read() -> None:
            async for data in socket:
                if latest == [socket]:
                    server.receive(codec.decode_client(data))

        reader = asyncio.create_task(read())
        while not reader.done():
            if latest != [socket]:
                await asyncio.sleep(0)
                continue
            server.step()
            while server.out:
                await socket.send(codec.encode(server.out.popleft()), text=True)
            if server.closing:
                await socket.close(server.closing)
            await asyncio.sleep(0)
        await reader

    async def main() -> None:
        done = asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(done.set))
        names = [Subprotocol("ramify.v1+json")]
        async with serve(handle, "127.0.0.1", 0, subprotocols=names) as listener:
            urls.append(f"ws://127.0.0.1:{next(iter(listener.sockets)).getsockname()[1]}")
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    ready.wait()
    yield urls[0]
    stop[0]()
    thread.join()
    loop.close()
