"""Pictures that the tower runs on beside the steps, and what the executor keeps of what it made.

A run whose prompt shows pictures waits here, with its row and its pages, until what the tower makes of
all of them is kept; then its prompt is computed. Steps go on meanwhile. Runs that show the same picture
share one run of the tower. What was made stays while a run needs it, up to the end of its prompt, and
then as long as there is room: what was not needed for longest goes first.

A run takes room for all of its pictures at once, so no two can wait for each other. One alone may take
more than there is. Who is next: the highest level, then the tenant whose runs have least of the room,
then the order of the grants. Who was next once stays so in its level, so that the small ones of others
do not keep a large one out.

The tower is given a few pictures at a time, as what it was given runs even if nobody wants it any more.
Levels go first, then tenants take turns. Does not know pixels, nor what a tower is.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

from ramify.actors.scheduler.prompt_queue import PromptQueue
from ramify.actors.scheduler.request import Level, Request, RequestRun, RequestState
from ramify.protocol.pictures import Picture, PictureLook, PlacedPicture
from ramify.protocol.plan import ExecutorInfo, PicturesSeen

PLAN_BYTES = 4 << 20  # of pixels that go with a plan; one picture does in any case
PLAN_PICTURES = 16  # and no more than these: each is chosen among all runs that wait
TOWER_BYTES = 32 << 20  # of pixels that a GPU's tower has yet to run on; a CPU's runs one by one
TOWER_PICTURES = 2  # that a tower is given in any case
Looked = tuple[list[PictureLook], list[bytes]]
NOTHING: Looked = [], []  # never changed


@dataclass(slots=True, eq=False)
class _Shown:
    """What is made of a picture. The tower itself is a user until it is ready."""

    size: int
    users: int = 0
    ready: bool = False


class PictureLooks:
    """The runs that wait for pictures, in the order of their grants."""

    def __init__(self, info: ExecutorInfo, prompts: PromptQueue) -> None:
        self._each, self.room = info.picture_bytes, info.picture_room
        self._most = max(1, info.max_rows // 2)  # runs that may wait; rows are left for those without
        self._prompts = prompts
        self._known: OrderedDict[bytes, _Shown] = OrderedDict()  # those without users by their last use
        self._bytes = self.held = 0  # of all that are known, and of those with users
        self._unsent: dict[bytes, Picture] = {}
        self._given: dict[bytes, int] = {}  # what the tower has: bytes of pixels
        self._given_bytes = 0
        self._most_given = TOWER_BYTES if info.device.startswith("cuda") else 0
        self._turns = count(1)
        self._unseen: list[bytes] = []  # for the next plan
        self._queue: dict[RequestRun, dict[bytes, PlacedPicture]] = {}  # no room for theirs
        self._first: RequestRun | None = None  # of these
        self._waiting: dict[RequestRun, set[bytes]] = {}  # what each still waits for
        self.parked: list[Request] = []  # to be granted again when fewer runs wait
        self.due = False  # there is something for the next plan

    @property
    def full(self) -> bool:
        """Whether as many runs wait as may."""
        return len(self._waiting) >= self._most

    @property
    def under_way(self) -> bool:
        """Whether the tower runs."""
        return any(not each.ready for each in self._known.values())

    def looking(self, run: RequestRun) -> bool:
        """Whether the tower was given a picture that `run` waits for."""
        return not self._waiting.get(run, set()).isdisjoint(self._given)

    def unparked(self) -> list[Request]:
        """Take as many requests of `parked` as may wait here now."""
        room = self._most - len(self._waiting)
        if room < 1:
            return []
        parked = [each for each in self.parked if each.state is RequestState.PARKED]
        parked.sort(key=lambda each: (not each.level[0], -each.level[1], each.account.tenant.looked))
        self.parked = parked[room:]
        return parked[:room]

    def waits(self, run: RequestRun) -> bool:
        """Whether `run`, whose prompt shows pictures, has to wait. It is added to the prompts when they
        are seen.
        """
        wanted = {each.key: each for each in run.pictures if each.picture is not None}
        run.pictures = [each.without_pixels() for each in run.pictures]
        if not wanted:
            return False
        self._waiting[run] = set(wanted)
        if self._queue or not self._take(run, wanted):
            self._queue[run] = wanted
            return True
        if self._waiting[run]:
            return True
        del self._waiting[run]
        return False

    def leave(self, run: RequestRun) -> None:
        """`run` needs its pictures no more: its prompt is computed, or it has ended."""
        if run in self._waiting:
            del self._waiting[run]
            self._queue.pop(run, None)
        for key in run.shows:
            run.account.tenant.shown -= self._known[key].size
            self._release(key)
        run.shows = frozenset()
        self._admit()

    def seen(self, message: PicturesSeen) -> list[RequestRun]:
        """Let runs go on whose pictures are all seen now. Returns those that wait for a failed one."""
        for key in (*message.keys, *message.failed):
            self._given_bytes -= self._given.pop(key)
        for key in message.keys:
            self._known[key].ready = True
            self._release(key)
        failed = set(message.failed)
        lost = [run for run, keys in self._waiting.items() if not failed.isdisjoint(keys)]
        for run in lost:
            self.leave(run)
        for key in message.failed:  # nobody is left who needs it
            self._bytes -= self._known[key].size
            self.held -= self._known.pop(key).size
        found = set(message.keys)
        for run, keys in list(self._waiting.items()):
            if run.shows and not keys.isdisjoint(found):
                keys -= found
                if not keys:
                    self._go_on(run)
        self._admit()
        self.due = self.due or bool(self._unsent)
        return lost

    def plan(self) -> Looked:
        """The pictures that the next plan gives to the tower, and those that the executor may forget."""
        looks: list[PictureLook] = []
        room = PLAN_BYTES
        while self._unsent and len(looks) < PLAN_PICTURES and self._wants_more():
            key = self._next()
            room -= len(self._unsent[key].pixels)
            if looks and room < 0:
                break
            looks.append(look := PictureLook(key, self._unsent.pop(key)))
            self._given[key] = size = len(look.picture.pixels)
            self._given_bytes += size
        unseen, self._unseen = self._unseen, []
        self.due = bool(self._unsent) and self._wants_more()
        return looks, unseen

    def clear(self) -> None:
        """The executor is gone, and all that was kept with it. All runs were dropped."""
        self._known.clear()
        self._unsent.clear()
        self._given.clear()
        self._unseen.clear()
        self._bytes = self.held = self._given_bytes = 0
        self.due = False

    def _wants_more(self) -> bool:
        """Whether the tower is given another picture."""
        return len(self._given) < TOWER_PICTURES or self._given_bytes < self._most_given

    def _next(self) -> bytes:
        """The next picture for the tower. O(runs that wait)."""
        runs = [run for run, keys in self._waiting.items() if run.shows and keys & self._unsent.keys()]
        run = max(runs, key=_turn)
        run.account.tenant.looked = next(self._turns)
        return next(key for key in self._unsent if key in self._waiting[run])

    def _take(self, run: RequestRun, wanted: dict[bytes, PlacedPicture]) -> bool:
        """Take room for the pictures of `run`, if there is any."""
        sizes = {key: each.rows * each.columns * self._each for key, each in wanted.items()}
        idle = [key for key in wanted if key not in self._known or not self._known[key].users]
        more = sum(sizes[key] for key in idle)
        if self.held and self.held + more > self.room:
            return False
        missing = self._waiting[run]
        for key, each in wanted.items():
            shown = self._known.get(key)
            if shown is None:
                assert each.picture is not None
                shown = self._known[key] = _Shown(sizes[key], users=1)
                self._bytes += shown.size
                self._unsent[key] = each.picture
                self.due = True
            elif shown.ready:
                missing.discard(key)
            shown.users += 1
        self.held += more
        run.account.tenant.shown += sum(sizes.values())
        run.shows = frozenset(wanted)
        self._evict()
        return True

    def _evict(self) -> None:
        if self._bytes <= self.room:
            return
        for key in [key for key, each in self._known.items() if not each.users]:
            if self._bytes <= self.room:
                break
            self._bytes -= self._known.pop(key).size
            self._unseen.append(key)
            self.due = True

    def _release(self, key: bytes) -> None:
        """One user less."""
        shown = self._known[key]
        shown.users -= 1
        if shown.users == 1 and key in self._unsent:  # the tower was not told yet, and needs not be
            del self._unsent[key], self._known[key]
            self._bytes -= shown.size
            self.held -= shown.size
        elif not shown.users:
            self.held -= shown.size
            self._known.move_to_end(key)

    def _admit(self) -> None:
        """Forget what is too much, and go on with runs that waited for room."""
        self._evict()
        while self._queue:
            run = max(self._queue, key=self._place)
            if not self._take(run, self._queue[run]):
                self._first = run
                return
            del self._queue[run]
            if not self._waiting[run]:
                self._go_on(run)

    def _place(self, run: RequestRun) -> tuple[Level, bool, int]:
        """The greatest is the next that gets room."""
        return _level(run), run is self._first, -run.account.tenant.shown

    def _go_on(self, run: RequestRun) -> None:
        del self._waiting[run]
        self._prompts.add(run)
        for request in run.waiters:
            self._prompts.hurry(run, request.level)


def _turn(run: RequestRun) -> tuple[Level, int]:
    """Of what waits, the highest is looked for first."""
    return _level(run), -run.account.tenant.looked


def _level(run: RequestRun) -> Level:
    """With that of those who wait for its prompt."""
    return max([run.level, *(request.level for request in run.waiters)])
