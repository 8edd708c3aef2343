"""Hints for KV: what is asked of the cache, and what the client is told."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.session.ops.set import FULL, MOST_LEASES
from ramify.protocol import messages as m
from ramify.protocol import wire as w

TEXT = "one two three four five"


def hints(*actions: tuple[str, dict[str, Any]], version: str = "1.0") -> w.KvHints:
    made = [w.KvAction(f"a{i}", kind, version, payload) for i, (kind, payload) in enumerate(actions)]
    return w.KvHints("0.1", "m", made)


class Hinting:
    """A session with some text on its branch; `kept`: what its cache keeps at most of a lease."""

    def __init__(self, sim: Callable[..., Any]) -> None:
        self.engine = sim()
        self.client = self.engine.session()
        self.client.send(w.Append(id=1, text=TEXT))
        self.engine.pump()
        self.length = self.client.replies[1][0].position
        self.ident = 10

    def outcomes(self, asked: w.KvHints) -> list[dict[str, Any]]:
        self.ident += 1
        self.client.send(w.Set(id=self.ident, branch="main", hints=asked))
        self.engine.pump()
        (reply,) = self.client.replies[self.ident]
        told = reply.result["kv_hints"]
        assert (told["protocol_version"], told["message_id"]) == ("0.1", "m")
        assert [each["action_id"] for each in told["outcomes"]] == [e.action_id for e in asked.actions]
        return [{k: v for k, v in each.items() if k != "action_id"} for each in told["outcomes"]]


@pytest.fixture
def hinting(sim: Callable[..., Any]) -> Hinting:
    return Hinting(sim)


def test_leases_say_how_much_they_keep_and_for_how_long(hinting: Hinting) -> None:
    several = {"directives": [{"end": 2, "duration": 60}, {"end": 4, "priority": 50, "duration": 9}]}
    asked = hints(("kv.retain", {}), ("pin", {"end": 3, "duration": 7}), ("kv.retain", several))
    assert hinting.outcomes(asked) == [
        {"outcome": "accepted", "tokens": hinting.length, "duration": 300.0},
        {"outcome": "accepted", "tokens": 3, "duration": 7.0},
        {"outcome": "accepted", "tokens": 4, "duration": 60.0},
    ]
    released = hinting.outcomes(hints(("kv.retain", {"priority": 0}), ("kv.pin", {"end": 999})))
    assert [each["tokens"] for each in released] == [0, hinting.length]


def test_what_is_computed_ahead_and_what_nobody_needs(hinting: Hinting) -> None:
    everything = hints(("kv.prefetch", {}), ("kv.share", {}), ("kv.demote", {}))
    first = hinting.outcomes(everything)
    assert first[0]["outcome"] in ("accepted", "deferred")  # it was appended just now
    again = hinting.outcomes(everything)  # and is computed since
    assert {each["outcome"] for each in again} == {"accepted"}
    assert again[0]["tokens"] >= hinting.length - 1
    tokens = hinting.length
    hinting.client.send(w.Generate(id=20, max_tokens=3))
    hinting.engine.pump()
    assert hinting.client.replies[20][0].usage.prompt == tokens


@pytest.mark.parametrize(
    ("kind", "version", "payload", "reason"),
    [
        ("kv.fly", "1.0", {}, "`action_type` is none of kv.retain"),
        ("", "1.0", {}, "`action_type`"),
        ("kv.retain", "2.0", {}, "`action_version` must be 1.x"),
        ("kv.retain", "one", {}, "`action_version`"),
        ("kv.retain", "1.0", {"end": 0}, "`payload`: .* >= 1"),
        ("kv.retain", "1.0", {"end": 2**60}, "`payload`: .* <= "),
        ("kv.retain", "1.0", {"end": "x"}, "`payload`: Expected `int"),
        ("kv.pin", "1.0", {"duration": 1e12}, "`payload`: .* <= "),
        ("kv.pin", "1.0", {"duration": -1}, "`payload`: .* >= 0"),
        ("kv.retain", "1.0", {"priority": 101}, "`payload`: .* <= 100"),
        ("kv.retain", "1.0", {"forever": True}, "`payload`: .*`forever`"),
        ("kv.retain", "1.0", {"directives": [{}] * 17}, "`payload`: .* <= 16"),
        ("kv.retain", "1.0", {"directives": 3}, "`payload`: Expected `array`"),
        ("kv.retain", "1.0", {"directives": [], "scope": "s"}, "`payload`: .*scope"),
        ("kv.share", "1.0", {"destination": "worker-2"}, "`payload.destination` is not served"),
        ("kv.prefetch", "1.0", {"session": "s"}, "`payload.session`"),
        ("kv.demote", "1.0", {"tier": "disk"}, "`payload.tier`"),
    ],
)
def test_what_is_not_served_is_rejected_alone(
    hinting: Hinting, kind: str, version: str, payload: dict[str, Any], reason: str
) -> None:
    odd = w.KvHints("0.1", "m", [w.KvAction("odd", kind, version, payload), *hints(("pin", {})).actions])
    rejected, accepted = hinting.outcomes(odd)
    assert rejected["outcome"] == "rejected"
    with pytest.raises(ValueError, match=reason):
        raise ValueError(rejected["reason"])
    assert accepted["outcome"] == "accepted"


def test_leases_of_one_op_are_bounded(hinting: Hinting) -> None:
    lot = {"directives": [{"end": 1}] * (MOST_LEASES // 2 + 1)}
    outcomes = hinting.outcomes(hints(("kv.retain", lot), ("kv.share", {}), ("kv.retain", lot)))
    assert [each["outcome"] for each in outcomes][::2] == ["rejected", "rejected"]


def test_hints_need_a_branch(alone: Callable[..., Any]) -> None:
    session = alone()
    session.send(w.Set(id=1, hints=hints()))
    (error,) = [each for each in session.replies(1) if isinstance(each, w.Error)]
    assert "`hints` needs a `branch`" in error.message


def answered(session: Any, *found: int) -> m.Inspect:
    (asked,) = [each for each in session.state.out.cache if isinstance(each, m.Inspect)]
    session.state.out.cache.clear()
    session.core.inspected(m.Inspected(asked.id, list(found)), session.now)
    return asked


def test_what_does_not_fit_is_clipped_or_rejected(alone: Callable[..., Any]) -> None:
    session = alone()
    session.send(w.Append(id=1, tokens=[1, 2, 3, 4]))
    asked = hints(("kv.pin", {"end": 3}), ("kv.pin", {"duration": 9}), ("kv.retain", {"end": 2}))
    session.send(w.Set(id=2, branch="main", hints=asked), w.Generate(id=3))
    assert session.asked() == []  # the next op waits for the answer
    inspect = answered(session, 0, 3, 2, 0)
    later = [session.now + seconds for seconds in (300, 9, 300)]
    assert inspect.leases == list(zip((3, None, 2), later, strict=True))
    assert (inspect.demote, inspect.owner) == (False, session.state.owner)
    told = session.reply(2).result["kv_hints"]["outcomes"]
    assert [each["outcome"] for each in told] == ["accepted", "clipped", "rejected"]
    assert [each.get("reason") for each in told] == [None, FULL, FULL]
    assert session.branch().retain_s == 9
    assert [type(each) for each in session.asked()] == [m.Submit]


def test_prefetch_computes_what_is_not_there(alone: Callable[..., Any]) -> None:
    session = alone()
    session.send(w.Append(id=1, tokens=[1, 2, 3, 4]))
    session.asked()
    session.send(w.Set(id=2, branch="main", hints=hints(("kv.prefetch", {}), ("kv.share", {}))))
    answered(session, 0)
    told = session.reply(2).result["kv_hints"]["outcomes"]
    assert [each["outcome"] for each in told] == ["deferred", "missing"]
    cancel, submit = session.asked()
    assert (type(cancel), submit.prompt, submit.max_tokens) == (m.CancelRequest, 4, 0)


def test_an_engine_that_has_nothing_yet_or_is_gone_defers(alone: Callable[..., Any]) -> None:
    session = alone()
    session.send(w.Append(id=1, tokens=[1, 2, 3, 4]))
    for number, found in ((2, [0]), (3, [-1, 0])):
        asked = hints(("kv.pin", {}), ("kv.demote", {}))
        session.send(w.Set(id=number, branch="main", hints=asked))
        assert answered(session, *found).demote
        told = session.reply(number).result["kv_hints"]["outcomes"]
        assert told[0]["outcome"] == "deferred"
        assert session.branch().retain_s is None
