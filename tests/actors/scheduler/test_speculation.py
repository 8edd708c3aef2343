"""The policy by itself: on simulated machines, whose step times and acceptance are known."""

import random
from collections import deque

import pytest

from ramify.actors.scheduler.speculation import FLOOR, DraftRecord, Speculation

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


def simulate(machine, rows, acceptance, steps, generous=1.0):
    """Tokens a second of so many streams, but for the first `BEGINNING` steps, which cost a few."""
    rolled = random.Random(1).random
    policy, records = Speculation(MOST), [DraftRecord() for _ in range(rows)]
    tokens, seconds = 0, 0.0
    on_the_way = deque()  # results of two steps: what is planned does not know them
    for step in range(steps + BEGINNING):
        if step == BEGINNING:
            tokens, seconds = 0, 0.0
        wanted = policy.choose(records, ROWS - rows, changed=not step)
        assert wanted is None or (sum(wanted) <= ROWS - rows and max(wanted) <= MOST)
        landed, drafts, depth, got = [], 0, 0, rows
        for row, asked in enumerate(wanted or ()):
            if asked:
                drafted = asked if rolled() < generous else 0
                chance, accepted = acceptance(row, step), 0
                while accepted < drafted and rolled() < chance:
                    accepted += 1
                landed.append((records[row], asked, drafted, accepted))
                drafts, depth, got = drafts + drafted, max(depth, asked), got + accepted
        took = machine(rows + drafts, depth) * (1 + 0.03 * rolled())
        tokens, seconds = tokens + got, seconds + took
        on_the_way.append((landed, drafts, depth, got, took))
        if len(on_the_way) == 2:
            landed, drafts, depth, got, took = on_the_way.popleft()
            for result in landed:
                policy.landed(*result)
            policy.took(rows, drafts, depth, got, took)
    return tokens / seconds


def expected(machine, rows, acceptance, drafts):
    """Tokens a second with so many drafts of each row in each step, each row's chance being fixed."""
    accepted = sum(acceptance(row, 0) ** i for row in range(rows) for i in range(1, drafts + 1))
    return (rows + accepted) / (machine(rows * (1 + drafts), drafts) * 1.015)


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_never_slower_than_without_and_near_the_best(machine, rows, acceptance):
    time, chance = MACHINES[machine], ACCEPTANCE[acceptance]
    steps = 900 if rows == 1 else 600 if rows == 8 else 300
    got = simulate(time, rows, chance, steps)
    fixed = [k for k in (0, 1, 2, 3, 4, 6, 8) if rows * (1 + k) <= ROWS]
    plain, *others = [expected(time, rows, chance, k) for k in fixed]
    assert got >= 0.98 * plain
    if acceptance != "changing":
        assert got >= 0.88 * max(plain, *others)


def test_no_room_no_drafts():
    policy = Speculation(MOST)
    assert all(policy.choose([DraftRecord()] * 4, 0, changed=False) is None for _ in range(50))


def test_a_drafter_that_gives_little_costs_little():
    """One that has a guess in a tenth of the steps gains by those."""
    with_drafts = simulate(MACHINES["flat"], 1, ACCEPTANCE["0.9"], 900, generous=0.1)
    assert with_drafts > 1.3 * expected(MACHINES["flat"], 1, ACCEPTANCE["0.9"], 0)


def test_rows_that_are_guessed_well_get_the_drafts():
    policy, good, bad = Speculation(MOST), DraftRecord(), DraftRecord()
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
    policy, record = Speculation(MOST), DraftRecord()
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
    policy, record = Speculation(MOST), DraftRecord()
    for accepted in [2] * 300 + [0] * 300:
        policy.landed(record, 2, 2, accepted)
        if accepted:
            high = policy.acceptance
    assert high > 0.9
    assert policy.acceptance < 0.3


def drive(policy, record, steps, *, alone=1.0, line=0.2, right=True, late=0.0, slow=lambda step: 1.0):
    """Steps of one row; the drafts that each asked for. `late`: seconds for each token it is behind."""
    asked = []
    for step in range(steps):
        drafts = (policy.choose([record], 100, changed=not step) or [0])[0]
        asked.append(drafts)
        missing = 0
        if drafts:
            length = record.length + step
            missing, record.known = max(0, length - record.known), length
            policy.landed(record, drafts, drafts, drafts if right else 0)
        tokens = 1 + drafts * right
        seconds = (alone + line * drafts) * slow(step)
        policy.took(1, drafts, drafts, tokens, seconds, late * missing, missing)
    return asked


def test_the_prompt_of_a_draft_model_is_no_part_of_what_steps_cost():
    """A row that is begun at the cost of twenty steps goes on being drafted."""
    policy, record = Speculation(MOST), DraftRecord()
    record.length = 400
    asked = drive(policy, record, 60, late=0.05)
    assert sum(asked[10:]) > 0.8 * 50 * MOST


def test_rows_that_would_not_repay_their_begin_are_not_begun():
    policy = Speculation(MOST)
    for _ in range(6):  # rows pay well, and what a begin costs is known
        record = DraftRecord()
        record.length = 400
        drive(policy, record, 60, late=0.05)
        policy.ended(200)
    short, long = DraftRecord(), DraftRecord()
    short.length = long.length = 400
    short.rest, long.rest = 5, 500
    wanted = policy.choose([short, long], 100, changed=True)
    for _ in range(12):  # two rows have to be measured first
        policy.took(2, sum(wanted or ()), max(wanted or [0]), 2 + sum(wanted or ()), 1.0)
        wanted = policy.choose([short, long], 100, changed=True)
    assert wanted is not None
    assert wanted[1] > 0
    assert wanted[0] <= 1  # a probe at most, of what the bank holds


def test_slow_steps_of_a_busy_machine_do_not_stop_drafts():
    """Every third step lasts ten times as long, the first ones with drafts among them."""
    policy, record = Speculation(MOST), DraftRecord()
    asked = drive(policy, record, 300, slow=lambda step: 10.0 if step % 3 == 0 else 1.0)
    assert sum(asked[50:]) > 0.8 * 250 * MOST


def test_rows_that_cannot_be_drafted_get_none():
    policy, record = Speculation(MOST), DraftRecord()
    for step in range(100):
        wanted = policy.choose([None, record, None], 100, changed=not step) or [0, 0, 0]
        assert wanted[0] == wanted[2] == 0
        if wanted[1]:
            policy.landed(record, wanted[1], wanted[1], wanted[1])
        policy.took(3, wanted[1], wanted[1], 3 + wanted[1], 1.0 + 0.1 * wanted[1])
    assert wanted[1] > 1


def test_steps_with_prompts_count_by_what_such_steps_usually_cost():
    """They say nothing of time, but what their drafts lose is lost."""
    policy, record = Speculation(MOST), DraftRecord()
    drive(policy, record, 40)
    high = policy.bank
    policy.took(1, MOST, MOST, 1, None)
    assert high - 2.0 < policy.bank < high - 1.0
    policy.took(1, 2, 2, 3, None)
    assert policy.bank > high - 2.0


def test_the_bank_owes_no_more_than_its_floor():
    policy, record = Speculation(MOST), DraftRecord()
    drive(policy, record, 20)
    for _ in range(50):
        policy.took(1, MOST, MOST, 1, 9.0)
    assert policy.bank == FLOOR
    assert policy.choose([record], 100, changed=False) is None
