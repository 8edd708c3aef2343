"""One attached socket: which part of each branch it has seen, and what waits for it.

The one mechanism behind streaming, merging, resume, `tick_ms`, `credit` and slow readers: a
cursor per branch, and `flush`, which sends everything between the cursor and what the branch has
released as one delta. A socket that cannot be sent to right now keeps its cursors. Only terminal
replies are queued for it, and the ops in flight bound their number.

Pure: messages go into `out`, which the actor delivers as one frame.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.kit.memory import OPENED, Meter, reply_bytes
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import OutputSegment
from ramify.actors.session.sockets.clients import Declared
from ramify.protocol.wire import Delta, Open, ServerMessage, StateReply, Tree

UNLIMITED = 2**63
FULL, OVERHEAD = 256 << 10, 200  # bytes of a frame that a socket catches up with; of a message, about


class BranchProgress(NamedTuple):
    """How far a socket is on one branch.

    `sent`: the position up to which it was sent; `truncate`: where the next delta cuts off what was
    sent; `credit`: the position up to which it may be sent.
    """

    sent: int | None
    truncate: int | None
    credit: int | None


class Subscriber:
    """A socket that is attached to the session. `write`: False for holders of the view key.

    `declared`: the tools in force for it; None: those in `opened`.
    """

    def __init__(
        self, socket: int, opened: Open, meter: Meter, *, write: bool, declared: Declared | None = None
    ) -> None:
        self.socket = socket
        self._meter = meter
        self._size = OPENED  # what it holds: this, and what waits for it
        meter.add(self._size)
        self.client = opened.who
        self._declared = declared if declared is not None else Declared(opened.tools, meter)
        self.opened = self._declared.into(opened)
        self.write = write
        self.out: list[ServerMessage] = []
        self.throttled = False
        self.trees: deque[Tree] = deque()  # those that wait for their answer
        self.looking: Tree | None = None  # the cache is asked for this one
        self.next_tick = 0.0  # with `tick_ms`: when the next deltas may go
        self._ticked: float | None = None  # when the last went: all branches of that moment go together
        self.held = 0  # how many replies and events wait for deltas
        self._cursors: dict[str, int] = {}
        self._truncate: dict[str, int] = {}
        self._credit: dict[str, int] = {}
        self._held: dict[str, deque[tuple[int, ServerMessage, Sequence[SessionBranch]]]] = {}
        # Branches whose text since `open`, or since it did not read, is still to be sent; the replies
        # that come in between, if any do.
        self._late: dict[str, dict[int, list[ServerMessage]] | None] = {}
        self._untold: dict[
            str, SessionBranch
        ] = {}  # a child whose fork waits, and for which branch's deltas

    @property
    def tools(self) -> Toolbox:
        """The tools that its client declared."""
        return self._declared.toolbox

    @property
    def unanswered(self) -> bool:
        """Whether the answer to its `open` is still to be sent."""
        return bool(self.out) and isinstance(self.out[0], StateReply) and self.out[0].id is None

    @property
    def progress(self) -> dict[str, BranchProgress]:
        """The progress of each branch that it was told of, or has given credit for."""
        tables = (self._cursors, self._truncate, self._credit)
        return {
            name: BranchProgress(*(table.get(name) for table in tables))
            for name in dict.fromkeys(name for table in tables for name in table)
        }

    # --- cursors ---------------------------------------------------------------------------

    def begin(self, branch: SessionBranch, position: int) -> None:
        """Deltas of `branch` start at `position`."""
        self._cursors[branch.name] = position

    def resume(self, branch: SessionBranch, have: int, revision: int | None) -> None:
        """Continue from `have`, or from where the branch was cut back to since `revision`."""
        start = min(have, branch.released)
        cut = branch.undercut(revision)
        if cut is not None:
            start = min(start, cut)
        for segment in branch.outputs_from(start):
            if segment.start < start:  # only marks name a text: go back to one
                start = segment.mark_position(segment.mark_at(start))
            break
        self._cursors[branch.name] = start
        if start < have:
            self._truncate[branch.name] = start

    def restart(self, branch: SessionBranch, have: int) -> None:
        """Forget what the socket has seen of a branch, and send it from its beginning."""
        self._cursors[branch.name] = 0
        if have:
            self._truncate[branch.name] = 0

    def cut(self, branch: SessionBranch, to: int) -> None:
        """Note that the branch was moved back to `to`. What is held comes before what is new."""
        if self._cursors.get(branch.name, 0) > to:
            self._cursors[branch.name] = to
        held = self._held.get(branch.name)
        if held is not None:
            self._held[branch.name] = deque(
                (min(upto, to), message, children) for upto, message, children in held
            )

    def place(self, branch: SessionBranch) -> None:
        """Note that `branch` has moved to where another one was. Both were settled before."""
        self.begin(branch, branch.position)
        truncate = self._truncate.pop(branch.name, None)
        if truncate is not None:
            self.out.append(Delta(branch=branch.name, position=truncate, text="", truncate=truncate))

    def rewrite(self, branch: SessionBranch, to: int) -> None:
        """Note that the text from `to` on has changed. The next delta says so, if it was seen."""
        if self._cursors.get(branch.name, 0) > to:
            self._truncate[branch.name] = min(to, self._truncate.get(branch.name, to))
        self.cut(branch, to)

    def rename(self, branch: SessionBranch, new: str) -> None:
        """Note that `branch` is about to be called `new`."""
        self.settle(branch)
        old = branch.name
        for table in (self._cursors, self._truncate, self._credit):
            if old in table:
                table[new] = table.pop(old)

    # --- catching up ---------------------------------------------------------------------------

    @property
    def late(self) -> list[str]:
        """The branches on which the socket is behind: see `catch_up`."""
        return list(self._late)

    @property
    def full(self) -> bool:
        """Whether what waits to be sent is enough for one frame."""
        size = 0
        for message in self.out:
            size += OVERHEAD + len(message.text) if isinstance(message, Delta) else OVERHEAD
            if size > FULL:
                return True
        return False

    def fall_behind(
        self, branch: SessionBranch, replies: dict[int, list[ServerMessage]] | None = None
    ) -> None:
        """Have `catch_up` send the branch later, with these replies in between (see `replay`)."""
        self._late.setdefault(branch.name, replies)

    def catch_up(self, branch: SessionBranch) -> None:
        """Send what the socket lacks of a branch. This precedes by itself other news of the branch."""
        replies = self._late.pop(branch.name, None)
        if replies is not None:
            self.replay(branch, replies)
        else:
            self.flush(branch)

    def forget_late(self, name: str) -> None:
        """Forget a branch that is gone."""
        self._late.pop(name, None)

    def drop(self, branch: SessionBranch) -> None:
        """Forget a branch that is about to go. Its name may come back for another one."""
        self.settle(branch)
        for table in (self._cursors, self._truncate, self._credit):
            table.pop(branch.name, None)

    def settle(self, branch: SessionBranch) -> None:
        """Send all that is due under the branch's present name, even to a socket that is held back.

        It cannot be made later from a branch that goes or is renamed, and a program that ends
        with `drop` needs it. Where its fork is not told yet, what the fork waits for is due too.
        """
        due = [branch]
        while (source := self._untold.get(due[-1].name)) is not None:
            due.append(source)
        throttled, self.throttled = self.throttled, False
        for each in reversed(due):
            credit = self._credit.pop(each.name, None)
            self.flush(each)
            if credit is not None:
                self._credit[each.name] = credit
        self.throttled = throttled

    def credit(self, name: str, upto: int, *, most: int) -> None:
        """Deliver `name` up to a position only. `most`: kept for branches that are still to come."""
        if name not in self._credit and len(self._credit) >= len(self._cursors) + most:
            for other in list(self._credit):
                if other not in self._cursors:
                    del self._credit[other]
        self._credit[name] = upto

    def give_up(self) -> None:
        """Send the replies that wait for deltas without them: the session is over."""
        for held in self._held.values():
            self.out += [message for _, message, _ in held]
        self._held.clear()

    def close(self) -> None:
        """Drop all that waits for a socket that is detached."""
        self._hold(-self._size)
        self._held.clear()
        self._untold.clear()
        self.held = 0

    def _wait(
        self,
        branch: SessionBranch,
        upto: int,
        message: ServerMessage,
        children: Sequence[SessionBranch] = (),
    ) -> None:
        """Have `message`, which tells of `children`, follow the deltas of `branch` up to `upto`."""
        self._held.setdefault(branch.name, deque()).append((upto, message, children))
        for child in children:
            self._untold[child.name] = branch
        self.held += 1
        self._hold(reply_bytes(message))

    def _hold(self, count: int) -> None:
        self._size += count
        self._meter.add(count)

    # --- sending -----------------------------------------------------------------------------

    def stream(self, branches: Iterable[SessionBranch], now: float) -> float | None:
        """Send what is due of the branches. If `tick_ms` holds it back, returns when to call `tick`."""
        tick = self.opened.tick_ms
        if tick and now != self._ticked:
            if now < self.next_tick:
                return self.next_tick
            self._ticked, self.next_tick = now, now + tick / 1e3
        plain = not (self._late or self._held or self._untold)  # as nearly always
        for branch in branches:
            if plain:
                self._advance(branch, branch.label.name, UNLIMITED)
            else:
                self.flush(branch)
        return None

    def tick(self, branches: Iterable[SessionBranch], now: float) -> float | None:
        """Send what waited for `tick_ms`, of all branches. Returns as `stream` does.

        The next pause begins with what is sent here, so deltas come at equal intervals.
        """
        tick = self.opened.tick_ms
        if not tick:
            return None
        if now < self.next_tick:
            return self.next_tick
        before = len(self.out)
        for branch in branches:
            self.flush(branch)
        if len(self.out) > before:
            self._ticked, self.next_tick = now, now + tick / 1e3
        return None

    def flush(self, branch: SessionBranch) -> None:
        """Send what is due of `branch`, and of children that this tells of, whatever `tick_ms` says."""
        due = self._flush(branch)
        while due:
            due += self._flush(due.pop())

    def _flush(self, branch: SessionBranch) -> list[SessionBranch]:
        """Send what is due of `branch`. Returns the children that the socket knows of since."""
        name = branch.label.name
        told: list[SessionBranch] = []
        if self._late and self._late.get(name) is not None:
            self.catch_up(branch)
        if name in self._untold:
            return told
        held = self._held.get(name)
        while held:
            upto, message, children = held[0]
            if not self._advance(branch, name, upto):
                return told
            self.out.append(message)
            held.popleft()
            self.held -= 1
            self._hold(-reply_bytes(message))
            for child in children:
                del self._untold[child.name]
            told += children
        if held is not None:
            del self._held[name]
        self._advance(branch, name, UNLIMITED)
        return told

    def reply(
        self,
        branch: SessionBranch | None,
        message: ServerMessage,
        children: Sequence[SessionBranch] = (),
    ) -> None:
        """Send a reply or an event after everything its branch has released so far.

        `children`: branches that it tells of. Nothing about them is sent before it.
        """
        if branch is not None and not self._catches_up(branch):
            self._wait(branch, branch.released, message, children)
        else:
            self.out.append(message)

    def _catches_up(self, branch: SessionBranch) -> bool:
        """Send what is due of `branch`. Returns whether that is all that it has released."""
        name = branch.label.name
        if not (self._late or self._held or self._untold):  # as nearly always
            return self._advance(branch, name, UNLIMITED) or not self._behind(branch)
        self.flush(branch)
        return not (name in self._held or name in self._untold or self._behind(branch))

    def replay(self, branch: SessionBranch, replies: dict[int, list[ServerMessage]]) -> None:
        """Send what was missed, after `resume`, with replies of this client's generations in between."""
        start = self._cursors[branch.name]
        for segment in list(branch.outputs_from(start)):
            if not segment.ended:
                break
            mine = self.write and segment.client == self.client
            done = _done(segment, branch, replies) if mine else None
            if done is not None:
                if self._advance(branch, branch.name, segment.end):
                    self.out.append(done)
                else:
                    self._wait(branch, segment.end, done)
        self.flush(branch)
        if branch.name in self._truncate and not self.throttled:
            truncate = self._truncate.pop(branch.name)
            self.out.append(Delta(branch=branch.name, position=truncate, text="", truncate=truncate))

    def _behind(self, branch: SessionBranch) -> bool:
        cursor = self._cursors.get(branch.name, 0)
        outputs = branch.outputs_back_to(cursor)
        return any(p.counts and not p.quiet and p.released > cursor for p in outputs)

    def _advance(self, branch: SessionBranch, name: str, upto: int) -> bool:
        """Move the cursor to `upto`, or as far as it may. True if it got there.

        `name`: of the branch. This runs for each token: it looks nothing up twice.
        """
        if self.throttled:
            return not self._behind(branch)
        cursor = self._cursors.get(name, 0)
        limit = min(upto, self._credit.get(name, upto)) if self._credit else upto
        complete, running = True, False  # running: the branch ends here, for now
        for segment in branch.outputs_from(cursor):
            if segment.start >= upto:
                break
            if segment.quiet:
                continue
            counts = segment.counts
            first, last = bisect_right(counts, cursor - segment.start), len(counts)  # `mark_at`
            if last and segment.start + counts[-1] > limit:
                last = segment.mark_at(limit)
                complete = complete and limit == upto
            if self.opened.parts and last > segment.labelled:  # what it is will be known soon
                last, complete = segment.labelled, False
            if last > first:
                delta = self._delta(name, segment, first, last)
                self.out.append(delta)
                cursor = delta.position
            if not complete:
                break
            running = not segment.ended and 0 < last == len(counts)
        if complete and not running:  # also past input, so that the next look begins there
            cursor = max(cursor, min(upto, branch.released))
        self._cursors[name] = cursor
        return complete

    def _delta(self, name: str, segment: OutputSegment, first: int, last: int) -> Delta:
        chunks = segment.chunks
        low = segment.counts[first - 1] if first else 0
        high = segment.counts[last - 1]
        begins = first == 0 and self.opened.usage
        return Delta(
            branch=name,
            position=segment.start + high,
            text=chunks[first] if last - first == 1 else "".join(chunks[first:last]),
            parts=segment.parts(first, last) or None if self.opened.parts else None,
            tokens=segment.tokens[low:high].tolist() if self.opened.tokens else None,
            logprobs=segment.logprobs[low:high] if segment.logprobs is not None else None,
            truncate=self._truncate.pop(name, None) if self._truncate else None,
            prompt=segment.start if begins else None,
            cached=segment.cached if begins else None,
        )


def _done(
    segment: OutputSegment, branch: SessionBranch, replies: dict[int, list[ServerMessage]]
) -> ServerMessage | None:
    """Find the kept reply of the generation that made this segment, if there still is one."""
    stored: Iterable[ServerMessage] = replies.get(segment.op, ()) if segment.op is not None else ()
    for message in stored:
        if getattr(message, "branch", None) == branch.name:
            return message
    return None
