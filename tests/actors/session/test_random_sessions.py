"""Random sessions against a model: whatever happens, text is that of an uninterrupted run.

After every step of every actor the cache's invariants hold (free + evictable + referenced = total
among them); at the end nothing is referenced, every op has its replies, and what clients pieced
together from deltas is what the branches hold.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.cache import snapshots
from ramify.actors.calls.dialects import dialect_of
from ramify.actors.grammar.structure import structure_automaton
from ramify.actors.session.branches.segments import OutputSegment
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.structure import JsonPart, Structure, StructureTag, TagsPart
from tests.amount import examples, stride

NAMES = ["main", "a", "b", "c"]
ARGUMENTS = {
    "properties": {"q": {"type": "string", "maxLength": 4}, "n": {"enum": [1, 22, None]}},
    "required": ["n"],
    "additionalProperties": False,
}
CALLS = structure_automaton(
    Structure(
        TagsPart(
            [
                StructureTag(
                    '<tool_call>\n{"name": "f", "arguments": ',
                    JsonPart({"type": "object", **ARGUMENTS}),
                    "}\n</tool_call>",
                )
            ],
            ["<tool_call>"],
        )
    )
)[0]
KINDS = {
    "append": 3, "message": 3, "generate": 6, "select": 2, "fork": 3, "rollback": 2, "drop": 1,
    "cancel": 2, "root": 1, "list": 1, "join": 1, "prune": 2,
}  # fmt: skip

TURNS = (1 << 40, 1, 300)  # what a session does in a turn of the loop: all, a step, some


def random_op(rng: random.Random, client: Any) -> w.Op:
    name = rng.choice(NAMES)
    ident = client.id()
    kind = rng.choices(
        [*KINDS],
        [*KINDS.values()],
    )[0]
    match kind:
        case "append":
            return w.Append(
                id=ident, branch=name, tokens=[rng.randrange(3, 300) for _ in range(rng.randrange(1, 9))]
            )
        case "message":
            role = rng.choice(["user", "user", "system", "assistant"])
            message = w.ChatMessage(role=role, content=rng.choice(["hi", "one two three", "café"]))
            return w.Append(id=ident, branch=name, messages=[message])
        case "generate":
            choice = rng.choice(["auto", "auto", "auto", "none", "required", "f"])
            if choice == "none":
                client.engine.unheld.add((client.number, client.name, ident))
            return w.Generate(
                id=ident,
                branch=name,
                max_tokens=rng.randrange(1, 25),
                temperature=0,
                stop=rng.choice([[], [], ["e"], ["ab", "th"]]),
                quiet=rng.random() < 0.1,
                tool_choice=choice,
            )
        case "select":
            return w.Select(
                id=ident,
                branch=rng.choice([name, name, ["main", "b"]]),
                choices=rng.sample(
                    ["e", "hi", "one", " two three", "ld", "é", "東"], rng.randrange(1, 5)
                ),
                method=rng.choice(
                    [
                        "token_length_normalized",
                        "greedy_token_selection",
                        "unconditional_likelihood_normalized",
                    ]
                ),
            )
        case "fork":
            return w.Fork(id=ident, branch=name, as_=rng.sample(NAMES, rng.randrange(1, 3)))
        case "rollback":
            if rng.random() < 0.5:
                return w.Rollback(id=ident, branch=name, turns=rng.randrange(1, 3))
            return w.Rollback(id=ident, branch=name, to=rng.randrange(0, 40))
        case "drop":
            return w.Drop(id=ident, branch=name)
        case "cancel":
            return w.Cancel(id=ident, subtree=rng.random() < 0.3, branch=rng.choice([None, "main"]))
        case "root":
            return w.Fork(id=ident, branch=None, as_=[name])
        case "join":
            into, *sources = rng.sample(NAMES, rng.randrange(2, 4))
            role = rng.choice(["user", None])
            return w.Join(id=ident, from_=sources, branch=into, role=role, keep=rng.random() < 0.5)
        case "prune":
            sources = rng.sample(NAMES, rng.randrange(1, 4))
            by = rng.choice(["first", "logprob", "number", "vote"])
            into = rng.choice([None, rng.choice(NAMES)])
            return w.Prune(id=ident, from_=sources, by=by, into=into, keep=rng.random() < 0.5)
        case _:
            return w.Generate(id=ident, branch=["main", "a"], max_tokens=5, temperature=0)


def check_client(engine: Any, client: Any) -> None:
    """Every op was answered, and the deltas add up to what the branches hold."""
    assert engine.cores[client.number].state.expects == 0
    assert client.unanswered == {}, client.unanswered
    for ident, replies in client.replies.items():
        branches = [getattr(reply, "branch", None) for reply in replies]
        assert len(set(branches)) == len(branches), ident
    for name, branch in engine.cores[client.number].state.branches.items():
        held = {}
        for segment in branch.segments:
            if isinstance(segment, OutputSegment):
                assert segment.ended
                text = ""
                for count, chunk in zip(segment.counts, segment.chunks, strict=True):
                    text += chunk
                    held[segment.start + count] = (segment.start, segment.quiet, text)
        last: dict[int, str] = {}
        for position, text in client.chunks.get(name, ()):
            assert position in held, (name, position, sorted(held))
            start = held[position][0]
            last[start] = last.get(start, "") + text
            assert last[start] == held[position][2][-len(last[start]) :] or not last[start]


@settings(max_examples=examples(20, 60), derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([160, 400, 4096]),
    page_size=st.sampled_from([1, 4]),
    in_flight=st.sampled_from([1, 2]),
    drafts=st.sampled_from([0, 3, 8]),
    acceptance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_random_sessions(
    sim_class: Any,
    tokenizer: Tokenizer,
    seed: int,
    pages: int,
    page_size: int,
    in_flight: int,
    drafts: int,
    acceptance: float,
) -> None:
    options = {"drafts": drafts, "acceptance": acceptance, "in_flight": in_flight}
    random_sessions(sim_class, tokenizer, seed, pages, page_size, options)


@settings(max_examples=examples(30, 120), derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([160, 400, 4096]),
    in_flight=st.sampled_from([1, 2]),
    state_slots=st.sampled_from([4, 9, 17, 40, 200]),
    drafts=st.sampled_from([0, 3]),
    near=st.sampled_from([0, 2, 64]),
)
def test_random_sessions_of_a_model_with_states(
    sim_class: Any,
    tokenizer: Tokenizer,
    seed: int,
    pages: int,
    in_flight: int,
    state_slots: int,
    drafts: int,
    near: int,
) -> None:
    """The executor checks that each step reads the state of just its row's tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "NEAR", near)
        patch.setattr(snapshots, "STRIDE", 8)
        options = {"state_slots": state_slots, "in_flight": in_flight, "drafts": drafts}
        engine = random_sessions(sim_class, tokenizer, seed, pages, 1, options)
    states = engine.cache.residency.snapshots
    assert states.available == states.total


