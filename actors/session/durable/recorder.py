"""Finds what a session has that its store lacks. Pure.

`collect` compares the session with what was collected before and returns the items that differ. Its cost
follows the branches and the ops that wait, not the text: a segment is encoded once, when it is complete,
and the one of a running generation each time. While nothing but outputs has grown (see
`SessionState.changed`), these are all that it looks at. Segments that no branch reaches any more tell so
themselves (`branch.Saved`). Where much text has come, `ahead` encodes it first, in parts: `collect` is
done in one turn of the loop, so that a save is of one moment.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypedDict, Unpack

import msgspec

from ramify.actors.kit.turns import Steps
from ramify.actors.session.branches.branch import SegmentLink, SessionBranch
from ramify.actors.session.branches.segments import OutputSegment, Rule, SavedNumber
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.branches.tasks import Task
from ramify.actors.session.durable.items import (
    Numbering,
    OpItems,
    StoreDelta,
    encoding_cost,
    number_of,
    reply_key,
    rule_of,
    saved_branches,
    saved_segment,
    unsaved,
)
from ramify.actors.session.output.generations import Generations
from ramify.actors.session.sockets.clients import Declared, Identity, ReplyLog
from ramify.actors.session.sockets.publisher import Publisher
from ramify.protocol.saved import (
    FORMAT,
    HEAD,
    Changes,
    SavedClient,
    SavedHead,
    SavedRun,
)

AHEAD = 1 << 20  # bytes of text and tokens that one turn of the loop encodes

_encode = msgspec.msgpack.Encoder().encode


class SaveTerms(TypedDict, total=False):
    """Fields of `Changes` that who writes them says."""

    sync: bool
    fence: int
    count: int
    whole: bool


class Recorder:
    """The recorder of one session.

    `tasks()`: those that wait or run. `model`: whose tokens its branches hold;
    `created`: seconds since 1970."""

    def __init__(
        self,
        identity: Identity,
        state: SessionState,
        publisher: Publisher,
        generations: Generations,
        *,
        tasks: Callable[[], list[Task]],
        model: str,
        priority: int,
        created: float,
        displaceable: bool,
    ) -> None:
        self._identity = identity
        self._state = state
        self._publisher = publisher
        self._generations = generations
        self._waiting = tasks
        self._model = model
        self._priority = priority
        self._created = created
        self._displaceable = displaceable
        self._items = StoreDelta()
        self._segments, self._rules, self._toolsets = Numbering("s"), Numbering("c"), Numbering("t")
        self._ops = OpItems(self._items)
        self._growing: dict[int, int] = {}  # segments that are being written -> their tokens, as saved
        self._head = b""
        self._busy = False  # ops wait or run
        self._replies: dict[str, dict[int, int]] = {}  # client -> ops with saved replies -> their bytes

    @property
    def kept(self) -> bool:
        """Whether a store may have the session at all."""
        return self._state.persist != "none"

    def adopt(
        self,
        segments: dict[int, SegmentLink],
        rules: dict[int, Rule],
        tools: dict[int, Declared],
        count: int,
        replies: dict[str, set[int]],
        items: Mapping[str, bytes],
        *,
        stored: bool,
    ) -> None:
        """Begin with the `items` of which the session was made. `stored`: whether the store has them.

        `count`: segments that were numbered. The items of ops and frames go, as these get new ones, and
        those of segments that no branch had when its server ended.
        """
        self._segments.count = count
        kept = {HEAD}
        holders: list[tuple[Numbering, Mapping[int, SegmentLink | Rule | Declared]]] = [
            (self._segments, segments),
            (self._rules, rules),
            (self._toolsets, tools),
        ]
        for numbers, holder in holders:
            for number, each in holder.items():
                key = f"{numbers.letter}{number}"
                each.saved = SavedNumber(number, numbers.gone, len(items[key]))
                kept.add(key)
        self._rules.count = _last(items, "c")
        self._toolsets.count = _last(items, "t")
        for client, log in self._publisher.reply_logs.items():
            replies.setdefault(client, set())
            log.changed = set()
        for client, known in replies.items():
            sizes = {ident: len(items[reply_key(client, ident)]) for ident in known}
            self._replies[client] = sizes
        self._head = items[HEAD]
        self._items.size = sum(len(body) for key, body in items.items() if key in kept or key[0] == "r")
        rest = [key for key in items if key not in kept and key[0] != "r"]
        if not stored:  # a file: its head says nothing of this session's life
            self._head = b""
            self._items.size -= len(items[HEAD])
            self._items.put |= {key: items[key] for key in kept if key != HEAD}
            return
        self._items.drop += rest
        self._ops.count = _last(rest, "of")

    def reset(self) -> None:
        """Forget what was saved: the store has nothing of the session, or not what it was told."""
        seen: set[int] = set()
        for branch in self._state.branches.values():
            link = branch.segments.top
            while link is not None and id(link) not in seen:  # the upper ones may not be saved yet
                seen.add(id(link))
                link.saved = None
                if (rule := rule_of(link)) is not None:
                    rule.saved = None
                link = link.before
        for declared in self._declared():
            declared.saved = None
        for numbers in (self._segments, self._rules, self._toolsets):
            numbers.gone.clear()
        self._growing, self._replies, self._head = {}, {}, b""
        self._items.clear()
        self._ops.clear()
        self._state.changed = True
        self._state.unsaved = AHEAD
        for log in self._publisher.reply_logs.values():
            log.changed = None

    @property
    def behind(self) -> bool:
        """Whether so much has come that `ahead` is to be called before `collect`."""
        return self._state.unsaved >= AHEAD and self.kept

    def ahead(self) -> Steps[None]:
        """Encode what is complete for the next `collect`, in parts. Nothing changes in between."""
        self._state.unsaved = 0
        for branch in self._wanted():
            yield 1
            for link in unsaved(branch):
                segment = link.segment
                if isinstance(segment, OutputSegment) and not segment.ended:
                    break
                yield encoding_cost(segment)
                self._put_segment(link)

    def collect(
        self,
        now: float,
        wall: float,
        *,
        ttl_s: float | None,
        away: bool,
        live: bool = True,
        force: bool = False,
        **how: Unpack[SaveTerms],
    ) -> Changes | None:
        """Collect what has changed since the last time; None: nothing. `force`: even then, not None.

        `now`: as ops arrive; `wall`: the same moment in seconds since 1970. `ttl_s`: how long it may be
        kept when nobody is there (`away`); None: as long as the store likes. See `reset`.
        """
        if not self.kept:
            return None
        gone = self._segments.gone or self._rules.gone or self._toolsets.gone
        if self._state.changed or gone or self._items.drop or not self._only_output():
            self._state.changed = False
            self._everything(now, wall, ttl_s)
        put, drop = self._items.take()
        if not put and not drop and live and not force:
            return None
        return Changes(
            session=self._identity.session,
            owner=self._state.owner,
            put=put,
            drop=drop,
            size=self._items.size,
            used=wall,
            expires=wall + ttl_s if away and ttl_s is not None else None,
            busy=self._busy,
            live=live,
            **how,
        )

    def _only_output(self) -> bool:
        """Write outputs that have grown. False if that need not be all that has changed."""
        for generation in self._generations.begun:
            top = generation.branch.segments.top
            if top is None or top.saved is None or generation.counting:
                return False
            if not self._growing.get(top.saved.number):  # without a token: its first one tells a time
                return False
            self._grown(top, top.saved)
        return True

    def _everything(self, now: float, wall: float, ttl_s: float | None) -> None:
        """Write what has changed."""
        self._state.unsaved = 0
        wanted = self._wanted()
        if self._items.put and len(wanted) < len(self._state.branches):
            self._take_back(wanted)
        branches, labels = saved_branches(wanted, self._number)
        tasks = self._tasks()
        waits, failed = self._ops.collect(tasks, now, wall, self._run)
        head = _encode(
            SavedHead(
                format=FORMAT,
                session=self._identity.session,
                key=self._identity.hashes[0],
                view_key=self._identity.hashes[1],
                owner=self._state.owner,
                namespace=self._state.namespace,
                priority=self._priority,
                displaceable=self._displaceable,
                model=self._model,
                revision=self._state.revision,
                lives=self._state.lives,
                handles=self._state.handles,
                segments=self._segments.count,
                created=self._created,
                ttl_s=ttl_s,
                persist=self._state.persist,
                meta=self._state.meta,
                branches=branches,
                labels=labels,
                clients=self._clients(tasks),
                waits=waits,
                failed=failed,
                tools=self._tools(self._publisher.declared),
            )
        )
        if head != self._head:
            self._items.write(HEAD, head, len(self._head))
            self._head = head
        self._busy = bool(waits)
        for number in self._segments.forget(self._items):
            self._growing.pop(number, None)
        self._rules.forget(self._items)
        self._toolsets.forget(self._items)

    # --- branches and segments -------------------------------------------------------------------

    def _wanted(self) -> list[SessionBranch]:
        """Find the branches that are to be saved."""
        branches, session = list(self._state.branches.values()), self._state.persist
        if all(branch.persist is None for branch in branches):
            return branches
        return [each for each in branches if (each.persist or session) != "none"]

    def _number(self, branch: SessionBranch) -> int:
        """Return the number of the branch's last segment. Number and write those without one."""
        new = unsaved(branch)
        link = new[0].before if new else branch.segments.top
        if link is not None and link.saved is not None and self._growing:
            self._grown(link, link.saved)
        for each in new:
            self._put_segment(each)
        return number_of(branch.segments.top)

    def _take_back(self, wanted: list[SessionBranch]) -> None:
        """Forget what was encoded ahead of branches that are not to be saved any more."""
        keeps: set[int] = set()
        for branch in wanted:
            for link in self._ahead_of(branch):
                if id(link) in keeps:
                    break
                keeps.add(id(link))
        for branch in self._state.branches.values():
            for link in self._ahead_of(branch):
                if id(link) not in keeps:
                    link.saved = None

    def _ahead_of(self, branch: SessionBranch) -> Iterator[SegmentLink]:
        """Find the branch's segments that the store has not heard of, the last one first."""
        link = branch.segments.top
        while link is not None and (link.saved is None or f"s{link.saved.number}" in self._items.put):
            yield link
            link = link.before

    def _put_segment(self, link: SegmentLink) -> None:
        """Number a segment, and write it."""
        saved = link.saved = self._segments.new()
        segment = link.segment
        self._write_rule(link)
        saved.size = self._items.write(f"s{saved.number}", _encode(saved_segment(link)))
        if isinstance(segment, OutputSegment) and not segment.ended:
            self._growing[saved.number] = len(segment.tokens)

    def _grown(self, link: SegmentLink, saved: SavedNumber) -> None:
        """Write a segment again that had more to come when it was written."""
        number = saved.number
        segment, length = link.segment, self._growing.get(number)
        if length is None:
            return
        assert isinstance(segment, OutputSegment)
        if segment.ended:
            del self._growing[number]
        elif len(segment.tokens) == length:
            return
        else:
            self._growing[number] = len(segment.tokens)
        self._write_rule(link)
        saved.size = self._items.write(f"s{number}", _encode(saved_segment(link)), saved.size)

    def _write_rule(self, link: SegmentLink) -> None:
        """Write the constraint that a complete output names, if the store does not have it."""
        rule = rule_of(link)
        if rule is None or rule.saved is not None:
            return
        rule.saved = self._rules.new()
        rule.saved.size = self._items.write(f"c{rule.saved.number}", _encode(rule.what))

    # --- ops -------------------------------------------------------------------------------------

    def _tasks(self) -> list[Task]:
        """The tasks that are not done, without those on branches that are not saved."""
        branches, tasks = self._state.branches, self._waiting()
        if all(branch.persist != "none" for branch in branches.values()):
            return tasks
        private = {name for name, branch in branches.items() if branch.persist == "none"}
        return [task for task in tasks if task.branch not in private]

    def _run(self, task: Task) -> Iterator[SavedRun]:
        """Record what the generation of `task` has done, if it has begun."""
        generation = self._generations.of(task)
        if generation is None:
            return
        top = generation.branch.segments.top
        number = top.saved.number if top is not None and top.saved is not None else 0
        yield SavedRun(
            place=task.place,
            segment=number,
            seed=generation.sampling.seed,
            opened=generation.opened,
            forced=generation.forced,
            accepted=generation.accepted,
            logprob=generation.logprob_sum,
            scored=generation.logprob_count,
            ttft=generation.ttft,
        )

    # --- replies ---------------------------------------------------------------------------------

    def _clients(self, tasks: list[Task]) -> list[SavedClient]:
        due = {(task.frame.client, task.op.id) for task in tasks}
        clients: list[SavedClient] = []
        logs = self._publisher.reply_logs
        for client, log in logs.items():
            mine = {ident: left for ident, left in log.due.items() if (client, ident) in due}
            clients.append(SavedClient(client, log.last, mine, self._tools(log.declared)))
            self._save_replies(client, log)
        for client in [client for client in self._replies if client not in logs]:
            for ident, size in self._replies.pop(client).items():
                self._items.remove(reply_key(client, ident), size)
        return clients

    def _declared(self) -> Iterator[Declared]:
        """The tools that clients have declared. Some come more than once."""
        if self._publisher.declared is not None:
            yield self._publisher.declared
        for log in self._publisher.reply_logs.values():
            if log.declared is not None:
                yield log.declared

    def _tools(self, declared: Declared | None) -> int:
        """Return the number of these tools (0: none); tools without one get theirs, and are written."""
        if declared is None or not declared.tools:
            return 0
        if declared.saved is None:
            saved = declared.saved = self._toolsets.new()
            saved.size = self._items.write(f"t{saved.number}", _encode(declared.tools))
        return declared.saved.number

    def _save_replies(self, client: str, log: ReplyLog) -> None:
        saved = self._replies.setdefault(client, {})
        if log.changed is None:
            log.changed = set(log.replies)
        for ident in log.changed:
            replies = log.replies.get(ident)
            if replies is not None:
                body = _encode(replies)
                saved[ident] = self._items.write(reply_key(client, ident), body, saved.get(ident, 0))
            elif ident in saved:
                self._items.remove(reply_key(client, ident), saved.pop(ident))
        log.changed.clear()


def _last(keys: Iterable[str], letters: str) -> int:
    """The highest number among the items whose keys begin with one of `letters`."""
    return max((int(key[1:]) for key in keys if key[0] in letters), default=0)
