"""`prune`: the best branches are kept, under their names or others; the rest goes."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.session.branches.segments import OutputSegment
from ramify.actors.session.branches.tasks import Race
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.ranking import READ, best_first, number_in, vote_of, votes

Sim = Callable[..., Any]
NAMES = ["a", "b", "c", "d"]


def only(client: Any, ident: int) -> Any:
    (reply,) = client.replies[ident]
    return reply


def say(engine: Any, name: str, text: str) -> None:
    """As if the model had said `text` last on the branch."""
    branch = engine.cores[1].state.branches[name]
    segment = branch.answer()
    assert segment is not None
    segment.chunks[:] = [text] + [""] * (len(segment.chunks) - 1)


def forked(sim: Sim, texts: list[str], **settings: Any) -> tuple[Any, Any]:
    """Children of "main" that have said these texts, and their client."""
    engine = sim(eos_every=0, **settings)
    client = engine.session()
    names = NAMES[: len(texts)]
    client.send(
        w.Append(id=1, text="hello"),
        w.Fork(id=2, as_=names),
        w.Generate(id=3, branch=names, max_tokens=4, temperature=0.9, seed=5),
    )
    engine.pump()
    for name, text in zip(names, texts, strict=True):
        say(engine, name, text)
    return engine, client


def clean(engine: Any) -> None:
    """Nothing is held beyond the session's branches."""
    state = engine.cores[1].state
    assert engine.cache.referenced == 0
    assert len(engine.cache.branches) == len(state.branches)


# --- what is compared --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("Score: 7/10", 7),
        ("I give it 7 out of 10.", 7),
        ("On a scale from 1 to 10: 8.", 8),
        ("-3.5e2", -350),
        ("1,234,567.5 is it", 1234567.5),
        ("10,20", 20),
        ("3-5", 5),
        (".5", 0.5),
        ("v2 and x9", None),
        ("none at all", None),
        ("", None),
        ("9" * 400, None),
        ("1e999", None),
        ("5" + "x " * READ, None),
        ("x " * READ + "12 of them" + " y" * 100, 12),
        ("1 " * READ + "7/10", 7),
        ("\u0663", None),
    ],
)
def test_the_last_number_counts(text: str, number: float | None) -> None:
    assert number_in(text) == number


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Paris", " paris.\n"),
        ("(B)", "b"),
        ("42", "42.0"),
        ("1,000", "1000"),
        ("new  York", "New York!"),
    ],
)
def test_equal_answers_are_the_same_vote(one: str, other: str) -> None:
    assert vote_of(one) == vote_of(other) != ""


def test_votes_are_counted_and_ties_go_to_the_first() -> None:
    said = [vote_of(text) for text in ("x", "y", " X.", "", "y")]
    scores = votes(said)
    assert scores == [2, 2, 2, None, 2]
    assert best_first(scores, said) == [0, 1, 2, 4, 3]  # one child for each answer comes first
    assert best_first([1.0, None, 3.0, 3.0]) == [2, 3, 0, 1]


# --- how it ends ---------------------------------------------------------------------------------------


def test_the_winner_moves_into_its_parent(sim: Sim) -> None:
    engine, client = forked(sim, ["3", "9", "no", "9"])
    state = engine.cores[1].state
    best = state.branches["b"]
    tokens, main = best.tokens(), state.branches["main"]
    client.send(w.Prune(id=4, from_=NAMES, by="number", into="main"))
    engine.pump()
    ok = only(client, 4)
    assert (ok.branch, ok.position) == ("main", len(tokens))
    assert ok.result == {
        "kept": [{"from": "b", "into": "main", "position": len(tokens)}],
        "dropped": NAMES,
        "scores": {"a": 3, "b": 9, "c": None, "d": 9},
    }
    assert state.branches == {"main": main}
    assert main.tokens() == tokens
    clean(engine)
    client.send(w.Generate(id=5, max_tokens=3, temperature=0))
    engine.pump()
    usage = only(client, 5).usage
    assert (usage.cached, usage.computed) == (len(tokens) - 1, 1)
    engine.cores[1].state.branches["main"].segments.pop()


