"""Which width wins, how soon a change is noticed, and what the trials cost."""

from collections.abc import Callable

from ramify.gpu.executors.threads import LARGEST, LATEST, SOONEST, ThreadChoice

Cost = Callable[[int], float]


def idle(threads: int) -> float:
    return 8.0 / threads


def crowded(threads: int) -> float:
    return 8.0 if threads == 1 else 100.0


def drive(choice: ThreadChoice, cost: Cost, steps: int, tokens: int = 1) -> list[int]:
    taken = []
    for _ in range(steps):
        taken.append(choice.take(tokens))
        choice.note(tokens, taken[-1], cost(taken[-1]))
    return taken


def test_an_idle_machine_is_used_whole() -> None:
    taken = drive(ThreadChoice(2), idle, 4 * LATEST)
    assert taken[:7] == [2, 2, 2, 1, 1, 1, 2]
    assert taken.count(1) < 30  # the trials become rare


def test_a_first_step_that_compiles_is_not_held_against_its_threads() -> None:
    choice = ThreadChoice(2)
    assert choice.take(8) == 2
    choice.note(8, 2, 1.0)  # then 4 ms on two threads, 8 on one
    taken = drive(choice, lambda threads: 0.008 / threads, 40, tokens=8)
    assert taken.count(1) == 6  # the first trial, and the one after 32 steps


def test_a_trial_that_was_held_up_once_still_wins() -> None:
    choice = ThreadChoice(2)
    drive(choice, crowded, 20)
    while choice.take(1) == 1:
        choice.note(1, 1, idle(1))
    for seconds in (100.0, idle(2), idle(2)):
        choice.note(1, choice.take(1), seconds)
    assert choice.take(1) == 2


def test_a_crowded_machine_is_noticed_within_a_few_steps_and_left_soon() -> None:
    choice = ThreadChoice(2)
    drive(choice, idle, 4 * LATEST)
    assert drive(choice, crowded, 20).count(2) <= 5
    assert drive(choice, crowded, 10 * LATEST).count(2) < 60
    drive(choice, idle, LATEST + 3)
    assert drive(choice, idle, SOONEST).count(2) >= SOONEST - 3


def test_one_hiccup_does_not_last() -> None:
    choice = ThreadChoice(4)
    drive(choice, idle, 100)
    choice.note(1, choice.take(1), 1e6)
    assert drive(choice, idle, 3 * SOONEST)[-SOONEST:].count(4) >= SOONEST - 3


def test_sizes_are_judged_apart() -> None:
    choice = ThreadChoice(2)
    drive(choice, crowded, 10, tokens=1)
    assert drive(choice, idle, 14, tokens=100)[6:] == [2] * 8
    assert choice.take(1) == 1


def test_long_steps_and_single_threads_are_left_alone() -> None:
    assert set(drive(ThreadChoice(2), crowded, 50, tokens=LARGEST + 1)) == {2}
    assert set(drive(ThreadChoice(1), crowded, 50)) == {1}
