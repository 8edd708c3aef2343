"""What the store is told: what to write, read and forget of sessions."""

from collections.abc import Callable
from typing import Literal

from ramify.protocol.messages.base import Base
from ramify.protocol.saved import Changes


class Save(Base, frozen=True, gc=True):
    """Write `changes`. With `session` not 0, answered by

    - `Saved`, once they are on the disk;
    - `Moved`, if another server has taken the session: nothing was written;
    - `NotSaved`, before one of these, when they could not be written yet;
    - `Unsaved`, if the store has lost earlier saves. A session that is over hears nothing; `again()`
      makes what to save then.

    `awaited`: an op waits for the save; otherwise it is written soon, with others, and the session is
    not woken to hear `Saved`.
    """

    session: int
    ticket: int
    changes: Changes
    awaited: bool = False
    again: "Callable[[], Save | None] | None" = None


class Fetch(Base, frozen=True):
    """Read a session. Answered by `Fetched` to the directory.

    `how`: "look": its head only, and it stays whose it is. Else it becomes this server's: "free": unless
    a server that lives has it; "ask": such a one is asked to save it first, and has a second for that.
    """

    session: str
    how: Literal["look", "free", "ask"] = "look"


class Forget(Base, frozen=True):
    """The session is over, or not to be saved any more. `fence`: of the server that says so."""

    session: str
    fence: int


class Release(Base, frozen=True):
    """The session is not in this server's memory: others need not wait for it."""

    session: str


StoreMessage = Save | Fetch | Forget | Release
