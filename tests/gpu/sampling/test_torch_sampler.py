"""The sampler against a straightforward reference, and its distributions against probabilities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.gpu.sampling.randomness import uniforms
from ramify.gpu.sampling.torch_sampler import Sampler
from ramify.gpu.step.inputs import Draws
from ramify.protocol.plan import OpenRow, pack
from ramify.protocol.sampling import MIN_TEMPERATURE, SamplingParams

VOCAB = 40


def make(params: list[SamplingParams], vocab: int = VOCAB, **more: object) -> Sampler:
    sampler = Sampler(len(params), vocab, torch.device("cpu"))
    for row, sampling in enumerate(params):
        sampler.open(OpenRow(row, row, b"", 0, sampling, **more))  # type: ignore[arg-type]
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, draws: list[int] | int = 0) -> list[int]:
    n = len(logits)
    counts = np.full(n, draws) if isinstance(draws, int) else np.array(draws)
    return sampler.sample(logits, np.arange(n), counts).tokens.tolist()


def distribution(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The probabilities as SamplingParams defines them, without any care for speed."""
    probabilities = (logits.double() / sampling.temperature).softmax(-1)
    order = probabilities.argsort(descending=True, stable=True).tolist()
    if sampling.top_k:
        for token in order[sampling.top_k :]:
            probabilities[token] = 0
        probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        mass = 0.0
        for token in order:
            kept = mass < sampling.top_p
            mass += float(probabilities[token])
            if not kept:
                probabilities[token] = 0
        probabilities /= probabilities.sum()
    probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


settings_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 1.6, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 39, 40, 1000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.8, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(params=st.lists(settings_strategy, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_each_row_draws_from_the_reference_distribution(params: list[SamplingParams], seed: int) -> None:
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    tokens = draw(make(params), logits)
    for row, sampling in enumerate(params):
        wanted = distribution(logits[row], sampling)
        point = uniforms(np.array([sampling.seed]), np.array([0]))[0]
        cumulative = wanted.cumsum(0)
        low = float(cumulative[tokens[row]] - wanted[tokens[row]])
        high = float(cumulative[tokens[row]])
        assert wanted[tokens[row]] > 0
        assert low - 1e-5 <= point <= high + 1e-5  # inversion of the CDF, in order of ids


def test_frequencies_match_the_probabilities() -> None:
    rows, draws = 50, 400
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0]).expand(rows, 6)
    sampling = [SamplingParams(temperature=0.8, top_p=0.95, seed=seed) for seed in range(rows)]
    sampler = make(sampling, 6)
    counts = np.zeros(6)
    for index in range(draws):
        np.add.at(counts, draw(sampler, logits, index), 1)
    wanted = distribution(logits[0], sampling[0]).numpy()
    deviation = np.sqrt(wanted * (1 - wanted) * rows * draws)
    assert (np.abs(counts - wanted * rows * draws) <= 4 * deviation).all()


def test_uniforms_are_uniform_and_independent() -> None:
    seeds, indices = np.divmod(np.arange(200_000), 400)
    values = uniforms(seeds, indices)
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 180  # chi square, 99 degrees, p about 1e-6
    table = values.reshape(500, 400)
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.01


def test_extreme_seeds_and_indices() -> None:
    values = uniforms(np.array([0, 1, 2**63 - 1, 0]), np.array([0, 0, 2**31, 1]))
    assert len(set(values.tolist())) == 4


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)) * 2
    mine = SamplingParams(temperature=1.1, top_p=0.9, seed=1234)
    others = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=3.0, top_k=700, seed=9),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=2),
        SamplingParams(temperature=0.2, min_p=0.2, logprobs=3, seed=3),
    ]
    for index in range(20):
        alone = draw(make([mine], 1000), logits[:1], index)[0]
        for place in range(5):
            order = [*others[:place], mine, *others[place:]]
            crowd = torch.cat((logits[1 : 1 + place], logits[:1], logits[1 + place :]))
            draws = [7] * 5
            draws[place] = index
            assert draw(make(order, 1000), crowd, draws)[place] == alone


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [5, 9]] = 1.0
    assert draw(make([SamplingParams(temperature=0.0)] * 2), logits) == [0, 5]


def test_tied_logits_are_kept_or_dropped_together() -> None:
    logits = torch.zeros(1, VOCAB)
    sampler = make([SamplingParams(top_k=3, seed=1)])
    assert len({draw(sampler, logits, index)[0] for index in range(400)}) == VOCAB


def test_nothing_is_sorted_on_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("sorted")

    for name in ("sort", "topk", "argsort"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
        monkeypatch.setattr(torch, name, refuse)
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(min_p=0.1)]
    draw(make(params), torch.randn(3, VOCAB))


def test_top_p_needs_more_than_the_first_candidates() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, :10] = 0.1
    sampling = SamplingParams(top_p=0.9, seed=3)
    wanted = distribution(logits[0], sampling)
    assert int((wanted > 0).sum()) > 4000
    sampler = make([sampling], 5000)
    assert {draw(sampler, logits, index)[0] < 10 for index in range(200)} == {False}


