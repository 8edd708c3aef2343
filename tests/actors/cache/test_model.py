"""Random programs against the cache, compared with a model that knows only tokens and pages.

The model keeps each branch as a tuple of tokens and, for every page slot, which prefix its KV was
computed from, and whether it is finite. Reading a page table back must give exactly the branch's
prefixes, for as long as a request runs: a page that was freed, remapped or published too early
shows up as a wrong prefix. The same holds for state slots: each remembers which prefix its state stands
for, and to window pages: what a step reads of them is the last tokens of its row.
"""

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ramify.actors.cache import snapshots
from ramify.actors.cache.cache import CacheShares, RadixCache
from ramify.actors.cache.canaries import Canaries
from ramify.actors.cache.node import DEVICE, SUSPECT
from ramify.actors.cache.on_disk import OnDisk
from ramify.actors.cache.windows import Tails, Windows
from ramify.protocol import messages as m
from ramify.protocol.plan import STATE, WINDOW, MovedBlock, pack, unpack
from tests.actors.cache.integrity import check
from tests.amount import examples

Path = tuple[str, tuple[int, ...]]  # namespace, tokens

tokens_lists = st.lists(st.integers(0, 1), min_size=1, max_size=9)
picks = st.integers(0, 10_000)


@dataclass
class Row:
    """A running request as the scheduler and executor see it."""

    branch: int
    path: Path  # of the prompt
    pages: list[int]
    computed: int
    tokens: list[int]  # sampled
    free: list[int] = field(default_factory=list)  # its state slots that hold nothing that it needs
    marks: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)  # positions and slots, to be committed
    newest: tuple[int, int] = (0, 0)  # position and slot
    windows: list[int] = field(default_factory=list)  # window page of each position; -1: never read
    reads: int = 0  # position from which its newest step reads
    written: int = 0
    loads: list[MovedBlock] = field(default_factory=list)  # to come before anything runs

    def prefix(self, position: int) -> Path:
        return self.path[0], (self.path[1] + tuple(self.tokens))[: position + 1]


