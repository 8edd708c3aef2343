"""`select` in a session: scores, the branch afterwards, and one reply whatever happens to it."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ramify.actors.kit.memory import MARK, SEGMENT, TOKEN
from ramify.actors.session.branches.branch import SessionBranch, input_segment
from ramify.actors.session.branches.segments import OutputSegment, Tail
from ramify.actors.session.branches.tasks import Joined
from ramify.actors.session.ops import op_bytes
from ramify.actors.session.ops.scoring import selects
from ramify.actors.session.ops.scoring.selection import NODE, ChoiceTree, choose
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.plan import pack, pack_floats
from ramify.protocol.sampling import SamplingParams
from tests.actors.session.alone import Alone

METHODS = [
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
]
CHOICES = ["Paris", "Paris and Spain", "Madrid", " one two three", "東京", "P"]


def tokens(engine: Any, name: str = "main") -> list[int]:
    return list(engine.cores[1].state.branches[name].tokens())


def wanted(
    engine: Any, before: Sequence[int], choices: Sequence[Sequence[int]], method: Any
) -> tuple[int, list[float]]:
    """From the fake model's own definition, choice by choice."""

    def scores(context: Sequence[int], choice: Sequence[int]) -> list[float]:
        whole = [*context, *choice]
        places = range(len(context) - 1, len(whole) - 1)
        known = [(place, token) for place, token in zip(places, choice, strict=True) if place >= 0]
        found = engine.model.expected_scores(whole, *zip(*known, strict=True)) if known else []
        return [0.0] * (len(choice) - len(found)) + found

    tree = ChoiceTree(choices)
    behind, alone = [0.0] * len(tree), [0.0] * len(tree)
    for choice, walk in zip(choices, tree.walks, strict=True):
        for into, context in ((behind, before), (alone, engine.tokenizer.start_ids)):
            for node, score in zip(walk, scores(context, choice), strict=True):
                into[node] = score
    return choose(method, tree.walks, behind, alone)


def at_rest(engine: Any) -> None:
    """Nothing of a selection is left anywhere."""
    core = engine.cores[1]
    handles = {handle for handle, _ in engine.cache.branches.items()}
    sessions = engine.cores.values()
    assert handles == {branch.handle for each in sessions for branch in each.state.branches.values()}
    assert not engine.cache.runs
    assert not core.runner.selects.busy
    assert not core.runner.selects.requests
    for name, branch in core.state.branches.items():
        node = engine.cache.branches.find(branch.handle)
        assert node.end == branch.position, name


def done(client: Any, ident: int, branch: str | None = None) -> Any:
    (reply,) = [r for r in client.replies[ident] if branch in (None, r.branch)]
    assert isinstance(reply, w.Done), reply
    return reply


def error(client: Any, ident: int) -> Any:
    (reply,) = client.replies[ident]
    assert isinstance(reply, w.Error), reply
    return reply


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("step_tokens", [16, 64])
def test_scores_and_the_branch(
    sim: Callable[..., Any], method: Any, page_size: int, step_tokens: int
) -> None:
    engine = sim(page_size=page_size, step_tokens=step_tokens)
    client = engine.session(tokens=True)
    client.send(
        w.Append(id=1, text="Capital of France? And Spain?" * 3),
        w.Select(id=2, choices=CHOICES, method=method),
    )
    engine.pump()
    reply = done(client, 2)
    encoded = [engine.tokenizer.encode(choice) for choice in CHOICES]
    before = tokens(engine)[: reply.position - reply.usage.output]
    index, scores = wanted(engine, before, encoded, method)
    assert (reply.choice, reply.text, reply.reason) == (index, CHOICES[index], "stop")
    assert reply.scores == pytest.approx(scores)
    assert tokens(engine) == [*before, *encoded[index]]
    assert client.text("main") == CHOICES[index]
    assert reply.usage.prompt == reply.usage.cached + reply.usage.computed
    at_rest(engine)


def test_what_the_branch_has_is_not_computed_again(sim: Callable[..., Any]) -> None:
    """Each choice costs its own tokens: the last of them is not run, the last of the prompt is."""
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, text="The quick brown fox jumps over"))
    engine.pump()
    before = engine.computed
    assert before == len(tokens(engine))
    choices = ["Paris", "Madrid", "seven"]
    client.send(w.Select(id=2, choices=choices))
    engine.pump()
    encoded = [engine.tokenizer.encode(choice) for choice in choices]
    tree = ChoiceTree(encoded)
    # one path runs the prompt's last token, each other path its own tokens only
    run = 1 + sum(len(path.tokens) - max(0, path.depths[0] - 1) for path in tree.paths)
    assert engine.computed - before <= run
    assert done(client, 2).usage.computed == engine.computed - before


