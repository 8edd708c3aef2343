"""Random programs against the cache, compared with a model that knows only tokens and pages.

The model keeps each branch as a tuple of tokens and, for every page slot, which prefix its KV was
computed from, and whether it is finite. Reading a page table back must give exactly the branch's
prefixes, for as long as a request runs: a page that was freed, remapped or published too early
shows up as a wrong prefix.
"""

from dataclasses import dataclass

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

from ramify.actors.cache.cache import RadixCache, Shares
from ramify.actors.cache.integrity import check
from ramify.actors.cache.states import DEVICE, SUSPECT
from ramify.protocol import messages as m
from ramify.protocol.plan import pack, unpack

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

    def prefix(self, position: int) -> Path:
        return self.path[0], (self.path[1] + tuple(self.tokens))[: position + 1]


class CacheMachine(RuleBasedStateMachine):
    page_size = 1
    pool = 24
    reach = 64

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(self.pool, self.page_size, self.reach, shares=Shares(50, 8))
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
        self.cache.renew(self.pool)
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
        asked = m.Acquire(request, branch, extra, history, rerun=rerun)
        verdict = self.cache.acquire(asked, self.now)
        size = self.page_size
        need = -(-(len(tokens) + extra) // size)
        if isinstance(verdict, m.Denied):
            assert request not in self.cache.runs
            if verdict.reason == "shared":
                assert verdict.on in self.rows
            else:
                assert verdict.reason == "memory"
                assert verdict.short > 0
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
        row = Row(branch, (namespace, tokens), pages, verdict.cached, [])
        self.rows[request] = row

    def slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.pages[position // self.page_size], position % self.page_size

    def make_copies(self) -> None:
        """As the next plan does, before it runs anything."""
        slots = {
            (target, slot): (source, slot)
            for target, source in self.copies.items()
            for slot in range(self.page_size)
        }
        self.copies.clear()
        self.content |= {to: self.content[slot] for to, slot in slots.items()}
        spoiled = {to for to, slot in slots.items() if slot in self.spoiled}
        self.spoiled = (self.spoiled - slots.keys()) | spoiled

    def finite(self, row: Row) -> bool | None:
        """What the executor says of the row's logits; None: it has not sampled yet."""
        if row.computed < len(row.path[1]):
            return None
        return all(self.slot(row, position) not in self.spoiled for position in range(row.computed))

    def compute(self, row: Row, count: int, sampled: int, spoil: bool = False) -> None:
        """Run up to `count` positions; past the prompt, tokens are sampled first, from finite logits."""
        self.make_copies()
        for _ in range(count):
            position = row.computed
            if position // self.page_size >= len(row.pages):
                return
            if position >= len(row.path[1]) + len(row.tokens):
                if not self.finite(row):
                    return
                row.tokens.append(sampled)
            slot = self.slot(row, position)
            self.content[slot] = row.prefix(position)
            self.spoiled.discard(slot)
            if spoil or (position and self.slot(row, position - 1) in self.spoiled):
                self.spoiled.add(slot)
            row.computed += 1

    @has_row
    @rule(which=picks, count=st.integers(1, 12), sampled=st.integers(0, 1), spoil=st.integers(0, 7))
    def run_step(self, which: int, count: int, sampled: int, spoil: int) -> None:
        self.compute(self.rows[self.pick_row(which)], count, sampled, spoil == 7)

    @has_row
    @rule(which=picks, less=st.integers(0, 3))
    def commit(self, which: int, less: int) -> None:
        request = self.pick_row(which)
        row = self.rows[request]
        computed = max(0, row.computed - less)
        finite = True if self.finite(row) else None
        self.cache.commit(m.Commit(request, computed, finite=finite))
        if self.branches.get(row.branch) == row.path and not self.suspects():
            reached = min(computed, len(row.path[1])) // self.page_size * self.page_size
            assert self.resident(row.branch) >= reached

    @has_row
    @rule(which=picks, tokens=st.integers(1, 6))
    def grow(self, which: int, tokens: int) -> None:
        request = self.pick_row(which)
        pages = unpack(self.cache.grow(m.Grow(request, tokens), self.now).pages)
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
        row = self.rows.pop(request)
        if not row.tokens and self.finite(row) is False:
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
        sure = not self.suspects()
        self.cache.commit(m.Commit(request, computed, pack(accepted), final=True, finite=finite))
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
        while self.cache.residency.kept:  # of parts of pages
            self.cache.residency._loosen()
        check(self.cache)
        assert (self.cache.free, self.cache.tree.nodes, len(self.cache.tree.roots)) == (self.pool, 0, 0)


@pytest.mark.parametrize(
    ("page_size", "pool", "reach"), [(1, 12, 64), (1, 40, 1), (1, 60, 2), (4, 4, 64), (4, 12, 1)]
)
def test_random_programs(page_size: int, pool: int, reach: int) -> None:
    """`reach` 1 and 2: locks are kept on short paths."""
    sizes = {"page_size": page_size, "pool": pool, "reach": reach}
    machine = type("Machine", (CacheMachine,), sizes)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=32,
            stateful_step_count=50,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
