"""The session state machine against a whole engine without a loop (see conftest)."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from ramify.actors.tokenizer.detokenizer import StopSet
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.errors import RamifyError
from tests.actors.session.alone import Alone


def user(text: str) -> list[w.ChatMessage]:
    return [w.ChatMessage(role="user", content=text)]


def done(client: Any, ident: int) -> w.Done:
    (reply,) = client.replies[ident]
    assert isinstance(reply, w.Done), reply
    return reply


def error(client: Any, ident: int) -> w.Error:
    (reply,) = client.replies[ident]
    assert isinstance(reply, w.Error), reply
    return reply


def test_a_second_turn_computes_only_what_is_new(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, messages=user("Capital of France?")),
        w.Generate(id=2, temperature=0, max_tokens=8),
    )
    engine.pump()
    first = done(client, 2)
    before = engine.computed
    client.send(
        w.Append(id=3, messages=user("And Spain?")), w.Generate(id=4, temperature=0, max_tokens=8)
    )
    engine.pump()
    second = done(client, 4)
    assert first.usage.cached == 0
    assert first.usage.prompt == first.usage.computed
    # Everything but the last sampled token was computed before.
    assert second.usage.cached == first.position - 1
    assert second.usage.cached + second.usage.computed == second.usage.prompt
    surplus = engine.computed - before - second.usage.computed - second.usage.output
    assert -1 <= surplus <= 0 or second.reason == "stop"  # the last token is not run
    engine.check_outputs(1)


def test_deltas_add_up_to_the_branch(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, text="hello"), w.Generate(id=2, temperature=0, max_tokens=20))
    engine.pump()
    branch = engine.cores[1].state.branches["main"]
    assert client.text("main") == branch.segments[-1].text
    assert client.have["main"] == branch.position == done(client, 2).position
    assert done(client, 2).reason == "length"


def test_fork_generates_children_from_one_prefix(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, messages=user("Plan a 1-day trip.")),
        w.Fork(id=2, as_=["a", "b", "c"]),
        w.Generate(id=3, branch=["a", "b", "c"], max_tokens=6, temperature=0.9, seed=1),
    )
    engine.pump()
    usages = {r.branch: r.usage for r in client.replies[3]}
    prompt = usages["a"].prompt
    # The shared prefix is computed once: two children run its last token only.
    assert sorted(u.computed for u in usages.values()) == [1, 1, prompt]


def test_generate_with_n_names_its_children(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, n=3, max_tokens=4, quiet=True))
    engine.pump()
    assert {r.branch for r in client.replies[2]} == {"main.2.1", "main.2.2", "main.2.3"}
    assert all(r.text is not None for r in client.replies[2])
    assert client.chunks == {}


def test_a_failed_op_skips_what_follows_on_its_branch_only(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, text="x"),
        w.Fork(id=2, branch="nope", as_=["a"]),
        w.Generate(id=3, branch="a", max_tokens=4),
        w.Generate(id=4, max_tokens=4),
        replies={2: 1},
    )
    engine.pump()
    assert error(client, 2).code == "no_branch"
    assert error(client, 3).code == "skipped"
    assert done(client, 4).reason in ("length", "stop")


def test_a_failed_spawn_is_reported_by_each_child(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, n=2, as_=["main", "b"], max_tokens=4))
    engine.pump()
    assert {r.code for r in client.replies[2]} == {"exists"}
    assert {r.branch for r in client.replies[2]} == {"main", "b"}


@pytest.mark.parametrize(
    ("ops", "code"),
    [
        ([w.Append(id=1)], "bad_request"),
        ([w.Append(id=1, text="a", tokens=[1])], "bad_request"),
        ([w.Append(id=1, tokens=[10**6])], "bad_request"),
        ([w.Generate(id=1)], "bad_request"),  # an empty branch
        ([w.Rollback(id=1)], "bad_request"),
        ([w.Rollback(id=1, to=5)], "bad_request"),
        ([w.Fork(id=1, as_=["main"])], "exists"),
        ([w.Fork(id=1, as_=["a", "a"])], "exists"),
        ([w.Fork(id=1, as_=["a"], at=3)], "bad_request"),
        ([w.Drop(id=1, branch="nope")], "no_branch"),
        ([w.Append(id=1, text="a", expect=3)], "conflict"),
        ([w.Append(id=1, tokens=[5] * 600)], "too_long"),
        ([w.Generate(id=1, n=65)], "limit"),
        ([w.Set(id=1, persist="lazy")], "unsupported"),
        ([w.Join(id=1, from_=["main"])], "bad_request"),
        ([w.Join(id=1, from_=["a", "a"])], "bad_request"),
        ([w.Join(id=1, from_=["nope"])], "no_branch"),
        ([w.Join(id=1, from_=["a"], each="{i}" * 65)], "limit"),
        ([w.Prune(id=1, from_=["main"], by="vote")], "bad_request"),  # nothing was generated
        ([w.Prune(id=1, from_=["main"], k=2)], "bad_request"),
        ([w.Prune(id=1, from_=["a", "a"])], "bad_request"),
        ([w.Prune(id=1, from_=["a", "b"], into=["x", "x"])], "bad_request"),
        ([w.Prune(id=1, from_=["a", "b"], into=["x", "y"], k=1)], "bad_request"),
        ([w.Prune(id=1, from_=["a", "b"], score_from=["c"])], "bad_request"),
        ([w.Prune(id=1, from_=["a"], score_from=["c"], by="first")], "bad_request"),
        ([w.Prune(id=1, from_=["nope"])], "no_branch"),
        ([w.Select(id=1, choices=["a"])], "bad_request"),  # an empty branch
        ([w.Select(id=1, choices=["a", ""])], "bad_request"),
        ([w.Select(id=1, branch=["main", "main"], choices=["a"])], "bad_request"),
        ([w.Select(id=1, choices=["a"], expect=3)], "conflict"),
        ([w.Cancel(id=1, branch="nope")], "no_branch"),
        ([w.Tree(id=1, branch="nope")], "no_branch"),
    ],
)
def test_bad_input_gets_an_error_and_changes_nothing(
    sim: Callable[..., Any], ops: list[w.Op], code: str
) -> None:
    engine = sim()
    client = engine.session()
    client.send(*ops)
    engine.pump()
    replies = [r for r in [*client.replies.get(1, []), *client.events] if isinstance(r, w.Error)]
    assert [r.code for r in replies] == [code]
    assert list(engine.cores[1].state.branches) == ["main"]
    assert engine.cores[1].state.branches["main"].position == 0


def test_a_refused_frame_uses_no_ids(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, text="a"), w.Append(id=2))
    engine.pump()
    assert engine.cores[1].state.branches["main"].position == 0
    assert [error(client, 1).code, error(client, 2).code] == ["skipped", "bad_request"]
    client.replies.clear()
    client.send(w.Append(id=1, text="a"))
    engine.pump()
    assert isinstance(client.replies[1][0], w.Ok)


def test_an_id_that_was_seen_is_not_run_again(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    op = w.Append(id=1, text="hello")
    client.send(op)
    engine.pump()
    position = engine.cores[1].state.branches["main"].position
    client.replies.clear()
    client.send(op)
    engine.pump()
    assert engine.cores[1].state.branches["main"].position == position
    assert client.unanswered == {}


@pytest.mark.parametrize("when", range(0, 60, 4))
def test_cancel_at_any_time_then_append_just_works(sim: Callable[..., Any], when: int) -> None:
    engine = sim(eos_every=0, seed=when)
    client = engine.session()
    client.send(w.Append(id=1, messages=user("one")), w.Generate(id=2, max_tokens=200, temperature=0))
    engine.pump(when)
    client.send(w.Cancel(id=3))
    client.send(w.Append(id=4, messages=user("two")), w.Generate(id=5, max_tokens=5, temperature=0))
    engine.pump()
    assert done(client, 2).reason in ("cancelled", "length")
    assert done(client, 5).reason == "length"
    engine.check_outputs(1)


def test_cancelling_a_queued_op_answers_it(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, text="a"), w.Generate(id=2, max_tokens=50), w.Append(id=3, text="b"))
    client.send(w.Cancel(id=4, ops=[3]))
    engine.pump()
    assert error(client, 3).code == "cancelled"
    assert done(client, 2).reason == "length"
    assert client.replies[4][0].result == {"cancelled": [3]}


def stop_string(engine: Any, tokens: int = 12) -> str:
    """Some text that the greedy output of "hello" contains."""
    client = engine.session("probe")
    client.send(w.Append(id=1, text="hello"), w.Generate(id=2, temperature=0, max_tokens=tokens))
    engine.pump()
    return str(client.text("main"))


def test_a_stop_string_cuts_inside_a_token(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0, seed=3)
    whole = stop_string(engine, 16)
    at = next(
        i
        for i in range(4, len(whole))
        if whole[i : i + 2].isascii() and whole.find(whole[i : i + 2]) == i
    )
    stop = whole[at : at + 2]
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"), w.Generate(id=2, temperature=0, max_tokens=16, stop=[stop])
    )
    engine.pump()
    reply = done(client, 2)
    assert (reply.reason, reply.stop) == ("stop", stop)
    assert client.text("main") == whole[:at]
    branch = engine.cores[2].state.branches["main"]
    assert branch.text() == "hello" + whole[:at]
    assert engine.tokenizer.decode(branch.tokens()) == "hello" + whole[:at]
    # And the branch goes on from exactly there.
    client.send(w.Generate(id=3, temperature=0, max_tokens=4))
    engine.pump()
    tokens = list(branch.tokens())
    assert tokens[-4:] == engine.model.expected(tokens[:-4], 4)


def test_a_stop_string_in_a_chat_closes_the_turn(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0, seed=4)
    client = engine.session()
    client.send(w.Append(id=1, messages=user("hi")), w.Generate(id=2, temperature=0, max_tokens=30))
    engine.pump()
    stop = client.text("main")[5:7]
    other = engine.session()
    other.send(
        w.Append(id=1, messages=user("hi")), w.Generate(id=2, temperature=0, max_tokens=30, stop=[stop])
    )
    engine.pump()
    assert done(other, 2).reason == "stop"
    rendered = engine.tokenizer.decode(engine.cores[2].state.branches["main"].tokens(), special=True)
    assert rendered.endswith("<|im_end|>\n")


def test_an_end_of_turn_token_stays_and_the_next_turn_completes_it(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=6)
    client = engine.session()
    client.send(w.Append(id=1, messages=user("hi")), w.Generate(id=2, temperature=0, max_tokens=100))
    engine.pump()
    assert done(client, 2).reason == "stop"
    assert done(client, 2).stop == 2
    client.send(w.Append(id=3, messages=user("again")))
    engine.pump()
    text = engine.tokenizer.decode(engine.cores[1].state.branches["main"].tokens(), special=True)
    answer = client.text("main")
    assert text == (
        f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_append_after_an_append_takes_the_prompt_back(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, messages=user("one")))
    engine.pump()
    client.send(w.Append(id=2, messages=user("two")))
    engine.pump()
    text = engine.tokenizer.decode(engine.cores[1].state.branches["main"].tokens(), special=True)
    assert text.count("assistant") == 1
    assert client.replies[2][0].result["rebased"] > 0


def test_rollback_by_turns_and_the_same_answer_again(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, messages=user("one")), w.Generate(id=2, temperature=0, max_tokens=9))
    client.send(w.Append(id=3, messages=user("two")), w.Generate(id=4, temperature=0, max_tokens=9))
    engine.pump()
    before = client.text("main")
    position = done(client, 4).position
    client.send(w.Rollback(id=5, turns=1))
    client.send(w.Append(id=6, messages=user("two")), w.Generate(id=7, temperature=0, max_tokens=9))
    engine.pump()
    assert client.text("main") == before
    assert done(client, 7).position == position
    assert done(client, 7).usage.computed == 1  # all of it is still warm


def test_view_key_holders_may_look_only(sim: Callable[..., Any]) -> None:
    engine = sim()
    engine.session()
    viewer = engine.session("viewer")
    engine.pump()
    viewer.number = 1
    engine.post_session(1, m.Attach(viewer.socket, w.Open(client="viewer", session="s_1"), [], False))
    engine.pump()
    viewer.send(w.Append(id=1, text="x"))
    viewer.send(w.Tree(id=2))
    engine.pump()
    assert error(viewer, 1).code == "forbidden"
    assert isinstance(viewer.replies[2][0], w.StateReply)


def test_other_clients_see_deltas_and_events(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    first = engine.session("one")
    second = engine.session("two")
    engine.pump()
    second.number = 1
    engine.post_session(1, m.Attach(second.socket, w.Open(client="two", session="s_1"), [], True))
    engine.pump()
    first.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=5))
    engine.pump()
    assert second.text("main") == first.text("main") != ""
    assert [e.op for e in second.events] == ["append", "generate"]
    assert {e.by for e in second.events} == {"one"}


def test_a_slow_reader_gets_fewer_frames_and_all_text(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    engine.pump()
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=60, temperature=0))
    engine.pump(40)
    engine.post_session(1, m.Throttled(client.socket))
    engine.pump()
    assert 2 not in client.replies  # `done` never overtakes a delta
    frames = client.frames
    engine.post_session(1, m.Drained(client.socket))
    engine.pump()
    assert client.frames == frames + 1
    assert client.text("main") == engine.cores[1].state.branches["main"].segments[-1].text
    assert done(client, 2).reason == "length"


def test_credit_holds_deltas_and_done_back(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, tokens=[5, 6]), w.Credit(branch="main", upto=10), w.Generate(id=2, max_tokens=30)
    )
    engine.pump()
    assert client.have["main"] <= 10
    assert 2 not in client.replies
    client.send(w.Credit(branch="main", upto=100))
    engine.pump()
    assert client.have["main"] == 32
    assert done(client, 2).reason == "length"


def test_tick_merges_deltas(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    fast, slow = engine.session(), engine.session(tick_ms=10_000)
    for client in (fast, slow):
        client.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=40, temperature=0))
    engine.pump()
    assert slow.text("main") == fast.text("main")
    assert len(slow.chunks["main"]) < len(fast.chunks["main"])


@pytest.mark.parametrize("policy", ["run", "pause", "cancel"])
@pytest.mark.parametrize("when", [5, 15, 25, 40])
def test_what_a_disconnect_does(sim: Callable[..., Any], policy: str, when: int) -> None:
    engine = sim(eos_every=0, seed=when)
    reference = engine.session()
    client = engine.session(detach=policy)
    for each in (reference, client):
        each.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=60, temperature=0.8, seed=5))
    engine.pump(when)
    client.drop()
    engine.pump()
    client.connect()
    engine.pump()
    reply = done(client, 2)
    if policy == "cancel":
        assert reply.reason in ("cancelled", "length")
        assert reference.text("main").startswith(client.text("main"))
    else:
        assert reply.reason == "length"
        assert client.text("main") == reference.text("main")


def test_a_session_without_sockets_expires(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session(ttl_s=50)
    engine.pump()
    client.drop()
    engine.pump()
    core = engine.cores[1]
    core.tick(engine.now + 40)  # by a timer of an earlier, shorter absence
    assert core.ended is None
    assert core.state.out.wake_at == engine.now + 50
    core.tick(engine.now + 51)
    assert core.ended == "expired"


def test_only_so_many_generations_run_at_once(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(running=2), eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, n=8, max_tokens=6))
    engine.pump()
    assert len(client.replies[2]) == 8
    assert all(r.reason == "length" for r in client.replies[2])


def test_appended_text_is_computed_ahead(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, text="hello world, one two three"))
    engine.pump()
    client.send(w.Generate(id=2, max_tokens=3))
    engine.pump()
    assert done(client, 2).usage.computed == 1


def test_set_renames_and_keeps_meta(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, text="x"),
        w.Set(id=2, branch="main", name="trunk", meta={"a": 1}, retain_s=5),
        w.Generate(id=3, branch="trunk", max_tokens=3),
        w.Tree(id=4, branch="trunk", text=True, tokens=True),
    )
    engine.pump()
    assert done(client, 3).branch == "trunk"
    client.send(w.Tree(id=5, text=True))
    engine.pump()
    (state,) = client.replies[5]
    assert [b.branch for b in state.branches] == ["trunk"]
    assert state.branches[0].meta == {"a": 1}
    assert state.branches[0].turns[0].text == "x"


def test_retention_ends_where_it_is_no_time_at_all(alone: Callable[..., Any]) -> None:
    session = alone()
    until = []
    for number, seconds in enumerate((5, 0), 1):
        session.send(w.Set(id=number, branch="main", retain_s=seconds))
        until.append(session.state.out.retained[session.branch().handle])
    assert until == [session.now + 5, 0.0]
    assert session.branch().retain_s is None


def test_strict_mode_moves_back_where_the_template_rewrites(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session(template="strict")
    client.send(w.Append(id=1, messages=user("one")), w.Generate(id=2, temperature=0, max_tokens=6))
    client.send(w.Append(id=3, messages=user("two")), w.Generate(id=4, temperature=0, max_tokens=6))
    engine.pump()
    branch = engine.cores[1].state.branches["main"]
    text = engine.tokenizer.decode(branch.tokens(), special=True)
    first = branch.segments[2].text
    assert text.startswith(
        f"<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n{first}<|im_end|>\n<|im_start|>user\ntwo"
    )


def test_closing_ends_the_session_for_all(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.CloseSession(id=1))
    engine.pump()
    assert engine.cores[1].ended == "closed"
    assert isinstance(client.replies[1][0], w.Ok)


def test_closing_ends_what_has_not_ended_first(sim: Callable[..., Any]) -> None:
    """Of all clients: what runs, what waits, also behind the close in its frame; then the close."""
    engine = sim(limits=Limits(running=2), eos_every=0)
    client, other = engine.session(), second_socket(engine)
    client.send(
        w.Fork(id=1, as_=["a", "b"]),
        w.Append(id=2, branch=["main", "a", "b"], text="hello"),
        w.Generate(id=3, branch=["main", "a", "b"], max_tokens=500),  # one of them waits for room
        w.Append(id=4, text="behind"),
        w.Drop(id=5, branch="a"),
    )
    engine.pump(40)
    core = engine.cores[1]
    other.send(w.Select(id=1, branch="b", choices=["x", "y"]), w.Tree(id=2))
    client.send(w.Tree(id=6), w.CloseSession(id=7), w.Append(id=8, text="late"), w.Tree(id=9))
    engine.pump()
    assert core.ended == "closed"
    assert [(each.reason, each.error) for each in client.replies[3]] == [("cancelled", None)] * 3
    assert any(each.usage.output for each in client.replies[3])
    for ident in (4, 5, 6, 8, 9):
        assert [each.code for each in client.replies[ident]] == ["cancelled"], ident
    for ident in (1, 2):
        assert [each.code for each in other.replies[ident]] == ["cancelled"], ident
    assert isinstance(client.replies[7][0], w.Ok)
    assert next(reversed(client.replies)) == 7
    assert not core.unfinished


def test_a_close_tells_replies_that_waited_for_credit(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, text="hello"), w.Generate(id=2, max_tokens=5))
    client.send(w.Credit(branch="main", upto=2), w.Append(id=3, text="more"))
    engine.pump()
    assert client.replies.keys().isdisjoint({2, 3})
    client.send(w.CloseSession(id=4))
    engine.pump()
    assert client.replies[2][0].reason == "length"
    assert [each[0].id for each in client.replies.values()][-2:] == [3, 4]


def test_cancel_of_a_generation_that_waits_and_of_what_is_behind_it(sim: Callable[..., Any]) -> None:
    """It ends at once, and so what is behind it, which is to be cancelled too, comes first."""
    engine = sim(limits=Limits(running=1), eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Fork(id=2, branch="main", as_=["b"]),
        w.Generate(id=3, temperature=0, max_tokens=200),
        w.Generate(id=4, branch="b", temperature=0, max_tokens=200),
        w.Append(id=5, branch="b", text="more"),
        w.Append(id=6, branch="b", text="kept"),
        w.Generate(id=7, branch="b", max_tokens=4, expect=1),
    )
    while not client.text("main"):
        engine.pump(1)
    client.send(w.Cancel(id=8, ops=[4, 5, 7]))
    engine.pump()
    assert client.replies[8][0].result == {"cancelled": [4, 5, 7]}
    assert done(client, 4).reason == "cancelled"
    assert [error(client, ident).code for ident in (5, 7)] == ["cancelled", "cancelled"]
    assert isinstance(client.replies[6][0], w.Ok)
    assert engine.cores[1].state.branches["b"].text() == "hellokept"
    assert done(client, 3).reason == "length"
    engine.check_outputs(1)


@pytest.mark.parametrize("evicted", [False, True])
def test_what_ends_while_the_cache_is_asked_is_not_cold(sim: Callable[..., Any], evicted: bool) -> None:
    """The cache's answer is of the time of the question: the end may overtake it."""
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, text="hello"), w.Generate(id=2, temperature=0, max_tokens=20))
    if evicted:
        engine.pump()
    else:
        while not client.text("main"):
            engine.pump(1)
    core = engine.cores[1]
    opened = w.Open(client="late", session="s_1", key="key")
    core.attach(m.Attach(99, opened, [], True), engine.now)
    (question,) = (each for each in core.state.out.cache if isinstance(each, m.Inspect))
    core.state.out.cache.clear()
    engine.pump()
    assert done(client, 2).reason == "length"
    core.inspected(m.Inspected(question.id, [3]), engine.now)
    state = core.subscribers[99].out[0]
    assert isinstance(state, w.StateReply)
    assert (state.resumed, state.cold) == (True, evicted)


