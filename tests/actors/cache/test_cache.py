"""One test for each thing the contract promises about grants, commits and handles."""

import pytest

from ramify.actors.cache.branches import UnknownBranch
from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.requests import UnknownRequest
from ramify.protocol import messages as m
from ramify.protocol.plan import pack, unpack

PROMPT = list(range(100, 110))


# --- grants


def test_a_cold_branch_is_granted_whole(bench) -> None:
    b = bench(32)
    b.open(1, PROMPT)
    granted = b.grant(7, 1, extra=3)
    assert granted.cached == 0
    assert list(unpack(granted.tokens)) == PROMPT
    assert len(set(unpack(granted.pages))) == 13
    assert b.counts == (19, 0, 13)


def test_a_warm_branch_runs_its_last_token_only(bench) -> None:
    b = bench(32)
    b.open(1, PROMPT)
    first = b.run(7, 1)
    again = b.grant(8, 1)
    assert again.cached == 9
    assert list(unpack(again.tokens)) == PROMPT[9:]
    assert unpack(again.pages)[:9] == unpack(first.pages)[:9]
    assert again.pages[-4:] != first.pages[-4:]  # the row writes to a page of its own
    b.finish(8, 10)
    assert b.counts == (22, 10, 0)


def test_cached_is_whole_pages(bench) -> None:
    b = bench(16, 4)
    b.open(1, PROMPT)
    b.run(7, 1)
    assert b.resident(1) == [8]
    assert b.grant(8, 1).cached == 8
    b.finish(8, 10)
    b.move(1, 8)
    # 8 are resident, but the last token is run again, and what nobody has sampled over is not copied
    assert b.grant(9, 1).cached == 4


def proven(b, request: int, branch: int, extra: int = 0) -> m.Granted:
    """A prefill of the whole branch, behind which somebody has sampled."""
    granted = b.grant(request, branch, extra)
    b.cache.take_copies()
    tokens = len(b.tokens(branch))
    b.cache.commit(m.Commit(request, tokens, final=True, finite=True))
    b.check()
    return granted


def copies(b) -> list[int]:
    return list(unpack(b.cache.take_copies()))


def test_a_fork_inside_a_page_gets_a_copy_of_it(bench) -> None:
    b = bench(16, 4)
    b.open(1, range(100, 112))
    first = unpack(proven(b, 7, 1).pages)
    b.fork(1, [2], 7)
    granted = b.grant(8, 2)
    pages = unpack(granted.pages)
    assert (granted.cached, list(unpack(granted.tokens))) == (6, [106])
    assert pages[0] == first[0]
    assert pages[1] not in first
    assert copies(b) == [first[1], pages[1]]
    assert copies(b) == []


def test_a_last_token_that_runs_again_runs_alone(bench) -> None:
    """All of the branch has KV; the page of its last token is copied, and only that token runs."""
    b = bench(16, 4)
    b.open(1, range(100, 108))
    first = unpack(proven(b, 7, 1).pages)
    granted = b.grant(8, 1)
    assert (granted.cached, list(unpack(granted.tokens))) == (7, [107])
    assert copies(b) == [first[1], unpack(granted.pages)[1]]


def test_what_a_settlement_copies_comes_with_its_answer(bench) -> None:
    b = bench(32, 4)
    b.open(1, range(100, 108))
    first = unpack(proven(b, 7, 1).pages)
    b.fork(1, [2, 3], 6)
    settled = b.cache.settle(m.Settle([], [], [m.Acquire(8, 2, 0), m.Acquire(9, 3, 0)]))
    own = [unpack(granted.pages)[1] for granted in settled.verdicts]
    assert list(unpack(settled.copies)) == [first[1], own[0], first[1], own[1]]
    assert b.cache.settle(m.Settle([], [], [])).copies == b""


