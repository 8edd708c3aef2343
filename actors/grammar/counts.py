"""What the pool and the shelf have counted, as metrics show it."""

from ramify.actors.grammar.pool import CompilePool
from ramify.actors.grammar.shelf import Shelf
from ramify.actors.kit.metrics import ConstraintCounts


def counts_of(pool: CompilePool, shelf: Shelf) -> ConstraintCounts:
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
            "hit": counters.hits + shelf.hits,
            "retired": shelf.retired,
        },
        counters.seconds,
        pool.waiting,
        len(shelf),
        shelf.bytes,
    )
