"""`benchmarks/agent_turns.py` on two conversations: the model writes calls, which are read and run."""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("RAMIFY_TEMPLATES", ROOT.parent / "shared" / "data" / "templates"))
LEFT_OUT = ("DeepSeek-V3.jinja",)  # its template shows no end of a turn with one call


def tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {key: {"type": kind, "description": f"The {key}."} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(schema)[:1]}
    function = {"name": name, "description": f"Tool description: {name}.", "parameters": parameters}
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


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("agent_turns")
    for name in set(sys.modules) - before:
        if name.startswith(("program", "agent_")) or name == "report":
            del sys.modules[name]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines: list[dict[str, Any]] = [{"kind": "toolset", "name": "files", "tools": [*FILES, tool("no")]}]
    for number in range(2):
        lines.append(
            {
                "kind": "conversation",
                "id": f"c{number}",
                "toolsets": ["files"],
                "excluded_tools": ["no"],
                "turns": [{"messages": said(f"I am {number}."), "expected_calls": []}, *TURNS],
            }
        )
    path = tmp_path / "agents.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check(total: Any, errors: list[str], *, parallel: bool) -> None:
    assert errors == []
    assert (total["conversations"], total["turns"], total["calls"]) == (2, 10, 12)
    assert (total["outputs with several calls"] > 0) == parallel
    assert total["tokens compared"] > 400
    assert total["computed"] < total["prompt tokens"]


async def test_the_bundled_template(bench: Any, data: Path) -> None:
    total, errors = await bench.run(bench.read(data), None, 2)
    check(total, errors, parallel=True)


@pytest.mark.parametrize("template", sorted(SHARED.glob("*.jinja")), ids=lambda path: path.stem)
async def test_published_templates(bench: Any, data: Path, template: Path) -> None:
    if template.name.endswith(LEFT_OUT):
        with pytest.raises(bench.Unfit, match="no end"):
            await bench.run(bench.read(data), template, 2)
        return
    total, errors = await bench.run(bench.read(data), template, 2)
    check(total, errors, parallel=not template.name.startswith(("meta-llama", "openai")))


async def test_a_call_that_is_not_the_recorded_one_is_told(bench: Any, data: Path) -> None:
    conversations = bench.read(data)[:1]
    bench.ConversationReplay._check = lambda self, step, *found: _other(bench)
    total, errors = await bench.run(conversations, None, 1)
    assert errors == ["c0: other"]
    assert total["conversations"] == 0


def _other(bench: Any) -> None:
    raise bench.Otherwise("other")