class CacheMachine(RuleBasedStateMachine):
    page_size = 1
    pool = 24
    reach = 64
    slots = 0  # of states
    windows: Windows | None = None
    host, block = 0, 4  # blocks, and tokens of each
    disk = 0  # blocks

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(
            self.pool,
            self.page_size,
            self.reach,
            self.block,
            shares=CacheShares(50, 8),
            state_slots=self.slots,
            windows=self.windows,
            host_blocks=self.host,
            disk=OnDisk(self.disk) if self.disk else None,
            part=2,
            canaries=Canaries(0.0 if self.slots or self.windows or self.host < 20 else 0.5),
        )
        self.on_disk: dict[int, tuple[bytes, list[Path]]] = {}  # as `host_content`, by place
        # by slot: its key, and prefixes, of a state just that which it stands for
        self.host_content: dict[int, tuple[bytes, list[Path]]] = {}
        self.loaded = self.compared = 0  # blocks
        self.resumed = 0  # requests that loaded what they begin from
        self.brought = 0  # tokens from the disk
        self.seen: dict[int, Path] = {}  # by window page: the prefix up to its position
        self.states: dict[int, Path] = {}  # by slot: what it stands for
        self.hits = 0  # requests that began from a snapshot
        self.bad: set[int] = set()  # slots of states that are not finite
        self.branches: dict[int, Path] = {}
        self.rows: dict[int, Row] = {}
        self.content: dict[tuple[int, int], Path] = {}
        self.spoiled: set[tuple[int, int]] = set()  # slots of KV that is not finite
        self.copies: dict[int, int] = {}  # page by where the next plan copies it to
        self.count = 0
        self.now = 0.0
        self.most = 0

    def new_id(self) -> int:
        self.count += 1
        return 1 << 32 | self.count

    def pick(self, which: int) -> int:
        return sorted(self.branches)[which % len(self.branches)]

    def pick_row(self, which: int) -> int:
        return sorted(self.rows)[which % len(self.rows)]

    has_branch = precondition(lambda self: bool(self.branches))
    has_row = precondition(lambda self: bool(self.rows))

    # --- branches

    @precondition(lambda self: not self.rows)
    @rule(more=st.integers(-2, 2))
    def renew(self, more: int) -> None:
        """Another executor, and a pool of another size: tokens stay, all KV is gone."""
        self.pool = type(self).pool + more
        self.serve_disk(1)
        count = self.slots or (self.windows.pages if self.windows else 0)
        self.cache.renew(self.pool, count, self.host)
        self.host_content.clear()
        self.states.clear()
        self.seen.clear()
        self.bad.clear()
        self.content.clear()
        self.spoiled.clear()
        self.copies.clear()
        assert self.cache.free == self.cache.total == self.pool

    @rule(namespace=st.sampled_from(["", "lora"]))
    def open(self, namespace: str) -> None:
        branch = self.new_id()
        self.cache.open_branch(m.OpenBranch(branch, namespace))
        self.branches[branch] = (namespace, ())

    @has_branch
    @rule(which=picks, tokens=tokens_lists)
    def extend(self, which: int, tokens: list[int]) -> None:
        branch = self.pick(which)
        self.cache.extend_branch(m.ExtendBranch(branch, pack(tokens)))
        namespace, before = self.branches[branch]
        self.branches[branch] = (namespace, before + tuple(tokens))

    @has_branch
    @rule(which=picks, at=picks, n=st.integers(1, 2))
    def fork(self, which: int, at: int, n: int) -> None:
        branch = self.pick(which)
        namespace, tokens = self.branches[branch]
        at %= len(tokens) + 1
        children = [self.new_id() for _ in range(n)]
        self.cache.fork_branch(m.ForkBranch(branch, children, at))
        self.branches.update(dict.fromkeys(children, (namespace, tokens[:at])))

    @has_branch
    @rule(which=picks, to=picks)
    def move(self, which: int, to: int) -> None:
        branch = self.pick(which)
        namespace, tokens = self.branches[branch]
        to %= len(tokens) + 1
        self.cache.move_branch(m.MoveBranch(branch, to))
        self.branches[branch] = (namespace, tokens[:to])

    @has_branch
    @rule(which=picks)
    def drop(self, which: int) -> None:
        branch = self.pick(which)
        self.cache.drop_branches(m.DropBranches([branch]))
        del self.branches[branch]

    @has_branch
    @rule(which=picks, seconds=st.sampled_from([0.0, 1.0, 3.0, 50.0]))
    def retain(self, which: int, seconds: float) -> None:
        until = self.now + seconds if seconds else 0.0
        self.cache.retain_branches(m.RetainBranches({self.pick(which): until}))

    @has_branch
    @rule(which=picks, seconds=st.sampled_from([0.0, 1.0, 50.0]))
    def end_session(self, which: int, seconds: float) -> None:
        """What it retained is kept, within the bounds of its owner."""
        branch = self.pick(which)
        until = self.now + seconds if seconds else 0.0
        self.cache.retain_branches(m.RetainBranches({branch: until}, "other"))
        self.cache.branches.drop(branch, keep=True)
        del self.branches[branch]

    @has_branch
    @rule(
        which=picks,
        ends=st.lists(st.one_of(st.none(), st.integers(1, 12)), max_size=3),
        seconds=st.sampled_from([0.0, 1.0, 50.0]),
        demote=st.booleans(),
    )
    def suggest(self, which: int, ends: list[int | None], seconds: float, demote: bool) -> None:
        """Prefixes are kept, as far as the owner's share goes; each answer says how far."""
        branch = self.pick(which)
        until = self.now + seconds if seconds else 0.0
        leases = [(end, until) for end in ends]
        found = self.cache.inspect(m.Inspect(1, 1, [branch], leases, "hints", demote)).resident
        length = len(self.branches[branch][1])
        assert len(found) == 1 + len(ends)
        kept = zip(ends, found[1:], strict=True)
        assert all(0 <= has <= (length if end is None else min(end, length)) for end, has in kept)

    @invariant()
    def nobody_retains_too_much(self) -> None:
        self.most = max(self.most, self.cache.total * self.cache.page_size)  # a pool may get smaller
        assert all(held <= self.most // 2 for held in self.cache.leases.tokens.values())

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0

    # --- requests

    @has_branch
    @rule(
        which=picks,
        extra=st.integers(0, 5),
        history=st.booleans(),
        rerun=st.one_of(st.none(), st.integers(0, 12)),
    )
    def acquire(self, which: int, extra: int, history: bool, rerun: int | None = None) -> None:
        branch = self.pick(which)
        namespace, tokens = self.branches[branch]
        if not tokens:
            return
        request = self.new_id()
        again = len(tokens) - 1 if rerun is None else min(rerun, len(tokens) - 1)
        slots = 2 if self.slots else 100 * (self.windows is not None)
        asked = m.Acquire(request, branch, extra, history, rerun=rerun, slots=slots, load=True)
        if self.disk:
            asked = msgspec.structs.replace(asked, rate=1000.0)
        verdict = self.cache.acquire(asked, self.now)
        if isinstance(verdict, m.Denied) and verdict.reason == "disk":
            self.serve_disk(request)
            if not self.cache.waits.take_ready():
                self.cache.waits.expire(self.now + 100)
                assert self.cache.waits.take_ready() == [request]
            verdict = self.cache.acquire(msgspec.structs.replace(asked, rate=0.0), self.now)
        size = self.page_size
        need = -(-(len(tokens) + extra) // size)
        if isinstance(verdict, m.Denied):
            assert request not in self.cache.runs
            if verdict.reason == "shared":
                assert verdict.on in self.rows
            else:
                assert verdict.reason == "memory"
                assert (verdict.short > 0) != (verdict.slots > 0)
                assert self.rows or need > self.pool, "a request that is alone and fits must run"
            return
        copies = unpack(self.cache.take_copies())
        assert (len(copies) == 2) == (verdict.cached % size > 0)
        self.copies.update(zip(copies[1::2], copies[::2], strict=True))
        assert verdict.cached <= again
        assert tuple(unpack(verdict.tokens)) == tokens[verdict.cached :]
        assert tuple(unpack(verdict.history)) == (tokens if history else ())
        pages = list(unpack(verdict.pages))
        assert len(pages) == need
        row = Row(branch, (namespace, tokens), pages, verdict.cached - verdict.loaded, [])
        row.loads = verdict.loads
        assert bool(row.loads) or not verdict.loaded
        self.resumed += bool(row.loads)
        self.brought = self.cache.tiers(1)[2].hit_tokens
        row.newest, row.free = (verdict.cached, verdict.state), unpack(verdict.slots).tolist()
        row.marks = unpack(verdict.marks).tolist()
        if self.slots:
            self.hits += verdict.state > 0
            assert (verdict.state == 0) == (verdict.cached == 0)
            assert len(row.free) == 2 + len(row.marks)
            assert row.marks == sorted(
                mark for mark in set(row.marks) if row.computed < mark < len(tokens)
            )
            assert verdict.cached + verdict.replayed <= again
        if self.windows is not None:
            self.hits += verdict.cached > 0
            windows = unpack(verdict.windows).tolist()
            row.windows = [-1] * (len(pages) - len(windows)) + windows
            row.reads, row.written = max(0, verdict.cached - self.windows.before), verdict.cached
            assert -1 not in row.windows[row.reads :]
            assert verdict.cached + verdict.replayed <= again
        self.rows[request] = row

    def write_state(self, row: Row) -> None:
        """The state at `row.computed` goes to the next slot."""
        (_, before), slot = row.newest, row.free.pop(0)
        self.states[slot] = row.prefix(row.computed - 1)
        self.bad.discard(slot)
        if self.slot(row, row.computed - 1) in self.spoiled:
            self.bad.add(slot)
        if (
            before in self.cache.runs[self.request_of(row)].slots
            and before not in dict(row.kept).values()
        ):
            row.free.append(before)
        row.newest = row.computed, slot
        if row.marks and row.marks[0] == row.computed:
            row.kept.append(row.newest)
            del row.marks[0]

    def request_of(self, row: Row) -> int:
        return next(request for request, each in self.rows.items() if each is row)

    def told(self, row: Row, computed: int, *, final: bool = False) -> bytes:
        """The states that come with a commit."""
        told = [pair for pair in row.kept if pair[0] <= computed]
        row.kept = [pair for pair in row.kept if pair[0] > computed]
        own = self.cache.runs[self.request_of(row)].slots
        if final and row.newest[0] <= computed and row.newest[1] in own and row.newest not in told:
            told.append(row.newest)
        return pack(part for pair in told for part in pair)

    def slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.pages[position // self.page_size], position % self.page_size

    def make_copies(self) -> None:
        """As the next plan does, before it runs anything."""
        stored = self.cache.residency.stored
        for block in stored.saves:
            slots = self.slots_of(block)
            if block.form == STATE:
                assert slots[0][0] not in self.bad
                prefixes = [self.states[slots[0][0]]]
            elif block.form == WINDOW:
                prefixes = [self.seen[page] for page, _ in slots]
            else:
                assert block.key in stored.coming or not self.spoiled & set(slots)
                prefixes = [self.content[slot] for slot in slots]
            self.host_content[block.slot] = block.key, prefixes
        stored.saves.clear()
        self.compare()
        slots = {
            (target, slot): (source, slot)
            for target, source in self.copies.items()
            for slot in range(self.page_size)
        }
        self.copies.clear()
        self.content |= {to: self.content[slot] for to, slot in slots.items()}
        spoiled = {to for to, slot in slots.items() if slot in self.spoiled}
        self.spoiled = (self.spoiled - slots.keys()) | spoiled

    def compare(self) -> None:
        """A block was computed for the same tokens as its twin; now and then it is said to differ."""
        canaries, stored = self.cache.canaries, self.cache.residency.stored
        for order in canaries.take_orders():
            (key, stored_tokens), (twin, computed) = (
                self.host_content[slot] for slot in (order.slot, order.other)
            )
            assert (key, twin, stored_tokens) == (order.key, order.twin, computed)
            self.compared += 1
            verdict = "differs" if self.compared % 4 == 0 else "equal"
            assert canaries.done(stored, m.CompareResult(order, verdict))

    def serve_disk(self, salt: int) -> None:
        """Carry out its orders, now and then not."""
        self.cache.residency.save_for_disk()
        self.make_copies()
        for number, order in enumerate(self.cache.waits.take_orders(), salt):
            whole = number % 8 > 0
            if order.write:
                whole = whole and self.host_content.get(order.slot, (b"",))[0] == order.key
                if whole:
                    self.on_disk[order.place] = self.host_content[order.slot]
            else:
                assert self.on_disk[order.place][0] == order.key
                self.host_content[order.slot] = self.on_disk[order.place]
            self.cache.waits.done(m.DiskResult(order, whole, 0.001))

    def slots_of(self, block: MovedBlock) -> list[tuple[int, int]]:
        return [(page, at) for page in unpack(block.pages) for at in range(self.page_size)]

    def load(self, row: Row) -> None:
        """As plans do, before the row runs; what they load is no other's."""
        for block in row.loads:
            key, prefixes = self.host_content[block.slot]
            assert key == block.key
            if block.form == STATE:
                slot = unpack(block.pages)[0]
                self.states[slot] = prefixes[0]
                self.bad.discard(slot)
                continue
            if block.form == WINDOW:
                self.seen.update(zip(unpack(block.pages), prefixes, strict=True))
                continue
            for slot, prefix in zip(self.slots_of(block), prefixes, strict=True):
                if slot[0] >= 0:
                    self.content[slot] = prefix
                    self.spoiled.discard(slot)
            row.computed = max(row.computed, len(prefixes[-1][1]))
            self.loaded += 1
        row.loads = []

    def finite(self, row: Row) -> bool | None:
        """What the executor says of the row's logits; None: it has not sampled yet."""
        if row.computed < len(row.path[1]):
            return None
        return all(self.slot(row, position) not in self.spoiled for position in range(row.computed))

    def compute(self, row: Row, count: int, sampled: int, spoil: bool = False) -> None:
        """Run up to `count` positions; past the prompt, tokens are sampled first, from finite logits."""
        self.make_copies()
        self.load(row)
        begin = row.computed
        for _ in range(count):
            position = row.computed
            if position // self.page_size >= len(row.pages):
                break
            if position >= len(row.path[1]) + len(row.tokens):
                if not self.finite(row):
                    break
                row.tokens.append(sampled)
            slot = self.slot(row, position)
            self.content[slot] = row.prefix(position)
            self.spoiled.discard(slot)
            before = position and self.slot(row, position - 1) in self.spoiled
            if spoil or before or (row.newest[1] in self.bad):
                self.spoiled.add(slot)
            row.computed += 1
            if self.windows is not None:
                self.write_window(self.windows, row, position, begin)
            if self.slots and row.marks and row.marks[0] == row.computed:
                self.write_state(row)
        if self.slots and row.newest[0] < row.computed:
            self.write_state(row)

    def write_window(self, windows: Windows, row: Row, position: int, begin: int) -> None:
        """`begin`: where the call began; its steps are as long as they may be."""
        size = windows.chunk if position < len(row.path[1]) else windows.slack
        if (position - begin) % size == 0 or position == len(row.path[1]):
            row.reads = max(0, position - windows.before)
        self.seen[row.windows[position]] = row.prefix(position)
        row.written = max(row.written, position + 1)
        self.check_window(row, row.reads)

    def check_window(self, row: Row, reads: int) -> None:
        for position in range(max(0, reads), row.computed):
            assert self.seen[row.windows[position]] == row.prefix(position), position

    @has_row
    @rule(which=picks, count=st.integers(1, 12), sampled=st.integers(0, 1), spoil=st.integers(0, 7))
    def run_step(self, which: int, count: int, sampled: int, spoil: int) -> None:
        self.compute(self.rows[self.pick_row(which)], count, sampled, spoil == 7)

    @has_row
    @rule(which=picks, less=st.integers(0, 3))
    def commit(self, which: int, less: int) -> None:
        request = self.pick_row(which)
        row = self.rows[request]
        if row.loads:
            return  # nothing is committed before its step ran
        computed = max(0, row.computed - less)
        finite = True if self.finite(row) else None
        told = self.told(row, computed) if self.slots else b""
        self.cache.commit(m.Commit(request, computed, finite=finite, states=told))
        if self.branches.get(row.branch) == row.path and not self.suspects():
            reached = min(computed, len(row.path[1])) // self.page_size * self.page_size
            assert self.resident(row.branch) >= reached or self.slots or self.windows

    @has_row
    @rule(which=picks, tokens=st.integers(1, 6))
    def grow(self, which: int, tokens: int) -> None:
        request = self.pick_row(which)
        grown = self.cache.grow(m.Grow(request, tokens), self.now)
        pages = unpack(grown.pages)
        assert len(grown.windows) == (4 * len(pages) if self.windows else 0)
        self.rows[request].windows += unpack(grown.windows)
        assert len(pages) in (0, -(-tokens // self.page_size))
        if not pages:
            assert self.cache.free + self.cache.evictable < -(-tokens // self.page_size)
        self.rows[request].pages.extend(pages)

    @has_row
    @rule(which=picks, keep=st.integers(0, 12), tail=st.booleans(), less=st.integers(0, 2))
    def finish(self, which: int, keep: int, tail: bool, less: int) -> None:
        """Accept some of the sampled tokens, the last of which may have no KV yet."""
        self.finish_row(self.pick_row(which), keep, tail, less)

    def suspects(self) -> bool:
        return any(node.state is SUSPECT for node in self.cache.tree.walk())

    def fail_row(self, request: int, row: Row) -> None:
        """Its first logits were not finite: nothing that it read stays, unless somebody proved it."""
        self.cache.commit(m.Commit(request, 0, final=True, finite=False))
        read = {self.slot(row, position) for position in range(row.computed)}
        for node in self.cache.tree.walk():
            if node.state is DEVICE and not node.proven:
                assert not read & {(page, 0) for page in node.pages.tolist()}

    def finish_row(self, request: int, keep: int, tail: bool, less: int) -> None:
        row = self.rows[request]
        if not row.tokens and self.finite(row) is False:
            del self.rows[request]
            self.fail_row(request, row)
            return
        namespace, prompt = row.path
        accepted = tuple(row.tokens)
        if tail and row.computed >= len(prompt):
            accepted = (*accepted, 1)
        accepted = accepted[:keep]
        if self.finite(row) is False:  # the step after the last accepted token
            accepted, less = tuple(row.tokens), 0
            while row.computed and self.slot(row, row.computed - 1) in self.spoiled:
                row.computed -= 1
        computed = max(0, row.computed - less)
        finite = True if row.tokens or (accepted and self.finite(row)) else None
        sure = not self.suspects() and not self.slots and self.windows is None
        reached = min(computed, len(prompt) + len(accepted))
        told = self.told(row, reached, final=True) if self.slots else b""
        del self.rows[request]
        commit = m.Commit(request, computed, pack(accepted), True, finite, told, row.written)
        self.cache.commit(commit)
        if self.branches.get(row.branch) == row.path:
            self.branches[row.branch] = (namespace, prompt + accepted)
            end = len(prompt) + len(accepted)
            reached = min(computed, end) // self.page_size * self.page_size
            assert self.resident(row.branch) >= reached or not sure

    def resident(self, branch: int) -> int:
        return self.cache.inspect(m.Inspect(1, 1, [branch])).resident[0]

    # --- longer steps, which reach warm and crowded states sooner

    @has_branch
    @rule(which=picks, tokens=tokens_lists, extra=st.integers(0, 3))
    def extend_and_acquire(self, which: int, tokens: list[int], extra: int) -> None:
        self.extend(which, tokens)
        self.acquire(which, extra, False)

    @has_branch
    @rule(which=picks, sampled=st.integers(0, 1), extra=st.integers(0, 4), less=st.integers(0, 1))
    def turn(self, which: int, sampled: int, extra: int, less: int) -> None:
        """A whole generation, if there is room for it now."""
        before = set(self.rows)
        self.acquire(which, extra, False)
        for request in set(self.rows) - before:
            self.compute(self.rows[request], self.pool * self.page_size, sampled)
            self.commit(sorted(self.rows).index(request), less)
            self.finish_row(request, extra, True, less)

    @rule(namespace=st.sampled_from(["", "lora"]), tokens=tokens_lists)
    def open_with_prompt(self, namespace: str, tokens: list[int]) -> None:
        self.open(namespace)
        branch = max(self.branches)
        self.extend(sorted(self.branches).index(branch), tokens)

    # --- what must hold after every operation

    @invariant()
    def sound(self) -> None:
        check(self.cache)

    @invariant()
    def rows_read_their_own_prefix(self) -> None:
        for row in self.rows.values():
            for position in range(row.computed):
                page, slot = self.slot(row, position)
                page = self.copies.get(page, page)
                assert self.content.get((page, slot)) == row.prefix(position)

    @invariant()
    def windows_are_true(self) -> None:
        if self.windows is not None:
            for row in self.rows.values():
                if row.loads:
                    continue
                self.check_window(row, row.computed - self.windows.before)
                tails = self.cache.residency.snapshots
                for page in row.windows[max(0, row.computed - self.windows.before) : row.computed]:
                    assert tails.runs[page] > 0, "given away while a step may read it"

    @invariant()
    def states_are_true(self) -> None:
        for row in self.rows.values():
            at, slot = row.newest
            if slot and not row.loads:
                assert self.states[slot] == row.prefix(at - 1)
            for at, slot in row.kept:
                assert self.states[slot] == row.prefix(at - 1)
        snapshots = self.cache.residency.snapshots
        for snapshot in snapshots.all() if snapshots is not None else ():
            tokens = tuple(unpack(self.cache.tree.tokens(snapshot.node, 0)))
            if isinstance(snapshots, Tails):
                pages = snapshots.pages[snapshot.slot].tolist()
                assert self.windows is not None
                assert len(pages) == min(self.windows.before, len(tokens))
                for i, page in enumerate(reversed(pages)):
                    assert self.seen[page][1] == tokens[: len(tokens) - i]
                continue
            assert self.states[snapshot.slot][1] == tokens
            assert not snapshot.proven or snapshot.slot not in self.bad

    @invariant()
    def branches_are_what_they_should_be(self) -> None:
        heads = dict(self.cache.branches.items())
        assert heads.keys() == self.branches.keys()
        for branch, (_, tokens) in self.branches.items():
            assert tuple(unpack(self.cache.tree.tokens(heads[branch], 0))) == tokens

    @invariant()
    def the_tree_holds_true_kv(self) -> None:
        size = self.page_size
        for namespace, root in self.cache.tree.roots.items():
            stack = [(root, ())]
            while stack:
                node, tokens = stack.pop()
                tokens = (*tokens, *node.tokens.tolist())
                stack.extend((child, tokens) for child in node.children.values())
                for index, page in enumerate(node.pages):
                    start = (node.start // size + index) * size
                    for slot in range(size):
                        expected = (namespace, tokens[: start + slot + 1])
                        assert self.content[int(page), slot] == expected
                        assert not node.proven or (int(page), slot) not in self.spoiled

    def teardown(self) -> None:
        for request in list(self.rows):
            self.finish_row(request, 12, True, 0)
            check(self.cache)
        if not self.cache.residency.kept:
            assert self.cache.referenced == 0
        assert not self.suspects()
        self.cache.drop_branches(m.DropBranches(list(self.branches)))
        check(self.cache)
        self.cache.leases.expire(1e9)
        assert (len(self.cache.leases), +self.cache.leases.tokens) == (0, {})
        if not self.cache.residency.kept:
            assert self.cache.free + self.cache.evictable == self.pool
        assert all(node.resident for node in self.cache.tree.walk()), "cold nodes leaked"
        # Everything that is left can be evicted: a prompt as large as the pool runs.
        branch, request = self.new_id(), self.new_id()
        prompt = np.arange(self.pool * self.page_size) + 7
        self.cache.open_branch(m.OpenBranch(branch))
        self.cache.extend_branch(m.ExtendBranch(branch, pack(prompt.tolist())))
        assert isinstance(self.cache.acquire(m.Acquire(request, branch, 0), self.now), m.Granted)
        self.cache.commit(m.Commit(request, 0, final=True))
        self.cache.drop_branches(m.DropBranches([branch]))
        snapshots = self.cache.residency.snapshots
        assert snapshots is None or snapshots.free == snapshots.total
        while self.cache.residency.kept:  # of parts of pages
            self.cache.residency._loosen()
        check(self.cache)
        assert (self.cache.free, self.cache.tree.nodes, len(self.cache.tree.roots)) == (self.pool, 0, 0)


@pytest.mark.parametrize(
    ("page_size", "pool", "reach", "slots", "windows", "host"),
    [
        (1, 12, 64, 0, None, 0),
        (1, 40, 1, 0, None, 0),
        (1, 60, 2, 0, None, 0),
        (4, 4, 64, 0, None, 0),
        (4, 12, 1, 0, None, 0),
        (1, 12, 64, 4, None, 0),
        (1, 40, 1, 9, None, 0),
        (1, 60, 2, 40, None, 0),
        (1, 12, 64, 0, Windows(3, 9, 5, 2), 0),
        (1, 40, 1, 0, Windows(4, 24, 4, 2), 0),
        (1, 60, 2, 0, Windows(2, 60, 3, 4), 0),
        (1, 60, 64, 0, Windows(2, 12, 3, 2), 0),
        (1, 60, 64, 0, Windows(9, 40, 3, 2), 0),
        (1, 12, 64, 0, None, 5),
        (1, 30, 1, 0, None, 40),
        (4, 6, 2, 0, None, 7),
        (1, 16, 2, 5, None, 9),
        (1, 20, 64, 6, None, 60),
        (1, 16, 2, 0, Windows(4, 24, 4, 2), 40),
    ],
)
def test_random_programs(
    page_size: int,
    pool: int,
    reach: int,
    slots: int,
    windows: Windows | None,
    host: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`reach` 1 and 2: locks are kept on short paths. `slots`: of a model with fixed states."""
    monkeypatch.setattr(snapshots, "NEAR", 1)
    monkeypatch.setattr(snapshots, "STRIDE", 3)
    sizes = {
        "page_size": page_size,
        "pool": pool,
        "reach": reach,
        "slots": slots,
        "windows": windows,
        "host": host,
    }
    machine = type("Machine", (CacheMachine,), sizes)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(10, 32),
            stateful_step_count=50,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(
    ("pool", "form", "near", "stride"),
    [
        (14, 4, 1, 3),
        (40, 8, 0, 2),
        (60, 24, 2, 4),
        (14, Windows(3, 20, 5, 2), 1, 3),
        (60, Windows(4, 40, 4, 2), 0, 2),
        (60, Windows(6, 90, 3, 3), 2, 4),
        (60, Windows(2, 60, 3, 2), 2, 4),
        (14, "6 blocks", 1, 3),
        (24, "90 blocks", 1, 3),
        (24, "20 blocks 8 slots", 0, 2),
        (24, "40 blocks 5 slots, disk", 1, 3),
        (24, "60 blocks windows, disk", 1, 3),
    ],
)
@pytest.mark.parametrize("seed", range(examples(2, 6)))
def test_random_turns_with_snapshots(
    pool: int,
    form: int | Windows | str,
    near: int,
    stride: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More runs than random programs have: forks, turns, rollbacks and runs side by side."""
    slots = form if isinstance(form, int) else 0
    windows = form if isinstance(form, Windows) else None
    host = int(form.split()[0]) if isinstance(form, str) else 0
    disk = 50 if isinstance(form, str) and form.endswith("disk") else 0
    if isinstance(form, str) and "slots" in form:
        slots = int(form.split()[2])
    if isinstance(form, str) and "windows" in form:
        windows = Windows(4, 24, 4, 2)
    if host and seed > 2:
        pytest.skip("three are enough")
    monkeypatch.setattr(snapshots, "NEAR", near)
    monkeypatch.setattr(snapshots, "STRIDE", stride)
    sizes = {"pool": pool, "slots": slots, "windows": windows, "reach": 1 + seed % 2}
    sizes |= {"host": host, "block": 2, "disk": disk}
    machine = type("Machine", (CacheMachine,), sizes)()
    dice = random.Random(seed)

    def any_of(count: int) -> int:
        return dice.randrange(count)

    for _ in range(400):
        which, tokens = any_of(10_000), [any_of(2) for _ in range(1 + any_of(8))]
        action = any_of(22)
        if action == 0 or not machine.branches:
            machine.open_with_prompt("", tokens)
        elif action == 1:
            machine.fork(which, any_of(10_000), 1 + any_of(2))
        elif action == 2:
            machine.move(which, any_of(10_000))
        elif action == 3 and len(machine.branches) > 3:
            machine.drop(which)
        elif action < 8 and len(machine.rows) < 3:
            machine.extend_and_acquire(which, tokens, any_of(4))
        elif action < 11 and len(machine.rows) < 3:
            machine.acquire(which, any_of(4), False, None if any_of(3) else any_of(12))
        elif action < 14 and machine.rows:
            machine.run_step(which, 1 + any_of(6), any_of(2), any_of(40))
        elif action < 16 and machine.rows:
            machine.commit(which, any_of(2))
        elif action < 18 and machine.rows:
            machine.finish(which, any_of(12), bool(any_of(2)), any_of(2))
        elif disk and action == 18:
            for request in list(machine.rows):
                machine.finish_row(request, 12, True, 0)
            machine.serve_disk(which)
            machine.renew(any_of(3))
        elif action > 19 and machine.rows:
            machine.grow(which, 1 + any_of(6))
            machine.run_step(which, 1 + any_of(6), any_of(2), 0)
        elif len(machine.rows) < 3:
            machine.turn(which, any_of(2), any_of(5), 0)
        machine.sound()
        machine.rows_read_their_own_prefix()
        machine.states_are_true()
        machine.windows_are_true()
        machine.branches_are_what_they_should_be()
        machine.the_tree_holds_true_kv()
    machine.teardown()
    assert machine.hits > 5 or machine.loaded > 5
    assert machine.resumed > 5 or not host
    assert machine.compared > 3 or host < 20 or slots or windows is not None
    assert machine.brought > 5 or not disk
