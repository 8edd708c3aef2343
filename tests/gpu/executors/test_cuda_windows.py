"""Layers with a window on the CUDA executor, in pages of their own; on a GPU the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.kv.layout import KVPool, PairLayout
from ramify.protocol.plan import ExtendRow, pack, unpack
from tests.gpu.executors.test_cuda_states import CUDA, in_flight, where
from tests.gpu.models.families.test_families import prompts, save
from tests.gpu.models.families.test_hybrids import assert_same, log_probabilities

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: exp of a gate overflows
WINDOW = 9
BEFORE = WINDOW - 1
CHUNK = 12
GAP = BEFORE + CHUNK  # positions of a prompt that share a page are so far apart at least
PAGES = 256
STEPS = 40 if CUDA else 1  # pairs; the interpreter takes a second for each
LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"head_dim": 32 if CUDA else 16, "query_pre_attn_scalar": 16}),
    "gpt_oss": ("GptOss", {"head_dim": 32 if CUDA else 16}),
}


def ring(first: int, positions: int, size: int = GAP) -> list[int]:
    """Window pages of so many positions from 0 on, of which `size` in a row have one each."""
    return [first + position % size for position in range(positions)]


@pytest.fixture(autouse=True)
def _unwritten_keys_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote is NaN, and so is what is made of it."""
    allocate = PairLayout.allocate

    def with_nan(self: PairLayout, *sizes: Any) -> KVPool:
        pool = allocate(self, *sizes)
        for kv in pool.layers:
            kv.k[:-1] = kv.v[:-1] = float("nan")
        return pool

    monkeypatch.setattr(PairLayout, "allocate", with_nan)


def loaded(drive: Any, folder: Path, where: Any, **settings: Any) -> Any:
    more = {"window_tokens": PAGES, "context": 192, "step_tokens": 16, **settings}
    d = drive(folder, **where | more)
    assert (d.executor.info.window, d.executor.info.window_pages) == (WINDOW, PAGES)
    return d


@where
@pytest.mark.parametrize("deterministic", [False, True])
def test_as_transformers(deterministic: bool, where: Any, tmp_path: Path, drive: Any) -> None:
    """A prompt in chunks beside decodes, a fork in its middle, two steps in flight; pages go around."""
    family, changes = MODELS["gemma3"]
    model = save(tmp_path, family, LAYERS | changes)
    first, _, long = prompts()
    first, long = first[:18], long[:25]
    d = loaded(drive, tmp_path, where, deterministic=deterministic)
    likely = log_probabilities(model, long)
    d.step(opens=[d.open(2, range(300, 325), windows=pack(ring(0, 25)))])
    for start, stop in ((0, 12), (12, 24), (24, 25)):
        ours = d.forward(extends=[ExtendRow(2, start, pack(long[start:stop]), True)])[0].log_softmax(-1)
        torch.testing.assert_close(ours.cpu(), likely[stop - 1], atol=1e-3, rtol=0)
    # a fork behind 24 tokens: below its window it has no window pages
    branch = [*long[:24], *first[:3]]
    pages = [*range(300, 324), *range(500, 600)]
    windows = [*ring(0, 24)[-BEFORE:], *ring(2 * GAP, 100)]
    plans: list[dict[str, Any]] = [
        {"opens": [d.open(0, range(700, 820), windows=pack(ring(GAP, 120)))],
         "extends": [ExtendRow(0, 0, pack(first[:9]), False)]},
        {"opens": [d.open(1, pages, 24, windows=pack(windows))],
         "extends": [ExtendRow(0, 9, pack(first[9:15]), False),
                     ExtendRow(1, 24, pack(first[:3]), True)]},
        {"decodes": [1], "extends": [ExtendRow(0, 15, pack(first[15:]), True)]},
        *({"decodes": rows} for rows in ([1, 0], [0, 1]) * STEPS),
    ]  # fmt: skip
    sampled = in_flight(d, plans)
    for row, prompt in enumerate((first, branch)):
        output = [each[row] for each in sampled if row in each]
        assert_same(model, prompt, output, len(output))


@where
def test_drafts(where: Any, tmp_path: Path, drive: Any) -> None:
    """Refused drafts leave keys and values that nobody reads; sinks beside windows."""
    family, changes = MODELS["gpt_oss"]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = save(tmp_path, family, LAYERS | changes | experts)
    prompt = prompts()[1][:6] * 2
    d = loaded(drive, tmp_path, where, draft="ngram", draft_tokens=3, jump_forward=False)
    opens = [d.open(0, range(300, 420), windows=pack(ring(99, 120)))]
    d.step(opens=opens)
    launched = [d.executor.launch(d.plan(extends=[ExtendRow(0, 0, pack(prompt), True)]))]
    output: list[int] = []
    for _ in range(2 * STEPS):  # two steps in flight
        launched.append(d.executor.launch(d.plan(decodes=[0], drafts=pack([3]))))
        output += unpack(launched[-2].result().tokens)
    output += unpack(launched[-1].result().tokens)
    assert_same(model, prompt, output, len(output))