def test_a_branch_that_was_not_asked_for_is_not_cold(sim: Callable[..., Any]) -> None:
    """Another client made it while the cache was asked."""
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, text="hello"))
    engine.pump()
    core = engine.cores[1]
    warm = core.state.branches["main"].position
    core.attach(m.Attach(99, w.Open(client="late", session="s_1", key="key"), [], True), engine.now)
    (question,) = (each for each in core.state.out.cache if isinstance(each, m.Inspect))
    core.state.out.cache.clear()
    client.send(w.Fork(id=2, branch="main", as_=["child"]))
    engine.pump()
    core.inspected(m.Inspected(question.id, [warm]), engine.now)
    state = core.subscribers[99].out[0]
    assert isinstance(state, w.StateReply)
    assert [branch.branch for branch in state.branches] == ["main", "child"]
    assert not state.cold


def test_a_broken_engine_answers_who_joins_looks_and_tokenizes(sim: Callable[..., Any]) -> None:
    engine = sim()
    first = engine.session("first")
    first.send(w.Append(id=1, text="hello"))
    engine.pump()
    core = engine.cores[1]
    first.send(w.Tree(id=2), w.Append(id=3, branch="main", text="x" * 100_000))
    first.send(w.Generate(id=4, max_tokens=3))
    for message in engine._mail[1]:  # nobody answers the cache's question, nobody tokenizes
        engine._session(1, message)
    engine._mail[1].clear()
    assert core.state.out.encode
    late, append = engine.session("late"), w.Append(id=9, text="!")  # it joins the first one's
    late.unanswered[9] = (append, 1)
    opened = w.Open(client="late", session="s_1", key="key")
    core.attach(m.Attach(late.socket, opened, [append], True), engine.now)
    engine.fail(1)
    (tree,) = first.replies[2]
    assert isinstance(tree, w.StateReply)
    assert tree.branches[0].resident is None
    for client, ident in ((first, 3), (first, 4), (late, 9)):
        assert (error(client, ident).code, error(client, ident).message) == ("internal", "broken")
    assert late.session == "s_1"
    assert core.ended == "the engine failed"


