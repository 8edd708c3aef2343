"""What waiting prunes are told, without a session."""

from types import SimpleNamespace
from typing import Any

from ramify.actors.session.branches.branch import SessionBranch, input_segment
from ramify.actors.session.branches.segments import OutputSegment, Tail
from ramify.actors.session.branches.tasks import Race
from ramify.actors.session.ops.running.queues import OpQueues, Races


class World:
    """Queues, branches that have an answer each, and what waits on them."""

    def __init__(self, *names: str) -> None:
        self.queues: Any = OpQueues()
        self.branches = {name: self.answered(name) for name in names}
        self.races = Races(self.queues, self.branches)

    def answered(self, name: str, reason: str = "stop") -> SessionBranch:
        branch = SessionBranch(name, 1)
        input_segment(branch, [1], "x", tail=Tail.RAW)
        branch.segments.append(OutputSegment(1))
        branch.reason = reason
        return branch

    def task(self, *touched: str, race: Race | None = None, scored: tuple[str, ...] = ()) -> Any:
        failed: dict[str, None] = {}
        task: Any = SimpleNamespace(touched=touched, race=race, scored=scored)
        task.frame = SimpleNamespace(failed=failed)
        return task

    def add(self, task: Any, now: float = 1.0) -> Any:
        self.queues.add(task)
        self.races.add(task, now)
        return task

    def finish(self, task: Any, now: float) -> None:
        self.queues.finish(task)
        self.races.finished(task, now)

    def losing(self) -> list[tuple[set[str], list[Any]]]:
        return list(self.races.losing())


def test_log_probabilities_are_wanted_while_any_prune_waits() -> None:
    world = World("a", "b")
    one = world.add(world.task("a", "b", scored=("a", "b")))
    two = world.add(world.task("a", scored=("a",)))
    assert [world.races.scored(name) for name in ("a", "b", "c")] == [True, True, False]
    world.finish(one, 2.0)
    assert [world.races.scored(name) for name in ("a", "b")] == [True, False]
    world.finish(two, 3.0)
    assert not world.races.scored("a")


def test_the_first_to_finish_wins_and_the_others_are_told() -> None:
    world = World("a", "b")
    mine, theirs = world.add(world.task("a")), world.add(world.task("b"))
    prune = world.add(world.task("a", "b", race=Race(["a", "b"], ["a"], 1)))
    assert world.losing() == []
    world.finish(theirs, 2.0)
    assert world.losing() == [({"a"}, [mine])]
    assert prune.race.decided == ["b"]
    world.finish(mine, 3.0)
    assert world.losing() == []  # decided once


def test_branches_that_nothing_runs_on_have_finished_when_the_prune_comes() -> None:
    world = World("a", "b", "c")
    busy = world.add(world.task("c"))
    prune = world.add(world.task("a", "b", "c", race=Race(["b", "a", "c"], ["b"], 2)), 5.0)
    assert world.losing() == [({"c"}, [busy])]
    assert prune.race.decided == ["b", "a"]  # at the same time: in the order of the op


def test_answers_that_were_cut_short_come_last() -> None:
    for reason in ("cancelled", "deadline", "error"):
        world = World("a", "b")
        world.branches["a"].reason = reason
        other = world.add(world.task("b"))
        prune = world.add(world.task("a", "b", race=Race(["a", "b"], ["a"], 1)))
        assert world.losing() == []
        world.finish(other, 2.0)
        assert world.losing() == [({"a"}, [])]
        assert prune.race.decided == ["b"]


def test_branches_without_an_answer_come_last() -> None:
    world = World("b")
    world.branches["a"] = SessionBranch("a", 1)
    other = world.add(world.task("b"))
    prune = world.add(world.task("a", "n", "b", race=Race(["a", "n", "b"], ["a"], 1)))
    assert world.losing() == []
    world.finish(other, 2.0)
    assert [losers for losers, _ in world.losing()] == [{"a", "n"}]
    assert prune.race.decided == ["b"]


def test_a_prune_that_is_gone_hears_nothing() -> None:
    world = World("a", "b")
    mine = world.add(world.task("a"))
    prune = world.add(world.task("b", "a", race=Race(["a", "b"], ["a"], 1)))
    world.finish(prune, 2.0)
    assert world.losing() == []
    world.finish(mine, 3.0)
    assert (world.losing(), world.races._running, world.races.due) == ([], {}, {})


def test_two_prunes_are_decided_by_themselves() -> None:
    world = World("a", "b", "c", "d")
    ran = [world.add(world.task(name)) for name in "abcd"]
    world.add(world.task("a", "b", race=Race(["a", "b"], ["a"], 1)))
    world.add(world.task("c", "d", race=Race(["c", "d"], ["c"], 1)))
    world.finish(ran[0], 2.0)
    world.finish(ran[3], 2.0)
    assert sorted(map(str, (losers for losers, _ in world.losing()))) == ["{'b'}", "{'c'}"]
