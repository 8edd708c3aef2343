"""`close`: the socket closes, and with it the session, unless it is to be kept or a viewer asks.

What has not ended by then, of all clients, ends as cancelled before `close` is answered.
"""

from ramify.actors.kit.turns import OP, Steps
from ramify.actors.session.ops.handler import AtOnce, Hands, one_entry, short
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.protocol.errors import Cancelled, Close
from ramify.protocol.wire import CloseSession, Ok

_END = 100  # what it costs to end one that runs (see `Work`)


def _run(hands: Hands, subscriber: Subscriber, op: CloseSession) -> Steps[None]:
    closes, runner, ends = hands.state.out.closes, hands.runner, not op.keep and subscriber.write
    if ends:
        runner.refuse(error := Cancelled("the session was closed"))
        yield from runner.cancel_subtree(None)
        yield _END * len(runner)  # those that ran
        runner.fail(error)
        yield from runner.steps()
        yield from hands.trees.close(error)
        for each in hands.publisher.subscribers.values():
            each.give_up()
    reply = Ok(id=op.id, revision=hands.state.revision)
    hands.publisher.reply(subscriber.client, op.id, reply, None, write=subscriber.write)
    closes.append((subscriber.socket, Close.DONE, "closed by the client"))
    if ends:
        hands.end("closed")
        others = [each for each in hands.publisher.subscribers.values() if each is not subscriber]
        closes += [(each.socket, Close.DONE, "the session was closed") for each in others]


def _cost(hands: Hands, op: CloseSession) -> int:
    return OP + len(hands.runner) + len(hands.state.branches)  # of finding what has not ended


HANDLER = AtOnce(CloseSession, _run, one_entry, short, viewers=True, last=True, cost=_cost)