def test_an_op_on_many_branches_prepares_its_stop_strings_once(
    sim: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    prepare = StopSet.__init__

    def counting(self: StopSet, stops: Iterable[str]) -> None:
        made.append(stops := list(stops))
        prepare(self, stops)

    monkeypatch.setattr(StopSet, "__init__", counting)
    engine = sim()
    client = engine.session()
    names = [f"b{i}" for i in range(60)]
    client.send(
        w.Append(id=1, tokens=[5, 6]),
        w.Fork(id=2, as_=names),
        w.Generate(id=3, branch=names, max_tokens=4, stop=["zz", "e"]),
        w.Generate(id=4, n=20, max_tokens=4, stop=["e"]),
    )
    engine.pump()
    assert client.unanswered == {}
    assert sorted(made) == [["e"], ["zz", "e"]]


def second_socket(engine: Any, number: int = 1, **opened: Any) -> Any:
    """Another client's socket of session `number`."""
    other = engine.session("other")
    engine.pump()
    other.number = number
    opened = {"client": "other", "session": f"s_{number}"} | opened
    engine.post_session(number, m.Attach(other.socket, w.Open(**opened), [], True))
    engine.pump()
    return other


def test_the_first_branch_is_older_than_the_first_state(sim: Callable[..., Any]) -> None:
    """Else a client that comes back would take it for another one of that name."""
    engine = sim()
    client = engine.session()
    engine.pump()
    assert client.revision == 1
    assert engine.cores[1].state.branches["main"].undercut(client.revision) is None


def test_a_close_tells_every_socket_why(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    other = second_socket(engine)
    core = engine.cores[1]
    core.frame(other.socket, [w.CloseSession(id=1)], engine.now)
    assert sorted(core.state.out.closes) == [
        (client.socket, 1000, "the session was closed"),
        (other.socket, 1000, "closed by the client"),
    ]


def test_who_detaches_closes_nobody_else(sim: Callable[..., Any]) -> None:
    engine = sim()
    engine.session()
    other = second_socket(engine)
    core = engine.cores[1]
    core.frame(other.socket, [w.CloseSession(id=1, keep=True)], engine.now)
    assert core.state.out.closes == [(other.socket, 1000, "closed by the client")]
    assert core.ended is None


def test_no_more_branches_than_the_limit(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(branches=3))
    client = engine.session()
    client.send(w.Fork(id=1, as_=["a", "b", "c"]))
    client.send(w.Fork(id=2, as_=["a", "b"]))
    client.send(w.Fork(id=3, as_=["c"]))
    client.send(w.Set(id=4, branch="a", name="c"))  # a rename makes none
    engine.pump()
    assert (error(client, 1).code, error(client, 3).code) == ("limit", "limit")
    assert error(client, 1).details == {"max": 3}
    assert sorted(engine.cores[1].state.branches) == ["b", "c", "main"]


def told_scheduler(engine: Any, number: int = 1) -> list[Any]:
    return list(engine.cores[number].state.out.scheduler)


def test_a_prefill_is_cancelled_where_its_text_goes(sim: Callable[..., Any]) -> None:
    """And once it has ended, there is nothing to cancel."""
    for ended in (False, True):
        engine = sim()
        client = engine.session()
        engine.pump()
        core = engine.cores[1]
        core.frame(client.socket, [w.Append(id=1, text="hello world, one two three")], engine.now)
        (submit,) = [each for each in told_scheduler(engine) if isinstance(each, m.Submit)]
        if ended:
            engine.pump()
        core.frame(client.socket, [w.Rollback(id=2, to=2)], engine.now)
        cancelled = [each for each in told_scheduler(engine) if isinstance(each, m.CancelRequest)]
        assert [each.request for each in cancelled] == ([] if ended else [submit.request])


def test_credit_still_holds_after_a_branch_was_settled(sim: Callable[..., Any]) -> None:
    """A rename sends what is due under the old name; the credit goes with the branch."""
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5, 6]), w.Credit(branch="main", upto=10))
    client.send(w.Set(id=2, branch="main", name="other"))
    client.send(w.Generate(id=3, branch="other", max_tokens=30))
    engine.pump()
    assert client.have["other"] <= 10
    assert 3 not in client.replies
    client.send(w.Credit(branch="other", upto=100))
    engine.pump()
    assert done(client, 3).position == 32


