"""The other end of a link, as its owner has it: told in order, and ended if it takes or says nothing.

A gateway process as the core sees it, a replica as a front sees it, and a front as a replica sees it
differ only by what they do with its messages.
"""

from collections.abc import Callable
from typing import Any

from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.links.bundle import MOST, Bundle
from ramify.actors.links.link import Link
from ramify.actors.processes.messages import AskMetrics, encoder
from ramify.actors.processes.silence import Silence

MOST_ASKED = 1024  # scrapes without an answer that are remembered


class Peer:
    """`ends`: ends its process, where that is ours. `silence`: since it last spoke; its owner ticks it.

    `why`: it was ended, in words; "" if it was not.
    """

    def __init__(self, ends: Callable[[], None] = lambda: None) -> None:
        self.ends = ends
        self.silence = Silence(0.0)
        self.why = ""
        self._link: Link[Any, Any] | None = None
        self._bundles: list[Bundle[Any]] = []

    def attach(self, link: Link[Any, Any]) -> None:
        """It has a link."""
        self._link = link

    @property
    def there(self) -> bool:
        """It has a link that has not ended."""
        return self._link is not None and not self._link.closed

    def bundle(self, wrap: Callable[[Any], Any], most: int = MOST) -> Bundle[Any]:
        """What it is told many a turn: see `Bundle`."""
        assert self._link is not None
        made: Bundle[Any] = Bundle(self._link, wrap, encoder(), most)
        self._bundles.append(made)
        return made

    def tell(self, message: Any, /) -> None:
        """Send `message`, behind what was put into bundles; nothing happens where there is no link."""
        if self._link is None:
            return
        try:
            for bundle in self._bundles:
                bundle.flush()
            self._link.tell(message)
        except MailboxFull as error:
            self.hung(str(error))
        except MailboxClosed:
            pass  # its end is under way

    def consumed(self, count: int = 1) -> None:
        """So many messages of it have been dealt with."""
        link = self._link
        if link is not None and not link.closed:
            link.consumed(count)

    def hung(self, why: str) -> None:
        """It takes nothing, or says nothing: end it. The first reason counts."""
        self.why = self.why or f"it hung: {why}"
        self.end()

    def end(self) -> None:
        """End the link, and the process if it is ours."""
        if self._link is not None:
            self._link.abort()
        self.ends()

    def close(self) -> None:
        """Forget what waits for it, and close the link behind what has left."""
        for bundle in self._bundles:
            bundle.close()
        if self._link is not None:
            self._link.close()


class Scrapes:
    """Asks peers for the text of their metrics."""

    def __init__(self) -> None:
        self._asked: dict[int, Callable[[bytes], object]] = {}
        self._count = 0

    def ask(self, tell: Callable[[AskMetrics], None], done: Callable[[bytes], object]) -> None:
        """`done` is called with the answer, if one comes."""
        self._count += 1
        self._asked[self._count] = done
        self._asked.pop(self._count - MOST_ASKED, None)
        tell(AskMetrics(self._count))

    def answered(self, ident: int, text: bytes) -> None:
        """A `MetricsText` has come."""
        done = self._asked.pop(ident, None)
        if done is not None:
            done(text)
