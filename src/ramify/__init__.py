"""Ramify: an LLM serving engine for stateful clients, and its Python client.

    import ramify

    async with ramify.connect("ws://127.0.0.1:8765") as session:
        print((await session.main.chat("Capital of France?")).text)

The folders beside this file are links to `actors/`, `clients/`, `gpu/` and `protocol/` at the top of
the repository, which makes these one package to every tool. The client's names are loaded when they
are used first: a server imports no client, and a client no server. This file itself imports nothing:
until the command line runs, an interrupt shows a traceback.
"""

TYPE_CHECKING = False  # what checkers take for that of `typing`
if TYPE_CHECKING:
    from typing import Any

    from ramify.clients import (
        BadConstraint,
        BadRequest,
        Branch,
        Cancelled,
        Conflict,
        Connection,
        ConnectionLost,
        DeadlineExceeded,
        Exists,
        Forbidden,
        Generation,
        Image,
        Internal,
        LimitExceeded,
        NoBranch,
        NoSession,
        Overloaded,
        RamifyError,
        Replaced,
        Reply,
        Result,
        Session,
        SessionLost,
        Skipped,
        TextDelta,
        TooLong,
        TypedGeneration,
        Unauthorized,
        Unsupported,
        connect,
        connect_sync,
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


def __getattr__(name: str) -> "Any":
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ramify import clients

    value = globals()[name] = getattr(clients, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