def test_a_beam_gets_new_names(sim: Sim) -> None:
    engine, client = forked(sim, ["3", "9", "5", "1"])
    made = []
    publisher = engine.cores[1].publisher
    reply = publisher.reply

    def noted(*args: Any, **fields: Any) -> None:
        made.extend(branch.name for branch in fields.get("children", ()))
        reply(*args, **fields)

    publisher.reply = noted
    client.send(w.Prune(id=4, from_=NAMES, by="number", into=["one", "two"]))
    engine.pump()
    assert made == ["two"]  # a socket is told of it before it hears anything about it
    assert [(k["from"], k["into"]) for k in only(client, 4).result["kept"]] == [
        ("b", "one"),
        ("c", "two"),
    ]
    state = engine.cores[1].state
    assert set(state.branches) == {"main", "one", "two"}
    assert state.branches["one"].parent == "main"
    clean(engine)
    client.send(w.Prune(id=5, from_=["two", "one"], by="number"))  # their last answers came along
    engine.pump()
    assert only(client, 5).result["scores"] == {"two": 5, "one": 9}
    assert set(state.branches) == {"main", "one"}


def test_winners_may_swap_their_names(sim: Sim) -> None:
    engine, client = forked(sim, ["3", "9"])
    state = engine.cores[1].state
    a, b = state.branches["a"].tokens(), state.branches["b"].tokens()
    client.send(w.Prune(id=4, from_=["a", "b"], by="number", into=["a", "b"]))
    engine.pump()
    assert (state.branches["a"].tokens(), state.branches["b"].tokens()) == (b, a)
    kept = only(client, 4).result["kept"]
    assert [k["rebased"] for k in kept] == [3, 3]
    clean(engine)


def test_without_into_the_winners_stay(sim: Sim) -> None:
    engine, client = forked(sim, ["3", "9", "5", "1"])
    client.send(w.Prune(id=4, from_=NAMES, by="number", k=2))
    engine.pump()
    assert set(engine.cores[1].state.branches) == {"main", "b", "c"}
    assert only(client, 4).result["dropped"] == ["a", "d"]
    clean(engine)


def test_keep_drops_nobody(sim: Sim) -> None:
    engine, client = forked(sim, ["3", "9", "5", "1"])
    client.send(w.Prune(id=4, from_=NAMES, by="number", into=["best"], keep=True))
    engine.pump()
    state = engine.cores[1].state
    assert set(state.branches) == {"main", *NAMES, "best"}
    assert state.branches["best"].tokens() == state.branches["b"].tokens()
    clean(engine)


def test_votes(sim: Sim) -> None:
    engine, client = forked(sim, ["4", "5.", "5", "four"])
    client.send(w.Prune(id=4, from_=NAMES, by="vote", k=2))
    engine.pump()
    ok = only(client, 4)
    assert [k["from"] for k in ok.result["kept"]] == ["b", "a"]
    assert ok.result["scores"] == {"a": 1, "b": 2, "c": 2, "d": 1}


def test_others_may_judge(sim: Sim) -> None:
    engine, client = forked(sim, ["x", "y", "2", "7"])
    client.send(w.Prune(id=4, from_=["a", "b"], score_from=["c", "d"], by="number", into="main"))
    engine.pump()
    assert only(client, 4).result["kept"][0]["from"] == "b"
    assert set(engine.cores[1].state.branches) == {"main"}
    clean(engine)


