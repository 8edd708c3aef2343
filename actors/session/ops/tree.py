"""`tree`: what the session holds. How it is answered, page by page, is in `session/sockets/trees.py`."""

from ramify.actors.session.ops.handler import AtOnce, Hands, one_entry, short
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.protocol.wire import Tree


def _run(hands: Hands, subscriber: Subscriber, op: Tree) -> None:
    hands.trees.ask(subscriber, op)


HANDLER = AtOnce(Tree, _run, one_entry, short, viewers=True, looks_again=True)
