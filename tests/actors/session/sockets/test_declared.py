"""The tools that a client has declared stay in force until it says otherwise."""

from typing import Any

import msgspec
import pytest

from ramify.actors.kit.memory import SESSION, Holdings, Meter
from ramify.actors.session.durable.exports import Unsound, check_saved
from ramify.actors.session.durable.items import exported
from ramify.actors.session.sockets.clients import Declared, in_force
from ramify.actors.session.sockets.publisher import TOOLS_KEPT
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.saved import HEAD, Exported, SavedHead
from tests.actors.session.alone import restore
from tests.actors.session.test_attachments import view

F: list[w.JsonObject] = [{"type": "function", "function": {"name": "f", "description": "d" * 50}}]
G: list[w.JsonObject] = [{"name": "g"}]


def meter() -> Meter:
    return Holdings(Limits()).open("")


def named(engine: Any, client: Any) -> list[str] | None:
    """The tools that the client's last `state` names; they are those that its ops may call."""
    engine.pump()
    assert client.socket is not None
    subscriber = engine.cores[client.number].subscribers[client.socket]
    told: list[str] | None = client.tools
    assert subscriber.tools.names == (told or [])
    assert [each.get("function", each)["name"] for each in subscriber.opened.tools or []] == (told or [])
    return told


def joined(engine: Any, name: str, **opened: Any) -> Any:
    """Another client of session 1."""
    client = engine.session(name)
    engine.pump()
    del engine.clients[client.socket]
    client.number, client.session, client.opened = 1, "s_1", opened
    client.connect()
    return client


def again(engine: Any, client: Any, **opened: Any) -> list[str] | None:
    """It resumes with these fields; returns the tools that are in force."""
    client.drop()
    client.opened = opened
    client.connect()
    return named(engine, client)


def test_a_resume_without_the_field_keeps_them(sim_class: Any, tokenizer: Tokenizer) -> None:
    engine = sim_class(tokenizer)
    client = engine.session(tools=F)
    assert named(engine, client) == ["f"]
    assert again(engine, client) == ["f"]
    assert again(engine, client, tools=G) == ["g"]
    assert again(engine, client, tools=[]) is None
    assert again(engine, client) is None


def test_each_client_has_its_own_and_a_stranger_the_last_ones(
    sim_class: Any, tokenizer: Tokenizer
) -> None:
    engine = sim_class(tokenizer)
    client = engine.session(tools=F)
    engine.pump()
    other = joined(engine, "d", tools=G)
    assert named(engine, other) == ["g"]
    assert again(engine, client) == ["f"]
    assert again(engine, other) == ["g"]
    assert named(engine, joined(engine, "e")) == ["g"]
    assert again(engine, client, tools=[]) is None
    assert named(engine, joined(engine, "h")) is None


def test_viewers_have_none_and_change_none(sim_class: Any, tokenizer: Tokenizer) -> None:
    engine = sim_class(tokenizer)
    client = engine.session(tools=F)
    engine.pump()
    viewer = view(engine, tools=G)
    assert named(engine, viewer) is None
    assert again(engine, client) == ["f"]


@pytest.mark.parametrize("times", [1, 3])
def test_they_survive_restarts(sim_class: Any, tokenizer: Tokenizer, times: int) -> None:
    engine = sim_class(tokenizer, stored=True)
    client = engine.session(tools=F)
    engine.pump()
    other = joined(engine, "d", tools=[])
    assert named(engine, other) is None
    for _ in range(times):
        engine.save(1)
        engine.crash()
        client.opened = {}
        client.connect()
        assert named(engine, client) == ["f"]
    other.connect()
    assert named(engine, other) is None
    assert [key for key in engine.saved[1] if key[0] == "t"] == ["t1"]


def test_what_nobody_has_any_more_leaves_store_and_meter(sim_class: Any, tokenizer: Tokenizer) -> None:
    engine = sim_class(tokenizer, stored=True)
    client = engine.session()
    engine.pump()
    held = engine.cores[1].state.meter.held
    for tools in (F, F, G):
        again(engine, client, tools=tools)
        engine.save(1)
    assert [key for key in engine.saved[1] if key[0] == "t"] == ["t2"]
    again(engine, client, tools=[])
    engine.save(1)
    engine.save(1)
    assert not [key for key in engine.saved[1] if key[0] == "t"]
    assert engine.cores[1].state.meter.held == held