def test_log_probabilities_are_computed_for_a_prune_that_waits(sim: Sim) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Fork(id=2, as_=["a", "b"]),
        w.Generate(id=3, branch=["a", "b"], max_tokens=4, temperature=0.9, seed=5),
        w.Prune(id=4, from_=["a", "b"], into="main"),
        w.Generate(id=5, max_tokens=4),
    )
    engine.pump()
    means = {reply.branch: reply.mean_logprob for reply in client.replies[3]}
    assert only(client, 4).result["scores"] == means
    assert all(mean is not None for mean in means.values())
    assert only(client, 5).mean_logprob is None  # nobody wants it
    (output, _) = [
        p for p in engine.cores[1].state.branches["main"].segments if isinstance(p, OutputSegment)
    ]
    assert output.logprobs is None


def test_without_them_a_prune_says_how_to_get_them(sim: Sim) -> None:
    engine, client = forked(sim, ["x", "y"])
    client.send(w.Prune(id=4, from_=["a", "b"]))
    engine.pump()
    assert (only(client, 4).code, "`logprobs`" in only(client, 4).message) == ("bad_request", True)
    assert set(engine.cores[1].state.branches) == {"main", "a", "b"}


# --- the first ones ------------------------------------------------------------------------------------


def racing(sim: Sim, *more: w.Op, **settings: Any) -> tuple[Any, Any]:
    """Four children that generate 5, 40, 200, 200 tokens."""
    engine = sim(eos_every=0, **settings)
    client = engine.session()
    lengths = dict(zip(NAMES, (200, 5, 200, 40), strict=True))
    client.send(
        w.Append(id=1, text="hello"),
        w.Fork(id=2, as_=NAMES),
        *(
            w.Generate(id=i, branch=name, max_tokens=n, temperature=0.9, seed=i)
            for i, (name, n) in enumerate(lengths.items(), 3)
        ),
        *more,
    )
    return engine, client


def test_the_first_one_wins_and_the_others_stop(sim: Sim) -> None:
    engine, client = racing(
        sim,
        w.Append(id=10, branch="a", tokens=[5]),
        w.Prune(id=11, from_=NAMES, by="first", into="main"),
        w.Generate(id=12, max_tokens=3, temperature=0),
    )
    engine.pump()
    assert [only(client, i).reason for i in (3, 4, 5, 6)] == [
        "cancelled",
        "length",
        "cancelled",
        "cancelled",
    ]
    assert all(only(client, i).usage.output < 30 for i in (3, 5, 6))
    assert only(client, 10).code == "cancelled"  # it waited behind a loser's generation
    assert only(client, 11).result == {
        "kept": [{"from": "b", "into": "main", "position": 8}],
        "dropped": NAMES,
    }
    assert only(client, 12).reason == "length"
    assert set(engine.cores[1].state.branches) == {"main"}
    clean(engine)


def test_the_first_two_are_a_beam(sim: Sim) -> None:
    engine, client = racing(sim, w.Prune(id=11, from_=NAMES, by="first", k=2))
    engine.pump()
    assert [k["from"] for k in only(client, 11).result["kept"]] == ["b", "d"]
    assert only(client, 3).usage.output < 80
    clean(engine)


def test_a_race_that_comes_late_is_decided_at_once(sim: Sim) -> None:
    engine, client = racing(sim)
    while 4 not in client.replies:
        engine.pump(1)
    client.send(w.Prune(id=11, from_=NAMES, by="first"))
    engine.pump()
    assert [k["from"] for k in only(client, 11).result["kept"]] == ["b"]
    assert only(client, 6).reason == "cancelled"


def test_what_was_cancelled_or_failed_does_not_win(sim: Sim) -> None:
    engine, client = racing(
        sim,
        w.Append(id=10, branch="b", tokens=[10**6]),  # fails behind the generation
        w.Prune(id=11, from_=NAMES, by="first", into="main"),
    )
    engine.pump(40)
    client.send(w.Cancel(id=12, branch="a"))
    engine.pump()
    assert only(client, 10).code == "bad_request"
    assert only(client, 11).result["kept"][0]["from"] == "d"
    clean(engine)


