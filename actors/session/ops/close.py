"""`close`: the socket closes, and with it the session, unless it is to be kept or a viewer asks."""

from ramify.actors.session.ops.handler import AtOnce, Hands, one_entry, short
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.protocol.errors import Close
from ramify.protocol.wire import CloseSession, Ok


def _run(hands: Hands, subscriber: Subscriber, op: CloseSession) -> None:
    closes = hands.state.out.closes
    reply = Ok(id=op.id, revision=hands.state.revision)
    hands.publisher.reply(subscriber.client, op.id, reply, None, write=subscriber.write)
    closes.append((subscriber.socket, Close.DONE, "closed by the client"))
    if not op.keep and subscriber.write:
        hands.end("closed")
        for other in hands.publisher.subscribers.values():
            if other is not subscriber:
                closes.append((other.socket, Close.DONE, "the session was closed"))


HANDLER = AtOnce(CloseSession, _run, one_entry, short, viewers=True)
