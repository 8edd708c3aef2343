"""A session that was saved and taken up again is the session that it was: recorder and restore."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import OutputSegment
from ramify.actors.session.restore import Damaged, read_head
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import wire as w
from tests.actors.session.alone import restore
from tests.actors.session.test_random_sessions import check_client, random_op
from tests.amount import examples


def shown(branch: SessionBranch) -> dict[str, Any]:
    """All of a branch that a store keeps."""
    fields = {
        name: getattr(branch, name)
        for name in (
            "name",
            "parent",
            "at",
            "own",
            "born",
            "cuts",
            "retain_s",
            "meta",
            "reason",
            "persist",
        )
    }
    fields["label"] = [
        label.name if label else None for label in (branch.label, branch.label.ancestor())
    ]
    fields["segments"] = [
        {
            name: getattr(segment, name)
            for name in (
                ("start", "tokens", "text", "tail", "role", "op", "raw", "ended", "counts", "chunks",
                 "labels", "logprobs", "spoken", "mean", "client", "quiet", "lead", "eos_text",
                 "since", "complete")
                if isinstance(segment, OutputSegment)
                else ("start", "tokens", "text", "tail", "role", "op", "raw", "messages", "turn", "chat")
            )
        } | {"history": segment.history.all() if segment.history else None}
        for segment in branch.segments
    ]  # fmt: skip
    return fields


def test_a_conversation_is_what_it_was(sim_class: Any, tokenizer: Tokenizer) -> None:
    engine = sim_class(tokenizer, stored=True)
    client = engine.session(template="strict", tools=[{"name": "f"}])
    for text in ("one two", "three", "café"):
        client.send(
            w.Append(id=client.id(), messages=[w.ChatMessage(role="user", content=text)]),
            w.Generate(id=client.id(), max_tokens=9, temperature=0, logprobs=2),
        )
        engine.pump()
    client.send(
        w.Fork(id=client.id(), branch="main", as_=["a", "b"]),
        w.Fork(id=client.id(), branch="a", as_=["c"]),
        w.Rollback(id=client.id(), branch="b", turns=1),
        w.Drop(id=client.id(), branch="a"),
        w.Set(id=client.id(), branch="c", meta={"x": [1]}, retain_s=5, persist="sync"),
        w.Set(id=client.id(), meta={"title": "t"}),
    )
    engine.pump()
    before = {name: shown(branch) for name, branch in engine.cores[1].state.branches.items()}
    engine.save(1)
    engine.crash()
    state = engine.cores[1].state
    assert {name: shown(branch) for name, branch in state.branches.items()} == before
    assert state.meta == {"title": "t"}
    b, c = state.branches["b"], state.branches["c"]
    assert b.segments[0] is c.segments[0]  # what branches share they share again
    client.connect()
    client.send(w.Generate(id=client.id(), branch="c", max_tokens=5, temperature=0))
    engine.pump()
    check_client(engine, client)
    engine.check_outputs(1)


def played(sim_class: Any, tokenizer: Tokenizer, at: int | None) -> Any:
    """A conversation with a crash after `at` steps, if at all."""
    engine = sim_class(tokenizer, stored=True, eos_every=40, seed=3)
    client = engine.session(parts=True, tools=[{"name": "f"}])
    client.send(
        w.Append(id=client.id(), messages=[w.ChatMessage(role="user", content="hi")]),
        w.Generate(id=client.id(), max_tokens=30, temperature=0, stop=["zzz"], logprobs=1),
        w.Append(id=client.id(), messages=[w.ChatMessage(role="user", content="more")]),
        w.Generate(id=client.id(), n=3, as_=["x", "y", "z"], max_tokens=8, temperature=0),
    )
    if at is not None:
        engine.pump(at)
        engine.save(1)
        engine.pump(2)  # what is not saved
        engine.crash()
        client.connect()
    engine.pump()
    check_client(engine, client)
    engine.check_outputs(1)
    return engine, client


@pytest.fixture(scope="module")
def undisturbed(sim_class: Any, tokenizer: Tokenizer) -> Any:
    return played(sim_class, tokenizer, None)


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_generation_goes_on_where_it_was(
    sim_class: Any, tokenizer: Tokenizer, undisturbed: Any, at: int
) -> None:
    """The text is that of a run without the crash, and the client sees it once."""
    (plain, told), (engine, client) = undisturbed, played(sim_class, tokenizer, at)
    for name, branch in plain.cores[1].state.branches.items():
        assert engine.cores[1].state.branches[name].tokens() == branch.tokens()
        assert client.text(name) == told.text(name) or name in "xyz"
    assert {i: [type(r) for r in replies] for i, replies in client.replies.items()} == {
        i: [type(r) for r in replies] for i, replies in told.replies.items()
    }
    done, again = told.replies[2][0], client.replies[2][0]
    assert again.usage.prompt == done.usage.prompt
    assert again.usage.output == done.usage.output


def test_an_outage_is_no_time_to_the_first_token(sim_class: Any, tokenizer: Tokenizer) -> None:
    engine = sim_class(tokenizer, stored=True)
    client = engine.session()
    client.send(
        w.Append(id=client.id(), text="one two three"),
        w.Generate(id=client.id(), max_tokens=30, temperature=0, ignore_eos=True),
    )
    main = engine.cores[1].state.branches["main"]
    while len(main.segments) < 2 or not main.segments[-1].tokens:
        engine.pump(1)
    engine.save(1)
    for _ in range(2):  # and once more, before it has gone on
        engine.now += 60.0
        engine.crash()
        engine.save(1)
    client.connect()
    engine.pump()
    usage = client.replies[2][0].usage
    assert usage.output == 30
    assert usage.ttft_ms < 1000
    assert usage.queue_ms < 1000
    assert usage.total_ms > 120_000


@settings(max_examples=examples(20, 60), derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32), sync=st.booleans())
def test_random_sessions_and_crashes(
    sim_class: Any, tokenizer: Tokenizer, seed: int, sync: bool
) -> None:
    """`sync`: saved before a client hears of anything, so nothing that it has heard is ever lost."""
    rng = random.Random(seed)
    small = {"context": 128, "step_tokens": 24, "max_rows": 4, "pages": 400}
    engine = sim_class(tokenizer, eos_every=20, seed=seed, stored=True, **small)
    if sync:
        flush = engine.flush

        def saving(number: int) -> None:
            if number in engine.cores:
                engine.save(number)
            flush(number)

        engine.flush = saving
    clients = [
        engine.session(
            detach=rng.choice(["run", "pause", "cancel"]),
            parts=rng.random() < 0.5,
            template=rng.choice(["append", "strict"]),
        )
        for _ in range(3)
    ]
    for client in clients:
        client.send(w.Append(id=client.id(), tokens=[5, 6, 7]))
    engine.pump()
    for client in clients:
        engine.save(client.number)
    for _ in range(30):
        client = rng.choice(clients)
        if client.socket is None:
            client.connect()
        client.send(*(random_op(rng, client) for _ in range(rng.randrange(1, 5))))
        engine.pump(rng.randrange(0, 30))
        if not sync and rng.random() < 0.5:
            engine.save(client.number)
        if rng.random() < 0.15:
            engine.crash()
    engine.crash()
    for client in clients:
        client.connect()
    engine.pump()
    for client in clients:
        engine.check_outputs(client.number, client.chosen)
        if sync:
            check_client(engine, client)
        assert not client.unanswered or not sync
        assert engine.cores[client.number].state.expects == 0
        engine.save(client.number)
        core = engine.cores[client.number]
        if engine.saved[client.number]:  # nothing is left of segments and ops that are gone
            known = {f"s{link.saved.number}" for link in links(core)}
            left = {key for key in engine.saved[client.number] if key[0] == "s"}
            assert left == known
            assert not [key for key in engine.saved[client.number] if key[0] in "of"]
        client.send(*(w.Drop(id=client.id() + 10**6, branch=name) for name in list(core.state.branches)))
    engine.pump()
    assert engine.cache.referenced == 0
    assert engine.cache.free + engine.cache.evictable == engine.cache.total


def links(core: Any) -> list[Any]:
    found = {}
    for branch in core.state.branches.values():
        link = branch.segments.top
        while link is not None and id(link) not in found:
            found[id(link)] = link
            link = link.before
    return list(found.values())


def test_a_client_hears_that_what_it_saw_is_lost(sim_class: Any, tokenizer: Tokenizer) -> None:
    engine = sim_class(tokenizer, stored=True)
    client = engine.session()
    client.send(w.Append(id=client.id(), text="one two three"))
    engine.pump()
    engine.save(1)
    client.send(w.Generate(id=client.id(), max_tokens=9, temperature=0))
    engine.pump()
    client.send(w.Rollback(id=client.id(), branch="main", to=2))
    engine.pump()
    engine.crash()
    states: list[w.StateReply] = []
    receive = client.receive
    client.receive = lambda ms: (
        states.extend(m for m in ms if isinstance(m, w.StateReply)),
        receive(ms),
    )
    client.connect()
    engine.pump()
    assert (states[0].resumed, states[0].lost) == (True, True)
    assert client.have["main"] <= engine.cores[1].state.branches["main"].position
    client.drop()
    client.connect()
    engine.pump()
    assert not states[1].lost


def test_damage_is_told(sim_class: Any, tokenizer: Tokenizer) -> None:
    engine = sim_class(tokenizer, stored=True)
    client = engine.session()
    client.send(
        w.Append(id=client.id(), text="one two"),
        w.Generate(id=client.id(), max_tokens=3, temperature=0),
        w.Append(id=client.id(), text=" four"),
    )
    engine.pump()
    engine.save(1)
    items = engine.saved[1]
    head = read_head(items)
    broken: list[dict[str, bytes]] = [
        {},
        {**items, "head": b"\xc1"},
        {**items, "head": msgspec.msgpack.encode(msgspec.structs.replace(head, format=99))},
        {**items, "head": items["head"][:-3]},
        *(
            {**items, "head": msgspec.msgpack.encode(msgspec.structs.replace(head, branches=[wrong]))}
            for wrong in (
                msgspec.structs.replace(head.branches[0], label=-1),
                msgspec.structs.replace(head.branches[0], label=9),
                msgspec.structs.replace(head.branches[0], of=-2),
            )
        ),
    ]
    for each in broken:
        with pytest.raises(Damaged):
            restore(engine.make_core(1, saved=True), each, 1.0, 1.0)
    partly = [
        *({k: v for k, v in items.items() if k != key} for key in items if key[0] == "s"),
        *({**items, key: items[key][:-3]} for key in items if key != "head"),
        {**items, "s1": items["s2"]},
    ]
    for each in partly:  # what can be read of it comes back
        assert not restore(engine.make_core(1, saved=True), each, 1.0, 1.0)
