"""The bill of a generation: times, counts and log-probabilities, over one request or several."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import OutputSegment
from ramify.actors.session.output.generation import GenerationState
from ramify.actors.tokenizer import Tokenizer
from ramify.actors.tokenizer.detokenizer import Detokenizer
from ramify.protocol.messages import Finished
from ramify.protocol.sampling import SamplingParams
from ramify.protocol.wire import Append, Generate, Usage


@pytest.fixture
def generation(tokenizer: Tokenizer) -> GenerationState:
    """Arrived at 100 s, without output."""
    return GenerationState(
        op=Generate(id=1),
        branch=SessionBranch("main", 1),
        segment=OutputSegment(5),
        text=Detokenizer(tokenizer.token_bytes).stream([]),
        sampling=SamplingParams(),
        stops=frozenset([2]),
        max_tokens=8,
        deadline=None,
        chat=False,
        arrived=100.0,
        began=100.0,
    )


def finished(**fields: Any) -> Finished:
    """The end of a request that started after 0.25 s, had a token after 0.5 s and took 2 s."""
    return Finished(
        **{
            "request": 1,
            "reason": "length",
            "output": 3,
            "prompt": 5,
            "cached": 4,
            "computed": 1,
            "arrived": 100.125,
            "started": 100.25,
            "first_token": 100.5,
            "ended": 102.0,
        }
        | fields
    )


def times(usage: Usage) -> tuple[float, float | None, float]:
    return usage.queue_ms, usage.ttft_ms, usage.total_ms


def test_times_are_milliseconds_since_the_ops_arrival(generation: GenerationState) -> None:
    end = finished()
    generation.note(end)
    usage = generation.usage(end, 3)
    assert times(usage) == (250.0, 500.0, 2000.0)
    assert (usage.prompt, usage.cached, usage.computed, usage.output) == (5, 4, 1, 3)
    assert (usage.forced, usage.accepted, usage.hit.gpu) == (0, 0, 4)


def test_accepted_drafts_add_up_over_requests_and_are_no_more_than_the_output(
    generation: GenerationState,
) -> None:
    generation.note(finished(accepted=3))
    end = finished(accepted=4)
    generation.note(end)
    assert generation.usage(end, 20).accepted == 7
    assert generation.usage(end, 5).accepted == 5


def test_what_never_started_waited_until_its_end(generation: GenerationState) -> None:
    end = finished(started=0.0, first_token=0.0, computed=0, cached=0, output=0, ended=101.0)
    generation.note(end)
    assert times(generation.usage(end, 0)) == (1000.0, None, 1000.0)


def test_the_first_request_that_ran_tells_the_prompt_and_the_first_token(
    generation: GenerationState,
) -> None:
    """Paused before it ran, then in mid-output, then to its end."""
    generation.note(finished(started=0.0, first_token=0.0, computed=0, cached=0, ended=100.2))
    generation.note(finished(started=103.0, first_token=0.0, prompt=5, cached=4, ended=104.0))
    generation.note(finished(started=105.0, first_token=106.0, prompt=6, cached=6, ended=107.0))
    last = finished(started=108.0, first_token=109.0, prompt=9, cached=8, ended=110.0)
    generation.note(last)
    usage = generation.usage(last, 6)
    assert times(usage) == (3000.0, 6000.0, 10_000.0)
    assert (usage.prompt, usage.cached, usage.computed, usage.output) == (5, 4, 1, 6)


def test_output_is_cut_with_its_logprobs(generation: GenerationState) -> None:
    assert generation.remaining == 8
    generation.push([10, 11, 12], [])
    assert generation.remaining == 5
    generation.keep(2)
    assert generation.segment.tokens.tolist() == [10, 11]
    assert generation.segment.logprobs is None
    assert generation.remaining == 6


def test_the_mean_logprob_is_that_of_the_tokens_with_one(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session(tokens=True)
    shown: list[float] = []
    receive = client.receive

    def noting(messages: list[Any]) -> None:
        for message in messages:
            shown.extend(entry.logprob for entry in getattr(message, "logprobs", None) or ())
        receive(messages)

    client.receive = noting
    client.send(Append(id=1, tokens=[5, 6, 7]), Generate(id=2, max_tokens=7, temperature=0, logprobs=2))
    engine.pump()
    (done,) = client.replies[2]
    assert len(shown) == 7
    assert done.mean_logprob == pytest.approx(sum(shown) / 7)
    assert done.usage.output == 7
