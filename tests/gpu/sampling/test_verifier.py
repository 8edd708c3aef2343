"""The CUDA executor with drafts and without, two steps in flight: the same tokens, whatever is guessed.

In Triton's interpreter, or on a GPU.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify.gpu.drafting.device import DeviceDrafter
from ramify.gpu.sampling.randomness import uniforms
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", minversion=None if CUDA else "3.7")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's: garbage in padding
    pytest.mark.usefixtures("ordered_dots"),
]
DEVICE = torch.device("cuda" if CUDA else "cpu")
PAGE, ROWS, DRAFTS = 16, 8, 3
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.7, "seed": 3, "top_p": 0.8, "logprobs": 2},
    {"temperature": 1.0, "seed": 5, "presence_penalty": 0.9, "repetition_penalty": 1.2},
]


class Oracle(DeviceDrafter):
    """A drafter that knows what will be sampled, and is wrong wherever it likes."""

    name, reads_tokens = "oracle", False

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.random = random.Random(3)

    def propose(self, entry: int, step: Any, inputs: Any, verifier: Any) -> None:
        ids, rows, positions = (
            part[inputs.extended :].tolist()
            for part in (inputs.input_ids, inputs.rows, inputs.positions)
        )
        width = verifier.inputs.shape[1]
        for line, (token, row, position) in enumerate(zip(ids, rows, positions, strict=True)):
            if token != -1 - row or row not in self.outputs:
                continue
            known = self.outputs[row][position - self.prompts[row] + 1 :] + [0] * DRAFTS
            for number in range(1, DRAFTS + 1):
                if ids[line + number : line + number + 1] == [-1 - row - number * width]:
                    right = self.random.random() < 0.8
                    verifier.inputs[number, row] = known[number - 1] if right else 1


class Requests:
    """Four requests with their own settings; a closed row is opened again by the next one."""

    def __init__(self, executor: Any, output: int) -> None:
        self.executor, self.output = executor, output
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.drafted = self.accepted = self.steps = 0

    def prompt(self, request: int) -> list[int]:
        return [(7 * request + i) % 5 + 1 for i in range(9 + request)]

    def run(self, drafts: int, requests: int = 6, seed: int = 1) -> None:
        """Up to `drafts` for each decode, any number."""
        dice = random.Random(seed)
        waiting, rows = list(range(requests)), dict[int, int]()
        closes: list[int] = []
        pending: list[tuple[Any, dict[int, int]]] = []
        while waiting or rows or pending:
            opens, extends = [], []
            decodes = list(rows)
            while waiting and len(rows) < 4 and dice.random() < 0.8:
                request = waiting.pop(0)
                row = next(row for row in range(4) if row not in rows)
                rows[row] = request
                prompt = self.prompt(request)
                pages = pack(range(8 * row, 8 * row + 8))
                sampling = SamplingParams(**SETTINGS[request % 4])
                opens.append(OpenRow(row, request, pages, 0, sampling, 0, pack(prompt)))
                extends.append(ExtendRow(row, 0, pack(prompt), True))
            room = ROWS - len(decodes) - len(extends)
            asked = []
            for _ in decodes:
                asked.append(dice.randint(0, min(drafts, room)))
                room -= asked[-1]
            plan = StepPlan(
                self.steps, pack(closes), opens, [], extends, pack(decodes),
                pack(asked) if any(asked) else b"",
            )  # fmt: skip
            pending.append((self.executor.launch(plan), dict(rows)))
            self.steps += 1
            closes = []
            if len(pending) == 2 or not rows:
                self.take(*pending.pop(0))
                for row, request in list(rows.items()):
                    if len(self.tokens.get(request, [])) >= self.output:
                        del rows[row]
                        closes.append(row)
            if not rows and not waiting:
                while pending:
                    self.take(*pending.pop(0))

    def take(self, step: Any, owners: dict[int, int]) -> None:
        result = step.result()
        rows, tokens = unpack(result.rows), list(unpack(result.tokens))
        counts = list(unpack(result.counts)) or [1] * len(rows)
        drafted = list(unpack(result.drafted)) or [0] * len(rows)
        logprobs = list(result.logprobs) or [None] * len(tokens)
        assert sum(counts) == len(tokens) == len(logprobs)
        assert all(1 <= count <= 1 + drafts for count, drafts in zip(counts, drafted, strict=True))
        self.drafted += sum(drafted)
        self.accepted += sum(counts) - len(counts)
        for row, count in zip(rows, counts, strict=True):
            self.tokens.setdefault(owners[row], []).extend(tokens[:count])
            self.logprobs.setdefault(owners[row], []).extend(logprobs[:count])
            del tokens[:count], logprobs[:count]

    def outputs(self) -> dict[int, list[int]]:
        return {request: tokens[: self.output] for request, tokens in sorted(self.tokens.items())}


@pytest.fixture
def make(
    tmp_path: Path, tiny_config: dict[str, Any], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    config = tiny_config | {
        "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    def executor(drafter: Any = None, **more: Any) -> Any:
        from ramify.gpu.startup import load

        settings = {"draft": "none"}
        with monkeypatch.context() as patch:
            if drafter is not None:
                settings = {"draft": "ngram", "draft_tokens": DRAFTS}
                if drafter != "ngram":
                    patch.setattr(load, "device_drafter", lambda *about: drafter)
            made = drive(
                tmp_path, device=DEVICE.type, dtype="float32", load_format="dummy", attention="triton",
                max_rows=ROWS, step_tokens=64, kv_tokens=64 * PAGE, page_size=PAGE, **settings, **more,
            ).executor  # fmt: skip
        made.capture([], lambda what, done: None)
        return made

    return executor


@pytest.mark.parametrize("deterministic", [False, True])
def test_drafts_change_no_token(make: Any, deterministic: bool) -> None:
    """Greedy, seeded, cut, penalised rows; opened and closed while steps with drafts are in flight."""
    output, requests = (12, 9) if CUDA else (4, 5 if not deterministic else 2)
    plain = Requests(make(deterministic=deterministic), output)
    plain.run(0, requests)
    wanted = plain.outputs()
    drafter = Oracle()
    executor = make(drafter, deterministic=deterministic)
    drafted = Requests(executor, output)
    owner = {}

    launch = executor.launch

    def spy(plan: StepPlan) -> Any:
        for opened in plan.opens:
            owner[opened.row] = opened.request
            drafter.outputs[opened.row] = wanted[opened.request]
            drafter.prompts[opened.row] = len(plain.prompt(opened.request))
        return launch(plan)

    executor.launch = spy
    drafted.run(DRAFTS, requests)
    assert drafted.outputs() == wanted
    assert drafted.accepted > drafted.drafted // 4
    assert drafted.accepted < drafted.drafted
    for request, logprobs in plain.logprobs.items():
        pairs = zip(logprobs[:output], drafted.logprobs[request][:output], strict=True)
        assert all(
            (a is None and b is None) or (a.top_ids == b.top_ids and abs(a.logprob - b.logprob) < 1e-4)
            for a, b in pairs
        )
    # all that was refused is settled
    table = executor.rows
    assert not table.unsettled.any()
    assert not executor.drafts.late


def test_ngrams_find_what_the_row_says(make: Any) -> None:
    """The tokens are read through the page table; a prompt in another row's pages counts."""
    wanted = Requests(make(), 4)
    wanted.run(0, requests=1)
    drafted = Requests(make("ngram"), 4)
    drafted.run(2, requests=1)
    assert drafted.outputs() == wanted.outputs()
    from ramify.gpu.drafting.triton_ngram import DeviceNgramDrafter
    from ramify.gpu.sampling.verifier import Verifier
    from ramify.gpu.step.buckets import Bucket
    from ramify.gpu.step.inputs import StepInputs

    text = [5, 6, 7, 8, 9, 5, 6, 1, 2, 7, 5, 6, 7]
    pages = torch.tensor([[3, 1], [0, 0]], dtype=torch.int32, device=DEVICE)
    verifier = Verifier(DRAFTS, pages, 8, 5 * 8)
    assert verifier.tokens is not None
    verifier.tokens[3 * 8 : 4 * 8] = torch.tensor(text[:8])
    verifier.tokens[8 : 8 + len(text) - 8] = torch.tensor(text[8:])

    def propose(last: int) -> list[int]:
        parts = {
            "input_ids": np.array([-1, -1 - 2, -1 - 4, -1 - 6], dtype=np.int32),
            "rows": np.zeros(4, dtype=np.int32),
            "positions": np.arange(last, last + 4, dtype=np.int32),
        }
        tensors = {name: torch.from_numpy(part).to(DEVICE) for name, part in parts.items()}
        DeviceNgramDrafter().warm(StepInputs.from_parts(Bucket(0, 0, 4, 4), tensors), verifier)
        return verifier.inputs[1:, 0].tolist()

    assert propose(12) == [8, 9, 5]  # 5 6 7 is longer than 7 alone
    assert propose(6) == [7, 8, 9]
    assert propose(8) == [2, 2, 2]  # nothing agrees
    assert propose(5) == [6, 7, 8]
    verifier.tokens[3 * 8 : 3 * 8 + 4] = torch.tensor([4, 9, 4, 9], dtype=torch.int32, device=DEVICE)
    assert propose(3) == [4, 9, 4]  # it repeats itself


