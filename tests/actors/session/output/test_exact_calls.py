"""Exact tool calls and structural tags through a whole engine without a loop, with a fake executor.

The fake model says anything, so whatever is in a call is there because the constraint says so.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from ramify.actors.calls.dialects import THOUGHTS, dialect_of
from ramify.actors.session.input.template import ChatTemplate
from ramify.protocol import wire as w
from ramify.protocol.wire import Constraint, StructuralTag, Tag

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["r", 'w"', "</tool_call>", 7, None]},
        "at": {
            "type": "array",
            "items": {"type": "integer", "minimum": -9, "maximum": 9},
            "maxItems": 2,
        },
        "pair": {"anyOf": [{"const": 1}, {"const": 12}]},
    },
    "required": ["mode", "pair"],
    "additionalProperties": False,
}
UNIQUE: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "array", "unevaluatedItems": False}},
}
QUESTION = w.Append(id=1, messages=[w.ChatMessage(role="user", content="Q")])


def tool(name: str = "open", parameters: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def ends(client: Any, ident: int = 2) -> list[Any]:
    return [each for each in client.replies[ident] if isinstance(each, w.Done | w.Error)]


def hermes(sim: Callable[..., Any], **options: Any) -> Any:
    engine = sim(eos_every=0, **options)
    engine.template = ChatTemplate(engine.tokenizer, dialect_of("", "hermes"))
    return engine


def asked(sim: Callable[..., Any], *tools: Any, **options: Any) -> Any:
    """An engine whose client has asked for one generation, which has ended."""
    engine = hermes(sim)
    client = engine.session(tools=list(tools) or None, parts=True)
    client.send(QUESTION, w.Generate(id=2, **{"max_tokens": 300} | options))
    engine.pump()
    return engine, client


def check(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


@pytest.mark.parametrize("choice", ["required", "open", "close"])
@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_is_exact(sim: Callable[..., Any], choice: str, seed: int) -> None:
    _, client = asked(
        sim,
        tool(),
        tool("close"),
        tool_choice=choice,
        temperature=1.0,
        seed=seed,
        parallel_tool_calls=False,
    )
    (done,) = ends(client)
    assert done.reason == "tool"
    (call,) = done.tool_calls
    check([call])
    assert choice == "required" or call["function"]["name"] == choice
    assert done.usage.forced > 0
    assert done.notes is None


def test_children_are_exact_each(sim: Callable[..., Any]) -> None:
    _, client = asked(
        sim, tool(), tool_choice="open", n=4, as_=["a", "b", "c", "d"], temperature=1.0, seed=1
    )
    found = [done.tool_calls for done in client.replies[2] if isinstance(done, w.Done)]
    assert len(found) == 4
    for calls in found:
        assert len(calls) == 1
        check(calls)
    assert len({calls[0]["function"]["arguments"] for calls in found}) > 1


def test_a_call_is_told_once_wherever_its_output_is_cut(sim: Callable[..., Any]) -> None:
    """By the output in which it ends, also where the length cuts that right behind it."""
    _, whole = asked(sim, tool(), tool_choice="open", temperature=1.0, seed=3, parallel_tool_calls=False)
    (wanted,) = ends(whole)[0].tool_calls
    for cut in range(1, ends(whole)[0].usage.output + 1):
        engine, client = asked(
            sim, tool(), tool_choice="open", temperature=1.0, seed=3, parallel_tool_calls=False,
            max_tokens=cut,
        )  # fmt: skip
        (done,) = ends(client)
        if not done.tool_calls:
            assert done.reason == "length"
            client.send(w.Generate(id=3, max_tokens=300, temperature=1.0, parallel_tool_calls=False))
            engine.pump()
            (done,) = ends(client, 3)
            assert done.reason == "tool"
            check(done.tool_calls)
        else:
            assert done.reason in ("length", "tool")
            assert done.tool_calls[0]["function"] == wanted["function"]
        assert len(done.tool_calls) == 1


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_call_goes_on_exactly_where_it_was_cut(sim: Callable[..., Any], cut: int) -> None:
    """Cut by its length, forked, rolled back: the rest of the call is held to the same schema."""
    engine, client = asked(sim, tool(), tool_choice="open", max_tokens=cut, temperature=1.0, seed=cut)
    (done,) = ends(client)
    if done.reason == "tool":
        return
    position = done.position
    client.send(
        w.Fork(id=3, as_=["x"]),
        w.Generate(id=4, branch="x", max_tokens=300, temperature=1.0, seed=5),
        w.Generate(id=5, max_tokens=3, temperature=1.0, seed=6),
        w.Rollback(id=6, branch="main", to=position),
        w.Generate(id=7, max_tokens=300, temperature=1.0, seed=7, stop=["END"]),
    )
    engine.pump()
    for ident in (4, 7):
        (end,) = ends(client, ident)
        if end.reason == "tool":
            check(end.tool_calls[:1])
        else:  # free text behind the call
            assert "</tool_call>" in engine.cores[1].state.branches["x" if ident == 4 else "main"].text()


def test_jump_forward_changes_nothing(sim: Callable[..., Any]) -> None:
    texts = []
    for jumps in (True, False):
        engine = hermes(sim, drafts=8, acceptance=0.0)
        engine.executor.constraints.jumps = jumps
        client = engine.session(tools=[tool()], parts=True)
        client.send(QUESTION, w.Generate(id=2, tool_choice="required", temperature=0, max_tokens=200))
        engine.pump()
        (done,) = ends(client)
        texts.append((engine.cores[1].state.branches["main"].text(), done.tool_calls))
        assert jumps or done.usage.accepted == 0
    assert texts[0] == texts[1]


def test_a_stop_string_cuts_a_call(sim: Callable[..., Any]) -> None:
    _, client = asked(sim, tool(), tool_choice="open", stop=['"pair"'], temperature=1.0, seed=3)
    (done,) = ends(client)
    assert (done.reason, done.stop, done.tool_calls) == ("stop", '"pair"', None)


def test_free_text_is_what_it_was(sim: Callable[..., Any]) -> None:
    """With `auto`, as long as no call begins, nothing is forced and nothing differs."""
    engine, client = asked(sim, tool(), max_tokens=40, temperature=0)
    free, other = asked(sim, tool(), max_tokens=40, temperature=0, tool_choice="none")
    assert engine.cores[1].state.branches["main"].text() == free.cores[1].state.branches["main"].text()
    (done,), (same,) = ends(client), ends(other)
    assert (done.usage.forced, done.usage.output) == (0, same.usage.output)
    assert engine.registry.find  # it was compiled
    assert len(engine.registry) == 1
    assert len(free.registry) == 0


@pytest.mark.parametrize(
    ("options", "strict", "refused"),
    [
        ({}, None, False),
        ({}, True, True),
        ({}, False, False),
        ({"tool_choice": "required"}, None, True),
        ({"tool_choice": "required"}, False, False),
    ],
)
def test_schemas_that_cannot_be_exact(
    sim: Callable[..., Any], options: Any, strict: bool | None, refused: bool
) -> None:
    more = {} if strict is None else {"strict": strict}
    engine, client = asked(sim, tool("odd", UNIQUE, **more), max_tokens=8, **options)
    (end,) = ends(client)
    if refused:
        assert isinstance(end, w.Error)
        assert end.code == "bad_constraint"
        assert "tools[0].parameters of 'odd'" in end.message
        assert not engine.cores[1].state.branches["main"].text().endswith('"name":')  # taken back
        return
    assert end.reason == "length"
    if strict is None or options.get("tool_choice") == "required":
        assert "tools[0].parameters of 'odd'" in end.notes[0]
    else:
        assert end.notes is None  # any object is what was asked for, or nothing is held to anything


def test_where_no_end_is_allowed_nothing_is_held(sim: Callable[..., Any]) -> None:
    _, client = asked(sim, tool(), max_tokens=8, ignore_eos=True)
    (done,) = ends(client)
    assert "ignore_eos" in done.notes[0]


TAGS = StructuralTag(
    tags=[
        Tag(begin="<n>", regex="[0-9]{1,3}", end="</n>"),
        Tag(begin="<j>", json_schema={"enum": [1, 12, "x"]}, end="</j>"),
        Tag(begin="<c>", choices=["yes", "no"], end="</c>"),
    ],
    triggers=["<"],
    at_least_one=True,
)
TAGGED = re.compile(r"<(n)>[0-9]{1,3}</n>|<(j)>(1|12|\"x\")</j>|<(c)>(yes|no)</c>")


@pytest.mark.parametrize("seed", range(4))
def test_structural_tags(sim: Callable[..., Any], seed: int) -> None:
    """The fake model says anything: each `<` that it says begins a tag, and the text ends behind one."""
    engine, client = asked(sim, constraint=Constraint(structural_tag=TAGS), temperature=1.0, seed=seed)
    (done,) = ends(client)
    text = engine.cores[1].state.branches["main"].segments[-1].text
    rest = TAGGED.sub("", text)
    if done.reason == "length":
        rest = rest.rpartition("<")[0]
    assert "<" not in rest
    assert done.reason == "length" or TAGGED.search(text)


def test_exactly_one_tag(sim: Callable[..., Any]) -> None:
    one = StructuralTag(tags=[TAGS.tags[0]], at_least_one=True, stop_after_first=True)
    engine, client = asked(sim, constraint=Constraint(structural_tag=one), temperature=1.0, seed=4)
    text = engine.cores[1].state.branches["main"].segments[-1].text
    if ends(client)[0].reason == "stop":
        assert re.fullmatch(r"(?s:.*)<n>[0-9]{1,3}</n>", text)
        assert text.count("<n>") == 1


@pytest.mark.parametrize(
    ("tags", "fault"),
    [
        (StructuralTag(tags=[Tag(begin="<n>")]), "exactly one"),
        (StructuralTag(tags=[Tag(begin="<n>", regex="a", choices=["b"])]), "exactly one"),
        (StructuralTag(tags=[Tag(begin="<n>", regex="a")], triggers=["<m"]), "triggers"),
        (StructuralTag(tags=[Tag(begin="<n>", regex="(a")]), "structural_tag.tags[0]"),
        (StructuralTag(tags=[Tag(begin="<n>", json_schema={"type": "x"})]), "structural_tag.tags[0]"),
        (StructuralTag(tags=[Tag(begin="<n>", regex="a" * 60_000)] * 2), "constraint.structural_tag"),
        (StructuralTag(tags=[Tag(begin=f"{i}" * 500, regex="a") for i in range(9, 35)]), "triggers"),
    ],
)
def test_hostile_tags(sim: Callable[..., Any], tags: StructuralTag, fault: str) -> None:
    _, client = asked(sim, constraint=Constraint(structural_tag=tags))
    (end,) = ends(client)
    assert isinstance(end, w.Error)
    assert fault in end.message


def test_a_thought_is_free_before_a_constrained_answer(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    dialect = dialect_of("")._replace(thought=THOUGHTS[0])
    engine.template = ChatTemplate(engine.tokenizer, dialect)
    client = engine.session()
    begun = w.Append(id=2, text="<think>Hm.")
    constraint = Constraint(choices=["yes", "no"], after_thought=True)
    client.send(QUESTION, begun, w.Generate(id=3, constraint=constraint, max_tokens=400))
    client.send(w.Append(id=4, text="</think>\n"), w.Generate(id=5, constraint=constraint))
    engine.pump()
    (cut,), (done,) = ends(client, 3), ends(client, 5)
    assert cut.reason == "length"  # it never says </think>
    assert done.text is None
    plain = sim(eos_every=0)
    client = plain.session()
    client.send(QUESTION, w.Generate(id=2, constraint=constraint, max_tokens=20))
    plain.pump()
    (done,) = ends(client)  # a model that does not think answers at once
    assert done.content in ("yes", "no")
