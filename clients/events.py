"""The client core's reports to its shell, as plain values."""

from typing import NamedTuple

from ramify.clients.stream import Ticket
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Bye, Delta, Error, Event, StateReply


class SessionOpened(NamedTuple):
    """The session is attached. `resumed`: this client had it before."""

    state: StateReply
    resumed: bool


class Changed(NamedTuple):
    """A ticket has new text or a new reply."""

    ticket: Ticket


class Foreign(NamedTuple):
    """Text on a branch on which this client generates nothing: another client's generation."""

    delta: Delta


class Noted(NamedTuple):
    """The server tells of a change by others, of its end, or of an error that belongs to no op."""

    message: Event | Bye | Error


class ConnectionRefused(NamedTuple):
    """The server did not attach this connection. `retry`: it may, later."""

    error: RamifyError
    retry: bool


class SessionEnded(NamedTuple):
    """The session is over; every op without a reply has failed."""

    error: RamifyError


CoreEvent = SessionOpened | Changed | Foreign | Noted | ConnectionRefused | SessionEnded