def test_a_tree_that_is_asked_for_again_looks_again(sim: Callable[..., Any]) -> None:
    """Its reply is not kept."""
    engine = sim()
    client = engine.session()
    client.send(w.Tree(id=1))
    engine.pump()
    client.send(w.Tree(id=1))
    engine.pump()
    client.send(w.Append(id=2, text="x"))
    client.send(w.Tree(id=1))
    engine.pump()
    positions = [state.branches[0].position for state in client.replies[1]]
    assert positions[:2] == [0, 0]
    assert positions[2] > 0


def test_a_reply_that_is_sent_again_stays_behind_its_deltas(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5, 6]), w.Credit(branch="main", upto=10))
    client.send(w.Generate(id=2, max_tokens=30))
    engine.pump()
    client.send(w.Generate(id=2, max_tokens=30))
    engine.pump()
    assert 2 not in client.replies
    client.send(w.Credit(branch="main", upto=100))
    engine.pump()
    assert (client.have["main"], done(client, 2).position) == (32, 32)


def test_ops_that_came_with_a_resume_are_judged_when_it_is_answered(sim: Callable[..., Any]) -> None:
    """A prune of branches that have ended waits for nothing that is still to come."""
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, text="x"), w.Fork(id=2, as_=["a", "b"]))
    client.send(w.Generate(id=3, branch=["a", "b"], max_tokens=3))
    engine.pump()
    client.drop()
    client.send(w.Prune(id=4, from_=["a", "b"], by="first"))
    client.connect()
    engine.pump()
    (ok,) = client.replies[4]
    assert isinstance(ok, w.Ok)
    assert len(ok.result["kept"]) == 1


