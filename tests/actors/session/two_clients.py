"""Random programs of several clients on one session, and what each of them must know at the end.

Two writers and, at times, a viewer share the branches of one session: they append, generate, select,
fork, roll back, rename, drop, cancel, give credit, stop reading, lose their sockets at any moment and
resume. Each `Sharer` keeps what docs/protocol.md tells a client to keep: deltas, `truncate`, its own
replies, and the events that tell what the others did. `run_program` compares that with the session's
branches.

Not a test module: `test_two_clients.py` runs a few programs, `benchmarks/random_programs.py` thousands.
"""

import random
from typing import Any

from ramify.actors.session.branches.segments import OutputSegment
from ramify.protocol import messages as m
from ramify.protocol import wire as w

NAMES = ["main", "a", "b", "c", "d"]
UNLIMITED = 2**53 - 1


class Sharer:
    """A client that shares its session. `write`: whether it holds the session's key.

    `held`: of each branch, what deltas brought: (start, end, tokens, text). The text is None where a
    move backwards cut a delta in two: only whole deltas name a text. `since`: from where on it follows
    the branch's output.
    """

    def __init__(self, engine: Any, number: int, name: str, *, write: bool, **opened: Any) -> None:
        self.engine = engine
        self.number = number
        self.name = name
        self.write = write
        self.opened = opened
        self.socket: int | None = None
        self.attached = False
        self.next_id = 1
        self.revision = 0
        self.seen = False  # it has had a `state`
        self.base = 0  # the revision of the last one
        self.held: dict[str, list[tuple[int, int, list[int], str | None]]] = {}
        self.have: dict[str, int] = {}
        self.since: dict[str, int] = {}
        self.waiting: dict[int, tuple[w.Op, set[str | None]]] = {}  # what is answered already
        self.maybe: set[str] = set()  # children of an `n` that failed: they may be there
        self.answered: dict[tuple[int, str | None], int | None] = {}  # by which socket
        self.resent: set[int] = set()
        self.chosen: set[tuple[str | None, int | None]] = set()  # its name and the ids of its `select`s
        self.counts: dict[str, int] = {}

    # --- its connection --------------------------------------------------------------------------

    def connect(self) -> None:
        """Attach, resuming if it was here before; ops without a reply are sent again."""
        engine = self.engine
        engine.sockets += 1
        self.socket = engine.sockets
        self.attached = False
        engine.clients[self.socket] = self
        again = [op for op, _ in self.waiting.values()]
        self.resent |= {op.id for op in again}
        opened = w.Open(
            client=self.name,
            session=f"s_{self.number}",
            key="key" if self.write else "view",
            have=dict(self.have),
            revision=self.revision if self.seen else None,
            tokens=True,
            **self.opened,
        )
        engine.post_session(self.number, m.Attach(self.socket, opened, list(again), self.write))

    def drop(self) -> None:
        """Lose the socket: what is under way to it is lost."""
        if self.socket is not None:
            del self.engine.clients[self.socket]
            self.engine.post_session(self.number, m.Detached(self.socket))
            self.socket = None

    def send(self, *ops: w.ClientMessage) -> None:
        for op in ops:
            if isinstance(op, w.Op):
                self.waiting[op.id] = (op, set())
                if isinstance(op, w.Select):
                    self.chosen.add((self.name, op.id))
                self.counts[type(op).__name__.lower()] = (
                    self.counts.get(type(op).__name__.lower(), 0) + 1
                )
        if self.socket is not None:
            self.engine.post_session(self.number, m.Frame(self.socket, list(ops)))

    def id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    # --- what it receives --------------------------------------------------------------------------

    def receive(self, messages: list[w.ServerMessage]) -> None:
        for message in messages:
            match message:
                case w.StateReply():
                    self._state(message)
                case w.Delta():
                    self._delta(message)
                case w.Event():
                    self._event(message)
                case w.Ok() | w.Done() | w.Error() if message.id is not None:
                    self._reply(message)
                case w.Error():
                    raise AssertionError(f"{self.name}: {message}")
                case _:
                    pass
            self.revision = max(self.revision, getattr(message, "revision", None) or 0)

    def _state(self, state: w.StateReply) -> None:
        if state.id is not None:
            self.waiting.pop(state.id, None)
            return
        self.attached = self.seen = True
        self.base = state.revision
        names = {branch.branch for branch in state.branches}
        for gone in [name for name in self.have if name not in names]:
            self._forget(gone)
        for branch in state.branches:
            if branch.branch not in self.have:
                start = branch.position if branch.started_at is None else branch.started_at
                self._learn(branch.branch, start)

    def _delta(self, delta: w.Delta) -> None:
        name, tokens = delta.branch, delta.tokens or []
        if delta.truncate is not None:
            self._cut(name, delta.truncate)
            self.have[name] = min(self.have.get(name, 0), delta.truncate)
        if not tokens:
            assert not delta.text, delta
            return
        start = delta.position - len(tokens)
        assert start >= self.have.get(name, 0), f"{self.name}: {delta} goes back: {self.have.get(name)}"
        self.since.setdefault(name, start)
        self.held.setdefault(name, []).append((start, delta.position, tokens, delta.text))
        self.have[name] = delta.position

    def _event(self, event: w.Event) -> None:
        """What another client did."""
        self.counts["event"] = self.counts.get("event", 0) + 1
        name, details = event.branch or "", event.details or {}
        if details.get("as"):
            for child in details["as"]:
                assert child not in self.have, f"{self.name}: {child} is told of before {event}"
                self._learn(child, details["position"] or 0)
        if event.op == "rollback":
            self._cut(name, details["position"])
        elif event.op in ("append", "join") and details.get("rebased") is not None:
            self._cut(name, details["rebased"])
        elif event.op == "drop":
            self._forget(name)
        elif event.op == "set" and details.get("from") is not None:
            self._rename(details["from"], name, details["position"])
        self._placed(details)

    def _reply(self, reply: w.Ok | w.Done | w.Error) -> None:
        assert reply.id is not None
        key = (reply.id, reply.branch)
        if key in self.answered:  # a resume may bring it again, and so may an op that was sent again
            again = self.answered[key] != self.socket or reply.id in self.resent
            assert again, f"{self.name}: {key} is answered twice: {reply}"
            return
        self.answered[key] = self.socket
        op, done = self.waiting[reply.id]
        done.add(reply.branch)
        if isinstance(reply, w.Error):
            if isinstance(op, w.Generate) and op.n > 1 and reply.branch is not None:
                self.maybe.add(reply.branch)
            if reply.branch is None or len(done) >= _targets(op):
                del self.waiting[reply.id]
            self.counts[reply.code] = self.counts.get(reply.code, 0) + 1
            return
        name = reply.branch or ""
        if (reply.revision or 0) <= self.base:
            pass  # missed, and sent again after a resume: `state` and what followed it were later
        else:
            self._done(op, name, reply)
        if len(done) >= _targets(op):
            del self.waiting[reply.id]

    def _done(self, op: w.Op, name: str, reply: w.Ok | w.Done) -> None:
        """What an own op did to the branches."""
        match op:
            case w.Rollback():
                assert reply.position is not None
                self._cut(name, reply.position)
            case w.Append() if isinstance(reply, w.Ok) and reply.result:
                self._cut(name, reply.result["rebased"])
            case w.Join() | w.Prune():
                assert isinstance(reply, w.Ok)
                assert reply.result is not None
                kind = f"{type(op).__name__.lower()}, done"
                self.counts[kind] = self.counts.get(kind, 0) + 1
                if "rebased" in reply.result:
                    self._cut(name, reply.result["rebased"])
                self._placed(reply.result)
            case w.Drop():
                assert isinstance(reply, w.Ok)
                self._forget(name)
            case w.Generate() if op.n > 1:
                self._learn(name, reply.position or 0)
            case w.Fork():
                assert isinstance(reply, w.Ok)
                for child in op.as_:
                    self._learn(child, reply.position or 0)
            case w.Set() if op.branch is not None and op.name is not None:
                assert isinstance(reply, w.Ok)
                self._rename(op.branch, op.name, reply.position or 0)
            case w.Select():
                assert isinstance(reply, w.Done)
                assert reply.text == op.choices[reply.choice or 0]
                assert len(reply.scores or ()) == len(op.choices)
                kinds = ["select, done", *(["select, rebased"] if reply.rebased is not None else [])]
                for kind in kinds:
                    self.counts[kind] = self.counts.get(kind, 0) + 1
            case _:
                pass

    # --- what it keeps -------------------------------------------------------------------------------

    def _placed(self, result: dict[str, Any]) -> None:
        """Branches that a prune moved, whose text was known by another name; and those that went."""
        for kept in result.get("kept", ()):
            name, position = kept["into"], kept["position"]
            if name != kept["from"]:
                self._cut(name, kept.get("rebased", position))
                self.have[name] = self.since[name] = position
        for name in result.get("dropped", ()):
            self._forget(name)

    def _learn(self, name: str, position: int) -> None:
        """A branch that is new to it begins at `position`, as far as it is concerned."""
        self.have.setdefault(name, position)
        self.since.setdefault(name, position)

    def _forget(self, name: str) -> None:
        for table in (self.have, self.since, self.held):
            table.pop(name, None)

    def _rename(self, old: str, new: str, position: int) -> None:
        if old == new:
            return
        for table in (self.have, self.since, self.held):
            if old in table:
                table[new] = table.pop(old)  # type: ignore[assignment]
        self._learn(new, position)

    def _cut(self, name: str, to: int) -> None:
        if self.since.get(name, 0) > to:
            self.since[name] = to
        if self.have.get(name, 0) > to:
            self.have[name] = to
        held = self.held.get(name, [])
        while held and held[-1][1] > to:
            start, _, tokens, _ = held.pop()
            if start < to:
                held.append((start, to, tokens[: to - start], None))
                break

    # --- checks --------------------------------------------------------------------------------------

    def check(self, branches: dict[str, Any]) -> None:
        """Its view is that of the session: same branches, and the same output where it followed it."""
        assert self.waiting == {}, f"{self.name}: no reply to {self.waiting}"
        unknown = set(branches) - set(self.have) - self.maybe
        assert not unknown, f"{self.name} does not know {sorted(unknown)}"
        gone = set(self.have) - set(branches)
        assert not gone, f"{self.name} does not know that {sorted(gone)} are gone"
        for name, branch in branches.items():
            marks: dict[
                int, tuple[int, str]
            ] = {}  # where each output chunk ends, and its segment and text
            for segment in branch.segments:
                if isinstance(segment, OutputSegment) and not segment.quiet:
                    text = ""
                    for count, chunk in zip(segment.counts, segment.chunks, strict=True):
                        text += chunk
                        marks[segment.start + count] = (segment.start, text)
            tokens = branch.tokens()
            covered = set()
            for start, end, got, text in self.held.get(name, ()):
                where = f"{self.name}, {name} [{start}, {end})"
                assert list(tokens[start:end]) == got, where
                covered |= set(range(start, end))
                if text is None:
                    continue
                assert end in marks, where
                piece_start, whole = marks[end]
                before = marks[start][1] if start in marks and start > piece_start else ""
                assert whole.removeprefix(before) == text, where
            for end, (start, _) in marks.items():
                low = max(start, self.since.get(name, end))
                missing = set(range(low, end)) - covered
                assert not missing, f"{self.name} lacks {sorted(missing)} of {name}"


