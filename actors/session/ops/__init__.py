"""The ops. Each has one home: a file with its check, the branches that it touches, and how it runs
(`handler` says more). To add one: its wire type in `protocol/wire/client.py`, and its file here, whose
`HANDLER` is found by its wire type. CONTRIBUTING.md has the walk.

Nothing else knows which ops there are. `open`, `ping` and `credit` are no ops: they have no id and no
reply of an op. The directory answers `open`, the gateway `ping`, and `credit` says how far a socket may
be sent to (`core`).
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ramify.actors.kit.memory import MESSAGE
from ramify.actors.session.ops.handler import AtOnce, OpHandler
from ramify.protocol.wire import ClientMessage, Op


def _found() -> Iterator[OpHandler[Any] | AtOnce[Any]]:
    for module in iter_modules(__path__, f"{__name__}."):
        if not module.ispkg:
            handler = getattr(import_module(module.name), "HANDLER", None)
            if handler is not None:
                yield handler


_ALL = list(_found())
HANDLERS: dict[type[Op], OpHandler[Any]] = {h.op: h for h in _ALL if isinstance(h, OpHandler)}
AT_ONCE: dict[type[Op], AtOnce[Any]] = {h.op: h for h in _ALL if isinstance(h, AtOnce)}


def op_entries(op: Op) -> int:
    """Count the names, texts and messages in the lists of `op`."""
    return (HANDLERS.get(type(op)) or AT_ONCE[type(op)]).entries(op)


def op_bytes(message: ClientMessage) -> int:
    """Count the bytes that a client's message takes while the session keeps it."""
    if not isinstance(message, Op):
        return MESSAGE
    return (HANDLERS.get(type(message)) or AT_ONCE[type(message)]).size(message)