def test_the_next_generation_finds_the_choice_computed(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, text="Capital of France?"),
        w.Select(id=2, choices=[" Paris and Spain", " Madrid and so on"]),
        w.Generate(id=3, max_tokens=5, temperature=0.0, ignore_eos=True),
    )
    engine.pump()
    usage = done(client, 3).usage
    assert (usage.computed, usage.cached) == (1, usage.prompt - 1)
    before = tokens(engine)[: usage.prompt]
    assert tokens(engine)[usage.prompt :] == engine.model.expected(before, 5)


def test_a_word_that_a_choice_completes(sim: Callable[..., Any]) -> None:
    """The branch's last token becomes another one; clients see one text."""
    engine = sim()
    client = engine.session(tokens=True)
    other = w.Open(client="d", session="s_1", key="key", have={"main": 0}, revision=0)
    engine.pump()
    engine.sockets += 1
    engine.clients[engine.sockets] = watcher = Watcher()
    engine.post_session(1, m.Attach(engine.sockets, other, [], True))
    client.send(w.Append(id=1, text="hello wor"))
    engine.pump()
    head = tokens(engine)
    client.send(w.Select(id=2, choices=["ld"]))
    engine.pump()
    reply = done(client, 2)
    assert tokens(engine) == engine.tokenizer.encode("hello world")
    assert (reply.rebased, reply.text) == (len(head) - 1, "ld")
    branch = engine.cores[1].state.branches["main"]  # what a socket that comes back has lost
    assert (branch.undercut(reply.revision - 1), branch.undercut(reply.revision)) == (
        reply.rebased,
        None,
    )
    assert engine.tokenizer.decode(head[: reply.rebased]) + client.text("main") == "hello world"
    _, scores = wanted(
        engine, head[: reply.rebased], [tokens(engine)[reply.rebased :]], "token_length_normalized"
    )
    assert reply.scores == pytest.approx(scores)
    event = next(e for e in watcher.events if e.op == "select")
    assert event.details == {"position": reply.position, "reason": "stop"}
    assert watcher.text == {"main": "rld"}  # from where the delta says
    at_rest(engine)


def test_a_choice_that_changes_nothing_is_only_appended(sim: Callable[..., Any]) -> None:
    """Another one would have: both are scored from there, and the branch is not moved back."""
    engine = sim()
    client = engine.session()
    names = [f"b{i}" for i in range(20)]
    client.send(w.Fork(id=1, branch=None, as_=names))
    for i, name in enumerate(names):
        client.send(w.Append(id=2 + 2 * i, branch=name, text=f"{i} hello wor"))
        client.send(w.Select(id=3 + 2 * i, branch=name, choices=["ld", " one"]))
    engine.pump()
    replies = [done(client, 3 + 2 * i) for i in range(20)]
    assert {reply.choice for reply in replies} == {0, 1}
    for i, reply in enumerate(replies):
        text = engine.tokenizer.decode(tokens(engine, reply.branch))
        assert text == f"{i} hello wor" + ["ld", " one"][reply.choice]
        assert (reply.rebased is None) == (reply.choice == 1)
        if reply.choice == 1:
            before = len(engine.tokenizer.encode(f"{i} hello wor"))
            assert reply.position == before + reply.usage.output
            assert client.text(reply.branch) == " one"
    at_rest(engine)


class Watcher:
    """Another client's socket."""

    def __init__(self) -> None:
        self.events: list[w.Event] = []
        self.text: dict[str, str] = {}

    def receive(self, messages: list[w.ServerMessage]) -> None:
        self.events += [message for message in messages if isinstance(message, w.Event)]
        self.text |= {m.branch: m.text for m in messages if isinstance(m, w.Delta)}


def test_in_a_chat_the_turn_stays_open(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, messages=[w.ChatMessage(role="user", content="Capital?")]),
        w.Select(id=2, choices=["Paris", "Madrid"]),
        w.Append(id=3, messages=[w.ChatMessage(role="user", content="And?")]),
    )
    engine.pump()
    text = engine.tokenizer.decode(tokens(engine), special=True)
    said = done(client, 2).text
    wanted = f"<|im_start|>assistant\n{said}<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
    assert wanted in text


def test_after_a_complete_turn_the_prompt_is_added(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, messages=[w.ChatMessage(role="assistant", content="Hello")]),
        w.Select(id=2, choices=["one", "two"]),
    )
    engine.pump()
    text = engine.tokenizer.decode(tokens(engine), special=True)
    assert text.endswith("<|im_start|>assistant\n" + done(client, 2).text)


def test_many_choices_at_once(sim: Callable[..., Any]) -> None:
    """1,000 on default limits, in one go."""
    engine = sim(step_tokens=256, max_rows=64)
    engine.integrity = False
    client = engine.session()
    choices = [f" {i} one two {i * 7919 % 1000}" for i in range(1000)]
    client.send(w.Append(id=1, text="Merge the best parts."), w.Select(id=2, choices=choices))
    engine.pump()
    reply = done(client, 2)
    encoded = [engine.tokenizer.encode(choice) for choice in choices]
    before = tokens(engine)[: reply.position - reply.usage.output]
    index, scores = wanted(engine, before, encoded, "token_length_normalized")
    assert reply.scores == pytest.approx(scores)
    assert reply.choice == index
    at_rest(engine)
    assert engine.cores[1].state.limits == Limits()


