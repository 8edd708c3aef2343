"""Branch handles: which node each branch's head is.

A handle is a pointer to a node whose end is the branch's head; tokens live in the tree. How long a
branch is retained is a lease, which follows it (`leases.py`). Does not know pages or requests.
"""

from collections.abc import Sequence

from ramify.actors.cache.leases import Leases
from ramify.actors.cache.node import Node, Tokens
from ramify.actors.cache.tree import RadixTree
from ramify.protocol.messages import Inspect, session_of
from ramify.protocol.pictures import PlacedPicture


class UnknownBranch(RuntimeError):
    """A message named a handle that is not open, or opened one twice: a bug of its sender."""


class Branches:
    """Handles by number."""

    def __init__(self, tree: RadixTree, leases: Leases) -> None:
        self._tree = tree
        self._leases = leases
        self._heads: dict[int, Node] = {}
        self._sessions: dict[int, set[int]] = {}  # the handles of each session
        self._pictures: dict[int, tuple[PlacedPicture, ...]] = {}  # of handles with some, in order

    def __len__(self) -> int:
        return len(self._heads)

    def items(self) -> list[tuple[int, Node]]:
        return list(self._heads.items())

    def of(self, session: int) -> list[int]:
        """The handles of a session."""
        return list(self._sessions.get(session, ()))

    def find(self, branch: int) -> Node | None:
        """The node whose end is the branch's head; None for an unknown branch."""
        return self._heads.get(branch)

    def head(self, branch: int) -> Node:
        """The node whose end is the branch's head. Raises UnknownBranch."""
        node = self._heads.get(branch)
        if node is None:
            raise UnknownBranch(f"branch {branch:#x} is not open")
        return node

    def open(self, branch: int, node: Node) -> None:
        if branch in self._heads:
            raise UnknownBranch(f"branch {branch:#x} is open already")
        node.refs += 1
        self._heads[branch] = node
        self._sessions.setdefault(session_of(branch), set()).add(branch)

    def extend(self, branch: int, tokens: Tokens, pictures: Sequence[PlacedPicture] = ()) -> None:
        """Append: O(len(tokens)) from the head."""
        node = self._tree.insert(self.head(branch), tokens)
        self.move(branch, node)
        if pictures:
            self._pictures[branch] = (*self._pictures.get(branch, ()), *pictures)
        self._tree.merge(node)

    def fork(self, branch: int, children: list[int], at: int) -> None:
        node = self._tree.ancestor(self.head(branch), at)
        pictures = self._up_to(branch, at)
        for child in children:
            self.open(child, node)
            if pictures:
                self._pictures[child] = pictures

    def rollback(self, branch: int, to: int) -> None:
        self.move(branch, self._tree.ancestor(self.head(branch), to))
        if branch in self._pictures:
            self._pictures[branch] = self._up_to(branch, to)

    def pictures(self, branch: int, cached: int) -> list[PlacedPicture]:
        """The pictures of a branch. Each has its pixels unless all of it is `cached`."""
        found = self._pictures.get(branch, ())
        return [each if each.stop > cached else each.without_pixels() for each in found]

    def _up_to(self, branch: int, at: int) -> tuple[PlacedPicture, ...]:
        return tuple(each for each in self._pictures.get(branch, ()) if each.stop <= at)

    def move(self, branch: int, node: Node) -> None:
        """Put the handle on `node`; its lease goes with it."""
        old = self.head(branch)
        if old is node:
            return
        node.refs += 1
        self._heads[branch] = node
        self._leases.follow(branch, node)
        self._leave(old)

    def keep(self, message: Inspect) -> tuple[list[int], Node | None]:
        """How many tokens each of its leases keeps, and the node that nobody comes back to."""
        node = self._heads.get(message.branches[0]) if message.leases or message.demote else None
        if node is None:
            return [0] * len(message.leases), None
        branch, owner = message.branches[0], message.owner
        kept = [self._leases.keep(branch, node, owner, until, end) for end, until in message.leases]
        return kept, node if message.demote else None

    def drop(self, branch: int, *, keep: bool = False) -> None:
        """Forget the handle. `keep`: its lease goes on."""
        node = self.head(branch)
        self._leases.drop(branch, keep=keep)
        del self._heads[branch]
        self._pictures.pop(branch, None)
        mates = self._sessions[session_of(branch)]
        mates.discard(branch)
        if not mates:
            del self._sessions[session_of(branch)]
        self._leave(node)

    def _leave(self, node: Node) -> None:
        node.refs -= 1
        self._tree.prune(node)
