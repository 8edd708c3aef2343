"""What number formats cost: bits per byte of held-out text and chats, exact and rounded, in one run.

    python benchmarks/quantization.py --text valid_text.txt --chat valid_chat.jsonl [--model DIR]
        [--documents 60] [--json FILE]

--text holds documents between lines `<|endoftext|>`, --chat a JSON object with `messages` in each
line. Every document is read from its start, cut to the model's context, and scored by the executor
alone. The bytes are those of the tokens that are scored. Exits with 1 if int8 needs over 0.5 % more
bits than `none`.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from report import headline, machine, table, write_json
from transformers import PreTrainedTokenizerFast

from ramify.gpu.startup.load import load_executor
from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams

MOST_LOSS = 0.005
FORMATS: dict[str, dict[str, Any]] = {
    "none": {"quantization": "none"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},  # groups of 32, and rows in 8 bits
    "mxfp4": {"quantization": "mxfp4"},
    "fp8": {"quantization": "fp8"},
    "fp8 KV": {"quantization": "none", "kv_dtype": "fp8"},
    "both": {"quantization": "fp8", "kv_dtype": "fp8"},
}


def texts(path: Path) -> Iterator[str]:
    """Documents of a text file."""
    for part in path.read_text(encoding="utf-8").split("<|endoftext|>\n"):
        text = part.replace("<|endoftext|>", "").strip()
        if text:
            yield text


def chats(path: Path, tokenizer: Any) -> Iterator[str]:
    """Conversations as the model's chat template writes them."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)


def nats(executor: Any, tokens: list[int]) -> float:
    """Of all tokens but the first."""
    opened = OpenRow(0, 1, pack(range(len(tokens))), 0, SamplingParams(temperature=0.0))
    places = pack(range(len(tokens) - 1))
    extend = ExtendRow(0, 0, pack(tokens), False, places, pack(tokens[1:]))
    result = executor.launch(StepPlan(0, opens=[opened], extends=[extend])).result()
    executor.launch(StepPlan(0, closes=pack([0]))).result()
    return -float(np.frombuffer(result.scores, dtype=np.float32).sum(dtype=np.float64))


def measure(executor: Any, documents: list[tuple[list[int], int]]) -> float:
    """Bits per byte; a document is its tokens and the bytes that they spell."""
    bits = sum(nats(executor, tokens) for tokens, _ in documents) / math.log(2)
    return bits / sum(size for _, size in documents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="default: the bundled one")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--chat", type=Path)
    parser.add_argument("--documents", type=int, default=60, help="of each kind")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    about = machine(["ramify", "torch", "llvmlite"])
    print(headline(about), flush=True)
    model = options.model or Path(str(files("ramify.gpu") / "default_model"))
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model)
    sources = {
        "text": texts(options.text) if options.text else iter(()),
        "chat": chats(options.chat, tokenizer) if options.chat else iter(()),
    }
    found: dict[str, dict[str, float]] = {}
    taken: dict[str, list[tuple[list[int], int]]] = {}
    for name, fields in FORMATS.items():
        config = ModelConfig(path=model, device="cpu", threads=options.threads, **fields)
        executor = load_executor(config, lambda what, done: None)
        for kind, source in sources.items():
            if kind not in taken:
                most = min(executor.info.context, executor.info.step_tokens)
                taken[kind] = list(_documents(source, tokenizer, most, options.documents))
            if taken[kind]:
                found.setdefault(kind, {})[name] = measure(executor, taken[kind])
        executor.close()
    losses = {kind: both["int8"] / both["none"] - 1 for kind, both in found.items()}
    rows = [
        [kind, f"{sum(size for _, size in taken[kind])}", f"{each['none']:.5f}",
         *(f"{100 * (each[name] / each['none'] - 1):+.3f} %" for name in FORMATS if name != "none")]
        for kind, each in found.items()
    ]  # fmt: skip
    others = [f"{name}, more" for name in FORMATS if name != "none"]
    print(table(["held out", "bytes", "none, bits/byte", *others], rows))
    write_json(options.json, about, found)
    sys.exit(any(loss > MOST_LOSS for loss in losses.values()))


def _documents(
    source: Iterator[str], tokenizer: Any, most: int, count: int
) -> Iterator[tuple[list[int], int]]:
    """Those of at least two tokens, cut to `most`."""
    for text in source:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"][:most]
        if len(tokens) < 2:
            continue
        yield tokens, len(tokenizer.decode(tokens[1:]).encode())
        count -= 1
        if count == 0:
            return


if __name__ == "__main__":
    main()
