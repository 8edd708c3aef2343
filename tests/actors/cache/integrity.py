"""A full check of every invariant of the radix cache. O(tree + pool).

Recomputes from the nodes what the other files keep incrementally, and compares. It shares no code
with them, so that one mistake does not hide in both.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import numpy as np
from anyio.abc import TaskStatus

from ramify.actors.cache.actor import CacheActor
from ramify.actors.cache.allocator import Pages
from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.node import COMPUTING, DEVICE, SUSPECT, Node
from ramify.actors.cache.windows import Tails
from ramify.protocol import messages as m


class IntegrityError(AssertionError):
    """The cache contradicts itself. Nothing that it says about pages can be trusted any more."""


def _require(condition: bool, message: str, *values: object) -> None:
    """`message` is formatted when it is raised: the nodes' texts would cost more than the checks."""
    if not condition:
        raise IntegrityError(message.format(*values))


def check(cache: RadixCache) -> None:
    """Raises IntegrityError at the first invariant that does not hold."""
    nodes = list(cache.tree.walk())
    for node in nodes:
        _check_shape(node, cache.page_size)
        _check_trust(node)
    _require(
        cache.tree.nodes == len(nodes) - len(cache.tree.roots),
        "{} nodes counted, {} found",
        cache.tree.nodes,
        len(nodes),
    )
    _check_references(cache, nodes)
    _check_retention(cache, nodes)
    _check_owners(cache, nodes)
    _check_pages(cache, nodes)
    _check_states(cache, nodes)
    _check_stored(cache, nodes)
    for node in nodes:
        candidate = node.parent is not None and _is_resident(node)
        if candidate and not node.locks and not node.resident_children:
            _require(node.stamp != 0, "{!r} can be evicted but is in no heap", node)


@contextmanager
def checked_when_idle() -> Iterator[None]:
    """Caches of actors that begin meanwhile are checked whenever nothing runs and nothing waits."""
    run = CacheActor.run

    async def checked(
        actor: CacheActor, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        drain, mailbox, cache = actor.mailbox.drain, actor.mailbox, actor.cache

        async def idle_then_drain() -> list[m.CacheMessage]:
            if not cache.runs and not len(mailbox):
                check(cache)
            return await drain()

        mailbox.drain = idle_then_drain  # type: ignore[method-assign]
        await run(actor, task_status=task_status)

    CacheActor.run = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        CacheActor.run = run  # type: ignore[method-assign]


def _check_shape(node: Node, size: int) -> None:
    _require(node.end == node.start + len(node.tokens), "{!r}: length", node)
    if node.parent is None:
        _require(node.end == 0 and node.state is DEVICE, "{!r}: root", node)
    else:
        _require(node.end > node.start == node.parent.end, "{!r}: place", node)
        _require(
            node.parent.children.get(int(node.tokens[0])) is node, "{!r}: not its parent's child", node
        )
    here = _is_resident(node)
    _require(node.resident == here, "{!r}: resident {}", node, node.resident)
    resident = sum(map(_is_resident, node.children.values()))
    _require(node.resident_children == resident, "{!r}: resident children", node)
    _require((node.owner != 0) == (node.state is COMPUTING), "{!r}: owner {:#x}", node, node.owner)
    pages = node.end // size - node.start // size if here else 0
    _require(len(node.pages) == pages, "{!r}: {} pages", node, pages)
    if not here:
        _require(resident == 0, "{!r}: cold above resident", node)
        _require(node.locks == 0, "{!r}: cold and locked", node)
        _require(bool(node.refs or node.children), "{!r}: cold and unused", node)
    elif node.table is not None and node.parent is not None:
        _require(node.locks > 0, "{!r}: keeps a table but is not locked", node)


def _is_resident(node: Node) -> bool:
    return node.state is DEVICE or node.state is SUSPECT


def _check_trust(node: Node) -> None:
    parent = node.parent
    if node.proven:
        _require(node.state is DEVICE, "{!r}: proven without good KV", node)
        _require(parent is None or parent.proven, "{!r}: proven below what is not", node)
    if node.state is SUSPECT:
        _require(node.locks > 0, "{!r}: suspect, and nothing holds it", node)
    if parent is not None and parent.state is SUSPECT:
        _require(node.state is not DEVICE, "{!r}: below suspect KV", node)


def _check_retention(cache: RadixCache, nodes: list[Node]) -> None:
    alive, leases = set(nodes), list(cache.leases.all())
    heads = dict(cache.branches.items())
    held: dict[Node, dict[str, int]] = {node: {} for node in nodes}
    for lease in leases:
        _require(lease.node in alive, "a lease of {!r} ends at a deleted node", lease.holder)
        _require(lease.branch is None or lease.branch in heads, "a lease follows no branch")
        counts = held[lease.node]
        counts[lease.holder] = counts.get(lease.holder, 0) + 1
    for node in reversed(nodes):  # children before their parents
        if node.parent is not None:
            above = held[node.parent]
            for holder in held[node]:
                above[holder] = above.get(holder, 0) + 1
    tokens = Counter[str]()
    for node in nodes:
        counts = held[node]
        _require((node.held or {}) == counts, "{!r}: held {}, expected {}", node, node.held, counts)
        _require((node.until > 0) == node.retained, "{!r}: until {}", node, node.until)
        tokens.update(dict.fromkeys(held[node], node.end - node.start))
    _require(+tokens == +cache.leases.tokens, "held {}, found {}", cache.leases.tokens, tokens)


def _check_references(cache: RadixCache, nodes: list[Node]) -> None:
    alive = set(nodes)
    refs = dict.fromkeys(nodes, 0)
    anchors = dict.fromkeys(nodes, 0)
    for branch, node in cache.branches.items():
        _require(node in alive, "branch {:#x} points to a deleted node", branch)
        refs[node] += 1
    for lease in cache.leases.all():
        refs[lease.node] += 1
    for run in cache.runs.values():
        _require(run.tip in alive and run.anchor in alive, "request {:#x}: deleted node", run.request)
        refs[run.tip] += 1
        anchors[run.anchor] += 1
    for node in nodes:
        _require(node.refs == refs[node], "{!r}: {} references found", node, refs[node])
        locks = anchors[node] + sum(child.locks > 0 for child in node.children.values())
        locks += node in cache.residency.kept
        _require(node.locks == locks, "{!r}: {} locks found", node, locks)


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
                "{!r}: owner {:#x} is elsewhere",
                node,
                node.owner,
            )


