"""What doors say of how long something is to be kept, in seconds."""

import msgspec
import pytest

from ramify.actors.gateway.apis.openai.retention import (
    Hinted,
    hinted,
    hinting,
    retaining,
    seconds_alive,
    seconds_of,
)
from ramify.protocol.errors import InvalidField
from ramify.protocol.wire import MONTH_S, Append, Done, Error, JsonObject, KvHints, Ok, Set
from tests.messages import usage


def test_words_of_openai() -> None:
    assert seconds_of(None, None) is None
    assert seconds_of(None, "a key") == seconds_of("in_memory", None) == 300.0
    assert seconds_of("in-memory", None) == 300.0
    assert seconds_of("24h", "a key") == 86_400.0


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (None, None),
        (0, 0.0),
        (1.5, 1.5),
        ("90", 90.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("500ms", 0.5),
        (-1, MONTH_S),
        ("-1m", MONTH_S),
        ("99999h", MONTH_S),
        (1e300, MONTH_S),
    ],
)
def test_durations_of_ollama(said: float | str | None, seconds: float | None) -> None:
    assert seconds_alive(said) == seconds


@pytest.mark.parametrize("said", ["", "soon", "5 m", "5mx", "m5", "1d"])
def test_what_is_no_duration_is_refused(said: str) -> None:
    with pytest.raises(InvalidField, match="keep_alive"):
        seconds_alive(said)


def test_the_op() -> None:
    assert retaining(None) == retaining(0.0) == []
    assert retaining(5.0) == [Set(id=0, retain_s=5.0)]


def test_what_became_of_hints_is_told() -> None:
    assert hinting(3, None, None) == []
    (own,) = ops = hinting(3, None, 5.0, "b")
    assert isinstance(own, Set)
    end = Done(id=2, branch="b", position=9, reason="stop", usage=usage())
    waits, replied = Hinted([Append(id=1), own]), Ok(id=3, result={"kv_hints": {"message_id": "m"}})
    appended = Ok(id=1)
    assert list(waits.order([appended, end])) == [appended]
    assert list(waits.order([replied, appended])) == [end, appended]
    assert waits.told == {"kv_hints": {"message_id": "m"}}
    failed = msgspec.structs.replace(end, reason="error")
    assert list(Hinted([own]).order([failed])) == [failed]
    assert list(Hinted(retaining(5.0)).order([end, replied])) == [end, replied]
    assert own.hints is not None
    asked = KvHints("0.1", "m", [])
    assert hinting(3, asked, 5.0) == [Set(id=3, branch="main", hints=asked)]
    assert ops == [Set(id=3, branch="b", hints=own.hints)]

    def told(message_id: str, outcome: str) -> JsonObject:
        outcomes = [{"action_id": "", "outcome": outcome, "tokens": 7}]
        return hinted(Ok(id=3, result={"kv_hints": {"message_id": message_id, "outcomes": outcomes}}))

    assert told("ramify", "accepted") == told("ramify", "deferred") == {}
    assert told("ramify", "clipped") == {"ramify_retention": {"outcome": "clipped", "tokens": 7}}
    assert told("m", "accepted")["kv_hints"]["message_id"] == "m"
    assert hinted(Error(code="skipped", message="s")) == hinted(Ok(id=3)) == {}
    assert hinted(Error(code="limit", message="no")) == {"kv_hints": {"error": "no"}}
