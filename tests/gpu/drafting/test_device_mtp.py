"""The checkpoint's own layer as a drafter on Triton kernels: in their interpreter, or on a GPU."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExtendRow, pack, unpack
from tests.gpu.conftest import Driver
from tests.gpu.drafting.test_mtp import expected, with_layer
from tests.gpu.models.families.test_families import prompts
from tests.gpu.ranked import ranked

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", minversion=None if CUDA else "3.7")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's: garbage in padding
    pytest.mark.usefixtures("ordered_dots"),
]
STEPS, MOST = 3, 2


@pytest.mark.parametrize(("family", "ranks"), [("qwen3_5", 1), ("deepseek_v3", 1), ("small", 2)])
def test_guesses_as_published_and_outputs_as_without(
    family: str, ranks: int, tmp_path: Path, one_at_a_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and padding beside each other; a step without drafts, and guesses that are refused."""
    if ranks > 1 and CUDA:
        pytest.skip("ranks are threads here, and each would want a GPU of a process")
    model, layer = with_layer(tmp_path, family)
    config = ModelConfig(
        path=tmp_path, draft="mtp", attention="triton", max_rows=8, step_tokens=32, kv_tokens=192,
        device="cuda" if CUDA else "cpu", dtype="float32", quantization="none", tensor_parallel=ranks,
    )  # fmt: skip
    with ranked(config) as executor:
        guess(Driver(executor), model, layer, monkeypatch)


def guess(d: Driver, model: Any, layer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [prompts()[0][:9], prompts()[1][:5], prompts()[2][:4]]
    opens = [d.open(row, d.pages(64 * row, 64)) for row in range(3)]
    extends = [ExtendRow(row, 0, pack(text), True) for row, text in enumerate(texts)]
    outputs = {row: [token] for row, token in d.step(opens=opens, extends=extends).items()}
    drafter, steps, guesses = d.executor.drafts.drafter, deque[Any](), list[Any]()
    propose, said = drafter.propose, list[torch.Tensor]()

    def watched(*about: Any) -> None:
        propose(*about)
        said.append(about[-1].inputs[1 : 1 + MOST].clone())

    monkeypatch.setattr(drafter, "propose", watched)

    def take() -> None:
        """The oldest step's tokens; what it guessed behind those that came before it."""
        asked, guessed, step = steps.popleft()
        before = [texts[row] + outputs[row] for row in range(3)]
        result = step.result()
        tokens = list(unpack(result.tokens))
        counts = list(unpack(result.counts)) or [1, 1, 1]
        for row, count in zip(unpack(result.rows), counts, strict=True):
            outputs[row] += tokens[:count]
            del tokens[:count]
        if asked:
            guesses.append((guessed[:, 0].tolist(), expected(model, layer, before[0], MOST)))
            guesses.append((guessed[:1, 1].tolist(), expected(model, layer, before[1], 1)))

    for at in range(STEPS):  # two in flight
        asked = pack([MOST, 1, 0]) if at != 1 else b""
        step = d.executor.launch(d.plan(decodes=[0, 1, 2], drafts=asked))
        steps.append((asked, said[-1], step))
        if len(steps) == 2:
            take()
    take()
    assert [found for found, _ in guesses] == [wanted for _, wanted in guesses]
    for text, output in zip(texts, outputs.values(), strict=True):
        whole = torch.tensor([text + output])
        with torch.inference_mode():
            likely = model(whole).logits[0, len(text) - 1 : -1].argmax(-1).tolist()
        assert output == likely