def test_on_several_branches_beside_others(sim: Callable[..., Any]) -> None:
    engine = sim(max_rows=4)
    client = engine.session()
    names = ["a", "b", "c"]
    client.send(
        w.Append(id=1, text="one two three"),
        w.Fork(id=2, as_=[*names, "d"]),
        w.Append(id=3, branch="b", text=" four"),
        w.Generate(id=4, branch="d", max_tokens=40, temperature=0.0),
        w.Select(id=5, branch=names, choices=CHOICES),
        w.Generate(id=6, max_tokens=20, temperature=0.0),
    )
    engine.pump()
    encoded = [engine.tokenizer.encode(choice) for choice in CHOICES]
    for name in names:
        reply = done(client, 5, name)
        before = tokens(engine, name)[: reply.position - reply.usage.output]
        index, scores = wanted(engine, before, encoded, "token_length_normalized")
        assert (reply.choice, reply.scores) == (index, pytest.approx(scores))
    engine.cores[1].state.branches = {
        name: branch for name, branch in engine.cores[1].state.branches.items() if name in ("main", "d")
    }
    engine.check_outputs(1)


@pytest.mark.parametrize("steps", range(0, 60, 4))
def test_cancelled_at_any_time(sim: Callable[..., Any], steps: int) -> None:
    """By branch or id: the branch is as it was, what follows in the frame is skipped."""
    engine = sim(step_tokens=16, seed=steps, context=4096)
    client = engine.session()
    client.send(w.Append(id=1, messages=[w.ChatMessage(role="assistant", content="Hi. " * 9)]))
    engine.pump()
    before = tokens(engine)
    client.send(
        w.Select(
            id=2, choices=[f"{i}, {i}" for i in range(99)], method="unconditional_likelihood_normalized"
        ),
        w.Append(id=3, text="never"),
    )
    engine.pump(steps)
    client.send(w.Cancel(id=4, branch="main") if steps % 8 else w.Cancel(id=4, ops=[2]))
    engine.pump()
    (reply,) = client.replies[2]
    if isinstance(reply, w.Done):
        assert steps > 10
        return
    assert reply.code == "cancelled"
    assert error(client, 3).code == "skipped"
    assert tokens(engine) == before
    at_rest(engine)
    client.send(w.Select(id=5, choices=["Paris"]))  # the session is usable at once
    engine.pump()
    assert done(client, 5).choice == 0


@pytest.mark.parametrize("steps", [4, 8, 20])
def test_the_deadline(sim: Callable[..., Any], steps: int) -> None:
    engine = sim(step_tokens=16, context=4096)
    client = engine.session()
    client.send(w.Append(id=1, text="hello " * 100))
    engine.pump()
    before = tokens(engine)
    client.send(w.Select(id=2, choices=[f"{i} one {i}" for i in range(200)], deadline_ms=500))
    engine.pump(steps)
    assert 2 not in client.replies
    engine.now += 0.6
    engine.post_session(1, m.Tick())
    engine.pump()
    assert error(client, 2).code == "deadline"
    assert tokens(engine) == before
    at_rest(engine)


def test_behind_an_op_that_takes_too_long(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0, context=4096)
    client = engine.session()
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=4000))
    client.send(w.Select(id=3, choices=["a"], deadline_ms=100))
    engine.pump(40)
    engine.now += 0.2
    engine.post_session(1, m.Tick())
    engine.pump(10)
    assert error(client, 3).code == "deadline"


def test_a_choice_that_does_not_fit(sim: Callable[..., Any]) -> None:
    """The context: an error that names it, before anything is scored or changed."""
    engine = sim(context=64)
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5] * 60), w.Select(id=2, choices=["a", "x y z u v w"]))
    engine.pump()
    reply = error(client, 2)
    assert (reply.code, reply.details["max"]) == ("too_long", 64)
    assert "choices[1]" in reply.message
    assert tokens(engine) == [5] * 60
    client.send(w.Append(id=3, tokens=[5] * 3), w.Select(id=4, choices=["a", "b"]))
    engine.pump()
    assert done(client, 4).position == 64  # to the last place
    at_rest(engine)


def test_a_pool_that_is_too_small(sim: Callable[..., Any]) -> None:
    engine = sim(pages=16, context=64)
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5] * 20), w.Select(id=2, choices=["a", "b"]))
    engine.pump()
    assert error(client, 2).code == "too_long"
    at_rest(engine)


