"""The order of compile jobs: names take turns, and so do the sessions of a name. Pure.

Neither a name nor a session gets all workers. Where the queue is full, the name with most jobs gives up
its newest for a name with fewer; of its sessions, the one with most. So many jobs or many sessions keep
no other name out. Sessions without a credential have one name, "".
"""

from collections import Counter, OrderedDict, deque
from typing import Generic, NamedTuple, TypeVar

from ramify.protocol.errors import Overloaded

T = TypeVar("T")

RETRY_MS = 1000


class Owner(NamedTuple):
    """A session of the credential `name`. Sessions without a credential share the name "": beside named
    ones they count as one, however many they are.
    """

    name: str = ""
    session: int = 0


class JobQueue(Generic[T]):
    """`most`: jobs that may wait; `most_each`: of one name, or of one session without a name.
    `workers`: how many there are.
    """

    def __init__(self, workers: int, most: int, most_each: int) -> None:
        self._most = most
        self._most_each = most_each
        self._workers = workers
        self._at_once = max(1, workers - 1)  # of one name, or session
        self._names: OrderedDict[str, OrderedDict[int, deque[T]]] = OrderedDict()
        self._waiting: Counter[str] = Counter()  # jobs of each name
        self._running: Counter[str | Owner] = Counter()  # of each name, and of each session
        self._named = False  # there are names, for which a worker is kept free
        self._count = 0

    def __len__(self) -> int:
        """Jobs that wait."""
        return self._count

    def add(self, owner: Owner, job: T) -> T | None:
        """Returns the job that had to give way, if one had. Raises Overloaded if too many wait."""
        name, session = owner
        own = len(self._jobs_of(owner))
        counted = self._waiting[name] if name else own
        if counted >= self._most_each:
            raise self.overloaded(counted)
        gone: T | None = None
        if self._count >= self._most:
            gone = self._make_room(owner, own)
        self._named = self._named or bool(name)
        self._names.setdefault(name, OrderedDict()).setdefault(session, deque()).append(job)
        self._counts(name, 1)
        return gone

    def overloaded(self, own: int) -> Overloaded:
        """Why a job has no place where its owner has `own`."""
        return Overloaded(
            f"{self._count} constraints wait to be compiled, {own} of yours: try again later",
            retry_ms=RETRY_MS,
        )

    def _make_room(self, owner: Owner, own: int) -> T:
        """The newest job of the session that has most, of the name that has most.

        Raises Overloaded if `owner`, whose session has `own`, would not have less then than they.
        """
        name = max(self._waiting, key=lambda each: self._waiting[each])
        if self._waiting[name] <= self._waiting[owner.name] + 1:
            name = owner.name  # its own sessions may yet have more than this one
        sessions = self._names.get(name)
        if not sessions:
            raise self.overloaded(own)
        session = max(sessions, key=lambda each: len(sessions[each]))
        if name == owner.name and len(sessions[session]) <= own + 1:
            raise self.overloaded(own)
        gone = sessions[session][-1]
        self.withdraw(Owner(name, session), gone)
        return gone

    def withdraw(self, owner: Owner, job: T) -> bool:
        """Remove a job that no request waits for. False if it is not queued."""
        jobs = self._jobs_of(owner)
        if job not in jobs:
            return False
        jobs.remove(job)
        self._counts(owner.name, -1)
        if not jobs:
            self._leave(owner)
        return True

    def take(self) -> tuple[Owner, T] | None:
        """The next job and its owner, who then is last; None if no job may run now."""
        for name, sessions in self._names.items():
            alone = not name and not self._named  # nobody to keep a worker for
            if self._running[name] >= (self._workers if alone else self._at_once):
                continue
            for session, jobs in sessions.items():
                owner = Owner(name, session)
                if self._running[owner] >= self._at_once:
                    continue
                job = jobs.popleft()
                self._counts(name, -1)
                self._running[name] += 1
                self._running[owner] += 1
                self._names.move_to_end(name)
                sessions.move_to_end(session)
                if not jobs:
                    self._leave(owner)
                return owner, job
        return None

    def finished(self, owner: Owner) -> None:
        """A job of `owner` that was taken has ended."""
        for each in (owner.name, owner):
            self._running[each] -= 1
            if not self._running[each]:
                del self._running[each]

    def clear(self) -> list[T]:
        """Take all that wait."""
        jobs = [job for sessions in self._names.values() for each in sessions.values() for job in each]
        self._names.clear()
        self._waiting.clear()
        self._count = 0
        return jobs

    def _jobs_of(self, owner: Owner) -> deque[T]:
        sessions = self._names.get(owner.name)
        return deque() if sessions is None else sessions.get(owner.session, deque())

    def _leave(self, owner: Owner) -> None:
        """Its session has no job any more."""
        sessions = self._names[owner.name]
        del sessions[owner.session]
        if not sessions:
            del self._names[owner.name]

    def _counts(self, name: str, more: int) -> None:
        self._count += more
        self._waiting[name] += more
        if not self._waiting[name]:
            del self._waiting[name]
