"""The close-code table, the waits, the pacer."""

import pytest

from ramify.clients.errors import ConnectionLost, Replaced
from ramify.clients.reconnect import LAST_DELAY_S, LONGEST_S, Action, Pacer, after_close, delay, pause
from ramify.protocol.errors import Forbidden, Unauthorized


@pytest.mark.parametrize(
    ("code", "action"),
    [
        (1000, Action.STOP),
        (1001, Action.RESUME),
        (1012, Action.RESUME),
        (1002, Action.STOP),
        (1005, Action.RESUME),
        (1013, Action.BACK_OFF),
        (1014, Action.RESUME),
        (1003, Action.STOP),
        (1007, Action.STOP),
        (1009, Action.SPLIT),
        (1011, Action.RESUME),
        (None, Action.RESUME),
        (1006, Action.RESUME),
        (4400, Action.STOP),
        (4401, Action.NEW_TOKEN),
        (4403, Action.STOP),
        (4408, Action.RESUME),
        (4409, Action.STOP),
        (4429, Action.BACK_OFF),
        (4999, Action.STOP),
    ],
)
def test_close_codes(code: int | None, action: Action) -> None:
    verdict = after_close(code, "why")
    assert verdict.action is action
    assert "why" in verdict.error.message


def test_close_codes_as_exceptions() -> None:
    assert isinstance(after_close(4401).error, Unauthorized)
    assert after_close(4401).error.message.endswith("(close code 4401)")
    assert "close code" not in after_close(None).error.message
    assert isinstance(after_close(4403).error, Forbidden)
    assert "protocol was violated" in after_close(1002).error.message
    assert isinstance(after_close(4409).error, Replaced)
    assert isinstance(after_close(4409).error, ConnectionError)
    error = after_close(1000).error
    assert isinstance(error, ConnectionLost)
    assert error.details == {"close": 1000, "reason": ""}


def test_what_a_server_asks_for_is_obeyed_within_reason() -> None:
    assert [pause(ms) for ms in (None, 0, 250, -5, 10**400)] == [0.0, 0.0, 0.25, 0.0, LONGEST_S]


@pytest.mark.parametrize(
    ("rate", "burst", "wait"),
    [(0, 0, 0.0), (-5, 9, 0.0), (10, -(10**9), 0.4), (10**400, 10**400, 0.0), (10, 10**400, 0.0)],
)
def test_limits_that_make_no_sense_hold_nobody_up(rate: int, burst: int, wait: float) -> None:
    pacer = Pacer(lambda: 0.0)
    pacer.limit(rate, burst)
    assert pacer.wait(5) == pytest.approx(wait)


def test_waits_double_up_to_a_ceiling() -> None:
    assert [delay(n, 1.0) for n in range(4)] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert delay(10_000, 1.0) == LAST_DELAY_S
    assert delay(5, 0.0) == 0.0
    assert delay(0, 0.5, 5.0) == pytest.approx(5.05)


def test_pacer() -> None:
    now = 1.0
    pacer = Pacer(lambda: now)
    assert pacer.wait(1000) == 0  # no limits yet
    pacer.limit(10, 20)
    assert pacer.wait(20) == 0
    assert pacer.wait(5) == pytest.approx(0.5)
    now += 0.5
    assert pacer.wait(0) == pytest.approx(0)
    now += 1000
    assert pacer.wait(20) == 0  # never more than the burst
    assert pacer.wait(1) == pytest.approx(0.1)