def _check_pages(cache: RadixCache, nodes: list[Node]) -> None:
    evictable: list[Pages] = []
    locked: list[Pages] = []
    for node in nodes:
        if _is_resident(node):
            (locked if node.locks else evictable).append(node.pages)
    private = [run.rest() for run in cache.runs.values()]
    counts = [sum(map(len, group)) for group in (evictable, locked, private)]
    held = cache.residency
    _require(
        counts == [held.evictable, held.locked, held.private],
        "evictable, locked, private: {}, found {}",
        [held.evictable, held.locked, held.private],
        counts,
    )
    _require(
        cache.free + cache.evictable + cache.referenced == cache.total,
        "{} + {} + {} != {}",
        cache.free,
        cache.evictable,
        cache.referenced,
        cache.total,
    )
    every = [*evictable, *locked, *private]
    pages = np.concatenate(every) if every else np.empty(0, dtype=np.int32)
    _require(len(np.unique(pages)) == len(pages), "a page has two owners")
    _require(bool(cache.allocator.is_out(pages).all()), "a page is owned and free at once")


def _check_states(cache: RadixCache, nodes: list[Node]) -> None:
    states = cache.residency.snapshots
    uses = Counter[int]()
    below = dict.fromkeys(nodes, 0)
    for node in reversed(nodes):  # children before their parents
        if node.snapshot:
            uses[node.snapshot] += 1
            _require(node.state is DEVICE, "{!r}: a snapshot without KV", node)
            kept = states.of(node.snapshot) if states is not None else None
            _require(kept is not None and kept.node is node, "{!r}: its snapshot is elsewhere", node)
        count = below[node] + (node.snapshot > 0)
        _require(node.resumable == count, "{!r}: {} resumable, found {}", node, node.resumable, count)
        if count and node.parent is not None:
            below[node.parent] += 1
        if node.ends:
            inside = sorted(end for end in set(node.ends) if node.start < end < node.end)
            _require(list(node.ends) == inside, "{!r}: ends {}", node, node.ends)
    if isinstance(states, Tails):
        _check_windows(cache, states)
    if states is None:
        return
    _require(len(states) == len(uses), "{} snapshots, found {}", len(states), len(uses))
    _require(max(uses.values(), default=0) <= 1, "two nodes have one slot")
    idle = len(uses)
    for run in cache.runs.values():
        read = {run.reads[1]} - {0}
        idle -= len([slot for slot in read if uses[slot] == 1])
        for slot in (*run.slots, *read):
            uses[slot] += 1
        _require(not run.slots & read, "request {:#x} may write what it reads", run.request)
        _require(all(uses[slot] == 1 for slot in run.slots), "request {:#x}: shared slots", run.request)
    counted = {slot: count for slot in range(1, states.total + 1) if (count := states.uses(slot))}
    _require(counted == +uses, "uses of slots: {}, found {}", counted, +uses)
    free = states.total - len(+uses)
    _require(
        (states.free, states.available) == (free, free + idle),
        "{} slots free, {} available, found {} and {}",
        states.free,
        states.available,
        free,
        free + idle,
    )