@pytest.mark.parametrize("steps", range(0, 40, 5))
def test_the_engine_breaks(sim: Callable[..., Any], steps: int) -> None:
    engine = sim(step_tokens=16)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello " * 20), w.Select(id=2, choices=[f"{i}, {i}" for i in range(99)])
    )
    engine.pump(steps)
    engine.fail(1)
    (reply,) = client.replies[2]
    assert reply.code == "internal" if isinstance(reply, w.Error) else steps > 20


def test_kv_that_is_not_finite(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    bad = engine.tokenizer.encode("Madrid")[0]
    engine.executor.faults = {bad: 99}
    client.send(w.Append(id=1, text="one two"), w.Select(id=2, choices=["Paris", "Madrid"]))
    engine.pump()
    assert error(client, 2).code == "internal"
    at_rest(engine)
    engine.executor.faults = {}
    client.send(w.Select(id=3, choices=["Paris", "Madrid"]))
    engine.pump()
    reply = done(client, 3)
    encoded = [engine.tokenizer.encode(choice) for choice in ["Paris", "Madrid"]]
    before = tokens(engine)[: reply.position - reply.usage.output]
    assert reply.scores == pytest.approx(wanted(engine, before, encoded, METHODS[0])[1])


def test_more_selects_than_a_session_may_run(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(running=2))
    client = engine.session()
    names = [f"b{i}" for i in range(6)]
    client.send(
        w.Append(id=1, text="one"),
        w.Fork(id=2, as_=names),
        w.Select(id=3, branch=names, choices=CHOICES),
    )
    engine.pump(30)
    waiting = engine.cores[1].runner.selects._ready
    assert waiting
    client.send(w.Cancel(id=4, branch=names[-1]))
    engine.pump()
    assert {r.branch: type(r).__name__ for r in client.replies[3]} == {
        name: "Error" if name == names[-1] else "Done" for name in names
    }
    at_rest(engine)


@pytest.mark.parametrize("method", METHODS)
def test_a_large_select_goes_in_lots_and_a_small_one_beside_it(
    sim: Callable[..., Any], method: Any
) -> None:
    """No more requests of a session are with the scheduler than it may run; two selects share them."""
    engine = sim(limits=Limits(running=4), context=128)
    client = engine.session()
    client.send(w.Append(id=1, text="one"), w.Fork(id=2, as_=["small"]))
    engine.pump()
    asked: list[int] = []
    schedule = engine.scheduler.handle

    def watched(event: Any, now: float) -> None:
        schedule(event, now)
        asked.append(len(engine.scheduler.requests))

    engine.scheduler.handle = watched
    many = [f"{i} {i * 7} {'ab'[i % 2]}" for i in range(60)]
    client.send(w.Select(id=3, choices=many, method=method))
    engine.pump(3)
    client.send(w.Select(id=4, branch="small", choices=["one", "two three"], method=method))
    while 4 not in client.replies:
        engine.pump(1)
    assert 3 not in client.replies
    engine.pump()
    assert max(asked) == 4
    for ident, branch, choices in ((3, "main", many), (4, "small", ["one", "two three"])):
        reply = done(client, ident)
        encoded = [engine.tokenizer.encode(choice) for choice in choices]
        before = tokens(engine, branch)[: reply.position - reply.usage.output]
        index, scores = wanted(engine, before, encoded, method)
        assert reply.choice == index
        assert reply.scores == pytest.approx(scores)
    at_rest(engine)


@pytest.mark.parametrize("steps", [0, 4, 8, 16, 30])
def test_a_select_pauses_while_its_client_is_away(sim: Callable[..., Any], steps: int) -> None:
    """What is scored stays so; the rest, and a select that begins meanwhile, wait for the client."""
    engine = sim(limits=Limits(running=3), context=128)
    client = engine.session(detach="pause")
    other = engine.session("other")
    client.send(w.Append(id=1, text="one"))
    engine.pump()
    choices = [f"{i} {i}" for i in range(12)]
    client.send(w.Select(id=2, choices=choices), w.Select(id=3, choices=["a", "b"]))
    engine.pump(steps)
    selects, before = engine.cores[1].runner.selects, len(engine.cache.branches)
    for _ in range(3):  # nothing is left behind by who comes and goes
        client.drop()
        engine.pump()
        assert not selects.busy
        assert not engine.cache.runs
        if not client.replies.get(2):
            assert len(engine.cache.branches) <= before + 12
            client.connect()
            engine.pump(2)
    other.send(w.Append(id=1, text="x"), w.Select(id=2, choices=choices))
    client.drop() if client.socket is not None else None
    engine.pump()
    assert done(other, 2)
    client.connect()
    engine.pump()
    reply = done(client, 2)
    encoded = [engine.tokenizer.encode(choice) for choice in choices]
    index, scores = wanted(engine, engine.tokenizer.encode("one"), encoded, METHODS[0])
    assert (reply.choice, reply.scores) == (index, pytest.approx(scores))
    assert done(client, 3)
    at_rest(engine)


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_a_select_that_stops_submits_no_more(sim: Callable[..., Any], end: str) -> None:
    engine = sim(limits=Limits(running=2), context=128)
    client = engine.session()
    client.send(w.Append(id=1, text="one"))
    late = 10 if end == "deadline" else None
    client.send(w.Select(id=2, choices=[f"{i} {i}" for i in range(60)], deadline_ms=late))
    engine.pump(8)
    if end == "cancel":
        client.send(w.Cancel(id=3, ops=[2]))
    engine.pump()
    engine.post_session(1, m.Tick())
    engine.pump()
    assert error(client, 2).code == {"cancel": "cancelled", "deadline": "deadline"}[end]
    assert engine.computed < 60
    at_rest(engine)


def test_a_full_session(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(session_bytes=80_000))
    client = engine.session()
    client.send(w.Append(id=1, text="one"), w.Select(id=2, choices=["x" * 60] * 400))
    engine.pump()
    assert error(client, 2).code == "limit"
    assert tokens(engine) == engine.tokenizer.encode("one")
    at_rest(engine)


def test_memory_is_given_back(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, text="one"))
    engine.pump()
    held = []
    for i in range(4):
        client.send(
            w.Select(id=2 + 2 * i, choices=[f"{i}, {i}" for i in range(99)]),
            w.Rollback(id=3 + 2 * i, to=1),
        )
        engine.pump()
        held.append(engine.cores[1].state.meter.held)
    assert held[3] - held[2] == held[2] - held[1] < 20_000  # replies that are kept