def _targets(op: w.Op) -> int:
    if isinstance(op, w.Generate) and (op.n > 1 or op.as_):
        return op.n
    branch = getattr(op, "branch", None)
    return len(branch) if isinstance(branch, list) and not isinstance(op, w.Cancel) else 1


KINDS = {
    "append": 4, "message": 3, "generate": 8, "many": 2, "select": 3, "fork": 3, "root": 1,
    "rollback": 3, "rename": 1, "drop": 1, "cancel": 1, "cancel branch": 1, "credit": 1, "tree": 1,
    "meta": 1, "join": 1, "prune": 2,
}  # fmt: skip


def random_message(rng: random.Random, client: Sharer) -> w.ClientMessage:
    """An op of a writer, or what a viewer may send."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if not client.write:
        kind = rng.choice(["credit", "tree"])
    name = rng.choice(list(client.have) or NAMES) if rng.random() < 0.8 else rng.choice(NAMES)
    if kind == "credit":
        position = client.have.get(name, 0)
        return w.Credit(branch=name, upto=rng.choice([position, position + 5, UNLIMITED, UNLIMITED]))
    ident = client.id()
    expect = None
    if rng.random() < 0.2:  # right, if nobody else was faster
        expect = max(0, client.have.get(name, 0) + rng.choice([0, 0, 1, -1]))
    match kind:
        case "append":
            tokens = [rng.randrange(3, 300) for _ in range(rng.randrange(1, 9))]
            return w.Append(id=ident, branch=name, tokens=tokens, expect=expect)
        case "message":
            role = rng.choice(["user", "user", "system", "assistant"])
            message = w.ChatMessage(role=role, content=rng.choice(["hi", "one two three", "café"]))
            return w.Append(id=ident, branch=name, messages=[message], expect=expect)
        case "generate":
            return w.Generate(
                id=ident,
                branch=name,
                max_tokens=rng.randrange(1, 25),
                temperature=0,
                stop=rng.choice([[], [], ["e"], ["ab", "th"]]),
                quiet=rng.random() < 0.1,
                expect=expect,
            )
        case "many":
            if rng.random() < 0.5:
                names = rng.sample(NAMES, 2)
                return w.Generate(id=ident, branch=names, max_tokens=5, temperature=0)
            return w.Generate(id=ident, branch=name, n=2, max_tokens=rng.randrange(1, 9), temperature=0)
        case "select":
            return random_select(rng, ident, rng.choice([name, name, rng.sample(NAMES, 2)]), expect)
        case "fork":
            at = rng.randrange(0, 20) if rng.random() < 0.3 else None
            return w.Fork(id=ident, branch=name, as_=rng.sample(NAMES, rng.randrange(1, 3)), at=at)
        case "root":
            return w.Fork(id=ident, branch=None, as_=[rng.choice(NAMES)])
        case "rollback":
            if rng.random() < 0.5:
                return w.Rollback(id=ident, branch=name, turns=rng.randrange(1, 3))
            return w.Rollback(id=ident, branch=name, to=rng.randrange(0, 40))
        case "rename":
            return w.Set(id=ident, branch=name, name=rng.choice(NAMES))
        case "drop":
            return w.Drop(id=ident, branch=name)
        case "cancel":
            ops = list(client.waiting)[-3:]
            return w.Cancel(id=ident, ops=rng.sample(ops, rng.randrange(len(ops) + 1)))
        case "cancel branch":
            return w.Cancel(id=ident, branch=rng.choice([None, name]), subtree=rng.random() < 0.5)
        case "join":
            return random_join(rng, ident)
        case "prune":
            return random_prune(rng, ident)
        case "tree":
            return w.Tree(id=ident, text=rng.random() < 0.3)
        case _:
            return w.Set(id=ident, branch=rng.choice([None, name]), meta={"n": ident})


CHOICES = ["e", "hi", "one", " two three", "ld", "é", "東", " the", "th"]


def random_select(
    rng: random.Random, ident: int, branch: str | list[str], expect: int | None = None
) -> w.Select:
    """A few choices, some of which join the branch's last token."""
    return w.Select(
        id=ident,
        branch=branch,
        choices=rng.sample(CHOICES, rng.randrange(1, 5)),
        method=rng.choice(
            [
                "token_length_normalized",
                "greedy_token_selection",
                "unconditional_likelihood_normalized",
            ]
        ),
        expect=expect,
    )