def _check_stored(cache: RadixCache, nodes: list[Node]) -> None:
    stored, size = cache.residency.stored, cache.tree.block
    complete = {node for node in nodes if len(node.keys) == node.end // size - node.start // size}
    for node in nodes:
        _require(len(node.keys) <= node.end // size - node.start // size, "{!r}: keys", node)
        known = node.parent is None or node.parent in complete or not node.keys
        _require(known, "{!r}: keys below a node without", node)
    runs = cache.runs.values()
    pins = Counter(key for run in runs for key in (*run.stored, *run.compared.values()))
    pins.update(cache.canaries.held())
    for key, slot, count in (held := list(stored.held())):
        _require(count == pins[key], "slot {}: {} pins, found {}", slot, count, pins[key])
    coming = list(stored.coming.values())
    slots = sorted([slot for _, slot, _ in held if slot >= 0] + coming + stored.free)
    _require(slots == list(range(stored.slots)), "slots in use and free: {}", slots)

    away = cache.residency.stored_snapshots
    if away is None:
        return
    for key in stored.notes:
        there = stored.here_or_on_disk(key) or key in stored.coming
        _require(there, "a stored snapshot without its first part: {}", key)
    if stored.disk is not None:
        _require(stored.disk.notes.keys() <= stored.disk.held().keys(), "a note of what the disk lacks")
    own = sorted(key for others in away.behind.values() for key in others)
    _require(sorted(stored.notes) == own, "stored snapshots: {}, found {}", stored.notes, own)
    _require(all(away.behind.values()), "a block without the snapshots behind it")


def _check_windows(cache: RadixCache, states: Tails) -> None:
    tails, runs, total = Counter[int](), Counter[int](), states.allocator.total
    _require(states.pages.keys() == {each.slot for each in states.all()}, "tails without a node")
    for slot, pages in states.pages.items():
        snapshot = states.of(slot)
        length = min(len(pages), snapshot.node.end) if snapshot is not None else -1
        _require(len(set(pages.tolist())) == length > 0, "tail {}: {} pages", slot, len(pages))
        tails.update(pages.tolist())
    rings = [run.ring for run in cache.runs.values() if run.ring is not None]
    _require(len(rings) == len(cache.runs), "{} runs, {} with windows", len(cache.runs), len(rings))
    for ring in rings:
        held = ring.pages.tolist()
        _require(len(set(held)) == len(held), "a run has a window page twice: {}", held)
        runs.update(held)
    for ring in rings:
        alone = ring.alone.tolist()
        _require(all(runs[page] == 1 for page in alone), "other runs read what one writes: {}", alone)
        _require(not tails.keys() & set(alone), "a run may write over a tail: {}", alone)
    used = states.allocator.is_out(np.arange(total, dtype=np.int32))
    for counted, found in ((states.tails, tails), (states.runs, runs)):
        wanted = np.bincount(np.fromiter(found.elements(), np.int64), minlength=total)
        wrong = np.flatnonzero(counted != wanted)
        _require(len(wrong) == 0, "window pages with other uses: {}", wrong)
    out = (states.tails > 0) | (states.runs > 0)
    _require(np.array_equal(used, out), "window pages in use: {}, found {}", used, out)
    _require(states.held == len(+runs), "{} window pages held, found {}", states.held, len(+runs))