@pytest.mark.parametrize("rate", [1.0, 1.4])
def test_penalties(rate: float) -> None:
    sampling = SamplingParams(
        temperature=0.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=rate,
        logprobs=2,
    )
    history = [1, 2, 2, 3, 3, 4]  # the last three are outputs: 3, 3, 4
    sampler = Sampler(1, 8, torch.device("cpu"))
    sampler.open(OpenRow(0, 0, b"", 0, sampling, 3, pack(history)))
    logits = torch.tensor([[0.0, 2.0, -1.0, 3.0, 2.6, 1.5, 1.4, -3.0]])
    counts = {3: 2, 4: 1}
    seen = set(history)
    for draws in range(3, 10):
        wanted = logits[0].tolist()
        for token in range(8):
            if token in seen:
                wanted[token] = wanted[token] / rate if wanted[token] > 0 else wanted[token] * rate
            count = counts.get(token, 0)
            wanted[token] -= 0.5 * count + (0.25 if count else 0)
        sampled = sampler.sample(logits, np.arange(1), np.array([draws]))
        token = int(sampled.tokens[0])
        assert token == max(range(8), key=lambda t: (wanted[t], -t))
        assert sampled.logprobs[0] is not None
        # log-probabilities are those of the model, not of the penalised logits
        assert sampled.logprobs[0].logprob == pytest.approx(
            float(logits[0].log_softmax(-1)[token]), abs=1e-5
        )
        counts[token] = counts.get(token, 0) + 1
        seen.add(token)


def test_penalties_end_with_the_row() -> None:
    sampler = make([SamplingParams(temperature=0.0, frequency_penalty=2.0)], 4)
    logits = torch.tensor([[0.0, 1.0, 0.5, 0.0]])
    assert [draw(sampler, logits)[0] for _ in range(2)] == [1, 2]
    sampler.close(0)
    sampler.open(OpenRow(0, 1, b"", 0, SamplingParams(temperature=0.0)))
    assert [draw(sampler, logits)[0] for _ in range(2)] == [1, 1]


def test_logprobs() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    params = [
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=0.3, top_k=2, seed=5),
        SamplingParams(temperature=5.0, logprobs=4, seed=6),
    ]
    sampled = make(params).sample(logits, np.arange(3), np.zeros(3, dtype=np.int64))
    first, second, third = sampled.logprobs
    assert second is None
    for row, entry, k in ((0, first, 1), (2, third, 4)):
        assert entry is not None
        values = logits[row].log_softmax(-1)
        assert math.isclose(entry.logprob, float(values[sampled.tokens[row]]), abs_tol=1e-5)
        assert entry.top_ids == values.argsort(descending=True)[:k].tolist()
        assert entry.top_logprobs == pytest.approx(values[entry.top_ids].tolist(), abs=1e-5)
    assert make([SamplingParams()]).sample(logits[:1], np.arange(1), np.arange(1)).logprobs == []


def test_a_tiny_temperature_is_nearly_greedy() -> None:
    logits = torch.randn(1, VOCAB) * 100
    sampler = make([SamplingParams(temperature=1e-30, seed=2)])
    assert draw(sampler, logits)[0] == int(logits.argmax())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_named(value: float, temperature: float) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 7] = value
    sampled = make([SamplingParams(temperature=temperature, top_p=0.9, seed=1)] * 3).sample(
        logits, np.arange(3), np.zeros(3, dtype=np.int64)
    )
    assert sampled.finite.tolist() == [True, False, True]
    assert 0 <= int(sampled.tokens[1]) < VOCAB


EXTREMES = {
    "temperature": [0.0, MIN_TEMPERATURE, 1.0, 100.0],
    "top_k": [0, 1, 2**31 - 1],
    "top_p": [1e-20, 1.0],
    "min_p": [0.0, 5e-324, 1.0],
    "frequency_penalty": [-2.0, 2.0],
    "presence_penalty": [-2.0, 2.0],
    "repetition_penalty": [0.01, 1.0, 100.0],
    "seed": [0, 2**63 - 1],
}
extremes = st.builds(
    SamplingParams, **{name: st.sampled_from(values) for name, values in EXTREMES.items()}
)


@given(extremes, st.sampled_from([0.0, 1.0, 30.0, 1e4, 1e30]), st.integers(0, 2**31 - 1))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_no_setting_in_range_makes_finite_logits_infinite(
    sampling: SamplingParams, scale: float, seed: int
) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
    sampler = make([sampling], history=pack([1, 2, 3]), sampled=2)
    for index in range(3):
        sampled = sampler.sample(logits, np.arange(1), np.array([index]))
        assert sampled.finite.tolist() == [True]
        assert 0 <= int(sampled.tokens[0]) < VOCAB


def test_the_best_token_alone_is_left_by_top_k_1() -> None:
    logits = torch.tensor([[0.0, 0.1, 0.05]])
    sampler = make([SamplingParams(temperature=1.0, top_k=1, seed=3)], vocab=3)
    assert {draw(sampler, logits, i)[0] for i in range(50)} == {1}


def test_a_point_at_the_very_end_draws_a_token_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product may be rounded up to the whole mass."""
    logits = torch.tensor([[0.0, 1.0, 0.0]])
    sampler = make([SamplingParams(temperature=1.0)], vocab=3)
    known = sampler.settings.draws

    def at_the_end(rows: np.ndarray, draws: np.ndarray) -> Draws:
        given = known(rows, draws)
        return Draws(given.temperatures, np.ones_like(given.uniforms))

    monkeypatch.setattr(sampler.settings, "draws", at_the_end)
    assert draw(sampler, logits) == [1]
