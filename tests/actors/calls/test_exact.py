"""Exact calls, family by family: random texts of the structures are read as calls that are valid."""

import json
import random
from typing import Any

import jsonschema
import pytest

from ramify.actors.calls.dialects import DIALECTS, THOUGHTS, Dialect, dialect_of
from ramify.actors.calls.exact import Written, exact_calls
from ramify.actors.calls.openings import Openings
from ramify.actors.calls.reader import Reader
from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.structure import structure_automaton
from ramify.protocol.errors import BadRequest, ConstraintError
from ramify.protocol.structure import Part, Structure
from tests.actors.grammar.samples import sample

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Köln", 'a "b"', "</tool>", "\n"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "units": {"enum": ["C", "F", None, 1, {"x": [True]}]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {
                "pairs": {"type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2},
                "n": {"type": "number", "multipleOf": 0.5, "minimum": -3, "maximum": 3},
            },
            "$defs": {"p": {"type": "array", "prefixItems": [{"type": "boolean"}], "maxItems": 1}},
            "required": ["pairs", "n"],
            "additionalProperties": False,
        },
    },
]
SCHEMAS = {
    tool.get("function", tool)["name"]: jsonschema.Draft202012Validator(
        tool.get("function", tool)["parameters"]
    )
    for tool in TOOLS
}
BOX = Toolbox(TOOLS)
FAMILIES = [name for name in DIALECTS if name != "none"]
SHORT = {"mistral": Written("[TOOL_CALLS]", "[CALL_ID]call00001[ARGS]")}
FENCED = Written("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n")


def refuses(*_: Any) -> str:
    raise BadRequest("no template")


def written_of(dialect: Dialect) -> Written:
    return Openings(refuses, dialect).written()


def automaton(root: Part, after: str = "", marks: tuple[str, ...] = ()) -> Automaton:
    return structure_automaton(Structure(root, list(marks), after))[0]


def calls_in(dialect: Dialect, text: str) -> list[tuple[str, Any]]:
    reader = Reader(dialect, BOX, 0)
    reader.feed(text)
    reader.finish()
    found = [call["function"] for call in reader.calls]
    return [(call["name"], json.loads(call["arguments"])) for call in found]


def shown(data: bytes) -> str:
    """As the detokenizer shows marks."""
    return data.replace(b"\xff", b"").replace(b"\xfe", b"").decode("utf-8", "replace")


CASES = [(name, written_of(DIALECTS[name])) for name in FAMILIES]
CASES += [*SHORT.items(), ("deepseek", FENCED)]


@pytest.mark.parametrize(("name", "written"), CASES)
@pytest.mark.parametrize("parallel", [False, True])
def test_forced_calls_are_exact(name: str, written: Written, parallel: bool) -> None:
    dialect = DIALECTS[name]
    calls = exact_calls(
        dialect, written, BOX.tools, demanded=True, parallel=parallel, ends_output=lambda mark: False
    )
    assert calls is not None
    rng = random.Random(name)
    made = automaton(calls.forced, marks=dialect.marks)
    counts, names = set(), set()
    for _ in range(30):
        found = calls_in(dialect, shown(sample(made, rng, rng.choice([0, 80, 200]))))
        assert found
        counts.add(len(found))
        for tool, arguments in found:
            names.add(tool)
            SCHEMAS[tool].validate(arguments)
    assert names == set(SCHEMAS)
    assert (max(counts) > 1) == (parallel and name != "harmony")


@pytest.mark.parametrize(("name", "written"), [case for case in CASES if case[0] != "any"])
def test_a_call_in_free_text_is_exact(name: str, written: Written) -> None:
    dialect = dialect_of("", name)
    calls = exact_calls(
        dialect, written, BOX.tools, demanded=True, parallel=True, ends_output=lambda mark: False
    )
    assert calls is not None
    assert calls.free is not None
    free = automaton(calls.free, marks=dialect.marks)
    forced = automaton(calls.forced, marks=dialect.marks)
    rng = random.Random(name)
    behind_text = name not in ("llama3", "harmony")  # these begin an answer
    for _ in range(15):
        call = sample(forced, rng, rng.choice([0, 120]))
        text = (b"Well. " if behind_text else b"") + call
        assert free.accepts(text), text
        assert calls_in(dialect, shown(text))
        cut = call[: rng.randrange(len(call))]
        assert free.walk(cut) >= 0
    for text in ("", "Hello.", "<tool", '{"name": "nobody"}', "[1, 2]", "to=functions", "\n\n{}"):
        assert free.accepts(text.encode()), text
    wrong = sample(forced, random.Random(1), 0).replace(b"weather", b"wether").replace(b"look", b"lock")
    if name != "llama3":  # there a JSON answer with another name is an answer
        assert not free.accepts(wrong)


