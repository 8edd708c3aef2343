"""A session whose engine has gone goes on at another one, and no client notices."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from tests.actors.session.test_random_sessions import check_client, random_op
from tests.amount import examples


def played(sim_class: Any, tokenizer: Tokenizer, at: int | None) -> Any:
    """A conversation whose engine goes after `at` steps, if at all."""
    scores: Any = "unconditional_likelihood_normalized"
    engine = sim_class(tokenizer, eos_every=40, seed=3)
    client = engine.session(parts=True, tools=[{"name": "f"}])
    client.send(
        w.Append(id=client.id(), messages=[w.ChatMessage(role="user", content="hi")]),
        w.Generate(id=client.id(), max_tokens=30, temperature=0, stop=["zzz"], logprobs=1),
        w.Select(id=client.id(), choices=["yes", "no"], method=scores),
        w.Append(id=client.id(), messages=[w.ChatMessage(role="user", content="more")]),
        w.Generate(id=client.id(), n=3, as_=["x", "y", "z"], max_tokens=8, temperature=1, seed=5),
    )
    if at is not None:
        engine.pump(at)
        engine.move()
    engine.pump()
    check_client(engine, client)
    return engine, client


@pytest.fixture(scope="module")
def undisturbed(sim_class: Any, tokenizer: Tokenizer) -> Any:
    return played(sim_class, tokenizer, None)


@pytest.mark.parametrize("at", range(0, 90, 3))
def test_a_generation_goes_on_at_the_same_position(
    sim_class: Any, tokenizer: Tokenizer, undisturbed: Any, at: int
) -> None:
    """Texts and replies are those of a run whose engine lives."""
    (plain, told), (engine, client) = undisturbed, played(sim_class, tokenizer, at)
    for name, branch in plain.cores[1].state.branches.items():
        assert engine.cores[1].state.branches[name].tokens() == branch.tokens()
        assert client.text(name) == told.text(name)
    assert {i: [type(r) for r in replies] for i, replies in client.replies.items()} == {
        i: [type(r) for r in replies] for i, replies in told.replies.items()
    }
    for ident, replies in told.replies.items():
        for done, again in zip(replies, client.replies[ident], strict=True):
            if isinstance(done, w.Done):
                assert (again.usage.output, again.text) == (done.usage.output, done.text)


@settings(max_examples=examples(24, 80), derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_sessions_move_at_any_time(sim_class: Any, tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    small = {"context": 128, "step_tokens": 24, "max_rows": 4, "pages": 400}
    engine = sim_class(tokenizer, eos_every=20, seed=seed, turn=(1 << 40, 1)[seed % 2], **small)
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
    for _ in range(30):
        client = rng.choice(clients)
        if client.socket is None:
            client.connect()
        client.send(*(random_op(rng, client) for _ in range(rng.randrange(1, 5))))
        engine.pump(rng.randrange(0, 30))
        if rng.random() < 0.1:
            client.drop()
        if rng.random() < 0.2:
            engine.move()
    for client in clients:
        if client.socket is None:
            client.connect()
    engine.pump()
    for client in clients:
        engine.check_outputs(client.number, client.chosen)
        check_client(engine, client)
        assert not client.unanswered
        core = engine.cores[client.number]
        assert core.state.expects == 0
        assert not core.busy
        client.send(*(w.Drop(id=client.id() + 10**6, branch=name) for name in list(core.state.branches)))
    engine.pump()
    assert engine.cache.referenced == 0
    assert engine.cache.free + engine.cache.evictable == engine.cache.total


def test_what_comes_late_from_the_old_engine_changes_nothing(
    sim_class: Any, tokenizer: Tokenizer
) -> None:
    engine = sim_class(tokenizer, seed=1, eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=client.id(), text="one two three"),
        w.Generate(id=client.id(), max_tokens=30, temperature=0),
    )
    engine.pump(40)
    core = engine.cores[1]
    (request,) = core.generations._by_request
    engine.move()
    engine._session(1, engine._mail[1].pop())
    assert list(core.generations._by_request) != [request]
    late = m.Progress(request, b"\x07\0\0\0")
    ended = m.Finished(request, "cancelled", 0, 3, 0, 3, 0.0, 0.0, 0.0, 0.0)
    core.tokens(m.Tokens([late], [ended]), engine.now)
    core.compiled(m.Compiled(request, 1), engine.now)
    core.inspected(m.Inspected(request, [0]), engine.now)
    engine.pump()
    engine.check_outputs(1)
    check_client(engine, client)
    (done,) = client.replies[2]
    assert done.usage.output == 30


def test_what_has_only_to_be_confirmed_ends_once(sim_class: Any, tokenizer: Tokenizer) -> None:
    """A stop string was found when the engine went: usage is that of an undisturbed run, and the choices
    that follow are scored once.
    """

    def run(at: int | None) -> Any:
        engine = sim_class(tokenizer, eos_every=40, seed=3)
        client = engine.session()
        client.send(
            w.Append(id=client.id(), messages=[w.ChatMessage(role="user", content="hi")]),
            w.Generate(id=client.id(), max_tokens=40, temperature=0, stop=["a", "o", "i", "n", "t"]),
            w.Select(id=client.id(), choices=["yes", "no", "one two"]),
        )
        if at is None:
            engine.pump()
            return client.replies.values()
        engine.pump(at)
        engine.move()
        engine.pump()
        check_client(engine, client)
        handles = {branch.handle for branch in engine.cores[1].state.branches.values()}
        assert set(engine.cache.branches.of(1)) == handles
        return client.replies.values()

    _, plain, choice = run(None)
    for at in range(10, 30):
        _, done, chosen = run(at)
        assert done[0].usage.output == plain[0].usage.output, at
        assert done[0].usage.cached + done[0].usage.computed <= done[0].usage.prompt, at
        assert chosen[0].choice == choice[0].choice


RECORD = w.Constraint(regex=r'\{"name": "[a-z]{1,12}", "tags": \[("[a-z]", ){0,3}"[a-z]"\]\}')


@pytest.mark.parametrize(("constraint", "drafts"), [(RECORD, 0), (None, 8)])
def test_usage_is_that_of_the_whole(
    sim_class: Any, tokenizer: Tokenizer, constraint: w.Constraint | None, drafts: int
) -> None:
    """What the engine that went had counted of a generation is not lost, however often it moves."""

    def run(*moves: int) -> tuple[w.Usage, int, int]:
        """The usage, and the drafts and forced tokens that were told before the last move."""
        engine = sim_class(tokenizer, seed=3, eos_every=0, drafts=drafts, acceptance=0.9)
        client = engine.session()
        client.send(
            w.Append(id=1, text="hello"),
            w.Generate(id=2, constraint=constraint, max_tokens=200, temperature=0),
        )
        accepted = forced = 0
        for at in moves:
            engine.pump(at)
            for generation, _ in engine.cores[1].generations._by_request.values():
                accepted, forced = generation.accepted, generation.forced
            engine.move()
        engine.pump()
        (done,) = client.replies[2]
        return done.usage, accepted, forced

    plain, _, _ = run()
    seen = [run(at, at // 2) for at in range(12, 60, 4)]
    assert {(usage.output, usage.forced) for usage, *_ in seen} == {(plain.output, plain.forced)}
    assert all(usage.accepted >= accepted for usage, accepted, _ in seen)
    assert any(forced for *_, forced in seen) == (constraint is not None)
    assert any(accepted for _, accepted, _ in seen) == (drafts > 0)
