"""What the grammar is told: constraints to compile, and those that are not wanted any more."""

from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.messages.base import Base


class Compile(Base, frozen=True):
    """Compile `spec`, for `request`. Answered by `Compiled` or `NotCompiled` to its session.

    `owner`: as in `Submit`: owners take turns.
    """

    request: int
    spec: ConstraintSpec
    owner: str = ""


class Abandon(Base, frozen=True):
    """Do not answer `request`'s `Compile`: no client waits for the constraint any more."""

    request: int


class AbandonSession(Base, frozen=True):
    """The session has ended, and all its requests with it."""

    session: int


GrammarMessage = Compile | Abandon | AbandonSession
