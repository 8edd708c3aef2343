"""Log-probabilities of given tokens against `transformers`: in chunks, beside others, many at once."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify.gpu.executors.base import BadLogits
from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.sampling import scoring
from ramify.protocol.plan import ExtendRow, StepPlan, StepResult, pack, unpack, unpack_floats
from ramify.protocol.sampling import SamplingParams

CUDA = torch.cuda.is_available()
VOCABULARY = 160


def save(folder: Path, family: str) -> Any:
    """A random model, saved and returned; large weights, so that what it says differs."""
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (57, 40, 91)]


def run(d: Any, **plan: Any) -> StepResult:
    result: StepResult = d.executor.launch(StepPlan(step=0, **plan)).result()
    return result


def extend(row: int, start: int, tokens: list[int], places: list[int], targets: list[int]) -> ExtendRow:
    return ExtendRow(row, start, pack(tokens), False, pack(places), pack(targets))


def close(result: StepResult, wanted: list[float]) -> None:
    assert unpack_floats(result.scores).tolist() == pytest.approx(wanted, abs=1e-4)


def test_likely_tokens_beside_targets(tmp_path: Path, device: str, drive: Any, monkeypatch: Any) -> None:
    """Each extend asks for as many as it wants; the greedy token's score is the target's, to the bit."""
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * 160 * 7)
    model = save(tmp_path, "Llama")
    first, second, third = prompts()
    with torch.inference_mode():
        wanted = [model(torch.tensor([p])).logits[0].log_softmax(-1) for p in (first, second, third)]
    d = drive(tmp_path, page_size=1, dtype="float32", max_rows=5)
    run(d, opens=[d.open(row, d.pages(512 * row, 192)) for row in range(3)])
    best = [w.argmax(-1).tolist() for w in wanted]
    asked = [(first, 3, 0), (second, 0, 1), (third, 5, 2)]
    extends = [
        ExtendRow(row, 0, pack(p), False, pack(range(len(p))), pack(best[row]), tops=tops)
        for p, tops, row in asked
    ]
    scores = unpack_floats(run(d, extends=extends).scores).tolist()
    at = 0
    for prompt, tops, row in asked:
        for place in range(len(prompt)):
            own = scores[at : at + 1 + 2 * tops]
            at += len(own)
            values, tokens = wanted[row][place].topk(tops) if tops else ([], [])
            assert own[0] == pytest.approx(wanted[row][place].max().item(), abs=1e-4)
            assert own[1::2] == pytest.approx([float(t) for t in tokens])
            assert own[2::2] == pytest.approx([float(v) for v in values], abs=1e-4)
            assert not tops or own[2] == own[0]
    assert at == len(scores)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_agrees_with_transformers(
    family: str, page_size: int, tmp_path: Path, device: str, drive: Any, monkeypatch: Any
) -> None:
    """In one extend, in chunks, behind a cached prefix, beside rows that sample and decode."""
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * 160 * 7)  # slices of seven lines
    model = save(tmp_path, family)
    first, second, third = prompts()
    with torch.inference_mode():
        wanted = [model(torch.tensor([p])).logits[0].log_softmax(-1) for p in (first, second, third)]

    def own(which: int, start: int, stop: int) -> list[float]:
        """What each of the prompt's tokens behind [start, stop) has."""
        prompt = (first, second, third)[which]
        return [wanted[which][p, prompt[p + 1]].item() for p in range(start, stop)]

    d = drive(tmp_path, page_size=page_size, dtype="float32", max_rows=5)
    opens = [d.open(row, d.pages(512 * row, 192)) for row in range(3)]
    run(d, opens=opens)
    close(run(d, extends=[extend(0, 0, first[:-1], list(range(56)), first[1:])]), own(0, 0, 56))
    # chunks: the last target of a chunk is the first token of the next one
    for start, stop in ((0, 9), (9, 10), (10, 39)):
        places, targets = list(range(start, stop)), second[start + 1 : stop + 1]
        close(
            run(d, extends=[extend(1, start, second[start:stop], places, targets)]), own(1, start, stop)
        )
    # every token of the vocabulary behind one place, and two places without targets in between
    every = list(range(160))
    parts = extend(2, 0, third[:50], [7, *[30] * 160, 49], [3, *every, 5])
    result = run(d, extends=[parts, ExtendRow(1, 39, pack(second[39:]), True)])
    close(result, [wanted[2][7, 3].item(), *wanted[2][30].tolist(), wanted[2][49, 5].item()])
    assert list(unpack(result.rows)) == [1]
    # a cached prefix, beside a decode with log-probabilities and a sample: the same as without
    logprobs = SamplingParams(temperature=0.0, logprobs=2)
    again = d.open(3, d.pages(0, 192), cached=48 - 48 % page_size, sampling=logprobs)
    start = again.cached
    places, targets = list(range(start, 56)), first[start + 1 :]
    more = [ExtendRow(2, 50, pack(third[50:]), True)]
    sampling = d.open(4, d.pages(1600, 192), sampling=logprobs)
    result = run(
        d,
        opens=[again, sampling],
        extends=[extend(3, start, first[start:-1], places, targets), *more,
                 ExtendRow(4, 0, pack(first), True)],
        decodes=pack([1]),
    )  # fmt: skip
    close(result, own(0, start, 56))
    assert list(unpack(result.rows)) == [2, 4, 1]
    tokens = list(unpack(result.tokens))
    assert (tokens[0], tokens[1]) == (wanted[2][-1].argmax(), wanted[0][-1].argmax())
    assert [bool(each) for each in result.logprobs] == [False, True, False]
    assert result.logprobs[1].logprob == pytest.approx(wanted[0][-1].max().item(), abs=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the garbage in padding
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_cuda_executor_equals_the_one_on_torch(
    page_size: int, tmp_path: Path, tiny_config: dict[str, Any], drive: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * 128 * 3)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | {"head_dim": 16}))
    found = []
    for attention in ("torch", "triton"):
        options = {"device": "cuda" if CUDA else "cpu", "dtype": "float32", "load_format": "dummy"}
        d = drive(tmp_path, attention=attention, page_size=page_size, max_rows=3, **options)
        settings = SamplingParams(temperature=0.8, top_p=0.9, logprobs=2, seed=4)
        opens = [d.open(row, d.pages(512 * row, 96), sampling=settings) for row in range(3)]
        plans = [
            StepPlan(0, opens=opens[:2], extends=[
                ExtendRow(0, 0, pack([1, 2, 3]), True), extend(1, 0, [4, 5, 6], [1, 1, 2], [9, 8, 7])]),
            # one token that is scored is no decode, one that is sampled may be
            StepPlan(1, opens=opens[2:], decodes=pack([0]), extends=[
                extend(1, 3, [7], [3, 3, 3, 3], [5, 6, 7, 8]), ExtendRow(2, 0, pack([9]), True)]),
            StepPlan(2, extends=[extend(1, 4, [3, 1, 2, 5, 4], [4, 5, 6, 7, 8], [1, 2, 5, 4, 0])]),
            StepPlan(3, decodes=pack([0, 2])),
        ]  # fmt: skip
        pending, results = [], []
        for plan in plans:
            pending.append(d.executor.launch(plan))
            if len(pending) == 2:
                results.append(pending.pop(0).result())
        results.append(pending.pop().result())
        assert [len(result.scores) // 4 for result in results] == [3, 4, 5, 0]
        assert [len(result.logprobs) for result in results] == [1, 2, 0, 2]
        found.append(results)
    for one, other in zip(*found, strict=True):
        assert (one.rows, one.tokens, one.computed) == (other.rows, other.tokens, other.computed)
        close(one, unpack_floats(other.scores).tolist())


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scores_that_are_not_finite_name_the_request(
    attention: str, tmp_path: Path, tiny_config: dict[str, Any], drive: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | {"head_dim": 16}))
    options = {"dtype": "float32", "load_format": "dummy", "device": "cuda" if CUDA else "cpu"}
    d = drive(tmp_path, attention=attention, max_rows=3, **options)
    model = d.executor.model
    model.embedding[77] = torch.nan
    opens = [d.open(row, d.pages(512 * row, 96)) for row in range(2)]
    extends = [extend(0, 0, [1, 2], [0, 1], [2, 3]), extend(1, 0, [4, 77, 5], [0, 1, 2], [7, 8, 9])]
    with pytest.raises(BadLogits) as caught:
        run(d, opens=opens, extends=extends)
    assert (caught.value.rows, caught.value.requests) == ([1], [101])
    bad = np.isnan(np.array(unpack_floats(caught.value.result.scores)))
    assert (bad[:2].any(), bad[3:].all()) == (False, True)  # what a token sees masked may spoil it too