def random_choice(rng: random.Random, client: Sharer) -> list[w.ClientMessage]:
    """Choices behind half a word, of which some change the branch's last token."""
    name = rng.choice(list(client.have) or NAMES)
    ops: list[w.ClientMessage] = []
    for _ in range(rng.randrange(1, 3)):
        if rng.random() < 0.7:
            ops.append(w.Append(id=client.id(), branch=name, text=rng.choice(["hello wor", " w", "t"])))
        choices = rng.choice([["ld"], ["ld", "ld "], ["or", "h"], ["ld", " one"]])
        ops.append(w.Select(id=client.id(), branch=name, choices=choices))
    if rng.random() < 0.5:
        ops.append(w.Generate(id=client.id(), branch=name, max_tokens=4, temperature=0))
    return ops


def random_join(rng: random.Random, ident: int) -> w.Join:
    """A join of branches that may be there."""
    into, *sources = rng.sample(NAMES, rng.randrange(2, 4))
    role = rng.choice(["user", None])
    return w.Join(id=ident, from_=sources, branch=into, role=role, keep=rng.random() < 0.4)


def random_prune(rng: random.Random, ident: int) -> w.Prune:
    """A prune of branches that may be there, perhaps into some of them."""
    sources = rng.sample(NAMES, rng.randrange(1, 5))
    count = rng.randrange(1, len(sources) + 1)
    by = rng.choice(["first", "first", "logprob", "number", "vote"])
    judges = rng.choices(NAMES, k=len(sources)) if by != "first" and rng.random() < 0.2 else None
    return w.Prune(
        id=ident,
        from_=sources,
        by=by,
        k=count,
        into=rng.choice([None, rng.sample(NAMES, count)]),
        score_from=judges,
        keep=rng.random() < 0.3,
    )