@pytest.mark.parametrize("why", ["unproven", "evicted", "never there", "whole", "page of one"])
def test_where_nothing_is_copied(bench, why: str) -> None:
    size = 1 if why == "page of one" else 4
    b = bench(32, size)
    b.open(1, range(100, 112 if why != "never there" else 106))
    if why == "unproven":
        b.run(7, 1)
    else:
        proven(b, 7, 1)
    b.fork(1, [2], 8 if why == "whole" else 6)
    if why == "whole":
        b.extend(2, [1])
    if why == "evicted":
        b.cache.residency._evict(2)
    granted = b.grant(8, 2)
    assert granted.cached == {"whole": 8, "page of one": 5}.get(why, 4)
    assert copies(b) == []


def test_the_page_is_found_behind_other_forks(bench) -> None:
    """The part of the page that follows is divided among nodes."""
    b = bench(64, 8)
    b.open(1, range(100, 116))
    first = unpack(proven(b, 7, 1).pages)
    for branch, at in ((2, 11), (3, 13), (4, 10)):
        b.fork(1, [branch], at)
        b.extend(branch, [branch])
    b.fork(1, [5], 10)
    granted = b.grant(9, 5)
    assert (granted.cached, copies(b)) == (9, [first[1], unpack(granted.pages)[1]])


def test_few_nodes_are_searched_for_a_page(bench) -> None:
    b = bench(4096, 8)
    b.open(1, range(100, 110))
    for branch in range(2, 52):  # of which none has the page
        b.fork(1, [branch], 10)
        b.extend(branch, [branch])
    b.extend(1, range(110, 116))
    proven(b, 7, 1)
    b.fork(1, [60], 10)
    assert b.grant(9, 60).cached == 8
    assert copies(b) == []


def test_a_page_may_be_evicted_by_the_grant_that_copies_it(bench) -> None:
    """It holds what it held until the plan runs, which copies before it writes."""
    b = bench(5, 4)
    b.open(1, range(100, 112))
    first = unpack(proven(b, 7, 1).pages)
    b.fork(1, [2], 7)
    b.drop(1)
    granted = b.grant(8, 2, extra=12)  # five pages: the first is shared, no other stays
    pages = unpack(granted.pages)
    assert (granted.cached, len(pages), pages[0]) == (6, 5, first[0])
    assert copies(b) == [first[1], pages[1]]
    assert first[1] in pages[1:]


def test_a_request_that_finds_no_memory_copies_nothing(bench) -> None:
    b = bench(4, 4)
    b.open(1, range(100, 112))
    proven(b, 7, 1)
    b.fork(1, [2], 7)
    denied = b.acquire(8, 2, extra=20)
    assert (denied.reason, denied.resident, copies(b)) == ("memory", 4, [])


def test_history_is_the_whole_branch(bench) -> None:
    b = bench(32)
    b.open(1, PROMPT)
    b.run(7, 1)
    granted = b.cache.acquire(m.Acquire(8, 1, 0, history=True))
    assert list(unpack(granted.history)) == PROMPT


def test_gone_and_empty_and_twice(bench) -> None:
    b = bench(32)
    assert b.acquire(7, 1) == m.Denied(7, "gone")
    b.open(1)
    with pytest.raises(ValueError, match="has no tokens"):
        b.acquire(7, 1)
    b.extend(1, PROMPT)
    b.grant(7, 1)
    with pytest.raises(ValueError, match="runs already"):
        b.acquire(7, 1)


def test_no_memory_grants_nothing(bench) -> None:
    b = bench(12)
    b.open(1, PROMPT)
    denied = b.acquire(7, 1, extra=5)
    assert denied == m.Denied(7, "memory", resident=0, short=3)
    assert b.counts == (12, 0, 0)
    b.grant(8, 1)
    assert b.grow(8, 3) == []
    assert len(b.grow(8, 2)) == 2


def test_grow_always_gives_room_for_what_was_asked(bench) -> None:
    b = bench(16, 4)
    b.open(1, PROMPT)
    assert len(unpack(b.grant(7, 1).pages)) == 3
    assert len(b.grow(7, 1)) == 1
    assert len(b.grow(7, 5)) == 2


