"""The homes of the ops that wait for their branches; `tree`, `cancel` and `close` never do (`core`)."""

from typing import Any

from ramify.actors.session.ops import append, drop, fork, generate, join, prune, rollback, select
from ramify.actors.session.ops import set as set_
from ramify.actors.session.ops.home import Home
from ramify.protocol import wire

HOMES: dict[type[wire.Op], Home[Any]] = {
    wire.Append: append.HOME,
    wire.Generate: generate.HOME,
    wire.Select: select.HOME,
    wire.Fork: fork.HOME,
    wire.Join: join.HOME,
    wire.Prune: prune.HOME,
    wire.Rollback: rollback.HOME,
    wire.Set: set_.HOME,
    wire.Drop: drop.HOME,
}
