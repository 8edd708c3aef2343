"""The counters of the compile pool and the registry, for metrics."""

from ramify.actors.grammar.constraint_registry import ConstraintRegistry
from ramify.actors.grammar.pool import CompilePool
from ramify.actors.kit.metrics import ConstraintCounts


def counts_of(pool: CompilePool, registry: ConstraintRegistry) -> ConstraintCounts:
    """Since the start. "hit": it was known already, "joined": another request had just asked for it,
    "killed": its worker took too long or too much, "retired": it had to give way later.
    """
    counters = pool.counters
    return ConstraintCounts(
        {
            "compiled": counters.compiled,
            "failed": counters.failed,
            "killed": counters.killed,
            "refused": counters.refused,
            "abandoned": counters.abandoned,
            "joined": counters.joined,
            "hit": counters.hits + registry.hits,
            "retired": registry.retired,
        },
        counters.seconds,
        pool.waiting,
        len(registry),
        registry.bytes,
    )