def test_a_reply_that_was_missed(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, text="hello wor"))
    engine.pump()
    client.send(w.Select(id=2, choices=["ld", " one"]))
    engine.pump(4)
    client.drop()
    engine.pump()
    client.connect()
    engine.pump()
    reply = done(client, 2)
    text = engine.tokenizer.decode(tokens(engine))
    assert text == "hello wor" + CHOICES_HERE[reply.choice]
    if reply.rebased is not None:
        assert text.endswith(client.text("main"))
    at_rest(engine)


CHOICES_HERE = ["ld", " one"]


def test_tree_and_rollback(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, text="one two"),
        w.Select(id=2, choices=[" three"]),
        w.Tree(id=3, text=True),
    )
    engine.pump()
    client.send(w.Tree(id=4, text=True))
    engine.pump()
    (state,) = client.replies[4]
    assert [(t.kind, t.text, t.op) for t in state.branches[0].turns] == [
        ("input", "one two", 1),
        ("output", " three", 2),
    ]
    assert state.branches[0].reason == "stop"
    client.send(w.Rollback(id=5, to=state.branches[0].turns[1].start))
    engine.pump()
    assert engine.tokenizer.decode(tokens(engine)) == "one two"


def test_a_prune_compares_what_was_selected(sim: Callable[..., Any]) -> None:
    """By the mean log-probability of the appended tokens, and by text."""
    engine = sim()
    client = engine.session()
    names = ["a", "b", "c"]
    client.send(w.Append(id=1, text="Capital of France?"), w.Fork(id=2, as_=names))
    for i, name in enumerate(names):
        client.send(w.Select(id=3 + i, branch=name, choices=CHOICES[i : i + 1]))
    client.send(w.Prune(id=6, from_=names, into="main", by="logprob"))
    engine.pump()
    means = {name: done(client, 3 + i).mean_logprob for i, name in enumerate(names)}
    assert [means[name] for name in names] == [done(client, 3 + i).scores[0] for i in range(3)]
    (reply,) = client.replies[6]
    assert reply.result["scores"] == pytest.approx(means)
    best = max(means, key=means.__getitem__)
    text = engine.tokenizer.decode(tokens(engine))
    assert text == "Capital of France?" + CHOICES[names.index(best)]
    at_rest(engine)


def test_a_join_takes_what_was_chosen(sim: Callable[..., Any]) -> None:
    """Not the end of a word that the choice completed."""
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello wor"),
        w.Fork(id=2, as_=["a", "b"]),
        w.Select(id=3, branch=["a", "b"], choices=["ld"]),
        w.Join(id=4, from_=["a", "b"], role=None, each="<{text}>"),
    )
    engine.pump()
    assert engine.tokenizer.decode(tokens(engine)) == "hello wor<ld><ld>"
    at_rest(engine)


