"""Makes `state` messages: the answers to `open` and to `tree`. Pure."""

from collections.abc import Callable
from typing import Literal, TypedDict, Unpack

from ramify.actors.kit.memory import json_size
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import OutputSegment, Segment
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.sockets.clients import Identity, ReplyLog
from ramify.protocol.messages import Attach, Inspect, Inspected
from ramify.protocol.wire import BranchState, Place, SegmentState, ServerInfo, StateReply, Tree, Usage

Then = Callable[[list[int], list[int]], None]
TIERS: tuple[Literal["host", "disk"], ...] = "host", "disk"  # of `Inspected.tiers`
UNKNOWN = -1  # tokens of a branch that are resident
BRANCH, TURN, TOKEN = 250, 100, 8  # bytes on the wire, beside names and text


class Suggested(TypedDict, total=False):
    """Fields of `Inspect`."""

    leases: list[tuple[int | None, float]]
    demote: bool


class Inspections:
    """Asks the cache how many tokens of branches are resident, and passes on the answers."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._waiting: dict[int, tuple[Inspect, Then]] = {}

    def ask(self, branches: list[SessionBranch], then: Then, **what: Unpack[Suggested]) -> None:
        """Ask about branches. `then` gets the resident tokens of each (UNKNOWN: the cache is gone), what
        its leases keep, and the tiers: see `Inspected`.
        """
        ident = self._state.next_id()
        handles = [branch.handle for branch in branches]
        question = Inspect(self._state.number, ident, handles, owner=self._state.owner, **what)
        self._waiting[ident] = (question, then)
        self._state.out.cache.append(question)

    def answered(self, message: Inspected) -> None:
        """Pass on an answer of the cache."""
        waiting = self._waiting.pop(message.id, None)
        if waiting is not None:
            waiting[1](message.resident, message.tiers or [0] * len(waiting[0].branches))

    def give_up(self) -> None:
        """Answer all with UNKNOWN: the cache is gone."""
        while self._waiting:  # those who are answered may ask
            question, then = self._waiting.pop(next(iter(self._waiting)))
            then([UNKNOWN] * len(question.branches), [0] * len(question.branches))

    def ask_again(self) -> None:
        """Ask again: another cache has the branches now."""
        self._state.out.cache += [question for question, _ in self._waiting.values()]


class View:
    """Makes `state` messages. Resident tokens come from the cache (`Inspections`)."""

    def __init__(
        self,
        identity: Identity,
        state: SessionState,
        server: ServerInfo,
        *,
        rewritten: Callable[..., str | None],
        stored: bool = False,
    ) -> None:
        """`rewritten`: what clients of append mode should know of the chat template."""
        self._identity = identity
        self._state = state
        self._server = server
        self._rewritten = rewritten
        self.stored = stored

    def lengths(self) -> dict[SessionBranch, int]:
        """Count the tokens of each branch that have KV for its next turn, unless evicted.

        0 while a generation runs: the tree does not have its KV yet.
        """
        branches = self._state.branches.values()
        return {branch: 0 if branch.running else branch.released for branch in branches}

    def opened(
        self,
        message: Attach,
        reply_log: ReplyLog,
        resident: dict[SessionBranch, tuple[int, int]],
        lengths: dict[SessionBranch, int],
        ttl_s: float,
        tools: list[str],
    ) -> StateReply:
        """Make the answer to `open`. `tools`: the names of those in force.

        `resident`: by branch, its tokens with KV and the tier of those that follow; of other branches
        that is not known. `lengths` are of the time when the cache was asked: a generation may have
        ended since.
        """
        state, identity = self._state, self._identity
        known = [(branch, *resident.get(branch, (UNKNOWN, 0))) for branch in state.branches.values()]
        resumed = message.open.session is not None
        note = self._rewritten(tools=bool(tools)) if message.open.template == "append" else None
        return StateReply(
            session=identity.session,
            op=reply_log.highest,
            revision=state.revision,
            branches=[branch_state(*each) for each in known],
            client=message.open.who,
            key=identity.key if message.write else None,
            view_key=identity.view_key or None,
            resumed=resumed,
            cold=resumed and any(warm < min(lengths.get(b, 0), b.released) - 1 for b, warm, _ in known),
            limits=state.limits.wire(),
            server=self._server,
            meta=state.meta,
            ttl_s=ttl_s,
            lost=state.lost(message.open.revision),
            persist=state.persist if self.stored else None,
            tools=tools or None,
            notes=[note] if note is not None else None,
        )

    def tree(
        self,
        op: Tree,
        reply_log: ReplyLog,
        branches: list[SessionBranch],
        resident: list[int],
        tiers: list[int],
    ) -> StateReply:
        """Make the answer to `tree`: about `limits.tree_bytes` of it, and one turn at least.

        A fork's turns begin where its parent's end, unless the op asks for one branch alone.
        """
        pages = _Page(self._state.limits.tree_bytes)
        after = op.after
        for branch, known, tier in zip(branches, resident, tiers, strict=True):
            pages.size += BRANCH + json_size(branch.meta)
            if pages.branches and pages.full:
                pages.next = Place(branch=branch.name)
                break
            turns, start = None, None
            if op.text or op.tokens:
                first = self._first(branch) if op.branch is None else 0
                if first:
                    start = branch.segments[first - 1].end
                if after is not None and after.branch == branch.name:
                    first = max(first, branch.index_at(after.position))
                turns = pages.take(branch, first, op)
            usage = branch.usage if op.branch is not None else None
            pages.branches.append(
                branch_state(branch, known, tier, turns=turns, turns_from=start, usage=usage)
            )
            if pages.next is not None:
                break
        return StateReply(
            session=self._identity.session,
            op=reply_log.highest,
            revision=self._state.revision,
            branches=pages.branches,
            meta=self._state.meta,
            id=op.id,
            next=pages.next,
        )

    def _first(self, branch: SessionBranch) -> int:
        """The index of the first segment that the branch's parent does not show."""
        parent = self._state.branches.get(branch.parent or "")
        return branch.shared_with(parent) if parent is not None else 0


