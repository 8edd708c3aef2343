"""`tree`: what the session holds, page by page."""

from ramify.actors.kit.turns import OP, Steps
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.ops.handler import AtOnce, Hands, one_entry, short
from ramify.actors.session.sockets.publisher import Publisher, error_message
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.actors.session.sockets.view import Inspections, View
from ramify.protocol.errors import BadRequest, RamifyError
from ramify.protocol.wire import Tree


class Trees:
    """The `tree` ops of all sockets: of each one after the other, and none while it is behind.

    An answer may be as large as `limits.tree_bytes`. A frame full of `tree`s must not block the event
    loop or fill memory. So the next one is answered only when the cache has been asked again, which lets
    others run, and only while the socket reads.
    """

    def __init__(
        self, state: SessionState, publisher: Publisher, inspections: Inspections, view: View
    ) -> None:
        self._state = state
        self._publisher = publisher
        self._inspections = inspections
        self._view = view
        self._hurry = False

    def ask(self, subscriber: Subscriber, op: Tree) -> None:
        """Answer `op` when those before it are answered."""
        subscriber.trees.append(op)
        self.go_on(subscriber)

    def go_on(self, subscriber: Subscriber) -> None:
        """Answer the next `tree`, if the socket can take it."""
        while subscriber.trees and subscriber.looking is None:
            if subscriber.throttled and not self._hurry:
                return
            op = subscriber.trees.popleft()
            try:
                chosen = self._chosen(op)
            except RamifyError as error:
                self._refuse(subscriber, op, error)
                continue
            self._look(subscriber, op, chosen)

    def _look(self, subscriber: Subscriber, op: Tree, chosen: list[SessionBranch]) -> None:
        subscriber.looking = op

        def show(resident: list[int], tiers: list[int]) -> None:
            subscriber.looking = None
            client, write = subscriber.client, subscriber.write
            replies = self._publisher.reply_log(client, write)
            answer = self._view.tree(op, replies, chosen, resident, tiers)
            self._publisher.reply(client, op.id, answer, None, keep=False, write=write)
            self.go_on(subscriber)

        self._inspections.ask(chosen, show)

    def forget(self, subscriber: Subscriber) -> None:
        """Forget what a socket asked that is gone. It gets no answer, so it may ask again."""
        reply_log = self._publisher.reply_log(subscriber.client, subscriber.write)
        while subscriber.trees:
            reply_log.drop(subscriber.trees.popleft().id)

    def close(self, error: RamifyError) -> Steps[None]:
        """Fail all that is asked with `error`: the session is over."""
        for subscriber in list(self._publisher.subscribers.values()):
            if subscriber.looking is not None:
                subscriber.trees.appendleft(subscriber.looking)
            while subscriber.trees:
                yield OP
                self._refuse(subscriber, subscriber.trees.popleft(), error)

    def _refuse(self, subscriber: Subscriber, op: Tree, error: RamifyError) -> None:
        message = error_message(error, ident=op.id, branch=op.branch)
        self._publisher.reply(subscriber.client, op.id, message, None, write=subscriber.write)

    def hurry(self) -> None:
        """Answer everything now, whether sockets read or not: the engine is broken."""
        self._hurry = True
        for subscriber in self._publisher.subscribers.values():
            self.go_on(subscriber)

    def _chosen(self, op: Tree) -> list[SessionBranch]:
        """The branches to show, in order. Raises NoBranch, BadRequest."""
        state, after = self._state, op.after
        if op.branch is not None:
            if after is not None and after.branch != op.branch:
                raise BadRequest("`after` names another branch than `branch`", details={"id": op.id})
            return [state.branch(op.branch)]
        chosen = list(state.branches.values())
        if after is not None:
            del chosen[: chosen.index(state.branch(after.branch))]
        return chosen


def _run(hands: Hands, subscriber: Subscriber, op: Tree) -> None:
    hands.trees.ask(subscriber, op)


HANDLER = AtOnce(Tree, _run, one_entry, short, viewers=True, looks_again=True)
