"""`programs.py race`: programs a second on a CPU, against stateless clients and `transformers`."""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from program_base import FAST, MODEL, spread, works
from program_runs import Asked, Words, on_prompts
from program_ways import marked, whole
from report import percentile, table, write_json

from ramify.clients.bench.server import served


class Transformers:
    """`generate` of `transformers`, in this process: each round of a program as one padded batch."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        settings = self._model.generation_config
        settings.eos_token_id, settings.pad_token_id, settings.do_sample = None, 0, False
        settings.temperature = settings.top_p = settings.top_k = None

    async def ask(self, calls: Sequence[Asked]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in calls]
        lengths = sorted({call.output for call in calls if call.output})
        for output in lengths:
            places = [i for i, call in enumerate(calls) if call.output == output]
            for i, tokens in zip(
                places, self._generate([calls[i].prompt for i in places], output), strict=True
            ):
                found[i] = tokens
        places = [i for i, call in enumerate(calls) if call.choices]
        if places:
            for i, best in zip(places, self._choose([calls[i] for i in places]), strict=True):
                found[i] = list(calls[i].targets[best])
        return found

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """Left-padded ids and their mask."""
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(p)) + list(p) for p in prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        return self._torch.tensor(ids), self._torch.tensor(mask)

    def _generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        ids, mask = self._padded(prompts)
        made = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=output)
        rows: list[list[int]] = made[:, ids.shape[1] :].tolist()
        return rows

    def _choose(self, calls: Sequence[Asked]) -> list[int]:
        """The choice with the highest mean log-probability of each call; all in one batch."""
        torch = self._torch
        pairs = [(call.prompt, target) for call in calls for target in call.targets]
        ids, mask = self._padded([[*prompt, *target] for prompt, target in pairs])
        with torch.no_grad():
            keep = max(len(target) for _, target in pairs) + 1
            logits = self._model(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits
        scores = []
        for row, (_, target) in enumerate(pairs):
            logs = logits[row, -len(target) - 1 : -1].log_softmax(-1)
            scores.append(float(logs.gather(1, torch.tensor(target)[:, None]).mean()))
        best, at = [], 0
        for call in calls:
            own = scores[at : at + len(call.targets)]
            best.append(own.index(max(own)))
            at += len(own)
        return best


def race(options: argparse.Namespace) -> int:
    words, ways = Words(MODEL), ["branches", "prompts", "no cache", "transformers"]
    threads = options.threads
    peer = Transformers(MODEL, threads)
    rows, results = [], []
    flags = ["--device=cpu", f"--threads={threads}", f"--quantization={options.quantization}",
             f"--limit-ops-per-second={FAST}", f"--limit-ops-burst={FAST}"]  # fmt: skip
    with served(flags, None) as server:
        for name, some in works(options, 2000).items():
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(-1, options.repeat):  # the first one warms up
                for way in ways[number % 4 :] + ways[: number % 4]:
                    mine = [marked(work, f"{way} {number}") for work in some]
                    begin = time.perf_counter()
                    if way == "transformers":
                        for work in mine:
                            asyncio.run(on_prompts(peer, work, words))
                    else:
                        asyncio.run(whole(server.url, mine, way, words))
                    if number >= 0:
                        seconds[way].append(time.perf_counter() - begin)
            rates = {way: [len(some) / each for each in times] for way, times in seconds.items()}
            ratios = [_ratio(seconds[way], seconds["branches"]) for way in ways[1:]]
            rows.append([name, *[spread(rates[way]) for way in ways], *ratios])
            results.append({"program": name, "programs": len(some), "seconds": seconds})
            print("; ".join(rows[-1]), flush=True)
    over = [f"over {way}" for way in ways[1:]]
    print(table(["programs/s", *ways, *over], rows))
    write_json(options.json, options.about, results)
    return 0


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """How many times as long theirs took: the median over the rounds."""
    return f"{percentile([a / b for a, b in zip(theirs, ours, strict=True)], 50):.2f}"
