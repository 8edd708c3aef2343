"""Blocks for and from other replicas: settled in order, copied when they are out, always answered."""

from ramify.actors.scheduler.exchange import KvExchange
from ramify.protocol.cluster import (
    KEY,
    BlocksPut,
    BlocksRead,
    CopiedIn,
    CopyIn,
    CopyOut,
    PutBlocks,
    ReadBlocks,
    SentBlock,
)
from ramify.protocol.messages import Settle, Settled
from ramify.protocol.plan import MovedBlock, pack

READ = ReadBlocks(1, 2, 0, b"r" * KEY)
BLOCK = MovedBlock(3, b"r" * KEY, b"")
PUT = PutBlocks(4, 5, BlocksRead(4, 5, [SentBlock(9, b"p" * KEY, 0), SentBlock(8, b"q" * KEY, 0)]))


def settled(*, saves: bool = False, reads: int = 0, puts: int = 0) -> Settled:
    slots = [pack([6, -1])] * puts
    saved = [MovedBlock(3, b"r" * KEY, pack(range(4)))] if saves else []
    return Settled([], [], 0, 0, 0, b"", saved, slots, [[BLOCK]] * reads)


def asked(*messages: ReadBlocks | PutBlocks | CopiedIn) -> tuple[KvExchange, Settle]:
    exchange = KvExchange()
    for message in messages:
        exchange.ask(message)
    assert exchange.asks
    settle = Settle([], [], [])
    exchange.settle(settle)
    assert not exchange.asks
    return exchange, settle


def test_what_is_asked_is_settled_and_copied() -> None:
    exchange, settle = asked(READ, PUT)
    assert (settle.puts, settle.reads) == ([b"p" * KEY + b"q" * KEY], [READ])
    exchange.settled(settled(reads=1, puts=1), down=False, saving=False)
    assert exchange.copies == [CopyIn(PUT, [6, -1]), CopyOut(READ, [BLOCK])]


def test_what_leaves_the_device_is_copied_when_the_step_is_over() -> None:
    exchange, _ = asked(READ)
    exchange.settled(settled(saves=True, reads=1), down=False, saving=True)
    assert exchange.copies == []
    assert exchange.plan()
    assert not exchange.plan()
    exchange.landed()
    assert exchange.copies == [CopyOut(READ, [BLOCK])]


def test_what_was_copied_is_settled_and_answered() -> None:
    exchange, settle = asked(CopiedIn(4, 5, b"p" * KEY, b"q" * KEY))
    assert (settle.kept, settle.refused) == ([b"p" * KEY], [b"q" * KEY])
    assert exchange.answers == [BlocksPut(4, 5)]


def test_without_an_executor_nothing_is_copied_and_all_is_answered() -> None:
    exchange, _ = asked(READ, PUT)
    exchange.settled(settled(saves=True, reads=1, puts=1), down=True, saving=True)
    assert exchange.copies == [CopyIn(PUT, [-1, -1]), CopyOut(READ, [])]
    exchange, _ = asked(READ)
    exchange.settled(settled(saves=True, reads=1), down=False, saving=True)
    exchange.plan()
    exchange.ask(READ)
    exchange.settle(Settle([], [], []))
    exchange.settled(settled(saves=True, reads=1), down=False, saving=True)
    exchange.lost()
    assert exchange.copies == [CopyOut(READ, [])] * 2