def test_the_winner_waits_for_its_place(sim: Sim) -> None:
    """Should the op before it on "main" fail, nobody was stopped for nothing."""
    engine, client = racing(
        sim,
        w.Rollback(id=10, branch="main", to=99),
        w.Prune(id=11, from_=NAMES, by="first", into="main"),
    )
    engine.pump()
    assert [only(client, i).reason for i in (3, 4, 5, 6)] == ["length"] * 4
    assert only(client, 11).code == "skipped"


def test_who_says_nothing_does_not_win(sim: Sim) -> None:
    engine, client = racing(
        sim,
        w.Fork(id=10, as_=["idle"]),
        w.Prune(id=11, from_=["idle", *NAMES], by="first", into="main"),
    )
    engine.pump()
    assert only(client, 11).result["kept"][0]["from"] == "b"


def test_a_race_in_short() -> None:
    race = Race(["a", "b", "c"], ["main", "c"], 2)
    race.through("c", 1.0, whole=True)
    race.through("b", 1.0, whole=False)
    race.through("main", 1.0, whole=True)
    assert not race.decide(())
    race.through("a", 2.0, whole=True)
    assert not race.decide({"main"})  # the prune will be skipped
    assert race.decide(())
    assert not race.decide(())
    assert (race.decided, race.losers) == (["c", "a"], ["b"])


# --- failures ------------------------------------------------------------------------------------------


def test_a_prune_goes_on_without_those_that_failed(sim: Sim) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Fork(id=2, as_=["a", "b"]),
        w.Append(id=3, branch="a", tokens=[10**6]),
        w.Generate(id=4, branch=["a", "b"], max_tokens=4),
        w.Prune(id=5, from_=["a", "b"], into="main"),
        w.Fork(id=6, as_=["c", "d"]),
        w.Append(id=7, branch=["c", "d"], tokens=[10**6]),
        w.Prune(id=8, from_=["c", "d"], into="main"),
        w.Generate(id=9, max_tokens=3),
    )
    engine.pump()
    ok = only(client, 5)
    assert (ok.result["kept"][0]["from"], ok.result["dropped"]) == ("b", ["a", "b"])
    assert list(ok.result["scores"]) == ["b"]
    assert [only(client, i).code for i in (8, 9)] == ["skipped", "skipped"]


def test_the_limit_of_branches_counts_those_that_go(sim: Sim) -> None:
    engine, client = forked(sim, ["1", "2", "3", "4"], limits=Limits(branches=5))
    client.send(w.Prune(id=4, from_=NAMES, by="number", into="x", keep=True))
    engine.pump()
    assert only(client, 4).code == "limit"
    client.send(w.Prune(id=5, from_=NAMES, by="number", into="x"))
    engine.pump()
    assert set(engine.cores[1].state.branches) == {"main", "x"}


def test_retention_and_facts_stay_with_the_name(sim: Sim) -> None:
    engine, client = forked(sim, ["1", "2"])
    client.send(w.Set(id=4, branch="main", retain_s=1000, meta={"k": 1}))
    engine.pump()
    client.send(w.Prune(id=5, from_=["a", "b"], by="number", into="main"))
    engine.pump()
    main = engine.cores[1].state.branches["main"]
    assert (main.retain_s, main.meta) == (1000, {"k": 1})
    assert list(engine.cache.leases.branches()) == [main.handle]


def test_who_was_away_gets_the_text_under_the_new_name(sim: Sim) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Generate(id=2, max_tokens=3, temperature=0),
        w.Fork(id=3, as_=["a", "b"]),
    )
    engine.pump()
    before = client.text("main")
    client.send(
        w.Generate(id=4, branch=["a", "b"], max_tokens=4, temperature=0.9, seed=5),
        w.Prune(id=5, from_=["a", "b"], into="main"),
    )
    client.drop()
    engine.pump()
    client.connect()
    engine.pump()
    main = engine.cores[1].state.branches["main"]
    outputs = [segment.text for segment in main.segments if isinstance(segment, OutputSegment)]
    assert [before, client.text("main")] == [outputs[0], "".join(outputs)]
    assert client.have == {"main": main.position}
    assert client.unanswered == {}
