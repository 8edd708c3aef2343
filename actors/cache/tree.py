"""The structure of the radix tree: roots, match, insert, split, merge, prune.

All sessions share it; a namespace is a root of its own. Every branch head is the end of a node.
Nothing here recurses (paths may be 10,000 nodes deep) or allocates pages. What keeps a node in
the tree: it is resident, or a handle, request or other node stands at or below it.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from ramify.actors.cache.node import DEVICE, NO_PAGES, NO_TOKENS, Node, Tokens, common_prefix, compact
from ramify.protocol.cluster import BLOCK

_TIDIED = 4  # nodes of a path's end: a generation prompt, an answer, and what no KV was made for
LOOKED_AT = 16  # nodes that are searched for the rest of a page
_ENDS = 8  # positions that a merged node remembers


class RadixTree:
    """Nodes by token runs.

    `page_size` and `block` only say how a split divides a node's pages, hashes and keys. `states`: node
    ends may have snapshots, so merged nodes remember where they were cut.
    """

    def __init__(self, page_size: int = 1, block: int = BLOCK, *, states: bool = False) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}: must be at least 1")
        self.page_size = page_size
        self.block = block
        self.states = states
        self.nodes = 0  # without roots
        self.roots: dict[str, Node] = {}
        self._namespaces: dict[Node, str] = {}

    def root(self, namespace: str) -> Node:
        """The root of `namespace`: made if it is not there. The caller takes a reference."""
        node = self.roots.get(namespace)
        if node is None:
            node = Node(None, 0, NO_TOKENS)
            node.fill(NO_PAGES)
            node.prove()
            node.table = b""
            self.roots[namespace] = node
            self._namespaces[node] = namespace
        return node

    def whole(self, position: int) -> int:
        """The end of the last whole page up to `position`."""
        return position - position % self.page_size

    def namespace(self, root: Node) -> str:
        """The namespace that `root` is the root of."""
        return self._namespaces[root]

    def insert(self, node: Node, tokens: Tokens) -> Node:
        """Append `tokens` at the end of `node`: the node whose end is theirs.

        Matches what the tree has, splits a node that matches in part, and adds the rest as one
        cold leaf. O(len(tokens)). The caller takes a reference at once, or calls `prune`.
        """
        position, length = 0, len(tokens)
        while position < length:
            rest = tokens[position:] if position else tokens
            first = int(rest[0])
            child = node.children.get(first)
            if child is None:
                leaf = Node(node, node.end, rest)
                node.children[first] = leaf
                self.nodes += 1
                return leaf
            same = common_prefix(child.tokens, rest)
            node = self.split(child, child.start + same)
            position += same
        return node

    def split(self, node: Node, at: int) -> Node:
        """The node of this path that ends at `at`, start < at <= end; cut in two if needed.

        `node` itself stays the lower part: handles, requests and locks that point to it stay
        right. The new upper part inherits the state of its KV and, as the parent of a locked or
        retained child, one lock or retention.
        """
        if at == node.end:
            return node
        parent = node.parent
        if parent is None or not node.start < at < node.end:
            raise ValueError(f"split at {at} of {node!r}")
        cut = at - node.start
        upper = Node(parent, node.start, node.tokens[:cut])
        lower_tokens = node.tokens[cut:]
        upper.children[int(lower_tokens[0])] = node
        upper.last_use = node.last_use
        upper.held = dict.fromkeys(node.held, 1) if node.held else None
        upper.until = node.until
        upper.locks = 1 if node.locks else 0
        upper.cut_from(node, at // self.page_size - node.start // self.page_size)
        upper.resident_children = 1 if node.resident else 0
        upper.resumable = 1 if node.resumable else 0
        if node.ends:
            upper.ends = tuple(end for end in node.ends if end < at)
            node.ends = tuple(end for end in node.ends if end > at)
        count = at // self.block - node.start // self.block
        upper.keys, node.keys = node.keys[:count], node.keys[count:]
        if node.hashes is not None:
            upper.hashes = node.hashes[:count]
            node.hashes = node.hashes[count:] if len(upper.hashes) == count else None
            upper.told = min(node.told, count)
            node.told -= upper.told
        parent.children[int(upper.tokens[0])] = upper
        node.parent = upper
        node.start = at
        node.tokens = lower_tokens
        self.nodes += 1
        return upper

    def merge(self, node: Node) -> None:
        """Absorb ancestors that `node` alone continues, as long as they are not much longer.

        Every turn of a chat adds two or three nodes; merged like this, the nodes of a path without
        forks grow geometrically towards the root: O(log length) of them, and each token is copied
        O(log length) times. `node` keeps its identity, absorbed nodes are gone.
        """
        parts, pages, hashes, keys = [node.tokens], [node.pages], [node.hashes], [node.keys]
        ends = list(node.ends[::-1])
        start = node.start
        top = node.parent
        while (
            top is not None
            and top.parent is not None
            and top.end - top.start <= 2 * (node.end - start)
            and len(top.children) == 1
            and not top.refs
            and not top.snapshot
            and top.locks == (1 if node.locks else 0)  # else a request is anchored there
            and top.is_alike(node)
        ):
            parts.append(top.tokens)
            pages.append(top.pages)
            hashes.append(top.hashes)
            keys.append(top.keys)
            if self.states:
                ends += (top.end, *top.ends[::-1])
            start = top.start
            node.told += top.told
            node.last_use = max(node.last_use, top.last_use)
            node.until = max(node.until, top.until)
            top.stamp = 0
            self.nodes -= 1
            above, top.parent = top.parent, None
            top = above
        if start == node.start:
            return
        assert top is not None
        node.tokens = np.concatenate(parts[::-1])
        node.pages = np.concatenate(pages[::-1])
        known = [part for part in reversed(hashes) if part is not None]  # those of the upper ones
        if known:
            node.hashes = np.concatenate(known)
        node.keys = [key for part in reversed(keys) for key in part]
        node.start = start
        node.ends = tuple(ends[:_ENDS][::-1])
        node.parent = top
        top.children[int(node.tokens[0])] = node

    def tidy(self, node: Node) -> None:
        """`merge` a path, from its end: a short answer absorbs nothing, but what is before it may."""
        current: Node | None = node
        for _ in range(_TIDIED):
            if current is not None:
                self.merge(current)
                current = current.parent

    def ancestor(self, node: Node, at: int) -> Node:
        """The node on the path to `node` that ends at position `at`: walks up, splits if needed."""
        if not 0 <= at <= node.end:
            raise ValueError(f"position {at} of a branch of {node.end} tokens")
        while node.start >= at and node.parent is not None:
            node = node.parent
        return self.split(node, at) if at < node.end else node

    def prune(self, node: Node) -> None:
        """Delete `node` and then its ancestors while they are cold and nothing needs them."""
        while not node.resident and not node.refs and not node.children:
            parent = node.parent
            assert parent is not None  # roots are resident
            self.delete(node)
            node = parent
        if node.parent is None:
            self._prune_root(node)

    def delete(self, leaf: Node) -> None:
        """Take a leaf out of the tree. Its pages have been freed by the caller."""
        parent = leaf.parent
        if parent is None or leaf.children or leaf.refs or leaf.locks:
            raise ValueError(f"{leaf!r} is in use")
        del parent.children[int(leaf.tokens[0])]
        leaf.parent = None
        self.nodes -= 1
        parent.tokens = compact(parent.tokens)
        parent.pages = compact(parent.pages)
        self._prune_root(parent)

    def tokens(self, node: Node, start: int) -> bytes:
        """int32 tokens of positions [start, node.end) on the path to `node`. Walks up to `start`."""
        parts: list[Tokens] = []
        current: Node | None = node
        while current is not None and current.end > start:
            skip = start - current.start
            parts.append(current.tokens[skip:] if skip > 0 else current.tokens)
            current = current.parent
        if len(parts) == 1:
            return parts[0].tobytes()
        parts.reverse()
        return b"".join(part.data for part in parts)

    def cut_page(self, node: Node, position: int) -> int | None:
        """The page that `position` is inside of, on the path to `node` or beyond; None: it is not there.

        `node` is on the device and holds `position` or ends there. KV that is not proven is not
        copied: what is wrong with it could not be traced to where it came from.
        """
        size = self.page_size
        index = position // size
        while node.start // size > index and node.parent is not None:
            node = node.parent
        nodes = [node]
        for each in nodes:  # grows meanwhile
            if each.state is not DEVICE or not each.proven:
                continue
            if each.end // size > index:
                return int(each.pages[index - each.start // size])
            if each.resident_children and len(nodes) < LOOKED_AT:
                nodes += islice(each.children.values(), LOOKED_AT - len(nodes))
        return None

    def walk(self) -> Iterator[Node]:
        """Every node, roots first, parents before children. O(tree): for checks only."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _prune_root(self, node: Node) -> None:
        if node.parent is None and not node.children and not node.refs and not node.locks:
            namespace = self._namespaces.pop(node, None)
            if namespace is not None:
                del self.roots[namespace]
