"""The programs of `benchmarks/programs.py` compute what a cache that never forgets would compute."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MODEL = Path(__file__).parents[2] / "gpu" / "default_model"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's modules as one, imported as its own folder would."""
    monkeypatch.syspath_prepend(str(MODEL.parents[1] / "benchmarks"))
    before = set(sys.modules)
    names = ["base", "count", "optimum", "runs", "suite"]
    found = [vars(importlib.import_module(f"program_{name}")) for name in names]
    yield SimpleNamespace(**{key: value for each in found for key, value in each.items()})
    for name in set(sys.modules) - before:
        if name.startswith("program") or name == "report":
            del sys.modules[name]


@pytest.mark.parametrize("name", ["tree of thought", "judge", "MMLU 5-shot", "generative agents"])
async def test_no_prompt_token_is_computed_twice(bench: Any, name: str) -> None:
    works = [bench.build(name, number, bench.Source()) for number in range(3)]
    found = await bench.count_some(works, 1 << 18, bench.Words(MODEL), None)
    assert found.computed == found.best < found.sent / 3


async def test_a_program_says_the_same_as_frames_and_as_whole_prompts(bench: Any) -> None:
    words = bench.Words(MODEL)
    async with bench.counted(1 << 18) as engine, bench.connect(engine.url, tokens=True) as session:
        for name in ("skeleton of thought", "generative agents", "ReAct"):
            work = bench.build(name, 1, bench.Source())
            ran = await bench.on_branches(session, work)
            branches = [call.prompt for call, _ in await bench.asked(session, ran, words)]
            whole = [call.prompt for call in await bench.on_prompts(bench.Roots(session), work, words)]
            assert sorted(map(len, branches)) == sorted(map(len, whole))
            await bench.drop(session, ran)


def test_a_file_of_programs_is_read_back_and_checked(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "programs.jsonl"
    works = [bench.build(name, 3, bench.Source()) for name in bench.PROGRAMS]
    bench.write(path, works)
    assert bench.read(path) == works
    path.write_text('{"program": "x", "calls": [{"parent": 0, "output": 4}]}\n')
    with pytest.raises(ValueError, match=r"line 1: .*names a call that is not before it"):
        bench.read(path)


def test_the_least_is_counted_by_tokens(bench: Any) -> None:
    def asked(prompt: list[int], **fields: Any) -> Any:
        return bench.Asked(prompt, **fields)

    trie = bench.Trie()
    assert bench.least([asked([1, 2, 3], output=2)], [[7, 8]], trie) == (3, 3)
    assert bench.least([asked([1, 2, 3], output=2)], [[7, 8]], trie) == (1, 3)  # its last token again
    assert bench.least([asked([1, 2, 3, 7, 8, 9], output=1)], [[5]], trie) == (2, 6)  # 8 was sampled
    choices = asked([1, 2, 3], targets=[[4], [7, 6]])  # the logits behind 3, and behind 7
    assert bench.least([choices], [[4]], trie) == (2, 7)


async def test_an_http_endpoint_gets_whole_prompts_and_one_request_a_choice(bench: Any) -> None:
    class Endpoint:
        """Notes what it is asked: prompt tokens, output tokens."""

        def __init__(self) -> None:
            self.asked: list[tuple[int, int]] = []
            self.now = self.most = 0

        async def generate(self, prompt: list[int], job: Any, *, ids: bool) -> tuple[None, list[int]]:
            self.asked.append((len(prompt), job.output))
            self.now += 1
            self.most = max(self.most, self.now)
            await bench.asyncio.sleep(0)
            self.now -= 1
            return None, [300] * job.output

    endpoint, words = Endpoint(), bench.Words(MODEL)
    work = bench.build("tree of thought", 0, bench.Source())
    found = await bench.on_prompts(bench.Http(endpoint), work, words)
    assert len(found) == sum(call.asks for call in work.calls)
    assert len(endpoint.asked) == sum(len(call.choices) or 1 for call in work.calls if call.asks)
    assert endpoint.most <= bench.width(work)
    assert sum(prompt for prompt, _ in endpoint.asked) > 10_000