def random_frames(rng: random.Random, client: Sharer) -> list[list[w.ClientMessage]]:
    """Ops that have nothing to do with each other; or a program in a frame, and room for it before."""
    if client.write and rng.random() < 0.1:
        return [random_choice(rng, client)]
    if not client.write or rng.random() < 0.8:
        return [[random_message(rng, client) for _ in range(rng.randrange(1, 5))]]
    parent, *children = rng.sample(NAMES, rng.randrange(3, 5))
    parent = rng.choice(list(client.have) or [parent])
    children = [name for name in children if name != parent] + ["x", "y"]
    room: list[w.ClientMessage] = [w.Drop(id=client.id(), branch=name) for name in children]
    ids = [client.id() for _ in range(8)]
    into = rng.choice([parent, None, children[:1]])
    last: list[w.ClientMessage] = [
        w.Join(id=ids[6], from_=children, branch=parent, keep=rng.random() < 0.3)
        if rng.random() < 0.3
        else w.Prune(id=ids[6], from_=children, into=into, by=rng.choice(["first", "logprob", "vote"]))
    ]
    program = [
        w.Append(id=ids[1], branch=parent, tokens=[7, 8, 9]),
        w.Fork(id=ids[2], branch=parent, as_=children),
        w.Append(id=ids[3], branch=children[0], tokens=[10]),
        w.Append(id=ids[4], branch=children[1], tokens=[11]),
        random_select(rng, ids[5], children)
        if rng.random() < 0.3
        else w.Generate(id=ids[5], branch=children, max_tokens=rng.randrange(1, 20), temperature=0),
        *last,
        w.Generate(id=ids[7], branch=parent, max_tokens=4, temperature=0),
    ]
    return [room, program]


