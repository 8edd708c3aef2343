"""Sessions that the store has: who waits for one, and whether it is taken up for them."""

from collections.abc import Container, Sequence, Set
from typing import Literal

from ramify.actors.kit.mailbox import Address
from ramify.actors.session.restore import Damaged, read_head
from ramify.actors.session.sockets.clients import Identity
from ramify.protocol.errors import Forbidden, NoSession, Overloaded, RamifyError
from ramify.protocol.messages import Fetch, Fetched, OpenSession, Release, StoreMessage
from ramify.protocol.saved import SavedHead

FETCH_RETRY_MS = 2000
WRONG_KEY = "the session's `key` is missing or wrong"


class Fetching:
    """Sessions that were asked of the `store`. Without a store there are none.

    `model`: whose tokens this process serves. `barred`: sessions that are not taken up. `here`: those in
    memory.
    """

    def __init__(
        self,
        store: Address[StoreMessage] | None,
        model: str,
        barred: Set[str],
        here: Container[str],
    ) -> None:
        self._store = store
        self._model = model
        self._barred = barred
        self._here = here
        self._coming: dict[str, list[OpenSession]] = {}  # who waits for a session that is being read

    def fetch(self, session: str, *who: OpenSession, how: Literal["look", "free"] = "look") -> None:
        """Read a session from the store, for those who open it, or because its ops wait ("free")."""
        coming = self._coming.get(session)
        if coming is not None:
            coming += who
        elif session not in self._here and self._store is not None:
            self._store.tell(Fetch(session, how))
            self._coming[session] = [*who]

    def judge(self, found: Fetched) -> Literal["ask", "take up", "let in"]:
        """Decide what to do with the store's answer. "ask": it was asked once more; wait for that.

        Raises RamifyError, Damaged.
        """
        session, items = found.session, found.items
        waiting = self._coming.get(session, [])
        if session in self._barred:
            raise RamifyError("the session kept its server from working: open a new one")
        if found.damaged:
            raise Damaged(found.error or "")
        if found.error is not None:
            raise Overloaded("the session cannot be read now: try later", retry_ms=FETCH_RETRY_MS)
        if found.held and waiting and self._store is not None:  # its ops are another server's
            self._store.tell(Fetch(session))
            return "ask"
        if not items or session in self._here:
            return "let in"
        head = read_head(items)
        _check_wanted(session, head, waiting)
        self._check_model(session, head)
        if not found.fence and self._store is not None:  # who may not open it moves nothing
            self._store.tell(Fetch(session, "ask"))
            return "ask"
        return "take up"

    def end(self, found: Fetched) -> list[OpenSession]:
        """Take those who have waited for a session, which was taken up or will not be."""
        if found.fence and found.session not in self._here and self._store is not None:
            self._store.tell(Release(found.session))
        return self._coming.pop(found.session, [])

    def give_up(self, session: str) -> None:
        """Release a session that the store says is here and is not: another server waits for it."""
        if session not in self._coming and self._store is not None:
            self._store.tell(Release(session))

    def _check_model(self, session: str, head: SavedHead) -> None:
        """Raises NoSession for one whose tokens are another model's."""
        if head.model != self._model:
            raise NoSession(
                f"session {session!r} was made with the model {head.model!r}, this server has "
                f"{self._model!r}, whose tokens differ: open a new one"
            )


def no_session(session: str) -> NoSession:
    """Make the error of an `open` that names a session which is nowhere."""
    return NoSession(
        f"there is no session {session!r}: it was closed, has expired, or the server restarted; "
        "open one without `session`"
    )


def _check_wanted(session: str, head: SavedHead, waiting: Sequence[OpenSession]) -> None:
    """Check that a saved session may be taken up: somebody has its key, or its ops wait.

    Raises NoSession or Forbidden if those who want it may not: it costs its owner, not them.
    """
    saved = Identity(session, "", hashes=(head.key, head.view_key))
    mine = [message for message in waiting if message.owner == head.owner]
    if not waiting or any(saved.opens(message.open.key or "") for message in mine):
        return
    if not any(saved.shows(message.open.key or "") for message in waiting):
        raise Forbidden(WRONG_KEY) if mine else no_session(session)
