"""The device's sampler against the one on torch, and what it keeps against a plain sort."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ramify.gpu.sampling.torch_sampler import Sampler
from ramify.protocol.plan import OpenRow, pack
from ramify.protocol.sampling import SamplingParams

CUDA = torch.cuda.is_available()
# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if CUDA else "3.7")

DEVICE = torch.device("cuda" if CUDA else "cpu")
VOCAB = 100


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: small vocabularies of several blocks."""
    if not CUDA:
        for name, size in (("_BLOCK", 64), ("_TILE", 32), ("_BINS", 4)):
            monkeypatch.setattr(f"ramify.gpu.sampling.triton_truncation.{name}", size)
        monkeypatch.setattr("ramify.gpu.sampling.triton_logprobs._BLOCK", 64)


class Rows:
    """Both samplers with the same rows open."""

    def __init__(self, params: list[SamplingParams], vocab: int, **more: Any) -> None:
        from ramify.gpu.sampling.cuda_sampler import CudaSampler

        self.rows = np.arange(len(params))
        opens = [OpenRow(row, row, b"", 0, own, **more) for row, own in enumerate(params)]
        self.torch = Sampler(len(params), vocab, DEVICE)
        for opened in opens:
            self.torch.open(opened)
        self.cuda = CudaSampler(len(params), vocab, DEVICE)
        self.cuda.apply(0, [], opens)
        self.last = torch.zeros(len(params), dtype=torch.int32, device=DEVICE)

    def draw(self, logits: torch.Tensor, index: int = 0) -> tuple[list[int], list[Any]]:
        """Tokens and log-probabilities of the CUDA sampler; -1 if not finite."""
        from ramify.gpu.sampling.cuda_sampler import token_logprobs
        from ramify.gpu.sampling.triton_logprobs import WORDS
        from ramify.gpu.sampling.triton_sampling import sample_into

        draws = np.full(len(self.rows), index)
        drawn = self.cuda.draws_for(self.rows, draws)
        heat, points = (torch.from_numpy(a).to(DEVICE) for a in (drawn.temperatures, drawn.uniforms))
        rows = torch.from_numpy(self.rows).int().to(DEVICE)
        tokens = torch.full((len(rows),), -7, dtype=torch.int32, device=DEVICE)
        sample_into(logits, rows, heat, points, self.last, tokens)
        words = self.cuda.resample(0, logits, self.rows, draws, self.last, tokens)
        assert torch.equal(self.last, tokens.clamp(min=0))
        asked = self.cuda.logprobs_asked(self.rows)
        lines = [] if words is None else words.cpu().numpy().reshape(-1, WORDS)
        found = [] if words is None else token_logprobs(lines, asked)
        return tokens.tolist(), found

    def wanted(self, logits: torch.Tensor, index: int = 0) -> tuple[list[int], list[Any]]:
        sampled = self.torch.sample(logits.float(), self.rows, np.full(len(self.rows), index))
        return torch.where(sampled.finite, sampled.tokens, -1).tolist(), sampled.logprobs


any_settings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 1e-4, 0.05, 0.7, 1.0, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 99, 100, 1000, 2**31 - 1]),
    top_p=st.sampled_from([1e-20, 1e-6, 0.3, 0.8, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.3, -0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.3, 0.8, 0.01, 100.0]),
    logprobs=st.sampled_from([0, 0, 1, 5, 20]),
    seed=st.integers(0, 2**63 - 1),
)
any_logits = st.one_of(
    st.lists(st.sampled_from([-1.5, 0.0, 0.25, 3.0]), min_size=VOCAB, max_size=VOCAB),  # ties
    st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB),
    st.lists(st.sampled_from([-np.inf, 0.0, 1.0, -30000.0]), min_size=VOCAB, max_size=VOCAB),
    st.just([0.0] * VOCAB),
)