def run_program(
    sim_class: Any, tokenizer: Any, seed: int, *, steps: int = 30, **settings: Any
) -> dict[str, int]:
    """One random program. Raises AssertionError if a client knows something else than the session.

    Returns what was done, by kind.
    """
    rng = random.Random(seed)
    engine = sim_class(
        tokenizer,
        **{
            "pages": rng.choice([160, 400, 4096]),
            "context": 128,
            "step_tokens": 24,
            "max_rows": 4,
            "eos_every": 20,
            "seed": seed,
            "in_flight": rng.choice([1, 2]),
        }
        | settings,
    )
    first = engine.session("maker")  # makes the session, and leaves
    engine.pump()
    first.drop()
    engine.pump()
    clients = [
        Sharer(engine, 1, f"w{i}", write=True, detach=rng.choice(["run", "run", "pause", "cancel"]))
        for i in range(2)
    ]
    if rng.random() < 0.4:
        clients.append(Sharer(engine, 1, rng.choice(["viewer", "w0"]), write=False))
    for client in clients:
        client.connect()
    engine.pump()
    held: set[int] = set()
    for _ in range(steps):
        client = rng.choice(clients)
        if rng.random() < 0.15 and client.socket is not None:
            client.drop()
        elif client.socket is None:
            client.connect()
        if client.socket is not None:
            for frame in random_frames(rng, client):
                client.send(*frame)
            if rng.random() < 0.1:  # it reads slowly
                message = m.Drained if client.socket in held else m.Throttled
                engine.post_session(1, message(client.socket))
                held ^= {client.socket}
        engine.pump(rng.randrange(0, 30))
    for client in clients:
        if client.socket is None:
            client.connect()
        elif client.socket in held:
            engine.post_session(1, m.Drained(client.socket))
    engine.pump()
    branches = engine.cores[1].state.branches
    for client in clients:
        client.send(*(w.Credit(branch=name, upto=UNLIMITED) for name in branches))
    engine.pump()
    engine.check_outputs(1, {each for client in clients for each in client.chosen})
    total: dict[str, int] = {}
    for client in clients:
        client.check(branches)
        for kind, count in client.counts.items():
            total[kind] = total.get(kind, 0) + count
    clients[0].send(*(w.Drop(id=clients[0].id(), branch=name) for name in list(branches)))
    engine.pump()
    assert engine.cache.referenced == 0
    assert engine.cache.free + engine.cache.evictable == engine.cache.total
    for client in clients:
        assert client.have == {}, (client.name, client.have)
    return total