def test_choices_that_cannot_be_tokenized(sim: Callable[..., Any]) -> None:
    """Also off the loop, and for a selection that was cancelled meanwhile."""
    for cancelled in (False, True):
        engine = sim(context=8192)
        client = engine.session()
        client.send(w.Append(id=1, text="hello "))
        engine.pump()
        core = engine.cores[1]
        core.frame(client.socket, [w.Select(id=2, choices=["a" * 5000])], engine.now)
        (job,) = core.state.out.encode
        core.state.out.encode.clear()
        if cancelled:
            core.frame(client.socket, [w.Cancel(id=3, ops=[2])], engine.now)
        core.encoded(job.ticket, None, ValueError("odd"), engine.now)
        client.unanswered[2] = (w.Select(id=2, choices=["a"]), 1)
        engine.pump()
        assert error(client, 2).code == ("cancelled" if cancelled else "bad_request")
        assert ("odd" in error(client, 2).message) == (not cancelled)
        at_rest(engine)


def test_selects_of_one_frame_are_tokenized_off_the_loop_once_they_are_long_together(
    sim: Callable[..., Any],
) -> None:
    engine = sim(context=8192)
    client = engine.session()
    client.send(w.Append(id=1, text="hello "), w.Fork(id=2, as_=["a", "b", "c"]))
    engine.pump()
    core = engine.cores[1]
    selects = [w.Select(id=3, branch=name, choices=["x" * 1500]) for name in ("main", "a", "b", "c")]
    frame = [w.Select(id=3 + i, branch=s.branch, choices=s.choices) for i, s in enumerate(selects)]
    core.frame(client.socket, frame, engine.now)
    assert len(core.state.out.encode) == 2
    for op in frame:
        client.unanswered[op.id] = (op, 1)
    engine.pump()
    assert [done(client, op.id).choice for op in frame] == [0] * 4


def test_a_select_cancels_what_is_computed_ahead(sim: Callable[..., Any]) -> None:
    """It asks for the branch itself, which may end elsewhere."""
    engine = sim()
    client = engine.session()
    engine.pump()
    core = engine.cores[1]
    core.frame(client.socket, [w.Append(id=1, text="hello world, one two three")], engine.now)
    (submit,) = [each for each in core.state.out.scheduler if isinstance(each, m.Submit)]
    core.frame(client.socket, [w.Select(id=2, choices=["a", "b"])], engine.now)
    assert m.CancelRequest(submit.request) in core.state.out.scheduler
    engine.pump()
    at_rest(engine)


@pytest.mark.parametrize("long", [False, True])
def test_choices_that_the_context_has_no_room_for(sim: Callable[..., Any], long: bool) -> None:
    """On the loop and off it: an error, and the branch as it was."""
    engine = sim(context=64)
    client = engine.session()
    client.send(w.Append(id=1, text="hello "))
    engine.pump()
    before = tokens(engine)
    client.send(w.Select(id=2, choices=["a", "one two three " * (400 if long else 40)]))
    engine.pump()
    assert error(client, 2).code == "too_long"
    assert tokens(engine) == before
    at_rest(engine)


# --- without an engine: what is asked, exactly ----------------------------------------------------


def spelt(monkeypatch: pytest.MonkeyPatch, *choices: list[int]) -> None:
    """Whatever the choices are, these are their tokens."""

    def joined(_tokenizer: Any, branch: Any, _texts: Any) -> Joined:
        return Joined(branch.position, array("i"), "", [array("i", each) for each in choices])

    monkeypatch.setattr(selects, "join_texts", joined)


def begun(session: Alone, **fields: Any) -> list[Any]:
    """Three tokens on `main`, and op 2, a selection behind them."""
    session.send(w.Append(id=1, tokens=[5, 6, 7]))
    session.state.out.cache.clear()
    asked = session.send(w.Select(id=2, **({"choices": ["a", "b"]} | fields)))
    return [each for each in asked if isinstance(each, m.Submit)]


def scored(session: Alone, submit: Any, *scores: float, **fields: Any) -> list[Any]:
    return session.over(submit.request, 0, scores=pack_floats(scores), **fields)


