"""The driver of stateless servers, in both dialects, against a server that cuts its answers badly."""

from typing import Any

import pytest

from ramify.clients.bench.execute import execute
from ramify.clients.bench.load_program import GenerateJob, Level, LoadProgram, Outcome, Target
from ramify.clients.bench.session import BenchFailed

KINDS = ("sglang", "openai")
CHAT = LoadProgram(
    [Level([GenerateJob([1, 2, 3], 4)]), Level([GenerateJob([5], 3)]), Level([GenerateJob([], 2)])]
)
TREE = LoadProgram(
    [
        Level([GenerateJob([], 2, 0), GenerateJob([9], 3, 1)], parent=0, prefix=[1, 2, 3]),
        Level([GenerateJob([], 2, 2), GenerateJob([], 2, 3)], parent=1),
    ]
)


async def run(server: Any, kind: str, *programs: LoadProgram, **changes: Any) -> Outcome:
    target = Target(kind, server.url, model="tiny", **changes)
    return await execute(target, programs)


def prompts(server: Any) -> list[list[int]]:
    return [body.get("prompt") or body.get("input_ids") for body in server.bodies]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"incremental": True, "group": 3}, {"cut": 1}, {"cut": 4096}])
async def test_a_chat_sends_its_history(http_serving: Any, kind: str, settings: dict[str, Any]) -> None:
    async with http_serving(**settings) as server:
        outcome = await run(server, kind, CHAT)
        asked = prompts(server)
        first = [(6 + i) % 97 for i in range(4)]
        assert asked[:2] == [[1, 2, 3], [1, 2, 3, *first, 5]]
        assert asked[2][:8] == asked[1]
        assert len(asked[2]) == 8 + 3
        assert [trace.output for trace in outcome.traces] == [4, 3, 2]
        assert [trace.cached for trace in outcome.traces] == [0, 6, 10]
        assert [trace.level for trace in outcome.traces] == [0, 1, 2]
        assert server.connections == 1
        for trace in outcome.traces:
            assert sum(trace.counts) == trace.output
            assert outcome.begin <= trace.sent <= trace.arrivals[0] <= trace.ended


@pytest.mark.parametrize("kind", KINDS)
async def test_a_tree_forks_histories(http_serving: Any, kind: str) -> None:
    async with http_serving() as server:
        outcome = await run(server, kind, TREE)
        asked = sorted(prompts(server))
        assert asked[0] == [1, 2, 3]
        third = [1, 2, 3, 9, 15, 16, 17]
        assert asked[1:] == [[1, 2, 3, 9], third, third]
        assert [trace.output for trace in outcome.load] == [2, 3, 2, 2]
        assert server.connections == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_helpful_client_runs_the_prefix_first(http_serving: Any, kind: str) -> None:
    async with http_serving() as server:
        outcome = await run(server, kind, TREE, warm_prefix=True)
        assert prompts(server)[0] == [1, 2, 3]
        assert [trace.extra for trace in outcome.traces].count(True) == 2
        assert len(outcome.load) == 4


async def test_what_a_request_says(http_serving: Any) -> None:
    async with http_serving() as server:
        await run(server, "sglang", CHAT, temperature=0.5)
        sampling = {"max_new_tokens": 4, "temperature": 0.5, "ignore_eos": True}
        assert server.bodies[0] == {
            "input_ids": [1, 2, 3], "sampling_params": sampling, "stream": True,
        }  # fmt: skip
    async with http_serving() as server:
        await run(server, "openai", CHAT)
        first, *_, last = server.bodies
        assert (first["model"], first["max_tokens"], first["ignore_eos"]) == ("tiny", 4, True)
        assert first["return_token_ids"] is True
        assert "return_token_ids" not in last  # nothing follows, so nobody needs them


async def test_an_openai_server_that_does_not_count_chunks(http_serving: Any) -> None:
    last = LoadProgram([Level([GenerateJob([1], 6)])])
    async with http_serving(counts=False) as server:
        outcome = await run(server, "openai", last)
        assert outcome.traces[0].output == 6
    async with http_serving(counts=False, group=2) as server:
        with pytest.raises(BenchFailed, match="continuous_usage_stats"):
            await run(server, "openai", last)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("short", "3 tokens came of 4"),
        ("stop", "'stop', not 'length'"),
        ("error", "out of memory"),
        ("status", "HTTP 400"),
        ("broken", "breaks off"),
    ],
)
async def test_faults_are_errors(http_serving: Any, kind: str, fault: str, text: str) -> None:
    async with http_serving(fault=fault) as server:
        with pytest.raises(BenchFailed, match=text):
            await run(server, kind, CHAT, CHAT)


async def test_ids_that_do_not_come(http_serving: Any) -> None:
    async with http_serving(fault="no ids") as server:
        with pytest.raises(BenchFailed, match="0 token ids came of 4"):
            await run(server, "openai", CHAT)


async def test_what_a_stateless_server_cannot(http_serving: Any) -> None:
    ahead = LoadProgram([Level([GenerateJob([1], 1)], ahead_s=0.01)])
    async with http_serving() as server:
        with pytest.raises(BenchFailed, match="only with its generation"):
            await run(server, "sglang", ahead)
    with pytest.raises(BenchFailed, match="--model"):
        await execute(Target("openai", "http://127.0.0.1:1"), [CHAT])
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        await execute(Target("sglang", "http://127.0.0.1:1"), [CHAT])
