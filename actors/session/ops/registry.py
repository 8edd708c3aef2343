"""The handler of each op, found by its wire type.

Nothing else knows which ops there are. `open`, `ping` and `credit` are no ops: they have no id and no
reply of an op. The directory answers `open`, the gateway `ping`, and `credit` says how far a socket may
be sent to (`core`).
"""

from typing import Any

from ramify.actors.session.ops import (
    append,
    cancel,
    close,
    drop,
    fork,
    generate,
    join,
    prune,
    rollback,
    select,
    tree,
)
from ramify.actors.session.ops import set as set_
from ramify.actors.session.ops.handler import AtOnce, OpHandler
from ramify.protocol import wire

HANDLERS: dict[type[wire.Op], OpHandler[Any]] = {  # those that wait for their branches
    wire.Append: append.HANDLER,
    wire.Generate: generate.HANDLER,
    wire.Select: select.HANDLER,
    wire.Fork: fork.HANDLER,
    wire.Join: join.HANDLER,
    wire.Prune: prune.HANDLER,
    wire.Rollback: rollback.HANDLER,
    wire.Set: set_.HANDLER,
    wire.Drop: drop.HANDLER,
}

AT_ONCE: dict[type[wire.Op], AtOnce[Any]] = {
    wire.Tree: tree.HANDLER,
    wire.Cancel: cancel.HANDLER,
    wire.CloseSession: close.HANDLER,
}
