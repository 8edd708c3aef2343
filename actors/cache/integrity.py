"""A full check of every invariant of the radix cache. O(tree + pool): for tests and idle moments.

Recomputes from the nodes what the other files keep incrementally, and compares. It shares no code
with them, so that one mistake does not hide in both.
"""

import numpy as np

from ramify.actors.cache.allocator import Pages
from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.node import Node


class IntegrityError(AssertionError):
    """The cache contradicts itself. Nothing that it says about pages can be trusted any more."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)


def check(cache: RadixCache) -> None:
    """Raises IntegrityError at the first invariant that does not hold."""
    nodes = list(cache.tree.walk())
    for node in nodes:
        _check_shape(node, cache.page_size)
        _check_trust(node)
    _require(
        cache.tree.nodes == len(nodes) - len(cache.tree.roots),
        f"{cache.tree.nodes} nodes counted, {len(nodes)} found",
    )
    _check_references(cache, nodes)
    _check_retention(cache, nodes)
    _check_owners(cache, nodes)
    _check_pages(cache, nodes)
    for node in nodes:
        candidate = node.parent is not None and node.pages is not None
        if candidate and not node.locks and not node.resident_children:
            _require(node.stamp != 0, f"{node!r} can be evicted but is in no heap")


def _check_shape(node: Node, size: int) -> None:
    _require(node.end == node.start + len(node.tokens), f"{node!r}: length")
    if node.parent is None:
        _require(node.end == 0 and node.pages is not None, f"{node!r}: root")
    else:
        _require(node.end > node.start == node.parent.end, f"{node!r}: place")
        _require(
            node.parent.children.get(int(node.tokens[0])) is node, f"{node!r}: not its parent's child"
        )
    resident = sum(child.pages is not None for child in node.children.values())
    _require(node.resident_children == resident, f"{node!r}: resident children")
    if node.pages is None:
        _require(resident == 0, f"{node!r}: cold above resident")
        _require(node.locks == 0, f"{node!r}: cold and locked")
        _require(bool(node.refs or node.children), f"{node!r}: cold and unused")
    else:
        _require(len(node.pages) == node.end // size - node.start // size, f"{node!r}: pages")
        _require(node.owner == 0, f"{node!r}: resident and owned")
        if node.table is not None and node.parent is not None:
            _require(node.locks > 0, f"{node!r}: keeps a table but is not locked")


def _check_trust(node: Node) -> None:
    parent = node.parent
    if node.proven:
        _require(node.pages is not None and not node.suspect, f"{node!r}: proven without good KV")
        _require(parent is None or parent.proven, f"{node!r}: proven below what is not")
    if node.suspect:
        _require(node.pages is not None and node.locks > 0, f"{node!r}: suspect, and nothing holds it")
    if parent is not None and parent.suspect and node.pages is not None:
        _require(node.suspect, f"{node!r}: below suspect KV")


def _check_retention(cache: RadixCache, nodes: list[Node]) -> None:
    heads = dict(cache.branches.items())
    retained = dict.fromkeys(nodes, 0)
    for branch in cache.branches.retained():
        _require(branch in heads, f"branch {branch:#x} is retained but not open")
        retained[heads[branch]] += 1
    for node in nodes:
        count = retained[node] + sum(child.retained > 0 for child in node.children.values())
        _require(node.retained == count, f"{node!r}: retained {node.retained}, expected {count}")
        _require((node.until > 0) == (count > 0), f"{node!r}: until {node.until}")


def _check_references(cache: RadixCache, nodes: list[Node]) -> None:
    alive = set(nodes)
    refs = dict.fromkeys(nodes, 0)
    anchors = dict.fromkeys(nodes, 0)
    for branch, node in cache.branches.items():
        _require(node in alive, f"branch {branch:#x} points to a deleted node")
        refs[node] += 1
    for run in cache.runs.values():
        _require(run.tip in alive and run.anchor in alive, f"request {run.request:#x}: deleted node")
        refs[run.tip] += 1
        anchors[run.anchor] += 1
    for node in nodes:
        _require(node.refs == refs[node], f"{node!r}: {refs[node]} references found")
        locks = anchors[node] + sum(child.locks > 0 for child in node.children.values())
        locks += node in cache.residency.kept
        _require(node.locks == locks, f"{node!r}: {locks} locks found")


def _check_owners(cache: RadixCache, nodes: list[Node]) -> None:
    on_path: dict[int, set[Node]] = {}
    for run in cache.runs.values():
        node: Node | None = run.tip
        path = on_path.setdefault(run.request, set())
        while node is not None:
            path.add(node)
            node = node.parent
    for node in nodes:
        if node.owner:
            _require(
                node in on_path.get(node.owner, ()),
                f"{node!r}: owner {node.owner:#x} is elsewhere",
            )


def _check_pages(cache: RadixCache, nodes: list[Node]) -> None:
    evictable: list[Pages] = []
    locked: list[Pages] = []
    for node in nodes:
        if node.pages is not None:
            (locked if node.locks else evictable).append(node.pages)
    private = [run.rest() for run in cache.runs.values()]
    counts = [sum(map(len, group)) for group in (evictable, locked, private)]
    held = cache.residency
    _require(
        counts == [held.evictable, held.locked, held.private],
        f"evictable, locked, private: {[held.evictable, held.locked, held.private]}, found {counts}",
    )
    _require(
        cache.free + cache.evictable + cache.referenced == cache.total,
        f"{cache.free} + {cache.evictable} + {cache.referenced} != {cache.total}",
    )
    every = [*evictable, *locked, *private]
    pages = np.concatenate(every) if every else np.empty(0, dtype=np.int32)
    _require(len(np.unique(pages)) == len(pages), "a page has two owners")
    _require(bool(cache.allocator.is_out(pages).all()), "a page is owned and free at once")
