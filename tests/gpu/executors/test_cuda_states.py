"""Models with fixed states on the CUDA executor: small in the interpreter, the same on a GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify.gpu.drafting.device import DeviceDrafter
from ramify.gpu.kv.states import StateLayout, StatePool
from ramify.gpu.step.buckets import decode_buckets, mixed_buckets
from ramify.gpu.step.rows import PlanError
from ramify.protocol.plan import ExtendRow, pack, unpack
from tests.gpu.models.families.test_families import prompts, reference
from tests.gpu.models.families.test_hybrids import FEW_LAYERS, assert_same, log_probabilities
from tests.gpu.models.families.test_hybrids import save as save_whole

CUDA = torch.cuda.is_available()
# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if CUDA else "3.7")
WHERE = [
    pytest.param(
        {"device": "cpu", "attention": "triton", "max_rows": 8},
        marks=pytest.mark.skipif(CUDA, reason="a GPU runs the same"),
    ),
    pytest.param(
        {"device": "cuda", "dtype": "float32", "max_rows": 8, "step_tokens": 256},
        marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")],
    ),
]
where = pytest.mark.parametrize("where", WHERE, ids=["interpreter", "gpu"])
STEPS = 40 if CUDA else 2  # pairs; the interpreter takes a second for each


def save(folder: Path, case: str) -> tuple[Any, float]:
    """With few layers where they are interpreted."""
    few = {} if CUDA or case == "lfm2-biases" else FEW_LAYERS[case.removesuffix("-biases")]
    return save_whole(folder, case, **few)


def in_flight(d: Any, plans: list[dict[str, Any]]) -> list[dict[int, int]]:
    """What each plan samples; the one before is settled when the one after is launched."""
    launched, results = [], []
    for plan in plans:
        launched.append(d.executor.launch(d.plan(**plan)))
        results += [launched[-2].result()] if len(launched) > 1 else []
    results.append(launched[-1].result())
    found = []
    for each in results:
        counts = unpack(each.counts) or [1] * len(unpack(each.rows))
        rows = [row for row, count in zip(unpack(each.rows), counts, strict=True) if count]
        found.append(dict(zip(rows, unpack(each.tokens), strict=True)))
    return found


@where
@pytest.mark.parametrize(
    "case", ["qwen3_5-biases", "granite4", "falcon_h1", "nemotron_h", "lfm2-biases"]
)
def test_as_transformers(case: str, where: Any, tmp_path: Path, drive: Any) -> None:
    """A prompt in chunks beside decodes, two steps in flight."""
    model, tolerance = save(tmp_path, case)
    first, _, long = prompts()
    long = long[:80]
    d = drive(tmp_path, **where)
    likely = log_probabilities(model, long)
    d.step(opens=[d.open(2, d.pages(3000, 120))])
    for start in (0, 7, 72):
        run = long[start : {0: 7, 7: 72, 72: 80}[start]]
        ours = d.forward(extends=[ExtendRow(2, start, pack(run), True)])[0].log_softmax(-1)
        torch.testing.assert_close(ours.cpu(), likely[start + len(run) - 1], atol=tolerance, rtol=0)
    plans: list[dict[str, Any]] = [
        {"closes": [2], "opens": [d.open(0, d.pages(0, 256))],
         "extends": [ExtendRow(0, 0, pack(first), True)]},
        {"decodes": [0], "opens": [d.open(1, d.pages(1000, 256))],
         "extends": [ExtendRow(1, 0, pack(long[:70]), False)]},
        {"decodes": [0], "extends": [ExtendRow(1, 70, pack(long[70:-1]), False)]},
        {"decodes": [0], "extends": [ExtendRow(1, len(long) - 1, pack(long[-1:]), True)]},
        *({"decodes": rows} for rows in ([1, 0], [0, 1]) * STEPS),
    ]  # fmt: skip
    sampled = in_flight(d, plans)
    for row, prompt in enumerate((first, long)):
        output = [each[row] for each in sampled if row in each]
        assert_same(model, prompt, output, len(output))


@where
@pytest.mark.parametrize("case", ["qwen3_5", "lfm2"])
def test_branches_and_rows_that_sit_out(
    case: str, where: Any, tmp_path: Path, drive: Any, monkeypatch: Any
) -> None:
    """Two rows go on from one slot; one of them sits out where it would have sampled."""
    model, _ = save(tmp_path, case)
    prefix, tails = prompts()[1], [prompts()[0][:9], prompts()[0][20:21]]
    d = drive(tmp_path, **where)
    shared = d.pages(2000, len(prefix))
    d.step(opens=[d.open(5, shared)])
    d.prefill(5, 0, prefix, sample=False)
    d.step(closes=[5])
    kept, table, begin = d.states[5], d.executor.rows, d.executor.drafts.begin
    absent: list[int] = []

    def begin_without(plan: Any) -> Any:
        step = begin(plan)
        gone = np.isin(step.sampled_rows, absent)
        if not gone.any():
            return step
        table.sat_out(step.sampled_rows[gone], np.ones(int(gone.sum()), dtype=np.int64))
        return step.without(gone)

    monkeypatch.setattr(d.executor.drafts, "begin", begin_without)
    opens = [d.open(row, shared + d.pages(256 * row, 96), cached=len(prefix)) for row in range(2)]
    extends = [ExtendRow(row, len(prefix), pack(tail), True) for row, tail in enumerate(tails)]
    absent.append(1)  # of its extend
    outputs: dict[int, list[int]] = {0: [], 1: []}
    pairs = pack([kept, 1, kept, 4])
    sampled = in_flight(d, [{"opens": opens, "extends": extends, "states": pairs}])
    d.states |= {0: 1, 1: 4}
    sampled += in_flight(d, [{"decodes": [0, 1]}])  # of a decode
    absent.clear()
    sampled += in_flight(d, [{"decodes": [1, 0]}] * STEPS)
    for each in sampled:
        for row, token in each.items():
            outputs[row].append(token)
    assert len(outputs[0]) == len(outputs[1]) + 2
    for row, tail in enumerate(tails):
        prompt = prefix + tail
        assert_same(model, prompt, outputs[row], len(outputs[row]))
    absent.append(0)
    with pytest.raises(PlanError, match=r"rows \[3\] sit out behind several tokens"):
        absent.append(3)
        d.step(opens=[d.open(3, d.pages(1500, 20))], extends=[ExtendRow(3, 0, pack([1, 2]), True)])


class Script(DeviceDrafter):
    """Guesses what it is told for each row, and forgets it."""

    name, reads_tokens = "script", False

    def __init__(self) -> None:
        self.guesses: dict[int, list[int]] = {}

    def propose(self, entry: int, step: Any, inputs: Any, verifier: Any) -> None:
        for row in set(step.rows.tolist()):
            guess = self.guesses.pop(row, [])
            for number, token in enumerate(guess, 1):
                verifier.inputs[number, row] = token


@where
@pytest.mark.parametrize("case", ["lfm2", *(["granite4", "qwen3_5"] if CUDA else [])])
def test_drafts_that_are_refused_leave_no_state(
    case: str, where: Any, tmp_path: Path, drive: Any
) -> None:
    """Rows with right and wrong drafts beside each other, the next step laid out before it is known."""
    model, _ = save(tmp_path, case)
    prompt = prompts()[0][:5]
    wanted = reference(model, prompt, 7)
    wrong = (wanted[1] + 1) % 50 + 2
    d = drive(tmp_path, draft="ngram", **(where | {"max_rows": 9}))
    script = d.executor.drafts.drafter = Script()
    shared, kept = d.pages(0, 4), pack([1, 4, 1, 7, 1, 10])
    d.step(opens=[d.open(0, shared)], extends=[ExtendRow(0, 0, pack(prompt[:4]), False)])
    d.step(
        closes=[0],
        opens=[d.open(row, shared + d.pages(64 * row, 32), cached=4) for row in (1, 2, 3)],
        extends=[ExtendRow(row, 4, pack(prompt[4:]), True) for row in (1, 2, 3)],
        states=kept,
    )
    d.states |= {1: 4, 2: 7, 3: 10}
    # none, one, and both of two drafts are right; then again, of what follows if all had been
    script.guesses = {1: [wrong, wrong], 2: [wanted[1], wrong], 3: wanted[1:3]}
    first = d.executor.launch(d.plan(decodes=[1, 2, 3], drafts=pack([2, 2, 2])))
    script.guesses = {1: [wanted[2]], 2: [wrong], 3: [wanted[4]]}
    second = d.executor.launch(d.plan(decodes=[3, 1, 2], drafts=pack([1, 1, 1])))
    outputs: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for result in (first.result(), second.result(), d.executor.launch(
            d.plan(decodes=[1, 2, 3])).result()):  # fmt: skip
        tokens = list(unpack(result.tokens))
        rows = unpack(result.rows)
        for row, count in zip(rows, unpack(result.counts) or [1] * len(rows), strict=True):
            outputs[row] += tokens[:count]
            del tokens[:count]
    assert [len(output) for output in outputs.values()] == [1 + 2 + 1, 2 + 1 + 1, 3 + 2 + 1]
    for output in outputs.values():
        assert output == wanted[1 : 1 + len(output)]


@where
def test_deterministic_mode_goes_on_with_the_same_bits(
    where: Any, tmp_path: Path, drive: Any, ordered_dots: None
) -> None:
    """From a snapshot at any position, in chunks of any size, beside others."""
    save(tmp_path, "qwen3_5")
    text = prompts()[0][:20]
    d = drive(tmp_path, deterministic=True, **where)
    d.step(opens=[d.open(0, d.pages(0, 64))])
    whole = d.forward(extends=[ExtendRow(0, 0, pack(text), True)])[0].clone()
    d.step(opens=[d.open(1, d.pages(100, 64)), d.open(2, d.pages(200, 64))])
    d.prefill(1, 0, text[:11], sample=False)
    d.forward(extends=[ExtendRow(2, 0, pack([5] * 4), True)])
    logits = d.forward(
        extends=[ExtendRow(2, 4, pack([9] * 3), True), ExtendRow(1, 11, pack(text[11:]), True)]
    )
    assert torch.equal(logits[1], whole)


@where
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the garbage in padding
def test_padding_writes_no_slot(where: Any, tmp_path: Path, drive: Any, monkeypatch: Any) -> None:
    save(tmp_path, "qwen3_5")
    pools: list[StatePool] = []
    allocate = StateLayout.allocate

    def kept(layout: StateLayout, slots: int, device: torch.device, spare: int) -> StatePool:
        pools.append(allocate(layout, slots, device, spare))
        return pools[-1]

    monkeypatch.setattr(StateLayout, "allocate", kept)
    d = drive(tmp_path, **(where | {"max_rows": 3, "step_tokens": 32, "state_slots": 12}))
    memory = pools[-1].memory
    for tensor in memory:
        tensor[:, 1:] = 7.0
    before = [tensor.clone() for tensor in memory]
    for bucket in [*decode_buckets(3), *mixed_buckets(3, 32)]:
        d.executor.run_padding(bucket)
    assert all(map(torch.equal, before, memory))
