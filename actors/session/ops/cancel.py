"""`cancel`: ops by their ids, or generations on branches, or all that runs and waits on a subtree."""

from ramify.actors.kit.memory import MESSAGE, NUMBER, TARGET
from ramify.actors.kit.turns import OP, Steps
from ramify.actors.session.ops.handler import AtOnce, Hands
from ramify.actors.session.sockets.publisher import error_message
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.protocol.errors import NoBranch
from ramify.protocol.wire import Cancel, Ok, names


def _entries(op: Cancel) -> int:
    return len(names(op.branch or "")) + len(op.ops or ())


def _size(op: Cancel) -> int:
    return MESSAGE + TARGET * len(names(op.branch or "")) + NUMBER * len(op.ops or ())


def _cost(hands: Hands, op: Cancel) -> int:
    """The cost of finding the tasks."""
    return OP + len(hands.runner) + (len(hands.state.branches) if op.subtree else 0)


def _run(hands: Hands, subscriber: Subscriber, op: Cancel) -> Steps[None]:
    client, runner = subscriber.client, hands.runner
    if op.ops is not None:
        tasks = yield from runner.cancel(client, set(op.ops))
    else:
        where = dict.fromkeys(names(op.branch)).keys() if op.branch is not None else None
        for name in where or ():
            if not runner.expects(name):
                error = NoBranch(f"there is no branch {name!r}")
                message = error_message(error, ident=op.id, branch=name)
                hands.publisher.reply(client, op.id, message, None)
                return
        stop = runner.cancel_subtree if op.subtree else runner.cancel_generations
        tasks = yield from stop(where)
    cancelled = sorted({task.op.id for task in tasks})
    reply = Ok(id=op.id, revision=hands.state.revision, result={"cancelled": cancelled})
    hands.publisher.reply(client, op.id, reply, None)


HANDLER = AtOnce(Cancel, _run, _entries, _size, cost=_cost)
