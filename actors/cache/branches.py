"""Branch handles: which node each branch's head is, and how long it is retained.

A handle is a pointer to a node whose end is the branch's head; tokens live in the tree. Retention
is a hint to eviction: `Node.retained` counts, as locks do, what is retained at or below a node, so
taking it back asks no sibling. Its end in time is kept here, in a heap.
Does not know pages or requests.
"""

import heapq
from collections.abc import Callable, Iterable

from ramify.actors.cache.node import Node, Tokens
from ramify.actors.cache.tree import RadixTree
from ramify.protocol.messages import session_of


class UnknownBranch(RuntimeError):
    """A message named a handle that is not open, or opened one twice: a bug of its sender."""


class Branches:
    """Handles by number. `lowered` is called with each node whose retention got shorter."""

    def __init__(self, tree: RadixTree, lowered: Callable[[Node], None]) -> None:
        self._tree = tree
        self._lowered = lowered
        self._heads: dict[int, Node] = {}
        self._sessions: dict[int, set[int]] = {}  # the handles of each session
        self._until: dict[int, float] = {}  # of the retained branches
        self._expiry: list[tuple[float, int]] = []  # (until, branch); valid if `_until` says so too

    def __len__(self) -> int:
        return len(self._heads)

    def items(self) -> list[tuple[int, Node]]:
        return list(self._heads.items())

    def of(self, session: int) -> list[int]:
        """The handles of a session."""
        return list(self._sessions.get(session, ()))

    def retained(self) -> Iterable[int]:
        """The branches whose retention counts in the tree."""
        return self._until.keys()

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
        until = self._until.get(branch)
        if until is not None:
            _retain(node, until)
            self._release(old)
        self._leave(old)

    def drop(self, branch: int) -> None:
        node = self.head(branch)
        if self._until.pop(branch, None) is not None:
            self._release(node)
        del self._heads[branch]
        mates = self._sessions[session_of(branch)]
        mates.discard(branch)
        if not mates:
            del self._sessions[session_of(branch)]
        self._leave(node)

    # --- retention --------------------------------------------------------------------------

    def retain(self, branch: int, until: float) -> None:
        """Retain the branch until that time; 0.0: no longer. Costs the nodes whose retention changes."""
        node = self.head(branch)
        before = self._until.pop(branch, None)
        if until <= 0.0:
            if before is not None:
                self._release(node)
            return
        self._until[branch] = until
        heapq.heappush(self._expiry, (until, branch))
        if len(self._expiry) > 64 + 4 * len(self._until):
            self._expiry = [(when, which) for which, when in self._until.items()]
            heapq.heapify(self._expiry)
        if before is None:
            _retain(node, until)
            return
        node.until = until if node.retained == 1 else max(node.until, until)
        if until < before:
            self._lowered(node)

    def expire(self, now: float) -> None:
        """End the retentions whose time is over. O(1) for each, beside the nodes."""
        expiry = self._expiry
        while expiry and expiry[0][0] <= now:
            until, branch = heapq.heappop(expiry)
            if self._until.get(branch) == until:
                del self._until[branch]
                self._release(self._heads[branch])

    def _release(self, node: Node) -> None:
        """Count one retained branch or child of `node` less, up to the first node that has another."""
        current: Node | None = node
        while current is not None:
            current.retained -= 1
            if current.retained:
                return
            current.until = 0.0
            self._lowered(current)
            current = current.parent

    def _leave(self, node: Node) -> None:
        node.refs -= 1
        self._tree.prune(node)


def _retain(node: Node, until: float) -> None:
    """Count one retained branch or child of `node` more, up to the first node that had another."""
    current: Node | None = node
    while current is not None:
        current.retained += 1
        current.until = max(current.until, until)
        if current.retained > 1:
            return
        current = current.parent
