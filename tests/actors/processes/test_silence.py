"""Silence: what was not heard, without the time in which nobody listened."""

from ramify.actors.processes.silence import MOST_BETWEEN_LOOKS, Silence


def test_silence_grows_until_something_is_heard() -> None:
    silence = Silence(10.0)
    assert silence.tick(10.5) == 0.5
    assert silence.tick(11.0) == 1.0
    silence.heard()
    assert silence.tick(11.25) == 0.25


def test_our_own_absence_is_not_theirs() -> None:
    silence = Silence(0.0)
    assert silence.tick(3600.0) == MOST_BETWEEN_LOOKS
    assert silence.tick(3599.0) == MOST_BETWEEN_LOOKS  # a clock that goes back
    assert silence.tick(3600.0) == MOST_BETWEEN_LOOKS + 1.0