def test_a_prompt_that_fills_the_pool_runs_warm_too(bench) -> None:
    """The duplicate page of the last token must come from the last token's own."""
    b = bench(10)
    b.open(1, PROMPT)
    b.run(7, 1)
    assert b.counts == (0, 10, 0)
    assert b.grant(8, 1).cached == 9
    b.finish(8, 10)
    assert b.resident(1) == [10]


# --- shared prefixes


def test_a_shared_prefix_is_computed_once(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.fork(1, [2, 3], 10)
    b.extend(2, [1, 2])
    b.extend(3, [3, 4])
    b.grant(7, 2)
    assert b.acquire(8, 3) == m.Denied(8, "shared", resident=0, on=7)
    b.commit(7, 4)
    assert b.acquire(8, 3) == m.Denied(8, "shared", resident=4, on=7)
    b.commit(7, 10)
    assert b.grant(8, 3).cached == 10


@pytest.mark.parametrize(("page_size", "cached"), [(1, 6), (4, 4)])
def test_what_is_to_run_again_does_not_count_as_cached(bench, page_size: int, cached: int) -> None:
    """It gets pages of its own, and leaves those of the tree as they are."""
    b = bench(64 // page_size, page_size)
    b.open(1, PROMPT)
    b.run(7, 1)
    before = b.counts
    granted = b.grant(8, 1, rerun=6)
    assert granted.cached == cached
    assert list(unpack(granted.tokens)) == PROMPT[cached:]
    b.finish(8, 10)
    assert b.counts == before
    assert b.grant(9, 1, rerun=99).cached == (9 if page_size == 1 else 8)  # the last token always


def test_nobody_waits_for_what_runs_again_in_any_case(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.fork(1, [2, 3], 10)
    b.extend(2, [1, 2, 3])
    b.extend(3, [1, 2, 4])
    b.grant(7, 2)
    assert b.acquire(8, 3, rerun=10) == m.Denied(8, "shared", resident=0, on=7)  # the prompt is awaited
    b.commit(7, 10)
    assert b.grant(8, 3, rerun=10).cached == 10  # the tokens that they share are not
    assert b.acquire(9, 3) == m.Denied(9, "shared", resident=10, on=8)
    b.finish(8, 13)
    assert b.resident(2, 3) == [12, 13]
    b.finish(7, 13)  # what it computed as well is its own, and given back
    assert b.resident(2, 3) == [13, 13]
    assert b.counts[2] == 0
    assert b.grant(9, 3).cached == 12


def test_identical_prompts_of_strangers_share(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.open(2, PROMPT)
    b.grant(7, 1)
    assert b.acquire(8, 2) == m.Denied(8, "shared", on=7)
    b.commit(7, 10)
    assert b.grant(8, 2).cached == 9


@pytest.mark.parametrize("computed", [0, 3])
def test_the_next_takes_over_when_the_owner_is_retracted(bench, computed: int) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.open(2, PROMPT)
    b.grant(7, 1)
    b.finish(7, computed)
    assert b.grant(8, 2).cached == computed


def test_a_partial_page_does_not_hold_others_up(bench) -> None:
    b = bench(64, 4)
    b.open(1, PROMPT)
    b.open(2, PROMPT)
    b.grant(7, 1)
    b.commit(7, 7)
    assert b.acquire(8, 2) == m.Denied(8, "shared", resident=4, on=7)
    b.commit(7, 8)  # the next one that ends a page is the last token, which runs again
    assert b.grant(8, 2).cached == 8


def test_siblings_do_not_wait_for_the_part_of_a_page_that_they_share(bench) -> None:
    b = bench(64, 4)
    b.open(1, PROMPT)
    b.fork(1, [2, 3, 4], 10)
    for branch in (2, 3, 4):
        b.extend(branch, [branch] * 4)
    b.grant(7, 2)
    b.commit(7, 8)
    assert [b.grant(request, branch).cached for request, branch in ((8, 3), (9, 4))] == [8, 8]
    for request in (7, 8, 9):
        b.finish(request, 14)
    assert b.resident(2, 3, 4) == [12, 12, 12]


def test_namespaces_do_not_share(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.run(7, 1)
    b.open(2, PROMPT, namespace="lora")
    assert b.grant(8, 2).cached == 0


# --- commits


def test_output_is_appended_and_its_last_token_has_no_kv(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.grant(7, 1, extra=16)
    b.finish(7, 12, [1, 2, 3])
    assert b.tokens(1) == [*PROMPT, 1, 2, 3]
    assert b.resident(1) == [12]
    b.extend(1, [50, 51])
    granted = b.grant(8, 1)
    assert (granted.cached, list(unpack(granted.tokens))) == (12, [3, 50, 51])


def test_fewer_tokens_than_were_decoded(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.grant(7, 1, extra=16)
    b.finish(7, 20, [1, 2])
    assert b.resident(1) == [12]
    assert b.counts == (52, 12, 0)


def test_equal_output_is_stored_once(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.run(6, 1)
    b.fork(1, [2], 10)
    b.grant(7, 1, extra=4)
    b.grant(8, 2, extra=4)
    b.finish(7, 13, [1, 2, 3])
    b.finish(8, 13, [1, 2, 3])
    assert b.counts == (51, 13, 0)
    assert b.resident(1, 2) == [13, 13]


def test_a_committed_page_stays_while_its_row_runs(bench) -> None:
    """Committed pages are the tree's, but not evictable before the final commit."""
    b = bench(12)
    b.open(1, PROMPT)
    b.grant(7, 1)
    b.commit(7, 10)
    assert b.counts == (2, 0, 10)
    b.open(2, [1, 2, 3])
    assert b.acquire(8, 2) == m.Denied(8, "memory", short=1)
    b.finish(7, 10)
    b.grant(8, 2)


def test_commits_that_cannot_be(bench) -> None:
    b = bench(32)
    b.open(1, PROMPT)
    b.grant(7, 1)
    with pytest.raises(ValueError, match="past its last page"):
        b.commit(7, 11)
    with pytest.raises(ValueError, match="final commit only"):
        b.cache.commit(m.Commit(7, 10, pack([1])))
    b.finish(7, 10)
    with pytest.raises(UnknownRequest):
        b.finish(7, 10)
    with pytest.raises(UnknownRequest):
        b.grow(7, 1)
    assert b.counts == (22, 10, 0)


@pytest.mark.parametrize("away", ["drop", "move", "extend"])
def test_a_handle_that_left_is_not_moved(bench, away: str) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.grant(7, 1, extra=4)
    if away == "drop":
        b.drop(1)
    elif away == "move":
        b.move(1, 4)
    else:
        b.extend(1, [9])
    b.finish(7, 12, [1, 2, 3])
    assert b.counts == (52, 12, 0)  # what was computed stays, as cache
    if away == "drop":
        assert b.resident(1) == [-1]
        assert all(node.resident for node in b.cache.tree.walk())
    else:
        assert b.tokens(1) == (PROMPT[:4] if away == "move" else [*PROMPT, 9])


def test_settle_commits_before_it_grows_before_it_acquires() -> None:
    cache = RadixCache(12)
    for branch in (1, 2):
        cache.open_branch(m.OpenBranch(branch))
    cache.extend_branch(m.ExtendBranch(1, pack(PROMPT)))
    cache.extend_branch(m.ExtendBranch(2, pack([1, 2])))
    settled = cache.settle(m.Settle([], [], [m.Acquire(7, 1, 0), m.Acquire(8, 2, 0)]))
    assert [type(verdict) for verdict in settled.verdicts] == [m.Granted, m.Granted]
    assert (settled.free, settled.evictable, settled.referenced) == (0, 0, 12)
    settled = cache.settle(m.Settle([m.Commit(7, 10, final=True)], [m.Grow(8, 9)], [m.Acquire(9, 1, 0)]))
    assert len(settled.grown[0].pages) == 9 * 4
    # The grow has evicted 9 of the 10 pages.
    assert settled.verdicts == [m.Denied(9, "memory", resident=1, short=9)]
    assert (settled.free, settled.evictable, settled.referenced) == (0, 1, 11)


# --- handles


def test_unknown_handles_are_errors(bench) -> None:
    b = bench(8)
    b.open(1, [1])
    with pytest.raises(UnknownBranch):
        b.open(1)
    for action in (b.extend, b.move, b.retain):
        with pytest.raises(UnknownBranch):
            action(2, [1] if action == b.extend else 0)
    with pytest.raises(UnknownBranch):
        b.drop(2)
    with pytest.raises(ValueError, match="position 2"):
        b.move(1, 2)


def test_fork_and_rollback_share_and_leave_nothing(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.run(7, 1)
    b.fork(1, [2, 3], 6)
    b.extend(2, [1, 2])
    assert b.resident(1, 2, 3) == [10, 6, 6]
    b.move(2, 3)
    b.drop(1, 2, 3)
    assert b.counts == (54, 10, 0)
    assert b.cache.tree.nodes == 3  # the cold tokens of branch 2 went with it


def test_nothing_appended(bench) -> None:
    b = bench(8)
    b.open(1, [1, 2])
    b.cache.extend_branch(m.ExtendBranch(1, b""))
    assert b.tokens(1) == [1, 2]


# --- hostile sizes


def test_a_chat_of_500_turns_stays_a_short_path(bench) -> None:
    b = bench(20_000)
    b.open(1)
    length = 0
    for turn in range(500):
        cache = b.cache
        cache.extend_branch(m.ExtendBranch(1, pack(range(20))))
        granted = cache.acquire(m.Acquire(7, 1, 12))
        assert granted.cached == max(0, length - 1)  # all but the last sampled token
        cache.commit(m.Commit(7, length + 20))
        length += 20 + 10
        cache.commit(m.Commit(7, length - 1, pack([turn] * 10), final=True))
    assert b.resident(1) == [length - 1]
    assert b.cache.tree.nodes <= 20
    assert b.counts == (20_000 - length + 1, length - 1, 0)


def test_siblings_share_one_page_table_of_a_long_path(bench) -> None:
    b = bench(200)
    b.open(1)
    for i in range(40):
        b.extend(1, [i])
        b.fork(1, [100 + i], i + 1)
    b.run(7, 1)
    b.fork(1, [2, 3], 40)
    b.extend(2, [50])
    b.extend(3, [51])
    first, second = b.grant(8, 2), b.grant(9, 3)
    assert first.pages[:160] == second.pages[:160]
    anchor = b.cache.runs[9].anchor
    assert anchor.table == first.pages[:160]
    b.finish(8, 41)
    assert anchor.table is not None
    b.finish(9, 41)
    assert anchor.table is None


def test_a_path_of_ten_thousand_nodes(bench) -> None:
    depth = 10_000
    cache = RadixCache(2 * depth)
    cache.open_branch(m.OpenBranch(1))
    for i in range(depth):  # a fork at each step keeps the nodes from merging
        cache.extend_branch(m.ExtendBranch(1, pack([i])))
        cache.fork_branch(m.ForkBranch(1, [2 + i], i + 1))
    assert cache.tree.nodes == depth
    assert len(cache.acquire(m.Acquire(7, 1, 0)).pages) == 4 * depth
    cache.commit(m.Commit(7, depth, final=True))
    cache.drop_branches(m.DropBranches(list(range(1, depth + 2))))
    cache.open_branch(m.OpenBranch(1))
    cache.extend_branch(m.ExtendBranch(1, pack(range(depth, 3 * depth))))
    assert isinstance(cache.acquire(m.Acquire(8, 1, 0)), m.Granted)
    assert cache.tree.nodes == 1


def test_a_thousand_siblings(bench) -> None:
    b = bench(3000)
    b.cache.open_branch(m.OpenBranch(1))
    b.extend(1, PROMPT)
    b.run(1, 1)
    children = list(range(10, 1010))
    b.fork(1, children, 10)
    for child in children:
        b.cache.extend_branch(m.ExtendBranch(child, pack([child])))
        b.cache.retain_branches(m.RetainBranches({child: float(child)}))
    settled = b.cache.settle(m.Settle([], [], [m.Acquire(child, child, 1) for child in children]))
    assert {verdict.cached for verdict in settled.verdicts} == {10}
    assert settled.referenced == 10 + 2 * 1000
    b.cache.settle(m.Settle([m.Commit(child, 11, final=True) for child in children], [], []))
    b.drop(*children, 1)
    assert b.counts == (1990, 1010, 0)


def test_sessions_that_are_gone_leave_no_handle(bench) -> None:
    """Those that ran give their pages back with their last commit, the others' branches stay."""
    b = bench(64)
    mine, theirs = [(1 << 32) + i for i in (1, 2)], [(2 << 32) + i for i in (1, 2)]
    for branch in (*mine, *theirs):
        b.open(branch, PROMPT)
    b.grant(7, mine[0], extra=3)
    b.cache.drop_sessions(m.DropSessions([1, 3]))
    assert sorted(branch for branch, _ in b.cache.branches.items()) == theirs
    b.finish(7, 10)
    assert b.counts[2] == 0
    assert b.run(8, theirs[0]).cached == 9


def test_what_runs_for_a_session_that_begins_anew_moves_nothing_of_it(bench) -> None:
    """It is told its branches again, by the same numbers, while a request of before still runs."""
    b = bench(64)
    branch = (1 << 32) + 1
    b.open(branch, PROMPT)
    b.grant(7, branch, extra=3)
    b.cache.drop_sessions(m.DropSessions([1]))
    b.open(branch, PROMPT)
    b.finish(7, 11, [1, 2])
    assert b.tokens(branch) == PROMPT
    assert b.run(8, branch).cached == 9
    assert b.counts[2] == 0


def test_a_request_may_have_to_leave_pages(bench) -> None:
    """Free or evictable ones: what it lacks counts them."""
    b = bench(pages=10)
    b.open(1, [1, 2, 3])
    b.grant(7, 1)
    b.finish(7, 3)
    b.open(2, [5, 6, 7, 8])
    assert b.cache.acquire(m.Acquire(8, 2, 0, leave=7)) == m.Denied(8, "memory", short=1)
    assert not b.cache.runs
    assert isinstance(b.cache.acquire(m.Acquire(8, 2, 0, leave=6)), m.Granted)
    assert b.cache.free + b.cache.evictable == 6
    b.check()


def test_a_branch_that_is_not_as_long_as_was_said_is_gone(bench) -> None:
    b = bench(32)
    b.open(1, PROMPT)
    assert b.cache.acquire(m.Acquire(7, 1, 0, prompt=9)) == m.Denied(7, "gone")
    assert isinstance(b.cache.acquire(m.Acquire(7, 1, 0, prompt=10)), m.Granted)


def test_growing_ends_the_retentions_whose_time_is_over(bench) -> None:
    b = bench(12)
    for branch in (1, 2):
        b.open(branch, [100 * branch + i for i in range(4)])
        b.run(90, branch)
    b.retain(1, 50.0)
    b.open(3, [7])
    b.grant(5, 3)
    b.now = 50.0
    b.grow(5, 7)  # three are free
    assert b.resident(1, 2) == [0, 4]


def test_what_was_found_counts_as_used(bench) -> None:
    """Also the part of the last token, which runs again."""
    b = bench(12)
    for branch in (1, 2):
        b.open(branch, [100 * branch + i for i in range(4)])
        b.run(90, branch)
    b.grant(5, 1)  # three stay locked, the fourth can be evicted
    b.open(3, [7, 8, 9, 10])
    b.grant(6, 3)  # three are free
    assert b.resident(1, 2) == [4, 3]


def test_what_ended_last_was_used_last(bench) -> None:
    """Also the last token's page, which the request itself did not read."""
    b = bench(10)
    for branch in (1, 2):
        b.open(branch, [100 * branch + i for i in range(4)])
        b.run(90, branch)
    b.grant(5, 1)
    b.run(6, 2)
    b.finish(5, 4)
    b.open(3, [7, 8, 9])
    b.grant(7, 3)  # two are free
    assert b.resident(1, 2) == [4, 3]


def test_a_request_whose_branch_is_gone_leaves_nothing(bench) -> None:
    b = bench(32)
    b.open(1, PROMPT)
    b.grant(7, 1)
    b.drop(1)
    b.finish(7, 0)
    assert (b.cache.tree.nodes, b.cache.tree.roots, b.counts) == (0, {}, (32, 0, 0))


def test_an_output_is_joined_with_its_prompt(bench) -> None:
    """All but the last token, whose KV was not computed."""
    b = bench(32)
    b.open(1, PROMPT)
    b.grant(7, 1, extra=6)
    b.finish(7, 15, [1, 2, 3, 4, 5, 6])
    assert (b.cache.tree.nodes, b.resident(1)) == (2, [15])


def test_no_node_is_cut_where_a_page_ends_in_it(bench) -> None:
    b = bench(16, 4)
    b.open(1, PROMPT)
    b.run(7, 1)
    b.fork(1, [2], 6)
    nodes = b.cache.tree.nodes
    assert b.grant(8, 2).cached == 4
    assert b.cache.tree.nodes == nodes


# --- what nobody waits for


def spare(b, request: int, branch: int):
    verdict = b.cache.acquire(m.Acquire(request, branch, 0, spare=True))
    b.check()
    return verdict


def test_nothing_is_evicted_for_what_nobody_waits_for(bench) -> None:
    b = bench(16)
    b.open(1, PROMPT)
    b.run(7, 1)
    b.drop(1)
    assert b.counts == (6, 10, 0)
    b.open(2, list(range(7)))
    assert spare(b, 8, 2) == m.Denied(8, "memory", short=1)
    assert b.counts == (6, 10, 0)
    b.move(2, 6)
    assert isinstance(spare(b, 8, 2), m.Granted)
    b.finish(8, 6)
    assert b.counts == (0, 16, 0)


def test_what_nobody_has_used_is_evicted_first_and_the_last_computed_before_the_others(bench) -> None:
    b = bench(30)
    for branch in (1, 2):
        b.open(branch, [branch] * 10)
        assert isinstance(spare(b, branch, branch), m.Granted)
        b.finish(branch, 10)
    b.open(3, PROMPT)
    b.run(3, 3)
    b.open(4, [4] * 10)
    b.run(4, 4)
    assert b.resident(1, 2, 3, 4) == [10, 0, 10, 10]
    b.run(5, 1)  # now it is used
    b.open(6, [6] * 10)
    b.run(6, 6)
    assert b.resident(1, 3, 4, 6) == [10, 0, 10, 10]


@pytest.mark.parametrize("first", [7, 8])
def test_a_request_proves_its_own_behind_what_a_sibling_computed_once_that_is(bench, first) -> None:
    """Logits of request 8 were sampled over its own copy of the last token; the tree has that of 7."""
    b = bench(32)
    for request in (7, 8):
        b.open(request, PROMPT)
        assert b.grant(request, request, extra=4).cached == 9 * (request == 8)
        b.commit(request, 10)
    for request in (first, 15 - first):
        end = m.Commit(request, 12, pack([request, 1, 2]), final=True, finite=True)
        b.cache.commit(end)
        b.check()
    own = {request: b.cache.branches.head(request).parent for request in (7, 8)}
    assert (own[7].proven, own[8].proven) == (True, first == 7)
