"""`benchmarks/programs.py drive` on endpoints of other engines: the same JSON, the same work."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "gpu" / "default_model"
WORKS = [
    {
        "program": "small tree",
        "calls": [
            {"text": "One two three. "},
            {"parent": 0, "text": "Thought:", "output": 3},
            {"parent": 0, "text": "Other thought:", "output": 3},
            {"parent": 1, "text": " More.", "output": 2, "after": [2]},
            {"parent": 0, "text": "All: ", "joins": [2, 3], "tail": "So:", "output": 4},
        ],
    },
    {
        "program": "exam",
        "calls": [
            {"text": "A question. "},
            {"parent": 0, "text": "The answer:", "choices": [" A", " B"]},
        ],
    },
]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """The command, as from a shell: its exit code."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    module = importlib.import_module("programs")

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["programs.py", *arguments])
        code: int = module.main()
        return code

    yield run
    for name in set(sys.modules) - before:
        if name.startswith("program") or name == "report":
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "programs.jsonl"
    path.write_text("".join(json.dumps(work) + "\n" for work in WORKS))
    return path


def flags(kind: str, url: str) -> list[str]:
    return ["--sglang", url] if kind == "sglang" else ["--openai", url, "--model", "tiny"]


@pytest.mark.parametrize("kind", ["sglang", "openai"])
@pytest.mark.parametrize("settings", [{}, {"cut": 3, "group": 2}, {"incremental": True, "cut": 1 << 16}])
async def test_the_whole_file_on_an_endpoint(
    http_serving: Any, programs: Callable[..., int], file: Path, tmp_path: Path, kind: str,
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    figures = tmp_path / "figures.json"
    async with http_serving(**settings) as server:
        arguments = [
            "drive",
            str(file),
            *flags(kind, server.url),
            "--repeat",
            "1",
            "--json",
            str(figures),
        ]
        assert await anyio.to_thread.run_sync(lambda: programs(*arguments)) == 0
    shown = capsys.readouterr().out
    results = json.loads(figures.read_text())["results"]
    assert [(r["program"], r["way"], r["programs"], r["output"]) for r in results] == [
        ("small tree", "prompts", 1, 12),
        ("exam", "prompts", 1, 0),
    ]
    assert all(len(r["alone_s"]) == len(r["seconds"]) == 1 and r["seconds"][0] > 0 for r in results)
    assert "small tree" in shown
    sent = [_asked(kind, body) for body in server.bodies]
    assert len(sent) == 2 * 2 * (4 + 2)  # warm-up and one round; alone and all at once; calls
    _check_histories([(prompt, count) for prompt, count in sent if count > 1])


def _asked(kind: str, body: dict[str, Any]) -> tuple[list[int], int]:
    if kind == "openai":
        assert (body["model"], body["stream"], body["ignore_eos"]) == ("tiny", True, True)
        return body["prompt"], body["max_tokens"]
    assert body["sampling_params"]["ignore_eos"]
    return body["input_ids"], body["sampling_params"]["max_new_tokens"]


def _check_histories(asked: list[tuple[list[int], int]]) -> None:
    """A call that goes on from another has sent that one's prompt and output, whole."""
    firsts = [
        prompt + [(sum(prompt) + i) % 97 for i in range(3)] for prompt, count in asked if count == 3
    ]
    seconds = [prompt for prompt, count in asked if count == 2]
    assert len(firsts) == 2 * len(seconds) > 0
    for prompt in seconds:
        assert any(prompt[: len(first)] == first for first in firsts)
    assert all(any(len(p) > len(q) for q in seconds) for p, count in asked if count == 4)


@pytest.mark.parametrize("kind", ["sglang", "openai"])
@pytest.mark.parametrize(
    ("fault", "why"),
    [("short", "of"), ("error", "out of memory"), ("status", "400"), ("stop", "stop"), ("broken", "")],
)
async def test_an_endpoint_that_does_something_else_is_an_error(
    http_serving: Any, programs: Callable[..., int], file: Path, kind: str, fault: str, why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    async with http_serving(fault=fault) as server:
        arguments = ["drive", str(file), *flags(kind, server.url), "--repeat", "1"]
        assert await anyio.to_thread.run_sync(lambda: programs(*arguments)) == 1
    told = capsys.readouterr().err
    assert told.startswith("programs.py: ")
    assert why in told


async def test_the_suite_of_the_paper_runs_there(
    http_serving: Any, programs: Callable[..., int], tmp_path: Path
) -> None:
    path = tmp_path / "suite.jsonl"
    kinds = ["judge", "MMLU 5-shot", "generative agents", "ReAct"]
    async with http_serving(cut=1 << 16) as server:
        await anyio.to_thread.run_sync(
            lambda: programs("write", str(path), "--programs", "1", "--only", *kinds)
        )
        assert len(path.read_bytes().splitlines()) == len(kinds)
        arguments = ["drive", str(path), *flags("openai", server.url), "--repeat", "1"]
        assert await anyio.to_thread.run_sync(lambda: programs(*arguments)) == 0