def again(engine: Any, client: Any, op: w.Op) -> Any:
    """The reply to an op that was answered before."""
    client.replies.pop(op.id)
    client.send(op)
    engine.pump()
    (reply,) = client.replies[op.id]
    return reply


def test_a_done_that_is_sent_again_has_the_text_unless_that_was_hidden(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    shown, hidden = w.Generate(id=2, max_tokens=5), w.Generate(id=3, max_tokens=5, hidden=True)
    client.send(w.Append(id=1, text="x"), shown, hidden)
    engine.pump()
    assert (done(client, 2).text, done(client, 3).text) == (None, None)
    assert again(engine, client, shown).text == client.text("main") != ""
    assert again(engine, client, hidden).text is None


def test_cancelling_all_below_a_branch_stops_what_is_computed_ahead(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    engine.pump()
    core = engine.cores[1]
    core.frame(client.socket, [w.Append(id=1, text="hello world, one two three")], engine.now)
    (submit,) = [each for each in told_scheduler(engine) if isinstance(each, m.Submit)]
    core.frame(client.socket, [w.Cancel(id=2, branch="main", subtree=True)], engine.now)
    assert m.CancelRequest(submit.request) in told_scheduler(engine)
    engine.pump()


def test_each_change_of_the_tree_has_a_revision_of_its_own(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, text="x"),
        w.Fork(id=2, as_=["a"]),
        w.Fork(id=3, branch=None, as_=["b"]),
        w.Set(id=4, branch="a", name="c"),
        w.Rollback(id=5, branch="c", to=0),
        w.Drop(id=6, branch="c"),
    )
    engine.pump()
    revisions = [client.replies[ident][0].revision for ident in range(1, 7)]
    assert sorted(revisions) == [2, 3, 4, 5, 6, 7]  # branches of their own are changed in any order


def submitted(engine: Any, number: int = 1) -> list[m.Submit]:
    return [each for each in told_scheduler(engine, number) if isinstance(each, m.Submit)]


def test_what_a_generation_asks_of_the_scheduler(sim: Callable[..., Any]) -> None:
    engine = sim(context=64)
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5] * 60))
    engine.pump()
    core = engine.cores[1]
    op = w.Generate(id=2, max_tokens=1000, priority=3, deadline_ms=2000, seed=4, stop_token_ids=[9])
    core.frame(client.socket, [op], engine.now)
    (submit,) = submitted(engine)
    assert (submit.prompt, submit.max_tokens, submit.priority) == (
        60,
        4,
        3,
    )  # what the context has room for
    assert submit.deadline == pytest.approx(engine.now + 2.0)
    assert submit.stop_token_ids == [2, 9]
    assert submit.sampling.seed == 4
    engine.pump()
    client.send(w.Append(id=3, tokens=[5]))
    engine.pump()
    client.send(w.Generate(id=4))
    engine.pump()
    assert error(client, 3).code == error(client, 4).code == "too_long"


