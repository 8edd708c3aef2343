"""Notices about a socket that a session must not miss, even when its mailbox is full.

A frame can be refused (the client is told and sends it again), but a lost `Detached` would keep
a binding for ever. What does not fit is owed, one notice per socket, and told later.
"""

from ramify.actors.kit.fanout import Router
from ramify.actors.kit.mailbox import MailboxFull
from ramify.protocol.messages import Detached, Drained, SessionMessage, Throttled

Notice = Throttled | Drained | Detached


class Notices:
    """Tells sessions about their sockets, in order, at least until the session is gone."""

    def __init__(self, sessions: Router[SessionMessage]) -> None:
        self._sessions = sessions
        self._owed: dict[tuple[int, int], Notice] = {}  # (session, socket) -> the latest state

    @property
    def owed(self) -> int:
        """How many notices wait for room in a mailbox."""
        return len(self._owed)

    def tell(self, session: int, notice: Notice) -> None:
        """Tell the session now, or as soon as it has room.

        A later notice about the same socket replaces one that is still owed: only the socket's
        present state matters, and `Detached` is the last there is.
        """
        key = (session, notice.socket)
        if key in self._owed or not self._try(session, notice):
            self._owed[key] = notice

    def retry(self) -> None:
        """Tell again what is owed."""
        for key, notice in list(self._owed.items()):
            if self._try(key[0], notice):
                del self._owed[key]

    def _try(self, session: int, notice: Notice) -> bool:
        try:
            self._sessions.tell(session, notice)
        except MailboxFull:
            return False
        return True  # told, or nobody is there any more
