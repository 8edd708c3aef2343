"""The policy by itself: on simulated machines, whose step times and acceptance are known."""

import random
from collections import deque

import pytest

from ramify.actors.scheduler.speculation import Record, Speculation

MOST = 8
BEGINNING = 50
ROWS = 256  # of the machine, and so its lines


def gpu(knee, drafter=0.0):
    """Flat up to so many lines, then linear. `drafter`: of each draft in a row, in sequence."""
    return lambda lines, depth: 4.0 + 0.02 * max(0, lines - knee) + drafter * depth


def cpu(fixed, line, drafter=0.0):
    return lambda lines, depth: fixed + line * lines + drafter * depth


MACHINES = {
    "flat": gpu(64),
    "soon linear": gpu(16),
    "a model drafts": gpu(64, 0.4),
    "cpu": cpu(0.6, 0.4),
    "cpu, a model drafts": cpu(0.6, 0.3, 0.1),
    "dear": cpu(0.0, 1.0, 0.3),
}
ACCEPTANCE = {
    "0": lambda row, step: 0.0,
    "0.3": lambda row, step: 0.3,
    "0.6": lambda row, step: 0.6,
    "0.8": lambda row, step: 0.8,
    "0.9": lambda row, step: 0.9,
    "mixed": lambda row, step: 0.9 * (row % 2),
    "changing": lambda row, step: 0.9 * (step // 150 % 2),
}


def simulate(machine, rows, acceptance, steps, fixed=None, generous=1.0):
    """Tokens a second of so many streams, but for the first `BEGINNING` steps, which cost a few steps.

    `fixed`: drafts of each row in each step.
    """
    dice = random.Random(1)
    policy, records = Speculation(MOST), [Record() for _ in range(rows)]
    tokens, seconds = 0, 0.0
    on_the_way = deque()  # results of two steps: what is planned does not know them
    for step in range(steps + BEGINNING):
        if step == BEGINNING:
            tokens, seconds = 0, 0.0
        if fixed is None:
            wanted = policy.choose(records, ROWS - rows, changed=not step)
            assert wanted is None or (sum(wanted) <= ROWS - rows and max(wanted) <= MOST)
        else:
            wanted = [fixed] * rows if fixed else None
        landed = []
        for row, asked in enumerate(wanted or [0] * rows):
            drafted = asked if dice.random() < generous else 0
            chance, accepted = acceptance(row, step), 0
            while accepted < drafted and dice.random() < chance:
                accepted += 1
            landed.append((asked, drafted, accepted))
        drafts = sum(drafted for _, drafted, _ in landed)
        depth = max(wanted) if wanted is not None else 0
        took = machine(rows + drafts, depth) * (1 + 0.03 * dice.random())
        got = rows + sum(accepted for _, _, accepted in landed)
        tokens, seconds = tokens + got, seconds + took
        on_the_way.append((landed, drafts, depth, got, took))
        if len(on_the_way) == 2:
            landed, drafts, depth, got, took = on_the_way.popleft()
            for record, (asked, drafted, accepted) in zip(records, landed, strict=True):
                if asked:
                    policy.landed(record, asked, drafted, accepted)
            policy.took(rows, drafts, depth, got, took)
    return tokens / seconds


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_never_slower_than_without_and_near_the_best(machine, rows, acceptance):
    time, chance = MACHINES[machine], ACCEPTANCE[acceptance]
    steps = 900 if rows == 1 else 600 if rows == 8 else 300
    got = simulate(time, rows, chance, steps)
    fixed = [k for k in (0, 1, 2, 3, 4, 6, 8) if rows * (1 + k) <= ROWS]
    plain, *others = [simulate(time, rows, chance, 150 if k else 50, k) for k in fixed]
    assert got >= 0.98 * plain
    if acceptance != "changing":
        assert got >= 0.88 * max(plain, *others)


def test_no_room_no_drafts():
    policy = Speculation(MOST)
    assert all(policy.choose([Record()] * 4, 0, changed=False) is None for _ in range(50))


def test_a_drafter_that_gives_little_costs_little():
    """One that has a guess in a tenth of the steps gains by those."""
    with_drafts = simulate(MACHINES["flat"], 1, ACCEPTANCE["0.9"], 900, generous=0.1)
    assert with_drafts > 1.3 * simulate(MACHINES["flat"], 1, ACCEPTANCE["0.9"], 50, 0)


def test_rows_that_are_guessed_well_get_the_drafts():
    policy, good, bad = Speculation(MOST), Record(), Record()
    drafts = [0, 0]
    for _ in range(300):
        wanted = policy.choose([good, bad], 100, changed=False)
        if wanted is None:
            policy.took(2, 0, 0, 2, 1.0)
            continue
        drafts = [drafts[0] + wanted[0], drafts[1] + wanted[1]]
        if wanted[0]:
            policy.landed(good, wanted[0], wanted[0], wanted[0])
        if wanted[1]:
            policy.landed(bad, wanted[1], wanted[1], 0)
        policy.took(2, sum(wanted), max(wanted), 2 + wanted[0], 1 + 0.1 * sum(wanted))
    assert drafts[0] > 1500
    assert drafts[1] < 100


def test_a_step_that_was_slow_for_once_changes_little():
    policy, record = Speculation(MOST), Record()
    drafts = []
    for step in range(400):
        wanted = policy.choose([record], 100, changed=False) or [0]
        drafts.append(wanted[0])
        if wanted[0]:
            policy.landed(record, wanted[0], wanted[0], wanted[0])
        seconds = 50.0 if step % 97 == 0 else 1.0
        policy.took(1, wanted[0], wanted[0], 1 + wanted[0], seconds)
    assert sum(drafts[100:]) > 0.8 * 300 * MOST


def test_acceptance_is_that_of_late():
    policy, record = Speculation(MOST), Record()
    for accepted in [2] * 300 + [0] * 300:
        policy.landed(record, 2, 2, accepted)
        if accepted:
            high = policy.acceptance
    assert high > 0.9
    assert policy.acceptance < 0.3
