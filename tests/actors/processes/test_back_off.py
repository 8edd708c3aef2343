"""Pauses grow to a bound, and begin anew after a success."""

from ramify.actors.processes.back_off import BackOff


def test_pauses_double_up_to_the_most() -> None:
    pauses = BackOff(0.5, 3.0)
    assert [pauses.failed() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert pauses.failures == 5
    pauses.succeeded()
    assert (pauses.failures, pauses.failed()) == (0, 0.5)
    assert [pauses.failed() for _ in range(5000)][-1] == 3.0