def test_a_path_is_asked_for_on_a_branch_of_its_own(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = alone()
    spelt(monkeypatch, [10, 11, 12], [10, 13], [14])
    (submit,) = begun(session, choices=["a", "b", "c"], priority=1, deadline_ms=2000)
    handle = session.branch().handle
    assert submit == m.Submit(
        request=submit.request,
        branch=submit.branch,
        prompt=5,
        max_tokens=0,
        sampling=SamplingParams(),
        priority=1,
        deadline=12.0,
        arrived=10.0,
        owner="who",
        places=pack([2, 2, 3, 3, 4]),
        targets=pack([10, 14, 11, 13, 12]),
    )
    assert session.state.out.cache == [
        m.ForkBranch(handle, [submit.branch], 3),
        m.ExtendBranch(submit.branch, pack([10, 11])),
    ]
    session.state.out.cache.clear()
    session.now = 11.0
    held = session.state.meter.held
    scored(session, submit, -1.0, -4.0, -1.0, -8.0, -1.0)
    done = session.reply(2)
    assert (done.choice, done.scores, done.mean_logprob, done.position) == (
        0,
        [-1.0, -4.5, -4.0],
        -1.0,
        6,
    )
    assert (done.reason, done.rebased, done.text, done.revision) == (
        "stop",
        None,
        "a",
        session.state.revision,
    )
    usage = done.usage
    assert (usage.prompt, usage.cached, usage.computed, usage.output, usage.total_ms) == (
        3,
        1,
        2,
        3,
        1000.0,
    )
    assert session.state.out.cache == [
        m.DropBranches([submit.branch]),
        m.ExtendBranch(handle, pack([10, 11, 12])),
    ]
    segment: Any = session.branch().segments[-1]
    assert (segment.tail, segment.role, segment.lead, segment.ended) == (Tail.RAW, None, 0, True)
    assert session.state.meter.held < held
    assert not session.core.runner.selects.busy


def test_what_was_chosen_is_metered_as_output(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = alone()
    spelt(monkeypatch, [10, 11])
    before = session.state.meter.held
    session.send(w.Append(id=1, tokens=[5, 6, 7]))
    base = session.state.meter.held
    assert base > before
    (submit,) = [
        each for each in session.send(w.Select(id=2, choices=["a"])) if isinstance(each, m.Submit)
    ]
    op = op_bytes(w.Select(id=2, choices=["a"]))
    assert session.state.meter.held - base == op + SEGMENT + 3 * TOKEN * 2 + NODE * 2
    scored(session, submit, -1.0, -1.0)
    segment: Any = session.branch().segments[-1]
    kept = SEGMENT + MARK + 2 * TOKEN + len(segment.text)
    assert segment._bytes == kept


def test_requests_of_selections_share_what_a_session_may_run(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = alone(running=3)
    paths = [[a, b] for a in range(20, 30) for b in range(30, 32)]  # ten paths
    spelt(monkeypatch, *paths)
    session.send(w.Append(id=1, tokens=[5, 6, 7]), w.Fork(id=2, as_=["a"]))
    session.asked()
    runner = session.core.runner
    texts = [f"x{i}" for i in range(20)]
    first = session.send(w.Select(id=3, choices=texts))
    assert len(first) == 3
    assert runner.selects.busy
    assert session.send(w.Select(id=4, branch="a", choices=texts)) == []
    following = scored(session, first[0], *[-1.0] * 12)
    assert len(following) == 1
    more = scored(session, first[1], *[-1.0] * 2) + scored(session, first[2], *[-1.0] * 2)
    assert len(more) == 2
    assert {owner.task.op.id for owner in runner.selects.requests.values()} == {3, 4}
    # the first one ends: its requests leave room for three of the other
    asked = session.send(w.Cancel(id=5, ops=[3]))
    submits = [each for each in asked if isinstance(each, m.Submit)]
    assert len(runner.selects.requests) == 3
    assert {owner.task.op.id for owner in runner.selects.requests.values()} == {4}
    assert submits
    assert session.reply(3).code == "cancelled"
    assert session.reply(5).result == {"cancelled": [3]}


def test_a_selection_is_put_aside_with_its_client_alone(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = alone(opened={"detach": "pause"})
    spelt(monkeypatch, [10, 11], [10, 12])
    other = session.attach("d")
    (mine,) = begun(session)
    *_, theirs = session.send(
        w.Fork(id=1, branch=None, as_=["b"]),
        w.Append(id=2, branch="b", tokens=[5]),
        w.Select(id=3, branch="b", choices=["a", "b"]),
        socket=other,
    )
    session.state.out.cache.clear()
    session.detach()
    assert session.asked() == [m.CancelRequest(mine.request)]
    assert session.state.out.cache == [m.DropBranches([mine.branch])]
    selects_ = session.core.runner.selects
    assert list(selects_.requests) == [theirs.request]
    assert scored(session, mine, -1.0, -1.0, -1.0) == []  # it had been on its way
    session.attach()
    (again,) = session.asked()
    assert (again.places, again.targets, again.prompt) == (mine.places, mine.targets, mine.prompt)
    scored(session, again, -1.0, -3.0, -2.0)
    assert (session.branch().position, session.branch().reason) == (5, "stop")


def test_a_deadline_ends_a_selection_that_waits(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = alone(running=1)
    spelt(monkeypatch, [10, 11], [12, 13])
    (first,) = begun(session, deadline_ms=1000)
    session.now = 11.0
    session.core.tick(11.0)
    assert session.reply(2).code == "deadline"
    assert session.asked() == [m.CancelRequest(first.request)]
    assert session.branch().position == 3
    assert not session.core.runner.selects.busy
    assert not session.core.runner.selects.measured


def test_the_scheduler_may_end_a_selection(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    for reason, code in (("deadline", "deadline"), ("error", "overloaded")):
        session = alone()
        spelt(monkeypatch, [10, 11], [12, 13])
        first, second = begun(session)
        asked = session.over(first.request, 0, reason, error="overloaded", message="later")
        assert asked == [m.CancelRequest(second.request)]
        assert session.reply(2).code == code
        assert session.branch().position == 3


def test_choices_that_cannot_be_scored_change_nothing(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    for choices, code, details in (
        ([[10], []], "bad_request", None),
        ([[10], [10] * 98], "too_long", {"max": 100, "position": 3, "tokens": 98}),
    ):
        session = alone()
        spelt(monkeypatch, *choices)
        held = session.state.meter.held
        assert begun(session) == []
        error = session.reply(2)
        assert (error.code, error.details) == (code, details)
        assert not session.core.runner.selects.measured
        session.send(w.Drop(id=3, branch="main"))
        assert session.state.meter.held < held + 3000
    session = alone()
    spelt(monkeypatch, [10], [10] * 97)
    assert len(begun(session)) == 1


def test_scoring_needs_memory_beforehand(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    spelt(monkeypatch, [10, 11, 12, 13], [14, 15, 16, 17])
    session = alone()
    session.send(w.Append(id=1, tokens=[5, 6, 7]))
    op = op_bytes(w.Select(id=2, choices=["a", "b"]))
    first = SEGMENT + TOKEN * (2 + 2 * 64)
    size = 2 * SEGMENT + 3 * TOKEN * 8 + NODE * 8
    assert size > first
    base = session.state.meter.held
    for ident, room, runs in ((2, size - 1, False), (3, size, True)):
        session.replies(1)
        session.state.meter.most = session.state.meter.held + op + room
        asked = session.send(w.Select(id=ident, choices=["a", "b"]))
        assert any(isinstance(each, m.Submit) for each in asked) is runs
        if not runs:
            assert session.reply(ident).code == "limit"
            assert session.branch().position == 3
    assert session.state.meter.held >= base


def test_long_choices_are_tokenized_off_the_loop(alone: Callable[..., Alone]) -> None:
    session = alone()
    choices = ["word " * 500, "other " * 500]
    assert begun(session, choices=choices) == []
    (job,) = session.state.out.encode
    assert job.size == 2500 + 3000 + 2 * 64
    runner = session.core.runner
    assert (runner.selects.busy, runner.busy) == (True, True)
    session.core.encoded(job.ticket, None, ValueError("no"), 11.0)
    assert session.reply(2).code == "bad_request"
    assert not runner.selects.busy


def test_a_text_is_sent_again_from_the_output_that_it_changes() -> None:
    branch = SessionBranch("a", 1)
    input_segment(branch, [1, 2, 3], "abc", tail=Tail.RAW)
    output = OutputSegment(3)
    output.tokens.extend([4, 5])
    branch.segments.append(output)
    told = {at: selects._told_from(branch, at) for at in range(6)}
    assert told == {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 5}


def test_choices_of_ids_that_the_model_does_not_have_are_refused(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = alone()
    spelt(monkeypatch, [10, session.state.vocab])
    monkeypatch.setattr(session.core.writer, "unknown", {session.state.vocab: "<x>"})
    assert begun(session, choices=["a"]) == []
    error = session.reply(2)
    assert (error.code, error.details["token"]) == ("bad_request", session.state.vocab)


def test_what_scoring_held_is_given_back(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = alone()
    spelt(monkeypatch, [10, 11])
    session.send(w.Append(id=1, tokens=[5, 6, 7]))
    session.replies(1)
    before = session.state.meter.held
    session.send(w.Select(id=2, choices=["a"]))
    size = SEGMENT + 3 * TOKEN * 2 + NODE * 2
    (running,) = session.core.runner.selects.measured
    assert running.size == size
    assert session.state.meter.held == before + size + op_bytes(w.Select(id=2, choices=["a"]))
    (reply_log,) = session.core.publisher.reply_logs.values()
    kept = reply_log.held
    session.send(w.Cancel(id=3))
    assert session.state.meter.held - before == reply_log.held - kept


def test_selections_are_submitted_in_turn(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time: who has asked goes behind those that wait."""
    session = alone(running=1)
    spelt(monkeypatch, [10, 11], [12, 13], [14, 15])
    session.send(w.Append(id=1, tokens=[5, 6, 7]), w.Fork(id=2, as_=["a"]))
    session.asked()
    runner = session.core.runner
    (submit,) = session.send(
        w.Select(id=3, choices=["a", "b", "c"]), w.Select(id=4, branch="a", choices=["a", "b", "c"])
    )
    order = []
    while runner.selects.requests:
        ((request, selection),) = runner.selects.requests.items()
        order.append(selection.task.op.id)
        scores = [-1.0] * len(selection.pending[request].path.nodes)
        session.over(request, 0, scores=pack_floats(scores))
    assert order == [3, 3, 4, 3, 4, 4]  # the other one came when the first had asked once
    assert submit.prompt > 3
