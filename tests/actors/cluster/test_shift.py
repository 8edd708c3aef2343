"""Times in messages between machines whose clocks began at another time."""

from ramify.actors.cluster.shift import Shift, machine
from ramify.protocol import messages as m
from ramify.protocol.sampling import SamplingParams


def test_one_machine_has_one_clock() -> None:
    assert Shift.between("a", 107.5, "a", 3.0).ahead == 0.0
    assert Shift.between("", 107.5, "", 3.0).ahead == 104.5  # nobody knows: perhaps two machines
    assert machine() == machine()
    shift, tokens = Shift(0.0), m.Tokens([], [])
    assert shift.inward(tokens) is tokens
    assert shift.outward(tokens) is tokens


def test_times_of_the_front_become_times_here() -> None:
    shift = Shift.between("a", 107.5, "b", 3.0)
    submit = m.Submit(1, 2, 3, 4, SamplingParams(), deadline=10.0, arrived=4.0)
    moved = shift.inward(submit)
    assert (moved.deadline, moved.arrived) == (114.5, 108.5)
    assert moved.request == submit.request
    without = shift.inward(m.Submit(1, 2, 3, 4, SamplingParams(), arrived=4.0))
    assert (without.deadline, without.arrived) == (None, 108.5)
    assert shift.inward(m.RetainBranches({1: 5.0, 2: 0.0})).until == {1: 109.5, 2: 0.0}
    owned = m.RetainBranches({1: 5.0}, "ann")
    assert shift.inward(owned) == m.RetainBranches({1: 109.5}, "ann")
    asked = m.Inspect(1, 2, [3], [(None, 5.0), (4, 0.0)], "ann", demote=True)
    assert shift.inward(asked) == m.Inspect(1, 2, [3], [(None, 109.5), (4, 0.0)], "ann", demote=True)
    other = m.OpenBranch(1)
    assert shift.inward(other) is other


def test_times_here_become_times_of_the_front() -> None:
    shift = Shift(100.0)
    ended = m.Finished(1, "stop", 1, 2, 0, 2, 101.0, 102.0, 0.0, 104.0, accepted=3)
    (back,) = shift.outward(m.Tokens([m.Progress(1, b"")], [ended])).finished
    assert (back.arrived, back.started, back.first_token, back.ended) == (1.0, 2.0, 0.0, 4.0)
    assert back.accepted == 3
    progress = m.Tokens([m.Progress(1, b"")], [])
    assert shift.outward(progress) is progress
