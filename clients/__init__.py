"""The Python client of `ramify.v1`.

    import ramify

    async with ramify.connect("ws://127.0.0.1:8765") as session:
        async for delta in session.main.chat("Capital of France?"):
            print(delta.text, end="", flush=True)

`connect_sync` is the same without `await`. The layers, from the bottom: `session.py` is the pure
state machine, `session_link.py` its asyncio shell. Users hold what is in `handles.py`, `branch.py` and
`generation.py`; `connect.py` puts them together, `sync.py` is the facade, `cli.py` the console script.
None of them imports torch.
"""

from ramify.clients.branch import Branch
from ramify.clients.connect import connect
from ramify.clients.errors import BadConstraint, ConnectionLost, Internal, Replaced, SessionLost
from ramify.clients.generation import Generation, Reply, Result, TypedGeneration
from ramify.clients.handles import Session
from ramify.clients.images import Image
from ramify.clients.session_link import Connection
from ramify.clients.stream import TextDelta
from ramify.clients.sync import connect_sync
from ramify.protocol.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Exists,
    Forbidden,
    LimitExceeded,
    NoBranch,
    NoSession,
    Overloaded,
    RamifyError,
    Skipped,
    TooLong,
    Unauthorized,
    Unsupported,
)

__all__ = [
    "BadConstraint",
    "BadRequest",
    "Branch",
    "Cancelled",
    "Conflict",
    "Connection",
    "ConnectionLost",
    "DeadlineExceeded",
    "Exists",
    "Forbidden",
    "Generation",
    "Image",
    "Internal",
    "LimitExceeded",
    "NoBranch",
    "NoSession",
    "Overloaded",
    "RamifyError",
    "Replaced",
    "Reply",
    "Result",
    "Session",
    "SessionLost",
    "Skipped",
    "TextDelta",
    "TooLong",
    "TypedGeneration",
    "Unauthorized",
    "Unsupported",
    "connect",
    "connect_sync",
]
