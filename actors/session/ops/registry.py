"""The homes of the ops that wait for their branches; `tree`, `cancel` and `close` never do (`core`)."""

from typing import Any

from ramify.actors.session.ops import append, drop, fork, generate, join, prune, rollback, select
from ramify.actors.session.ops import set as set_
from ramify.actors.session.ops.handler import OpHandler
from ramify.protocol import wire

HANDLERS: dict[type[wire.Op], OpHandler[Any]] = {
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