def test_memory_is_bounded(tmp_path: Path, drive: Any, monkeypatch: Any) -> None:
    """No more positions' logits at a time than a slice has, whatever the step asks for."""
    save(tmp_path, "Llama")
    size = scoring.slice_lines(VOCABULARY)
    assert size * 4 * VOCABULARY <= scoring.LOGITS_BYTES
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * 160 * 10)
    d = drive(tmp_path, device="cpu", step_tokens=512)
    most = []
    model = d.executor.model
    plain = model.logits

    def watched(hidden: Any, lines: Any, *more: Any) -> Any:
        most.append(len(lines))
        return plain(hidden, lines, *more)

    monkeypatch.setattr(model, "logits", watched)
    tokens = [random.Random(3).randrange(160) for _ in range(200)]
    run(d, opens=[d.open(0, d.pages(0, 200))], extends=[extend(0, 0, tokens, list(range(200)), tokens)])
    assert (max(most), sum(most)) == (10, 200)


def test_the_fake_scores_by_the_tokens_alone() -> None:
    executor = FakeExecutor(pages=256, page_size=4)
    tokens = [5, 9, 2, 400, 7, 7, 31]
    places, targets = [0, 2, 2, 6], [9, 400, 3, 1]
    wanted = executor.model.expected_scores(tokens, places, targets)
    assert all(-15 <= each <= 0 for each in wanted)
    opened = [
        {"row": 0, "pages": range(40, 50)},
        {"row": 1, "pages": range(10)},
    ]
    from ramify.protocol.plan import OpenRow

    opens = [OpenRow(o["row"], o["row"], pack(o["pages"]), 0, SamplingParams()) for o in opened]
    whole = extend(1, 0, tokens, places, targets)
    launched = executor.launch(StepPlan(0, opens=opens, extends=[
        extend(0, 0, tokens[:3], places[:3], targets[:3]), whole]))  # fmt: skip
    scores = unpack_floats(launched.result().scores).tolist()
    assert scores[:3] == wanted[:3]
    assert scores[3:] == wanted
    rest = executor.launch(StepPlan(1, extends=[extend(0, 3, tokens[3:], places[3:], targets[3:])]))
    assert unpack_floats(rest.result().scores).tolist() == wanted[3:]
