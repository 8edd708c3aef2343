"""Recorded conversations of agents with tools: the model writes calls, which are read and run."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.agent_records import RecordedConversation, RecordedTurn
from tests.e2e.agent_replay import ConversationReplay, Otherwise, run
from tests.e2e.agent_script import Unfit

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("RAMIFY_TEMPLATES", ROOT.parent / "shared" / "data" / "templates"))
LEFT_OUT = ("DeepSeek-V3.jinja",)  # its template shows no end of a turn with one call


def tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {key: {"type": kind, "description": f"The {key}."} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(schema)[:1]}
    function = {"name": name, "description": f"Tool description: {name}.", "parameters": parameters}
    function["strict"] = False  # a scripted model says what it is told to
    return {"type": "function", "function": function}


def expected(name: str, result: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments, "result": result}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


FILES = [tool("cd", folder="string"), tool("list", all="boolean", depth="integer", of="object")]
TURNS = [
    {
        "messages": said('Go to "a" and list. 🎉'),
        "expected_calls": [
            expected("cd", '{"at": "a"}', folder='a "b" </tool_call>é'),
            expected("list", "[1,\n2]", all=True, depth=-3, of={"x": [None, 1.5]}),
            expected("list", "Error: no", all=False),
        ],
    },
    {"messages": said("What for?"), "expected_calls": []},
    {"messages": [], "tools_added": ["list"], "expected_calls": [expected("cd", "None", folder="..")]},
    {
        "messages": said("Twice."),
        "expected_calls": [expected("cd", "1", folder="x"), expected("cd", "2", folder="y")],
    },
]


def conversations(count: int) -> list[RecordedConversation]:
    return [
        RecordedConversation(
            f"c{number}",
            FILES,
            msgspec.convert(
                [{"messages": said(f"I am {number}."), "expected_calls": []}, *TURNS], list[RecordedTurn]
            ),
        )
        for number in range(count)
    ]


def check(total: Any, errors: list[str], *, parallel: bool) -> None:
    assert errors == []
    assert (total["conversations"], total["turns"], total["calls"]) == (2, 10, 12)
    assert (total["outputs with several calls"] > 0) == parallel
    assert total["tokens compared"] > 400
    assert total["computed"] < total["prompt tokens"]


async def test_the_bundled_template() -> None:
    check(*await run(conversations(2), None, 2), parallel=True)


@pytest.mark.parametrize("template", sorted(SHARED.glob("*.jinja")), ids=lambda path: path.stem)
async def test_published_templates(template: Path) -> None:
    if template.name.endswith(LEFT_OUT):
        with pytest.raises(Unfit, match="no end"):
            await run(conversations(2), template, 2)
        return
    parallel = not template.name.startswith(("meta-llama", "openai"))
    check(*await run(conversations(2), template, 2), parallel=parallel)


async def test_a_call_that_is_not_the_recorded_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: Any) -> None:
        raise Otherwise("other")

    monkeypatch.setattr(ConversationReplay, "check", other)
    total, errors = await run(conversations(1), None, 1)
    assert errors == ["c0: other"]
    assert total["conversations"] == 0
