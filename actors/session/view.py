"""The session as `state` messages show it: to a client that opens it, and to one that asks. Pure."""

from ramify.actors.session.branch import Branch
from ramify.actors.session.generations import Generations
from ramify.actors.session.inspections import UNKNOWN
from ramify.actors.session.ledger import Ledger
from ramify.actors.session.state import SessionState
from ramify.protocol.messages import Attach
from ramify.protocol.wire import BranchState, ServerInfo, State, Tree


class Identity:
    """What a session is called: its public id and the keys that grant access."""

    def __init__(self, session: str, key: str, view_key: str) -> None:
        self.session = session
        self.key = key
        self.view_key = view_key


class View:
    """Makes `state` messages. Resident tokens come from the cache (`inspections`)."""

    def __init__(
        self, identity: Identity, state: SessionState, generations: Generations, server: ServerInfo
    ) -> None:
        self._identity = identity
        self._state = state
        self._generations = generations
        self._server = server

    def lengths(self) -> dict[Branch, int]:
        """Tokens of each branch that its next turn finds computed, unless they were evicted.

        0 while a generation runs: what that has computed so far is its own.
        """
        branches, running = self._state.branches.values(), self._generations.running_piece
        return {branch: 0 if running(branch) else branch.released for branch in branches}

    def opened(
        self,
        message: Attach,
        ledger: Ledger,
        resident: dict[Branch, int],
        lengths: dict[Branch, int],
        ttl_s: float,
    ) -> State:
        """The answer to `open`. Branches that `resident` does not name are not known to be warm.

        `lengths` are of the time when the cache was asked: a generation may have ended since.
        """
        state, identity = self._state, self._identity
        known = [(branch, resident.get(branch, UNKNOWN)) for branch in state.branches.values()]
        resumed = message.open.session is not None
        return State(
            session=identity.session,
            op=ledger.highest,
            revision=state.revision,
            branches=[self._branch(*each) for each in known],
            client=message.open.who,
            key=identity.key if message.write else None,
            view_key=identity.view_key,
            resumed=resumed,
            cold=resumed and any(warm < min(lengths.get(b, 0), b.released) - 1 for b, warm in known),
            limits=state.limits.wire(),
            server=self._server,
            meta=state.meta,
            ttl_s=ttl_s,
        )

    def tree(self, op: Tree, ledger: Ledger, branches: list[Branch], resident: list[int]) -> State:
        """The answer to `tree`."""
        return State(
            session=self._identity.session,
            op=ledger.highest,
            revision=self._state.revision,
            branches=[
                self._branch(branch, known, text=op.text, tokens=op.tokens)
                for branch, known in zip(branches, resident, strict=True)
            ],
            meta=self._state.meta,
            id=op.id,
        )

    def _branch(
        self, branch: Branch, resident: int, *, text: bool = False, tokens: bool = False
    ) -> BranchState:
        running = self._generations.running_piece(branch)
        return branch.state(running, resident, text=text, tokens=tokens)