class _Page:
    """One answer to `tree`. `next`: where it is full."""

    def __init__(self, most: int) -> None:
        self.branches: list[BranchState] = []
        self.next: Place | None = None
        self.size = 0
        self._most = most
        self._turns = 0

    @property
    def full(self) -> bool:
        return self.size > self._most

    def take(self, branch: SessionBranch, first: int, op: Tree) -> list[SegmentState]:
        """Take the turns of `branch` from segment `first` on, as many as fit.

        One without tokens is left out: a position could not tell whether a fork shares it.
        """
        turns: list[SegmentState] = []
        for index in range(first, len(branch.segments)):
            segment = branch.segments[index]
            turn = segment_state(segment, op.text, op.tokens)
            if turn.end == turn.start:
                continue
            self.size += TURN + len(turn.text or "") + TOKEN * len(turn.tokens or ())
            if self._turns and self.full:
                self.next = Place(branch=branch.name, position=segment.start)
                break
            turns.append(turn)
            self._turns += 1
        return turns


def branch_state(
    branch: SessionBranch,
    resident: int,
    tier: int = 0,
    *,
    turns: list[SegmentState] | None = None,
    turns_from: int | None = None,
    usage: Usage | None = None,
) -> BranchState:
    """Show a branch as `state` does. `resident`: tokens with KV (-1: not known). `tier`: of more."""
    running = branch.running
    return BranchState(
        branch=branch.name,
        position=branch.released,
        parent=branch.parent,
        at=branch.at if branch.parent is not None else None,
        running=running.op if running else None,
        started_at=running.start if running else None,
        kv=TIERS[tier - 1] if tier else "gpu" if resident > 0 else "none",
        resident=resident if resident >= 0 else None,
        retain_s=branch.retain_s,
        persist=branch.persist,
        reason=branch.reason,
        usage=usage,
        meta=branch.meta,
        turns=turns,
        turns_from=turns_from,
    )


def segment_state(segment: Segment, text: bool, tokens: bool) -> SegmentState:
    """Make what `tree` shows of a segment: of one that is being written, what is released."""
    messages = segment.messages if text and not isinstance(segment, OutputSegment) else ()
    output = isinstance(segment, OutputSegment)
    end = segment.released if isinstance(segment, OutputSegment) and not segment.ended else segment.end
    return SegmentState(
        kind="output" if output else "input",
        start=segment.start,
        end=end,
        op=segment.op,
        role=segment.role,
        text=segment.text if text else None,
        tokens=segment.tokens[: end - segment.start].tolist() if tokens else None,
        messages=list(messages) or None,
    )