def test_thoughts_are_free() -> None:
    dialect = DIALECTS["hermes"]._replace(thought=THOUGHTS[0])
    calls = exact_calls(
        dialect,
        written_of(dialect),
        BOX.tools,
        demanded=False,
        parallel=True,
        ends_output=lambda mark: False,
    )
    assert calls is not None
    assert calls.free is not None
    free = automaton(calls.free, marks=(*dialect.marks, "<think>", "</think>"))
    call = sample(automaton(calls.forced, marks=dialect.marks), random.Random(2), 30)
    thought = b"\xff<think>\xfeI could use \xff<tool_call>\xfe{ now.\xff</think>\xfe\n"
    assert free.accepts(thought + call)
    assert free.accepts(thought + b"Hello.")
    assert not free.accepts(thought + b"\xff<tool_call>\xfe{")
    assert free.accepts(call + b"<think>no thought: it came too late")


def test_what_ends_an_output_is_no_part_of_a_call() -> None:
    dialect = DIALECTS["harmony"]
    calls = exact_calls(
        dialect,
        written_of(dialect),
        BOX.tools[:1],
        demanded=True,
        parallel=True,
        ends_output=lambda mark: mark == "<|call|>",
    )
    assert calls is not None
    text = sample(automaton(calls.forced), random.Random(1), 0).decode()
    assert text.endswith("}")
    assert calls_in(dialect, text)


def bad(**more: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"x": {"type": "array", "unevaluatedItems": False}}}
    return [{"name": "bad", "parameters": parameters, **more}]


@pytest.mark.parametrize(
    ("strict", "demanded", "refused"),
    [
        (None, False, False),
        (None, True, True),
        (True, False, True),
        (False, False, False),
        (False, True, False),
    ],
)
def test_schemas_that_cannot_be_kept(strict: bool | None, demanded: bool, refused: bool) -> None:
    tools = Toolbox(bad() if strict is None else bad(strict=strict)).tools
    dialect = DIALECTS["hermes"]
    calls = exact_calls(
        dialect,
        written_of(dialect),
        tools,
        demanded=demanded,
        parallel=True,
        ends_output=lambda mark: False,
    )
    assert calls is not None
    if refused:
        with pytest.raises(ConstraintError, match=r"tools\[0\]\.parameters of 'bad'"):
            automaton(calls.forced)
    else:
        notes = structure_automaton(Structure(calls.forced))[1]
        noted = len(notes) == 1 and "any object is allowed" in notes[0]
        assert noted == (strict is None or demanded)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forced_call_of_a_tool_that_is_not_strict_is_valid(name: str) -> None:
    dialect = DIALECTS[name]
    loose = Toolbox(
        [{**tool, "strict": False} for tool in (each.get("function", each) for each in TOOLS)]
    )
    written = SHORT.get(name) or written_of(dialect)

    def forced(tools: Toolbox) -> Automaton:
        calls = exact_calls(
            dialect, written, tools.tools, demanded=True, parallel=False, ends_output=lambda mark: False
        )
        assert calls is not None
        return automaton(calls.forced)

    strict, made = forced(BOX), forced(loose)
    for seed in range(4):
        assert strict.accepts(sample(made, random.Random(seed), 30))


def test_no_calls_no_structure() -> None:
    dialect = DIALECTS["none"]
    assert (
        exact_calls(
            dialect,
            Written("", ""),
            BOX.tools,
            demanded=True,
            parallel=True,
            ends_output=lambda mark: False,
        )
        is None
    )