@settings(max_examples=300 if CUDA else 8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(lines=st.lists(st.tuples(any_settings, any_logits), min_size=1, max_size=3))
def test_it_equals_the_sampler_on_torch(lines: list[tuple[SamplingParams, list[float]]]) -> None:
    """Two tokens in a row, so that what was sampled is counted."""
    both = Rows([own for own, _ in lines], VOCAB, history=pack([3, 1, 4, 1, 5, 9, 2, 6, 5]), sampled=4)
    logits = torch.tensor([own for _, own in lines], dtype=torch.float32, device=DEVICE)
    for index in range(2):
        ours, logprobs = both.draw(logits, index)
        wanted, wanted_logprobs = both.wanted(logits, index)
        assert ours == wanted
        assert len(logprobs) == len(wanted_logprobs)
        for own, other in zip(logprobs, wanted_logprobs, strict=True):
            assert (own is None) == (other is None)
            if own is not None:
                assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert own.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
                assert len(set(own.top_ids)) == len(own.top_ids) == len(other.top_ids)


def kept_by_sort(scaled: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, float]:
    """bool[V] of one row in float64, and by how much mass its top-p edge was clear."""
    order = scaled.sort(descending=True).values
    low, clear = torch.tensor(-torch.inf, device=scaled.device), 1.0
    if sampling.top_k:
        low = order[min(sampling.top_k, len(order)) - 1]
    weights = torch.where(order >= low, order.double().exp(), 0.0)
    if sampling.top_p < 1:
        before = (weights.cumsum(0) - weights) / weights.sum() - sampling.top_p
        clear = float(before.abs().min())
        low = torch.maximum(low, order[int((before < 0).sum()) - 1])
    return scaled >= low, clear


def search(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """bool[S, V]: what each line may draw, found by drawing at each kept token's own point."""
    import ramify.gpu.sampling.triton_truncation as module

    kept: list[torch.Tensor] = []
    real = module._masses

    class Spy:
        def __getitem__(self, grid: Any) -> Any:
            def run(*args: Any, **more: Any) -> None:
                kept.append(args[11].clone())
                real[grid](*args, **more)

            return run

    module._masses = Spy()
    try:
        Rows(params, logits.shape[1]).draw(logits)
    finally:
        module._masses = real
    heat = torch.tensor([own.temperature for own in params], device=DEVICE)[:, None]
    x = logits.float()
    keys = ((x - x.amax(-1, keepdim=True)) / heat).abs().view(torch.int32)
    return keys <= kept[0][:, None]


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_the_kept_set_is_that_of_a_sort(spread: float) -> None:
    torch.manual_seed(5)
    vocab, lines = (151936, 64) if CUDA else (400, 6)
    logits = (torch.randn(lines, vocab, device=DEVICE) * spread).bfloat16()  # bf16: many ties
    choices = [
        {"top_p": 0.9}, {"top_p": 0.5, "top_k": 50}, {"top_k": 20, "top_p": 0.95}, {"top_k": 700},
        {"top_p": 0.999}, {"top_k": 3 * vocab, "top_p": 0.2},
    ]  # fmt: skip
    params = [SamplingParams(temperature=0.6, **choices[i % 6]) for i in range(lines)]
    ours = search(logits, params)
    x = logits.float()
    scaled = (x - x.amax(-1, keepdim=True)) / torch.tensor(0.6, device=DEVICE)
    for line, own in enumerate(params):
        wanted, clear = kept_by_sort(scaled[line], own)
        # float32's exp may put the edge of the nucleus on the other side of a token
        assert torch.equal(ours[line], wanted) or clear < 1e-7


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(6)
    vocab = 5000 if CUDA else 300
    logits = torch.randn(5, vocab, device=DEVICE) * 2
    mine = SamplingParams(temperature=1.1, top_p=0.9, seed=1234)
    others = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=3.0, top_k=700, seed=9),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=2),
        SamplingParams(temperature=0.2, min_p=0.2, logprobs=3, seed=3),
    ]
    for index in range(3 if CUDA else 1):
        alone = Rows([mine], vocab).draw(logits[:1], index)[0][0]
        for place in range(0, 5, 1 if CUDA else 3):
            crowd = torch.cat((logits[1 : 1 + place], logits[:1], logits[1 + place :]))
            rows = Rows([*others[:place], mine, *others[place:]], vocab)
            assert rows.draw(crowd, index)[0][place] == alone


def test_rows_that_are_not_finite_get_no_token() -> None:
    for value in (torch.nan, torch.inf) if CUDA else (torch.nan,):
        logits = torch.randn(3, VOCAB, device=DEVICE)
        logits[1, 7] = value
        params = [SamplingParams(top_p=0.9, top_k=5, presence_penalty=0.1, logprobs=2)] * 3
        tokens, logprobs = Rows(params, VOCAB).draw(logits)
        assert tokens[1] == -1
        assert min(tokens[0], tokens[2]) >= 0
        assert len(logprobs) == 3
    logits = torch.full((1, VOCAB), -torch.inf, device=DEVICE)
    assert Rows([SamplingParams(top_p=0.5)], VOCAB).draw(logits)[0] == [-1]


def test_counts_end_with_the_row_and_their_lines_are_used_again() -> None:
    penalised = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    both = Rows([penalised] * 3, 4)
    logits = torch.tensor([[0.0, 1.0, 0.5, 0.0]] * 3, device=DEVICE)
    assert [both.draw(logits)[0][0] for _ in range(2)] == [1, 2]
    lines = both.cuda._rows["counted"].tolist()
    assert len(set(lines)) == 3
    both.cuda.apply(0, [0, 2], [OpenRow(2, 9, b"", 0, penalised, history=pack([0, 1]), sampled=1)])
    assert both.cuda._rows["counted"][0] == -1
    assert both.cuda._rows["counted"][2] in lines
    assert both.draw(logits)[0][2] == 2  # 1 was an output of the new request