def test_clients_share_them_and_they_count_once(sim_class: Any, tokenizer: Tokenizer) -> None:
    engine = sim_class(tokenizer)
    client = engine.session(tools=F)
    engine.pump()
    held = engine.cores[1].state.meter.held
    client.drop()
    engine.pump()
    held -= engine.cores[1].state.meter.held  # the socket
    size = 8 * len(msgspec.json.encode(F))
    assert engine.cores[1].state.meter.held - SESSION >= size
    before = engine.cores[1].state.meter.held
    for i in range(5):
        joined(engine, f"n{i}")
        engine.pump()
    assert engine.cores[1].state.meter.held - before == 5 * held


def test_all_that_are_kept_are_bounded(sim_class: Any, tokenizer: Tokenizer) -> None:
    engine = sim_class(tokenizer)
    client = engine.session(tools=[{"name": "f0", "description": "d" * (TOOLS_KEPT // 3)}])
    engine.pump()
    client.drop()
    for i in range(1, 5):
        other = joined(
            engine, f"n{i}", tools=[{"name": f"f{i}", "description": "d" * (TOOLS_KEPT // 3)}]
        )
        engine.pump()
        other.drop()
        engine.pump()
    logs = engine.cores[1].publisher.reply_logs
    kept = [log.declared.names for log in logs.values() if log.declared is not None]
    assert kept == [["f3"], ["f4"]]
    assert again(engine, client) == ["f4"]


def test_tools_that_cannot_be_read_cost_no_text(sim_class: Any, tokenizer: Tokenizer) -> None:
    engine = sim_class(tokenizer, stored=True)
    client = engine.session(tools=F)
    client.send(w.Append(id=client.id(), text="hello"))
    engine.pump()
    engine.save(1)
    items = engine.saved[1]
    check_saved(items)
    for bad in (b"\x00", msgspec.msgpack.encode([{"name": 3}])):
        damaged = items | {"t1": bad}
        with pytest.raises(Unsound, match="t1"):
            check_saved(damaged)
        core = engine.make_core(9, saved=True)
        assert not restore(core, damaged, engine.now, 1e9)
        assert "".join(each.text for each in core.state.branches["main"].segments) == "hello"
        assert core.publisher.declared is None


def test_a_file_has_none(sim_class: Any, tokenizer: Tokenizer) -> None:
    engine = sim_class(tokenizer)
    engine.session(tools=F)
    engine.pump()
    file = msgspec.msgpack.decode(exported(engine.cores[1].state), type=Exported)
    assert not [key for key in file.items if key[0] == "t"]
    assert msgspec.msgpack.decode(file.items[HEAD], type=SavedHead).tools == 0


def test_the_same_tools_again_are_the_ones_that_are_kept() -> None:
    counted = meter()
    own = Declared(F, counted)
    resumed = w.Open(client="c", session="s")
    assert in_force(msgspec.structs.replace(resumed, tools=F), own, None, counted) is own
    assert in_force(resumed, own, None, counted) is own
    assert in_force(resumed, None, own, counted) is own
    assert in_force(w.Open(client="c"), None, own, counted).tools == []
    one: list[w.JsonObject] = [{"name": "f", "strict": 1}]
    true: list[w.JsonObject] = [{"name": "f", "strict": True}]  # equal to Python, not as JSON
    given = in_force(msgspec.structs.replace(resumed, tools=true), Declared(one, counted), None, counted)
    assert given.tools[0]["strict"] is True


def test_an_open_gets_them_and_stays_as_it_came() -> None:
    opened = w.Open(client="c", session="s", tick_ms=5)
    given = Declared(F, meter()).into(opened)
    assert (given.tools, given.tick_ms, opened.tools) == (F, 5, None)
    assert Declared([], meter()).into(given).tools is None