def test_what_is_computed_ahead_asks_for_no_token(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    engine.pump()
    core = engine.cores[1]
    core.frame(client.socket, [w.Append(id=1, tokens=[5, 6, 7])], engine.now)
    (submit,) = submitted(engine)
    assert (submit.prompt, submit.max_tokens, submit.sampling.temperature) == (3, 0, 1.0)
    assert submit.priority < 0


def test_a_refused_frame_ends_no_op_that_was_seen(sim: Callable[..., Any]) -> None:
    """A client that comes back sends again what has no reply: one fault must not end all of it."""
    engine = sim(eos_every=0)
    client = engine.session()
    again = [w.Append(id=1, text="one"), w.Generate(id=2, max_tokens=20), w.Fork(id=3, as_=["a"])]
    client.send(*again)
    engine.pump(20)
    assert 2 not in client.replies
    replies: list[Any] = []
    client.receive = lambda messages: replies.extend(messages)
    client.send(*again, w.Rollback(id=4), w.Append(id=5, text="x"))
    engine.pump()
    ends = [(r.id, type(r).__name__, getattr(r, "code", "")) for r in replies if hasattr(r, "id")]
    assert sorted(ends) == [
        (1, "Ok", ""),
        (2, "Done", ""),
        (3, "Ok", ""),
        (4, "Error", "bad_request"),
        (5, "Error", "skipped"),
    ]


def test_meta_of_one_branch_is_bounded(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(meta_bytes=100))
    client = engine.session()
    client.send(w.Set(id=1, branch="main", meta={"k": "v" * 92}))  # with quotes and braces: 100 bytes
    client.send(w.Set(id=2, branch="main", meta={"k": "v" * 93}))
    engine.pump()
    assert isinstance(client.replies[1][0], w.Ok)
    assert error(client, 2).code == "limit"


def test_a_prune_moves_a_branch_back_for_whoever_was_away(sim: Callable[..., Any]) -> None:
    """What its own head had beyond the fork is gone."""
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5, 6]), w.Fork(id=2, as_=["a"]))
    client.send(w.Generate(id=3, branch=["a", "main"], max_tokens=4))
    engine.pump()
    known = engine.cores[1].state.revision
    client.send(w.Prune(id=4, from_=["a"], into="main", by="first"))
    engine.pump()
    assert isinstance(client.replies[4][0], w.Ok)
    assert engine.cores[1].state.branches["main"].undercut(known) == 2


