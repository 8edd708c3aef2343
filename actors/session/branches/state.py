"""What the parts of a session share: its branches, its outbox, what it knows of the engine.

Pure. Every change of a branch goes through here, so that the session's segments and the cache's
handle move together.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from ramify.actors.kit.memory import BRANCH, JSON, Holdings, Meter, json_size
from ramify.actors.kit.turns import Steps
from ramify.actors.session.branches.branch import Label, SegmentLink, SessionBranch, input_segment
from ramify.actors.session.branches.segments import Decode, InputSegment, Rule, Segment
from ramify.actors.tokenizer.encoder import Queue
from ramify.actors.tokenizer.histories import Bound, Histories
from ramify.actors.tokenizer.pictures import PictureDecoder
from ramify.protocol.config import Limits
from ramify.protocol.errors import Exists, LimitExceeded, NoBranch, TooLong
from ramify.protocol.messages import (
    Abandon,
    CancelRequest,
    Compile,
    DropBranches,
    ExtendBranch,
    ForkBranch,
    Inspect,
    MoveBranch,
    OpenBranch,
    Reopen,
    RetainBranches,
    Submit,
)
from ramify.protocol.pictures import MOST_ON_BRANCH, Picture, PlacedPicture, placed
from ramify.protocol.plan import pack
from ramify.protocol.saved import SavedRule
from ramify.protocol.wire import Error, JsonObject, Persist, ServerMessage

MakeTokens = Callable[[], "array[int]"]
Made = object  # by `EncodeText.run`: input, choices or a prompt, as the one who asked for it knows
ToCache = (
    OpenBranch
    | ExtendBranch
    | ForkBranch
    | MoveBranch
    | RetainBranches
    | DropBranches
    | Reopen
    | Inspect
)
ToScheduler = Submit | CancelRequest
ToGrammar = Compile | Abandon


class EncodeText(msgspec.Struct, frozen=True):
    """Render and tokenize long text off the event loop: `run`. Answered with `Encoded`."""

    ticket: int
    size: int  # characters, about
    run: Callable[[], Made]
    queue: Queue = "text"  # whose turn it awaits


class Encoded(msgspec.Struct, frozen=True):
    """What the `run` of an `EncodeText` returned, or why it could not."""

    ticket: int
    prepared: Made | None
    error: BaseException | None = None


class Outbox:
    """Commands to other actors, collected while a session handles its mailbox.

    The actor sends them when it has read its mailbox: first to sockets, then to the cache, then to the
    grammar actor and the scheduler. A request may name a branch that the cache has just been told of, so
    the cache comes first.
    """

    def __init__(self) -> None:
        self.cache: list[ToCache] = []
        self.retained: dict[int, float] = {}  # handle -> until, told after `cache`
        self.scheduler: list[ToScheduler] = []
        self.grammar: list[ToGrammar] = []
        self.notes: list[tuple[int, ServerMessage]] = []  # to sockets that are not attached
        self.refused: list[tuple[int, Error]] = []  # sockets that are turned away, and why
        self.closes: list[tuple[int, int, str]] = []  # socket, code, reason
        self.encode: list[EncodeText] = []
        self.wake_at: float | None = None

    def forget(self) -> None:
        """Drop what is for cache, scheduler and grammar, which are gone. Replies still go out."""
        self.forget_engine()
        self.encode.clear()
        self.wake_at = None

    def forget_engine(self) -> None:
        """Drop what is for cache, scheduler and grammar: others replace them, and are told all anew."""
        for commands in (self.cache, self.retained, self.scheduler, self.grammar):
            commands.clear()

    def seal(self, owner: str = "") -> None:
        """Make one message of all that is retained, behind those that make, move or drop branches."""
        if self.retained:
            self.cache.append(RetainBranches(self.retained, owner))
            self.retained = {}

    def wake(self, when: float) -> None:
        """Ask for a `Tick` at `when` or earlier."""
        self.wake_at = when if self.wake_at is None else min(when, self.wake_at)


LIFE = 1 << 32  # revisions of one life of a session: each server that takes it up begins with the next
LIVES_KEPT = 64
SEGMENTS = 1 << 14  # of a branch
SAVED = 16  # bytes of an output's token in a store, about
MESSAGE = 128  # of text that cost as much to save as a chat message
TELLING = 5  # what it costs to tell a cache of a branch (see `Work`)
LINKS = 2  # that are looked at in a microsecond then


class SessionState:
    """The branches of one session and the numbers it hands out.

    `owner`, `namespace`: see `OpenSession`. `model`: whose tokens it has. `vocab`: ids that the model
    has. `meter`: what it holds; by default nobody else counts it.
    """

    def __init__(
        self,
        number: int,
        *,
        context: int,
        vocab: int,
        limits: Limits,
        decode: Decode,
        owner: str = "",
        model: str = "",
        namespace: str = "",
        meter: Meter | None = None,
    ) -> None:
        self.number = number
        self.context = context
        self.vocab = vocab
        self.limits = limits
        self.decode = decode
        self.owner = owner
        self.model = model
        self.namespace = namespace
        self.meter = meter if meter is not None else Holdings(limits).open(owner)
        self.branches: dict[str, SessionBranch] = {}
        self.revision = 0
        self.lives: list[int] = []  # the last revision that was saved in each life before this one
        self.meta: JsonObject | None = None
        self.persist: Persist = "lazy"  # what a store keeps of it, where there is one
        self.stored = False  # the server has a store
        self.changed = True  # anything that a store keeps, beyond output that grows
        self.unsaved = 0  # bytes of text and tokens since the last save, about
        self.out = Outbox()
        self.expects = 0  # tokens that its ops, waiting or running, are going to add, about
        self.pictures: PictureDecoder | None = None  # the server's; None: the model takes none
        self.histories = Histories(limits)  # the server's, where there is one
        self.ahead: Callable[[str, MakeTokens], None] | None = None  # see `SpareWork.put`
        self.binds = False  # its first messages may be a history that is known
        # what those became: text, and what was known of it
        self.asked: tuple[str, Bound] | None = None
        self._rules = WeakValueDictionary[SavedRule, Rule]()
        self.handles = 0  # how many were given out
        self._meta_bytes = 0

    def next_id(self) -> int:
        """Make a branch handle or request id (see `protocol.messages`)."""
        self.handles += 1
        return self.number << 32 | self.handles

    def restore(self, revision: int, lives: list[int], handles: int, meta: JsonObject | None) -> None:
        """Restore what another server had at `revision`. The branches follow."""
        self.lives = [*lives, revision][-LIVES_KEPT:]
        self.revision = (revision // LIFE + 1) * LIFE
        self.handles = handles
        self.annotate(None, meta)

    def lost(self, revision: int | None) -> bool:
        """Whether a client that has seen `revision` saw what was not saved before its server ended."""
        if revision is None:
            return False
        life, now = revision // LIFE, self.revision // LIFE
        if life >= now:  # equal: the one before had saved nothing, or the store is an older copy
            return revision > self.revision
        known = now - life <= len(self.lives)
        return not known or revision > self.lives[life - now]

    def bump(self) -> int:
        """Count a change of the tree. Returns the new revision."""
        self.revision += 1
        return self.revision

    def branch(self, name: str) -> SessionBranch:
        """Find a branch by its name. Raises NoBranch."""
        branch = self.branches.get(name)
        if branch is None:
            raise NoBranch(f"there is no branch {name!r}", details={"branch": name})
        return branch

    def root(self, name: str) -> SessionBranch:
        """Make a new empty branch. Raises Exists or LimitExceeded."""
        return self.roots([name])[0]

    def roots(self, names: Sequence[str]) -> list[SessionBranch]:
        """Make new empty branches, all or none. Raises Exists or LimitExceeded."""
        self.check_new(names)
        roots = [SessionBranch(name, self.next_id(), born=self.revision + 1) for name in names]
        for branch in roots:
            self.branches[branch.name] = branch
            self.meter.add(BRANCH)
            self.out.cache.append(OpenBranch(branch.handle, self.namespace))
        return roots

    def check_new(self, names: Sequence[str], *, moved: int = 0) -> None:
        """Raises Exists or LimitExceeded if branches of these names cannot be made.

        `moved`: how many of them are branches that exist and change their name.
        """
        if len(self.branches) + len(names) - moved > self.limits.branches:
            raise LimitExceeded(
                f"the session has {len(self.branches)} branches; {len(names)} more pass the limit: "
                "drop some first",
                details={"max": self.limits.branches},
            )
        taken: set[str] = set()
        for name in names:
            if name in self.branches or name in taken:
                raise Exists(
                    f"branch {name!r} exists already: choose another name", details={"branch": name}
                )
            taken.add(name)
        if len(names) > moved:
            self.meter.require(BRANCH * (len(names) - moved))

    def fork(self, branch: SessionBranch, names: Sequence[str], at: int) -> list[SessionBranch]:
        """Fork children of `branch` at position `at`, all or none. Raises Exists or LimitExceeded."""
        if not names:
            return []
        self.check_new(names)
        born = self.revision + 1
        first = branch.fork(names[0], self.next_id(), at, self.decode, born=born)
        children = [first, *(first.twin(name, self.next_id()) for name in names[1:])]
        self.branches.update((child.name, child) for child in children)
        self.meter.add(BRANCH * len(children))
        self.out.cache.append(ForkBranch(branch.handle, [child.handle for child in children], at))
        return children

    def place(self, placements: Sequence[tuple[SessionBranch, str]]) -> list[int | None]:
        """Have each name stand for what a branch holds, all at once, so that names may be swapped.

        The branch of that name is moved; where there is none, one is made: the caller has made sure of
        the room (`check_new`). Returns of each name up to where its branch is as before; None: new.
        Raises Exists if a name is given twice: one of its branches would be lost.
        """
        names = [name for _, name in placements]
        for name in names if len(set(names)) < len(names) else ():
            if names.count(name) > 1:
                raise Exists(f"two branches cannot be {name!r}", details={"branch": name})
        twins: list[tuple[SessionBranch, SessionBranch | None]] = []
        for source, name in placements:
            twin = source.twin(name, self.next_id())
            twin.born = self.revision
            self.out.cache.append(ForkBranch(source.handle, [twin.handle], source.position))
            twins.append((twin, self.branches.get(name)))
        same: list[int | None] = []
        for twin, there in twins:
            if there is None:
                self.branches[twin.name] = twin
                self.meter.add(BRANCH)
                same.append(None)
                continue
            self.out.retained.pop(there.handle, None)
            self.out.cache.append(DropBranches([there.handle]))
            same.append(there.become(twin))
        return same

    def below(self, roots: Iterable[SessionBranch]) -> list[SessionBranch]:
        """Find these branches and all their descendants. O(branches)."""
        known: dict[Label | None, bool] = {None: False}
        known.update((branch.label, True) for branch in roots)
        found: list[SessionBranch] = []
        for branch in self.branches.values():
            way: list[Label] = []
            at: Label | None = branch.label
            while at not in known:
                assert at is not None
                way.append(at)
                at = at.ancestor()
            inside = known[at]
            known.update((label, inside) for label in way)
            if inside:
                found.append(branch)
        return found

    def rule(self, what: SavedRule) -> Rule:
        """Find or make the rule of a constraint, which counts once."""
        rule = self._rules.get(what)
        if rule is None:
            rule = Rule(what)
            rule.charge(self.meter, rule.size)
            self._rules[what] = rule
        return rule

    def room(self, branch: SessionBranch, count: int, *, at_least: bool = False) -> None:
        """Raises TooLong if `count` more tokens pass the context length. `at_least`: or even more.

        LimitExceeded if the branch has as many segments as one may have.
        """
        if len(branch.segments) >= SEGMENTS:
            raise LimitExceeded(
                f"branch {branch.name!r} has {len(branch.segments)} inputs and outputs, at most "
                f"{SEGMENTS} are allowed: fork from an earlier position, or append more at once",
                details={"max": SEGMENTS},
            )
        if branch.position + count > self.context:
            more = f"at least {count}" if at_least else f"{count}"
            raise TooLong(
                f"branch {branch.name!r} has {branch.position} tokens; {more} more pass the context "
                f"of {self.context}: shorten the input, or fork from an earlier position",
                details={"max": self.context, "position": branch.position, "tokens": count},
            )

    def room_for(self, branch: SessionBranch, pictures: Sequence[Picture]) -> int:
        """Count the bytes of pixels. Raises LimitExceeded if the branch may not have so many."""
        added, top = sum(len(each.pixels) for each in pictures), branch.segments.top
        if added and added + (0 if top is None else top.pixels) > MOST_ON_BRANCH:
            raise LimitExceeded(
                f"the pictures of branch {branch.name!r} would have more than {MOST_ON_BRANCH} bytes of "
                "pixels: append smaller ones, or fork from an earlier position",
                details={"max": MOST_ON_BRANCH},
            )
        return added

    def extend(
        self, branch: SessionBranch, tokens: Sequence[int], text: str, packed: bytes = b"", **fields: Any
    ) -> InputSegment:
        """Append an input segment. `packed`: `tokens` for the cache, where the caller has them."""
        segment = input_segment(branch, tokens, text, **fields)
        if tokens:
            shown = self.shown(segment)
            self.out.cache.append(ExtendBranch(branch.handle, packed or pack(tokens), shown))
        segment.count(self.meter)
        self.unsaved += len(text) + 4 * len(tokens) + MESSAGE * len(segment.messages)
        return segment

    def shown(self, segment: Segment) -> list[PlacedPicture]:
        """The pictures of a segment, as the cache is told of them."""
        if segment.picture is None or self.pictures is None:
            return []
        return [placed(segment.start, segment.tokens, segment.picture, self.pictures.settings)]

    def extend_handle(self, branch: SessionBranch, tokens: Sequence[int]) -> None:
        """Tell the cache of tokens that the caller puts into a segment."""
        if tokens:
            self.out.cache.append(ExtendBranch(branch.handle, pack(tokens)))

    def move_handle(self, branch: SessionBranch, to: int) -> None:
        """Tell the cache that the branch now ends at position `to`."""
        self.out.cache.append(MoveBranch(branch.handle, to))

    def truncate(self, branch: SessionBranch, to: int) -> None:
        """Cut the branch back to position `to`."""
        if to < branch.position:
            branch.truncate(to, self.decode)
            self.move_handle(branch, to)

    def drop(self, branch: SessionBranch) -> None:
        del self.branches[branch.name]
        branch.label.gone = True
        self.meter.add(-BRANCH)
        self.annotate(branch, None)
        self.out.retained.pop(branch.handle, None)  # told after the drop, and nobody has it then
        self.out.cache.append(DropBranches([branch.handle]))

    def rename(self, branch: SessionBranch, name: str) -> None:
        """Raises Exists if another branch has that name."""
        self.check_new([name], moved=1)
        del self.branches[branch.name]
        branch.label.name, branch.born = name, self.revision + 1
        self.branches[name] = branch

    def annotate(self, branch: SessionBranch | None, meta: JsonObject | None) -> None:
        """Set the `meta` of a branch, or of the session. Raises LimitExceeded."""
        holder = branch if branch is not None else self
        size, before = json_size(meta), json_size(holder.meta)
        self._check_meta(size - before)
        holder.meta = meta
        self._meta_bytes += size - before
        self.meter.add(JSON * (size - before))

    def _check_meta(self, more: int) -> None:
        """Raises LimitExceeded if `meta` objects may not take `more` bytes."""
        most = self.limits.session_meta_bytes
        if self._meta_bytes + more > most:
            raise LimitExceeded(
                f"the session's `meta` would take {self._meta_bytes + more} bytes, at most {most} are "
                "allowed: keep a key there, and what it stands for with you",
                details={"max": most},
            )
        if more > 0:
            self.meter.require(JSON * more)


def retell(state: SessionState, now: float) -> Steps[None]:
    """Tell a cache of all branches, of which it has none: the session was restored, or has moved.

    Each branch is a fork of the first that has its segments: shared tokens are told once.

    `now`: from when on branches are retained.
    """
    at: dict[int, int] = {}  # id(link) -> a handle that has it
    for branch in list(state.branches.values()):
        own: list[SegmentLink] = []
        link = branch.segments.top
        while link is not None and id(link) not in at:
            own.append(link)
            link = link.before
        if link is None:
            state.out.cache.append(OpenBranch(branch.handle, state.namespace))
        else:
            state.out.cache.append(ForkBranch(at[id(link)], [branch.handle], link.segment.end))
        yield TELLING + len(own) // LINKS
        tokens, pictures = array("i"), list[PlacedPicture]()
        for each in reversed(own):
            at[id(each)] = branch.handle
            tokens.extend(each.segment.tokens)
            pictures += state.shown(each.segment)
        if tokens:
            state.out.cache.append(ExtendBranch(branch.handle, pack(tokens), pictures))
        if branch.retain_s is not None:
            state.out.retained[branch.handle] = now + branch.retain_s
