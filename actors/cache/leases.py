"""Leases: who keeps which path of the tree warm, and until when. One mechanism for all retention.

A lease ends at a node and keeps the path to it behind all others in eviction. It follows a branch, and
stands where it is once the branch's session is over. Each lease has a *holder*, a credential, which has
no more tokens than its share of the pool: what does not fit is left out of the lease, from its end.
Tokens that several leases of a holder share count once: `Node.held` counts, as locks do, the holder's
leases at or below a node.

Does not know pages, requests or clocks: `until` and `now` are arguments.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ramify.actors.cache.node import Node
from ramify.actors.cache.tree import RadixTree

_REACH = 64  # nodes above a lease among which those are looked for that it makes superfluous


class Bounds(NamedTuple):
    """The most tokens and leases that one holder may have."""

    tokens: int = 1 << 62
    leases: int = 1 << 62


@dataclass(slots=True, eq=False)
class Lease:
    """The path to `node` is kept until `until`. `branch`: which it follows; None: none any more."""

    node: Node
    holder: str
    until: float
    branch: int | None


class Leases:
    """All leases. `lowered` is called with each node whose retention got shorter."""

    def __init__(self, tree: RadixTree, lowered: Callable[[Node], None], bounds: Bounds) -> None:
        self.bounds = bounds
        self.tokens = Counter[str]()  # by holder
        self._tree = tree
        self._lowered = lowered
        self._of: dict[int, Lease] = {}  # by branch
        self._standing: dict[tuple[str, Node], Lease] = {}
        self._counts = Counter[str]()  # leases by holder
        self._expiry: list[tuple[float, int, Lease]] = []  # valid if the lease is there and says so too
        self._entries = 0

    def __len__(self) -> int:
        return len(self._of) + len(self._standing)

    def all(self) -> Iterable[Lease]:
        return [*self._of.values(), *self._standing.values()]

    def of(self, branch: int) -> Lease | None:
        """The lease that follows a branch."""
        return self._of.get(branch)

    def branches(self) -> Iterable[int]:
        """The branches whose leases follow them."""
        return self._of.keys()

    # --- of branches ------------------------------------------------------------------------

    def retain(self, branch: int, node: Node, holder: str, until: float) -> int:
        """The branch, which ends at `node`, is kept until then; 0.0: no longer. Returns tokens kept."""
        lease = self._of.get(branch)
        if until <= 0.0:
            if lease is not None:
                self._end(lease)
            return 0
        if lease is None:
            lease = self._grant(branch, node, holder, until)
            if lease is None:
                return 0
        else:
            self._put_off(lease, until)
        return lease.node.end

    def keep(self, branch: int, node: Node, holder: str, until: float, end: int | None) -> int:
        """As `retain`; with `end`: the first tokens of the path to `node`, wherever the branch goes."""
        if end is None:
            return self.retain(branch, node, holder, until)
        node = self._tree.ancestor(node, min(end, node.end))
        lease = self._standing.get((holder, node))
        if until <= 0.0:
            if lease is not None:
                self._end(lease)
            return 0
        if lease is None:
            lease = self._grant(None, node, holder, until)
            return lease.node.end if lease is not None else 0
        if until > lease.until:
            self._put_off(lease, until)
        return node.end

    def follow(self, branch: int, node: Node) -> None:
        """Move the branch's lease to `node`, its new end."""
        lease = self._of.get(branch)
        if lease is None or lease.node is node:
            return
        old, lease.node = lease.node, self._fit(node, lease.holder)
        self._hold(lease)
        self._release(old, lease.holder)

    def drop(self, branch: int, *, keep: bool = False) -> None:
        """Forget the branch. `keep`: its lease stays where it is."""
        lease = self._of.get(branch)
        if lease is None:
            return
        if not keep or lease.node.parent is None:
            self._end(lease)
            return
        del self._of[branch]
        lease.branch = None
        self._stand(lease)

    def expire(self, now: float) -> None:
        """End the leases whose time is over. O(1) for each, beside the nodes."""
        expiry = self._expiry
        while expiry and expiry[0][0] <= now:
            until, _, lease = heapq.heappop(expiry)
            if self._valid(lease) and lease.until == until:
                self._end(lease)

    # --- internals --------------------------------------------------------------------------

    def _grant(self, branch: int | None, node: Node, holder: str, until: float) -> Lease | None:
        """A lease on as much of the path as fits; None: the holder has too many, or nothing fits."""
        if self._counts[holder] >= self.bounds.leases:
            return None
        lease = Lease(self._fit(node, holder), holder, until, branch)
        if branch is None and lease.node.parent is None:
            return None
        self._counts[holder] += 1
        self._hold(lease)
        if branch is None:
            self._stand(lease)
        else:
            self._of[branch] = lease
        self._note(lease)
        return lease

    def _stand(self, lease: Lease) -> None:
        """The lease follows no branch any more, and takes the place of those that it makes needless."""
        other = self._standing.get((lease.holder, lease.node))
        if other is not None:
            self._merge(lease, other)
        self._standing[lease.holder, lease.node] = lease
        self._supersede(lease)

    def _fit(self, node: Node, holder: str) -> Node:
        """The deepest node on the path to `node` up to which the holder may hold it."""
        held: Node | None = node
        while held is not None and not (held.held and holder in held.held):
            held = held.parent
        has = held.end if held is not None else 0
        room = max(0, self.bounds.tokens - self.tokens[holder])
        return self._tree.ancestor(node, min(node.end, has + room))

    def _hold(self, lease: Lease) -> None:
        """Count the lease on its path, up to the first node that its holder has already."""
        holder = lease.holder
        lease.node.refs += 1
        current: Node | None = lease.node
        while current is not None:
            held = current.held
            if held is None:
                held = current.held = {}
            count = held[holder] = held.get(holder, 0) + 1
            current.until = max(current.until, lease.until)
            if count > 1:
                return
            self.tokens[holder] += current.end - current.start
            current = current.parent

    def _release(self, node: Node, holder: str) -> None:
        """Undo `_hold`, which ended at `node`."""
        current: Node | None = node
        while current is not None:
            held = current.held
            assert held is not None
            held[holder] -= 1
            if held[holder]:
                break
            del held[holder]
            self.tokens[holder] -= current.end - current.start
            if not held:
                current.held, current.until = None, 0.0
                self._lowered(current)
            current = current.parent
        if not self.tokens[holder]:
            del self.tokens[holder]
        node.refs -= 1
        self._tree.prune(node)

    def _end(self, lease: Lease) -> None:
        if lease.branch is not None:
            del self._of[lease.branch]
        else:
            del self._standing[lease.holder, lease.node]
        self._counts[lease.holder] -= 1
        if not self._counts[lease.holder]:
            del self._counts[lease.holder]
        self._release(lease.node, lease.holder)

    def _put_off(self, lease: Lease, until: float) -> None:
        """The lease ends at another time, later or sooner."""
        node, before, lease.until = lease.node, lease.until, until
        alone = node.held is not None and all(count == 1 for count in node.held.values())
        node.until = until if alone else max(node.until, until)
        self._note(lease)
        if until < before:
            self._lowered(node)

    def _merge(self, lease: Lease, other: Lease) -> None:
        """`lease` takes the place of `other`, which is of the same holder at the same node."""
        if other.until > lease.until:
            self._put_off(lease, other.until)
        self._end(other)

    def _supersede(self, lease: Lease) -> None:
        """End the holder's leases a little above that add nothing to a new one: each turn of a chat
        brings one."""
        current = lease.node.parent
        for _ in range(_REACH):
            if current is None:
                break
            other = self._standing.get((lease.holder, current))
            above = current.parent
            if other is not None and other.until <= lease.until:
                self._end(other)
            current = above
        self._tree.tidy(lease.node)

    def _valid(self, lease: Lease) -> bool:
        if lease.branch is not None:
            return self._of.get(lease.branch) is lease
        return self._standing.get((lease.holder, lease.node)) is lease

    def _note(self, lease: Lease) -> None:
        self._entries += 1
        heapq.heappush(self._expiry, (lease.until, self._entries, lease))
        if len(self._expiry) > 64 + 4 * len(self):
            every = list({id(each): each for each in (*self.all(), lease)}.values())
            self._expiry = [(each.until, i, each) for i, each in enumerate(every)]
            self._entries = len(every)
            heapq.heapify(self._expiry)