def test_names_that_the_server_makes_are_no_longer_than_names_may_be(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    fits, longer = "b" * 60, "b" * 61
    client.send(w.Append(id=1, text="x"), w.Fork(id=2, as_=[fits, longer]))
    client.send(w.Generate(id=3, branch=fits, n=2, max_tokens=1))
    client.send(w.Generate(id=4, branch=longer, n=2, max_tokens=1))
    engine.pump()
    assert sorted(reply.branch for reply in client.replies[3]) == [f"{fits}.3.1", f"{fits}.3.2"]
    assert {reply.code for reply in client.replies[4]} == {"bad_request"}


# --- without an engine ---------------------------------------------------------------------------


def test_each_message_brings_the_time(alone: Callable[..., Alone]) -> None:
    """What a session does is dated by the message that made it do so."""
    session = alone(context=100_000)
    core, publisher = session.core, session.core.publisher
    (submit,) = session.send(w.Append(id=1, tokens=[5]), w.Generate(id=2))
    times: list[float] = []

    def at(now: float, told: Callable[[float], None]) -> None:
        told(now)
        times.append(publisher.now)

    at(11.0, lambda now: core.frame(1, [], now))
    at(12.0, lambda now: core.throttled(1, True, now))
    at(13.0, lambda now: core.throttled(1, False, now))
    at(14.0, core.tick)
    at(15.0, lambda now: core.tokens(m.Tokens([], []), now))
    at(16.0, lambda now: core.inspected(m.Inspected(99, []), now))
    opened = w.Open(client="d")
    at(17.0, lambda now: core.attach(m.Attach(7, opened, [], True), now))
    at(18.0, lambda now: core.detached(7, now))
    core.frame(1, [w.Fork(id=3, branch=None, as_=["t"])], 18.5)
    core.frame(1, [w.Append(id=4, branch="t", text="word " * 2000)], 18.5)
    (job,) = session.state.out.encode
    at(19.0, lambda now: core.encoded(job.ticket, job.run(), None, now))
    at(20.0, lambda now: core.fail(RamifyError("broken"), now))
    assert times == [11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 19.0, 20.0]
    done = session.reply(2)
    assert done.code == "internal"
    assert submit.arrived == 10.0


def test_ops_that_wait_count_as_in_flight(alone: Callable[..., Alone]) -> None:
    session = alone(ops_in_flight=4)
    session.send(w.Append(id=1, tokens=[5]), w.Generate(id=2), w.Append(id=3, tokens=[5]))
    session.send(*(w.Append(id=ident, tokens=[5]) for ident in (4, 5, 6)))
    assert [each.code for each in session.replies(6)] == ["limit"]
    session.send(*(w.Append(id=ident, tokens=[5]) for ident in (4, 5)))
    assert [type(each) for each in session.replies(5)] == [w.Error]  # the first frame's
    session.send(w.Append(id=6, tokens=[5]))
    assert [each.code for each in session.replies(6)] == ["limit", "limit"]


def test_replies_that_are_held_back_count_as_in_flight(alone: Callable[..., Alone]) -> None:
    session = alone(ops_in_flight=2)
    (subscriber,) = session.core.subscribers.values()
    submit, *_ = session.send(
        w.Credit(branch="main", upto=1), w.Append(id=1, tokens=[5]), w.Generate(id=2, max_tokens=3)
    )
    session.said(submit.request, 40, 41, 42)
    session.over(submit.request, 3)
    assert (session.replies(2), subscriber.held) == ([], 1)
    session.send(w.Fork(id=3, branch=None, as_=["a"]), w.Fork(id=4, branch=None, as_=["b"]))
    assert set(session.state.branches) == {"main"}
    session.send(w.Fork(id=3, branch=None, as_=["a"]))
    assert set(session.state.branches) == {"main", "a"}


def test_trees_that_are_not_answered_count_as_in_flight(alone: Callable[..., Alone]) -> None:
    session = alone(ops_in_flight=3)
    session.core.throttled(1, True, 10.0)
    session.send(w.Tree(id=1), w.Tree(id=2))
    session.send(w.Append(id=3, tokens=[5]), w.Append(id=4, tokens=[5]))
    assert {each.code for each in session.replies(3) + session.replies(4)} <= {"limit", "skipped"}
    assert session.branch().position == 0
    session.send(w.Append(id=3, tokens=[5]))
    assert session.branch().position == 1


def test_an_op_that_was_answered_long_ago_is_an_error_and_runs_no_more(
    alone: Callable[..., Alone],
) -> None:
    session = alone(replies_kept=1)
    session.send(w.Append(id=1, tokens=[5]), w.Append(id=2, tokens=[5]))
    assert len(session.replies(1)) == 1
    session.send(w.Append(id=1, tokens=[5]))
    first, second = session.replies(1)
    assert (type(first), second.code) == (w.Ok, "bad_request")
    session.send(w.Append(id=2, tokens=[5]))
    assert session.replies(2)[0] == session.replies(2)[1]
    session.send(w.Cancel(id=3), w.Cancel(id=4))
    session.send(w.Cancel(id=3))
    assert [type(each) for each in session.replies(3)] == [w.Ok, w.Error]
    assert session.branch().position == 2


def test_a_spawn_has_a_reply_for_each_child_and_no_other(alone: Callable[..., Alone]) -> None:
    session = alone()
    (reply_log,) = session.core.publisher.reply_logs.values()
    submits = session.send(w.Append(id=1, tokens=[5]), w.Generate(id=2, n=3, max_tokens=1))
    for left, submit in zip((True, True, False), submits, strict=True):
        assert reply_log.waits(2)
        session.over(submit.request, 0)
        assert reply_log.waits(2) is left
    assert reply_log.idle


def test_text_that_was_held_back_is_sent_when_the_engine_fails(alone: Callable[..., Alone]) -> None:
    session = alone(opened={"tick_ms": 1000})
    (submit,) = session.send(w.Append(id=1, tokens=[5]), w.Generate(id=2))
    session.said(submit.request, 40)
    session.said(submit.request, 41, 42)
    session.core.fail(RamifyError("broken"), 10.1)
    session.replies(2)
    text = "".join(each.text for each in session.sent if isinstance(each, w.Delta))
    segment: Any = session.branch().segments[-1]
    assert text == segment.text
    assert segment.ended
    assert session.core.ended == "the engine failed"
    assert (session.state.out.cache, session.state.out.scheduler, session.state.out.wake_at) == (
        [],
        [],
        None,
    )


def test_credit_for_a_name_that_nobody_makes_is_not_kept(alone: Callable[..., Alone]) -> None:
    session = alone()
    (subscriber,) = session.core.subscribers.values()
    heard: list[tuple[str, int, int]] = []
    subscriber.credit = lambda branch, upto, most: heard.append((branch, upto, most))  # type: ignore[method-assign]
    session.send(w.Credit(branch="nobody", upto=5), w.Credit(branch="main", upto=6))
    assert heard == [("main", 6, session.state.limits.ops_in_flight)]


def test_the_first_branch_is_there_from_the_first_revision(alone: Callable[..., Alone]) -> None:
    session = alone()
    assert (session.state.revision, session.branch().born, list(session.state.branches)) == (
        1,
        1,
        ["main"],
    )
    assert (session.core.ended, session.core.sockets) == (None, [1])


def test_a_frame_that_the_gateway_refuses_gives_no_op_a_second_end(alone: Callable[..., Any]) -> None:
    """After a resume a client sends ops again that wait or have run: they have an end of their own."""
    session = alone()
    session.send(w.Append(id=1, text="hello"))
    (first,) = session.replies(1)
    session.send(w.Generate(id=2, max_tokens=5))
    limit = w.Error(code="limit", message="slow down", retry_ms=5, details={"max": 9})
    again = [w.Append(id=1, text="hello"), w.Generate(id=2, max_tokens=5), w.Append(id=3, text="x")]
    session.core.framed(m.Frame(1, again, limit=limit), session.now)
    assert session.replies(1) == [first, first]  # as it was
    assert session.replies(2) == []  # it is running
    (refused,) = session.replies(3)
    assert (refused.code, refused.retry_ms, refused.details) == ("limit", 5, {"max": 9})
    assert session.core.publisher.reply_log("c", True).last == 2  # so 3 may come again
