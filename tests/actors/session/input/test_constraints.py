"""Constrained generations through a whole engine without a loop, with a fake executor."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.wire import Constraint

PHONE = Constraint(regex=r"[0-9]{3}-[0-9]{4}")
RECORD = Constraint(regex=r'\{"name": "[a-z]{1,12}", "tags": \[("[a-z]", ){0,3}"[a-z]"\]\}')


def said(engine: Any, branch: str = "main", number: int = 1) -> str:
    """The text of the last output on a branch."""
    text: str = engine.cores[number].state.branches[branch].segments[-1].text
    return text


def ends(client: Any, ident: int) -> list[Any]:
    return [each for each in client.replies[ident] if isinstance(each, w.Done | w.Error)]


@pytest.mark.parametrize("seed", range(4))
def test_the_output_is_what_the_constraint_says(sim: Callable[..., Any], seed: int) -> None:
    engine = sim(seed=seed)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Generate(id=2, constraint=RECORD, max_tokens=300, temperature=1.0, seed=seed),
    )
    engine.pump()
    assert re.fullmatch(RECORD.regex or "", said(engine))
    (done,) = ends(client, 2)
    assert (done.reason, done.notes) == ("stop", None)
    assert 0 < done.usage.forced < done.usage.output


def test_a_constraint_holds_for_its_generation_only(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Generate(id=2, constraint=PHONE, max_tokens=30),
        w.Generate(id=3, max_tokens=12),
    )
    engine.pump()
    (free,) = ends(client, 3)
    assert free.usage.output == 12
    assert free.usage.forced == 0
    assert not re.fullmatch(PHONE.regex or "", said(engine))


def test_all_children_and_branches_obey(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Generate(id=2, constraint=PHONE, n=4, as_=["a", "b", "c", "d"], temperature=1.0),
    )
    engine.pump()
    texts = {said(engine, name) for name in "abcd"}
    assert all(re.fullmatch(PHONE.regex or "", text) for text in texts)
    assert len(texts) > 1


def test_max_tokens_cuts_a_constrained_output(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, text="hello"), w.Generate(id=2, constraint=RECORD, max_tokens=3))
    engine.pump()
    (done,) = ends(client, 2)
    assert (done.reason, done.usage.output) == ("length", 3)


@pytest.mark.parametrize(
    ("constraint", "fault"),
    [
        (Constraint(regex="(a"), "character 0"),
        (Constraint(regex="[^\\x00-\\U0010ffff]"), ""),
        (Constraint(json_schema={"type": "nothing"}), ""),
        (Constraint(json_schema="{"), "not JSON"),
        (Constraint(choices=[""] * 2, regex=None), ""),
    ],
)
def test_what_does_not_compile_is_said(
    sim: Callable[..., Any], constraint: Constraint, fault: str
) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, text="hello"), w.Generate(id=2, constraint=constraint, max_tokens=5))
    engine.pump()
    (end,) = ends(client, 2)
    if isinstance(end, w.Error):
        assert end.code == "bad_constraint"
        assert fault in end.message
        assert engine.cores[1].state.branches["main"].segments[-1].text == "hello"  # nothing was begun
    else:
        assert constraint.choices == ["", ""]  # the empty text is a text


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"constraint": Constraint()}, "constraint"),
        ({"constraint": Constraint(regex="a", choices=["b"])}, "constraint"),
        ({"constraint": PHONE, "ignore_eos": True}, "ignore_eos"),
        ({"constraint": PHONE, "tool_choice": "required"}, "tool_choice"),
        ({"constraint": Constraint(regex="a" * 9000)}, "constraint.regex"),
        ({"constraint": Constraint(choices=["é" * 40_000])}, "constraint.choices"),
    ],
)
def test_what_cannot_be_asked_for(sim: Callable[..., Any], fields: dict[str, Any], path: str) -> None:
    engine = sim(limits=Limits())
    client = engine.session()
    client.send(w.Append(id=1, text="hello"), w.Generate(id=2, **fields))
    engine.pump()
    (end,) = ends(client, 2)
    assert isinstance(end, w.Error)
    assert end.code in ("bad_request", "limit")
    assert path in end.message


@pytest.mark.parametrize("steps", [3, 6, 9, 14, 20, 30])
def test_cancelled_in_the_midst(sim: Callable[..., Any], steps: int) -> None:
    """Whether it compiles, waits or runs: one end, and the branch goes on."""
    engine = sim(seed=steps)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Generate(id=2, constraint=Constraint(regex="(ab){100}"), max_tokens=400),
    )
    engine.pump(steps)
    client.send(w.Cancel(id=3, branch="main"))
    engine.pump()
    (end,) = ends(client, 2)
    assert isinstance(end, w.Done | w.Error)
    if isinstance(end, w.Done):
        assert ("ab" * 100).startswith(said(engine)) or end.usage.output == 0
    client.send(w.Generate(id=4, constraint=PHONE))
    engine.pump()
    assert re.fullmatch(PHONE.regex or "", said(engine))


@pytest.mark.parametrize("steps", [2, 4, 8, 16, 24, 40, 60])
def test_paused_and_resumed(sim: Callable[..., Any], steps: int) -> None:
    """A generation that is paused goes on under its constraint exactly where it was."""
    outputs = []
    for cut in (None, steps):
        engine = sim(seed=1)
        client = engine.session(detach="pause")
        client.send(
            w.Append(id=1, text="hello"),
            w.Generate(id=2, constraint=RECORD, max_tokens=300, temperature=1.0, seed=5),
        )
        if cut is not None:
            engine.pump(cut)
            client.drop()
            engine.pump()
            client.connect()
        engine.pump()
        outputs.append(said(engine))
        (done,) = ends(client, 2)
        outputs.append(done.usage.forced)
    assert outputs[:2] == outputs[2:]
    assert re.fullmatch(RECORD.regex or "", outputs[0])


@pytest.mark.parametrize("seed", range(3))
def test_retracted_for_memory(sim: Callable[..., Any], seed: int) -> None:
    """Too few pages for all: some are retracted, and their constraints are replayed."""
    engine = sim(pages=96, seed=seed, context=90, eos_every=0)
    clients = [engine.session(f"c{i}") for i in range(4)]
    for client in clients:
        client.send(
            w.Append(id=1, text="hello"),
            w.Generate(id=2, constraint=Constraint(regex="(ab|c){60}"), max_tokens=62, temperature=1.0),
        )
    engine.pump()
    for number in range(1, 5):
        text = said(engine, number=number)
        assert re.fullmatch("(ab|c)*a?", text)
    assert engine.scheduler.lifecycle.retractions


def test_constraints_that_give_way_are_compiled_again(sim: Callable[..., Any]) -> None:
    """With room for one, each compile retires the last one; requests keep what they have."""
    engine = sim(constraints=1)
    client = engine.session()
    ops: list[w.Op] = [w.Append(id=1, text="hello"), w.Fork(id=2, as_=list("abcdef"))]
    patterns = {name: rf"{name}[0-9]{{5,9}}" for name in "abcdef"}
    ops += [
        w.Generate(id=10 + i, branch=name, constraint=Constraint(regex=pattern))
        for i, (name, pattern) in enumerate(patterns.items())
    ]
    client.send(*ops)
    engine.pump()
    for name, pattern in patterns.items():
        assert re.fullmatch(pattern, said(engine, name))
    assert len(engine.executor.constraints._known) <= 2
