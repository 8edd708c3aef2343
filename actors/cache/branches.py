"""Branch handles: which node each branch's head is, and how long it is retained.

A handle is a pointer to a node whose end is the branch's head; tokens live in the tree. Retention
is a hint to eviction: `Node.until` is the latest retention at or below a node, kept true on the way
up from a handle, O(1) where nothing is retained.
Does not know pages or requests.
"""

from collections.abc import Callable

from ramify.actors.cache.node import Node, Tokens
from ramify.actors.cache.tree import RadixTree
from ramify.protocol.messages import session_of


class UnknownBranch(RuntimeError):
    """A message named a handle that is not open, or opened one twice: a bug of its sender."""


class Branches:
    """Handles by number. `lowered` is called with each node whose retention became shorter."""

    def __init__(self, tree: RadixTree, lowered: Callable[[Node], None]) -> None:
        self._tree = tree
        self._lowered = lowered
        self._heads: dict[int, Node] = {}
        self._sessions: dict[int, set[int]] = {}  # the handles of each session

    def __len__(self) -> int:
        return len(self._heads)

    def __contains__(self, branch: int) -> bool:
        return branch in self._heads

    def items(self) -> list[tuple[int, Node]]:
        return list(self._heads.items())

    def of(self, session: int) -> list[int]:
        """The handles of a session."""
        return list(self._sessions.get(session, ()))

    def find(self, branch: int) -> Node | None:
        """The node whose end is the branch's head; None for an unknown branch."""
        return self._heads.get(branch)

    def head(self, branch: int) -> Node:
        """As `find`. Raises UnknownBranch."""
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

    def extend(self, branch: int, tokens: Tokens) -> None:
        """Append: O(len(tokens)) from the head."""
        node = self._tree.insert(self.head(branch), tokens)
        self.move(branch, node)
        self._tree.merge(node)

    def fork(self, branch: int, children: list[int], at: int) -> None:
        node = self._tree.ancestor(self.head(branch), at)
        for child in children:
            self.open(child, node)

    def rollback(self, branch: int, to: int) -> None:
        self.move(branch, self._tree.ancestor(self.head(branch), to))

    def move(self, branch: int, node: Node) -> None:
        """Put the handle on `node`; its retention goes with it."""
        old = self.head(branch)
        if old is node:
            return
        node.refs += 1
        self._heads[branch] = node
        if old.retainers is not None:
            until = old.retainers.get(branch, 0.0)
            self._retain(node, branch, until)
            self._retain(old, branch, 0.0)
        self._leave(old)

    def retain(self, branch: int, until: float) -> None:
        self._retain(self.head(branch), branch, until)

    def drop(self, branch: int) -> None:
        node = self.head(branch)
        self._retain(node, branch, 0.0)
        del self._heads[branch]
        mates = self._sessions[session_of(branch)]
        mates.discard(branch)
        if not mates:
            del self._sessions[session_of(branch)]
        self._leave(node)

    def _leave(self, node: Node) -> None:
        node.refs -= 1
        self._tree.prune(node)

    def _retain(self, node: Node, branch: int, until: float) -> None:
        """Set what `branch` asks for at `node`, then put the path above right."""
        before = 0.0
        if node.retainers is not None:
            before = node.retainers.pop(branch, 0.0)
            if not node.retainers:
                node.retainers = None
        if until > 0.0:
            if node.retainers is None:
                node.retainers = {}
            node.retainers[branch] = until
        current: Node | None = node
        while current is not None and current.until < until:
            current.until = until
            current = current.parent
        if before > until:
            self._lower(node, before)

    def _lower(self, node: Node, before: float) -> None:
        """`before` no longer counts at `node`: find the maximum again where it was the maximum."""
        current: Node | None = node
        while current is not None and current.until == before:
            until = max(current.retainers.values()) if current.retainers else 0.0
            for child in current.children.values():
                until = max(until, child.until)
            if until == before:
                return
            current.until = until
            self._lowered(current)
            current = current.parent
