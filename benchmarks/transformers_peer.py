"""The other side of `cpu_serving.py`: `transformers` `generate`, in a process of its own.

`TransformersPeer` starts this file as a script. Each JSON line on its stdin is a conversation of
several sessions (`Work`); the answer is a JSON line with times and tokens (`Record`). All sessions
ask for their next turn at the same moment, when the turn before has ended for all.

    sequential   one session after the other, batch size 1
    batched      all sessions in one left-padded batch
    keep         past_key_values are kept from turn to turn; otherwise each turn reads its history

Float32, greedy, no end of sequence, SDPA. It does not know what it is compared with.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

Prompts = list[list[list[int]]]  # [session][turn] the token ids of each new input


@dataclass
class Work:
    """One conversation of each session. `output`: tokens that every turn generates."""

    batched: bool
    keep: bool
    output: int
    prompts: Prompts


@dataclass
class Record:
    """What came of it, seconds. `asked`: [turn][session] from the moment when the turn was asked for
    to the first token; `served`: from the moment when its own call of `generate` began."""

    seconds: float
    asked: list[list[float]] = field(default_factory=list)
    served: list[list[float]] = field(default_factory=list)
    outputs: list[list[list[int]]] = field(default_factory=list)  # [session][turn]


class TransformersPeer:
    """The process. Use with `with`."""

    def __init__(self, model: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        self._answer()

    def run(self, work: Work) -> Record:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(work)) + "\n")
        self._process.stdin.flush()
        return Record(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"transformers ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> "TransformersPeer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        self._process.wait(30)


# --- in its process ----------------------------------------------------------------------------


class _Model:
    """A loaded model and `generate` with a clock at the first token."""

    def __init__(self, path: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        settings = self.model.generation_config
        settings.eos_token_id = None
        settings.pad_token_id = 0
        settings.do_sample = False
        settings.temperature = settings.top_p = settings.top_k = None

    def generate(self, ids: Any, mask: Any, cache: Any, output: int) -> tuple[list[list[int]], float]:
        """ids, mask: int64[batch, length], the whole history even where `cache` has a part of it.

        Returns the new tokens and when the first ones were there.
        """
        first: list[float] = []

        def note(ids: Any, scores: Any) -> Any:
            first.append(time.perf_counter())
            return self.torch.zeros(len(ids), dtype=self.torch.bool)

        found = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=output,
            stopping_criteria=[note],
        )
        return found[:, ids.shape[1] :].tolist(), first[0]


def _run(model: _Model, work: Work) -> Record:
    from transformers import DynamicCache

    sessions = range(len(work.prompts))
    groups = [list(sessions)] if work.batched else [[i] for i in sessions]
    caches = [DynamicCache() if work.keep else None for _ in groups]
    histories: list[Any] = [None for _ in groups]
    record = Record(0.0, outputs=[[] for _ in sessions])
    begin = time.perf_counter()
    for turn in range(len(work.prompts[0])):
        asked_at = time.perf_counter()
        asked, served = [], []
        for at, group in enumerate(groups):
            called = time.perf_counter()
            ids, mask = _extend(model.torch, histories[at], [work.prompts[i][turn] for i in group])
            outputs, first = model.generate(ids, mask, caches[at], work.output)
            asked += [first - asked_at] * len(group)
            served += [first - called] * len(group)
            new = model.torch.tensor(outputs)
            ones = model.torch.ones_like(new)
            histories[at] = (model.torch.cat((ids, new), 1), model.torch.cat((mask, ones), 1))
            for i, output in zip(group, outputs, strict=True):
                record.outputs[i].append(output)
        record.asked.append(asked)
        record.served.append(served)
    record.seconds = time.perf_counter() - begin
    return record


def _extend(torch: Any, history: Any, inputs: list[list[int]]) -> tuple[Any, Any]:
    """The history and the new inputs, padded on their left: the mask hides the holes."""
    longest = max(map(len, inputs))
    ids = torch.tensor([[0] * (longest - len(own)) + own for own in inputs])
    mask = torch.tensor([[0] * (longest - len(own)) + [1] * len(own) for own in inputs])
    if history is None:
        return ids, mask
    return torch.cat((history[0], ids), 1), torch.cat((history[1], mask), 1)


def main() -> None:
    path, threads = sys.argv[1:]
    model = _Model(Path(path), int(threads))
    print("{}", flush=True)
    for line in sys.stdin:
        record = _run(model, Work(**json.loads(line)))
        print(json.dumps(asdict(record)), flush=True)


if __name__ == "__main__":
    main()