@settings(max_examples=examples(30, 120), derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([160, 400, 4096]),
    drafts=st.sampled_from([0, 3]),
    window=st.sampled_from([2, 7, 40]),
    more=st.sampled_from([100, 400, 2000]),
    near=st.sampled_from([0, 2, 64]),
)
def test_random_sessions_of_a_model_with_windows(
    sim_class: Any,
    tokenizer: Tokenizer,
    seed: int,
    pages: int,
    drafts: int,
    window: int,
    more: int,
    near: int,
) -> None:
    """The executor checks that no step reads a window page that is not its row's any more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "NEAR", near)
        patch.setattr(snapshots, "STRIDE", 8)
        options = {"window": window, "window_pages": 2 * window + more, "drafts": drafts}
        engine = random_sessions(sim_class, tokenizer, seed, pages, 1, options)
    tails = engine.cache.residency.snapshots
    assert tails.held == 0


def random_sessions(
    sim_class: Any,
    tokenizer: Tokenizer,
    seed: int,
    pages: int,
    page_size: int,
    options: dict[str, Any],
) -> Any:
    rng = random.Random(seed)
    engine = sim_class(
        tokenizer,
        pages=pages // page_size,
        page_size=page_size,
        context=128,
        turn=TURNS[seed % 3],
        step_tokens=24,
        max_rows=4,
        eos_every=20,
        seed=seed,
        **options,
    )
    engine.calls = CALLS
    engine.template = ChatTemplate(tokenizer, dialect_of("", "hermes"))
    clients = [
        engine.session(
            detach=rng.choice(["run", "pause", "cancel"]),
            parts=rng.random() < 0.5,
            tools=rng.choice([None, [{"name": "f", "parameters": ARGUMENTS}]]),
        )
        for _ in range(3)
    ]
    for client in clients:
        client.send(w.Append(id=client.id(), tokens=[5, 6, 7]))
    engine.pump()  # sessions have their keys
    for _ in range(30):
        client = rng.choice(clients)
        if rng.random() < 0.15 and client.socket is not None:
            client.drop()
        elif client.socket is None:
            client.connect()
        client.send(*(random_op(rng, client) for _ in range(rng.randrange(1, 5))))
        engine.pump(rng.randrange(0, 30))
    for client in clients:
        if client.socket is None:
            client.connect()
    engine.pump()
    for client in clients:
        engine.check_outputs(client.number, client.chosen)
        check_client(engine, client)
        client.send(
            *(
                w.Drop(id=client.id(), branch=name)
                for name in list(engine.cores[client.number].state.branches)
            )
        )
    engine.pump()
    assert engine.cache.referenced == 0
    assert engine.cache.free + engine.cache.evictable == engine.cache.total
    assert engine.executor.corruptions == 0
    return engine


@settings(max_examples=examples(20, 60), derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_broken_engine_answers_every_op_once(sim_class: Any, tokenizer: Tokenizer, seed: int) -> None:
    """Whatever ran, waited, was paused, or was held back from a socket that does not read."""
    rng = random.Random(seed)
    limits = Limits(running=rng.choice([1, 2, 16]))
    engine = sim_class(
        tokenizer,
        context=128,
        turn=TURNS[seed % 3],
        step_tokens=24,
        max_rows=4,
        seed=seed,
        limits=limits,
    )
    tools = rng.choice([None, [{"name": "f"}]])
    client = engine.session(detach=rng.choice(["run", "pause"]), parts=rng.random() < 0.5, tools=tools)
    client.send(w.Append(id=client.id(), tokens=[5, 6, 7]))
    engine.pump()
    resent: set[int] = set()
    for _ in range(rng.randrange(1, 12)):
        client.send(*(random_op(rng, client) for _ in range(rng.randrange(1, 5))))
        engine.pump(rng.randrange(0, 30))
        if rng.random() < 0.2:
            client.drop()
            engine.pump(rng.randrange(0, 9))
            resent |= set(client.unanswered)
            client.connect()
        elif rng.random() < 0.2:
            engine.post_session(1, m.Throttled(client.socket))
    counts: dict[tuple[int, str | None], int] = {}
    receive = client.receive

    def counting(messages: list[w.ServerMessage]) -> None:
        for message in messages:
            if isinstance(message, w.Ok | w.Done | w.Error) and message.id is not None:
                key = (message.id, message.branch)
                counts[key] = counts.get(key, 0) + 1
        receive(messages)

    client.receive = counting
    waiting = set(client.unanswered)
    engine.fail(1)
    assert client.unanswered == {}
    assert waiting <= {ident for ident, _ in counts}
    again = {ident for (ident, _), count in counts.items() if count > 1}
    assert again <= resent  # a repeated op gets what is kept of it, besides what was missed
    assert engine.cores[1].ended is not None


def program(client: Any) -> None:
    """A chat with forks, stop strings and several turns."""
    user = [w.ChatMessage(role="user", content="Plan a trip.")]
    client.send(
        w.Append(id=1, messages=user),
        w.Fork(id=2, as_=["a", "b"]),
        w.Generate(id=3, branch=["a", "b"], max_tokens=12, temperature=0.9, seed=3),
        w.Generate(id=4, max_tokens=15, temperature=0, stop=["e"]),
        w.Append(id=5, messages=user),
        w.Generate(id=6, max_tokens=15, temperature=0.7, seed=9, logprobs=0),
    )


def tree_of_thought(client: Any) -> None:
    """Children that race, vote and are joined, in one frame; an op in the middle fails."""
    names = ["a", "b", "c"]
    client.send(
        w.Append(id=1, messages=[w.ChatMessage(role="user", content="Plan a trip.")]),
        w.Fork(id=2, as_=names),
        *(w.Append(id=3 + i, branch=name, tokens=[20 + i]) for i, name in enumerate(names)),
        w.Generate(id=6, branch=names, max_tokens=6, temperature=0),
        w.Prune(id=7, from_=names, by="logprob", into="main"),
        w.Generate(id=8, n=2, as_=names[:2], max_tokens=8, temperature=0.9, seed=4),
        w.Join(id=9, from_=["a", "b"], each="{i}) {text}\n", role=None),
        w.Generate(id=10, max_tokens=5, temperature=0),
        w.Fork(id=11, as_=["d", "e"]),
        w.Append(id=12, branch="d", tokens=[10**6]),
        w.Generate(id=13, branch=["d", "e"], max_tokens=5, temperature=0),
        w.Prune(id=14, from_=["d", "e"], by="vote", into=["best"]),
        w.Join(id=15, from_=["best", "d"]),
        w.Generate(id=16, max_tokens=3, temperature=0),
        replies={16: 1},
    )


@pytest.mark.parametrize("policy", ["run", "pause", "cancel"])
def test_resume_at_every_frame_of_a_program(sim: Callable[..., Any], policy: str) -> None:
    """Each op has its reply, each branch its text, wherever the connection was lost."""
    engine = sim(eos_every=0, seed=1)
    whole = engine.session(detach=policy)
    tree_of_thought(whole)
    engine.pump()
    assert whole.unanswered == {}
    ends = {ident: [_end(reply) for reply in replies] for ident, replies in whole.replies.items()}
    assert [ends[i] for i in (12, 14, 15, 16)] == [
        ["bad_request"],
        ["ok"],
        ["skipped"],
        ["skipped"],
    ]
    state = engine.cores[1].state
    texts = {name: branch.text() for name, branch in state.branches.items()}
    assert set(texts) == {"main", "best"}
    first = 1 + len(policy) % stride(3)  # another one for each policy but two
    for cut in range(first, whole.frames + 1, stride(3)):
        engine = sim(eos_every=0, seed=1)
        client = engine.session(detach=policy)
        tree_of_thought(client)
        while client.frames < cut:
            engine.pump(1)
        client.drop()
        engine.pump(cut % 7)
        client.connect()
        engine.pump()
        assert client.unanswered == {}, cut
        assert set(client.have) == set(engine.cores[1].state.branches), cut
        if policy == "cancel":  # what ran then was cut short, and the rest worked with it
            continue
        for name, branch in engine.cores[1].state.branches.items():
            assert client.have[name] == branch.position, (cut, name)
        assert {name: b.text() for name, b in engine.cores[1].state.branches.items()} == texts, cut
        found = {ident: [_end(reply) for reply in replies] for ident, replies in client.replies.items()}
        assert found == ends, cut


def _end(reply: Any) -> str:
    if isinstance(reply, w.Error):
        return str(reply.code)
    return reply.reason if isinstance(reply, w.Done) else "ok"


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("policy", ["run", "pause"])
def test_resume_at_every_frame_gives_the_same_text(
    sim: Callable[..., Any], policy: str, drafts: int
) -> None:
    engine = sim(eos_every=0, seed=1)
    whole = engine.session(detach=policy)
    program(whole)
    engine.pump()
    assert whole.unanswered == {}
    texts = {name: whole.text(name) for name in ("main", "a", "b")}
    assert all(texts.values())
    if drafts:  # the same text in fewer frames
        engine = sim(eos_every=0, seed=1, drafts=drafts, acceptance=0.7)
        whole = engine.session(detach=policy)
        program(whole)
        engine.pump()
        assert {name: whole.text(name) for name in texts} == texts
        assert engine.executor.drafts.accepted > 0
    frames = whole.frames
    for cut in range(1 + (drafts > 0) % stride(2), frames + 1, stride(2)):
        engine = sim(eos_every=0, seed=1, drafts=drafts, acceptance=0.7)
        client = engine.session(detach=policy)
        program(client)
        while client.frames < cut:
            engine.pump(1)
        client.drop()
        engine.pump(cut % 7)
        client.connect()
        engine.pump()
        assert client.unanswered == {}, cut
        assert {name: client.text(name) for name in texts} == texts, cut
        positions = {name: b.position for name, b in engine.cores[1].state.branches.items()}
        assert {r.branch: r.position for r in client.replies[3]} == {
            name: positions[name] for name in ("a", "b")
        }