def test_random_numbers_are_the_hosts() -> None:
    from ramify.gpu.sampling.verifier import _correct_draws

    dice = np.random.default_rng(5)
    seeds = dice.integers(-(2**63), 2**63, 6)
    indices = np.array([0, 1, 2, 1000, 2**31, 2**40])
    asks = np.zeros((6, 16), dtype=np.int32)
    asks[:, 1] = np.arange(6)
    asks.view(np.int64)[:, 6] = indices
    words = torch.from_numpy(asks.copy()).to(DEVICE)
    refused = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    own = torch.from_numpy(seeds).to(DEVICE)
    _correct_draws[(1,)](words, words.view(torch.int64), refused, own, 6, BLOCK=128)
    ours = words.cpu().numpy().view(np.float64)[:, 6]
    assert ours.tolist() == uniforms(seeds, indices).tolist()


def test_drafts_that_come_with_an_extend(make: Any) -> None:
    """Given tokens are checked as guessed ones are, by an executor that guesses nothing itself."""
    plain = make()
    prompt = [3, 4, 5]
    opened = OpenRow(0, 0, pack(range(4)), 0, SamplingParams(temperature=0.0))
    tokens: list[int] = []
    plan = StepPlan(0, opens=[opened], extends=[ExtendRow(0, 0, pack(prompt), True)])
    for step in range(5):
        tokens += unpack(plain.launch(plan).result().tokens)
        plan = StepPlan(step + 1, decodes=pack([0]))
    other = make()
    for cut, given, count in ((3, [*tokens[:2], (tokens[2] + 1) % 64], 3), (1, tokens[:3], 4)):
        other.launch(
            StepPlan(0, opens=[opened], extends=[ExtendRow(0, 0, pack(prompt[:cut]), cut == 3)])
        )
        start = cut if cut < 3 else 0
        if cut == 3:  # the whole prompt with drafts behind it, in a row of its own
            other.launch(StepPlan(1, closes=pack([0]), opens=[opened]))
        run = prompt[start:] + given
        plan = StepPlan(2, extends=[ExtendRow(0, start, pack(run), True, drafts=3)])
        first = other.launch(plan)
        found = list(unpack(first.result().tokens))
        assert unpack(first.result().counts).tolist() == [count]
        assert unpack(first.result().drafted).tolist() == [3]
        assert found == tokens[:count]
        more = other.launch(StepPlan(3, decodes=pack([0]))).result()
        assert unpack(more.tokens)[0] == tokens[count]
        other.launch(StepPlan(4, closes=pack([0]))).result()
