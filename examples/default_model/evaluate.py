"""Measure a default-model folder: held-out bits, sums, memory, JSON, tools, endings, stories.

Prints one line a measure with its target, and runs on a GPU or on the CPU. Generation is this folder's
own (`generate.py`); `--check` loads the folder with `transformers` and compares greedy answers. Does not know how the model was trained; the probes come from `probes.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpus
import model as models
import probes
import torch
import torch.nn.functional as F
from generate import generate
from prepare import turns
from transformers import AutoModelForCausalLM, AutoTokenizer


class Subject:
    """A loaded folder that can answer many conversations at once."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model = models.load_folder(folder).to(device).eval()
        self.device = device

    def prompt(self, messages: list[corpus.Message]) -> list[int]:
        """Token ids of a conversation that waits for the assistant."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def answer(
        self,
        conversations: list[list[corpus.Message]],
        limit: int = 256,
        temperature: float = 0.0,
        batch: int = 256,
    ) -> list[tuple[str, bool]]:
        """For each conversation the answer, and whether it ended by itself within `limit` tokens."""
        prompts = [self.prompt(one)[-(2048 - limit) :] for one in conversations]
        found: list[tuple[str, bool]] = []
        for start in range(0, len(prompts), batch):
            for row in generate(
                self.model, prompts[start : start + batch], limit, temperature=temperature
            ):
                found.append((self.tokenizer.decode(row, skip_special_tokens=True), row[-1] == 2))
        return found

    @torch.no_grad()
    def bits(self, pieces: list[tuple[str, bool]]) -> tuple[float, int]:
        """Bits and bytes of the pieces marked True, read after everything before them."""
        ids: list[int] = []
        counted: list[bool] = []
        size = 0
        for text, counts in pieces:
            part = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += part
            counted += [counts] * len(part)
            size += len(text.replace("<|im_end|>", "").encode()) if counts else 0
        ids, counted = ids[:2048], counted[:2048]
        tokens = torch.tensor([ids], device=self.device)
        logits = self.model(tokens[:, :-1])[0].float()
        nats = F.cross_entropy(logits, tokens[0, 1:], reduction="none")
        keep = torch.tensor(counted[1:], device=self.device)
        return float(nats[keep].sum()) / math.log(2), size


def held_out_bits(subject: Subject, folder: Path, limit: int) -> None:
    """Bits per byte on the held-out files, and on held-out synthetic conversations if there are none."""
    sets: dict[str, list[list[tuple[str, bool]]]] = {}
    # A text is read from its start and cut so that it fits the context.
    texts = [text[:6000] for text in corpus.documents(folder, "valid_text.txt")]
    sets["text"] = [[("<|endoftext|>", False), (text, True)] for text in texts]
    chats = [messages for _, messages in corpus.conversations(folder, "valid_chat.jsonl")]
    sets["chat"] = [list(turns(messages)) for messages in chats]
    for name, documents in sets.items():
        bits = size = 0.0
        for pieces in documents[:limit]:
            some, bytes_ = subject.bits(pieces)
            bits, size = bits + some, size + bytes_
        print(f"held-out {name}: {bits / size:.4f} bits per byte ({int(size)} bytes)", flush=True)


Maker = Callable[[random.Random], probes.Probe]
MEASURES: dict[str, tuple[Maker, str]] = {
    "two-digit addition": (lambda rng: probes.arithmetic(rng, "+"), ">= 90 %"),
    "two-digit subtraction": (lambda rng: probes.arithmetic(rng, "-"), ">= 90 %"),
    "fact from three turns back": (lambda rng: probes.recall(rng, 3), ">= 90 %"),
    "fact from six turns back": (lambda rng: probes.recall(rng, 6), ""),
    "JSON valid": (probes.structured, ">= 95 %"),
    "JSON valid and values right": (probes.structured, ""),
    "ReAct first action": (probes.react, ""),
    "ReAct finish": (probes.react_finish, ""),
    "tool call": (probes.tool_call, ""),
    "score within two points": (probes.score, ""),
    "short orders": (probes.instruction, ""),
    "answers that end in 256 tokens": (probes.free, ">= 99 %"),
    "the same, sampled at 0.7": (probes.free, ">= 99 %"),
}


def measure(subject: Subject, count: int, show: int) -> None:
    """Ask every probe and print the shares that are right."""
    for name, (make, target) in MEASURES.items():
        rng = random.Random(
            zlib.crc32(make.__name__.encode()) if "JSON" in name else zlib.crc32(name.encode())
        )
        asked = [make(rng) for _ in range(count)]
        sampled = 0.7 if "sampled" in name else 0.0
        torch.manual_seed(1)
        answers = subject.answer([probe.messages for probe in asked], temperature=sampled)
        if "end in" in name or "sampled" in name:
            marks = [ended for _, ended in answers]
        elif name == "JSON valid":
            marks = [probes.parsed(answer) is not None for answer, _ in answers]
        else:
            marks = [probe.right(answer) for probe, (answer, _) in zip(asked, answers, strict=True)]
        print(
            f"{name}: {100 * sum(marks) / count:.1f} % of {count} {'(target ' + target + ')' if target else ''}",
            flush=True,
        )
        wrong = [place for place, mark in enumerate(marks) if not mark][:show]
        for place in wrong:
            probe = asked[place]
            print(
                f"    {probe.messages[-1]['content']!r} wanted {probe.wanted!r} got {answers[place][0][:160]!r}"
            )


def stories(subject: Subject, count: int) -> None:
    """Length and repetition of stories, greedy and sampled."""
    rng = random.Random(11)
    asked = [probes.story(rng).messages for _ in range(count)]
    for temperature in (0.0, 0.7):
        torch.manual_seed(2)
        texts = [text for text, _ in subject.answer(asked, limit=400, temperature=temperature)]
        rates = [probes.repetition(text) for text in texts]
        words = sum(len(text.split()) for text in texts) / count
        print(
            f"stories at temperature {temperature}: {words:.0f} words on average, repeated runs of four words "
            f"{100 * sum(rates) / count:.1f} %, {len(set(texts))} different of {count}",
            flush=True,
        )


TRANSCRIPTS: tuple[tuple[str, ...], ...] = (
    ("Hello!", "Who are you?", "What can you do?"),
    ("My name is Zelda and I have a parrot called Rufus.", "Tell me a joke.", "What is 34 + 58?", "What is my parrot called?"),
    ("Tell me a story about a hedgehog and a lantern.",),
    ("What is 91 - 47?", "And what is 20 + 79?", "Which is bigger, 44 or 99?"),
    ("Why is the sky blue?", "Tell me more."),
    ("Extract name, city and job as JSON.\n\nMirela is a beekeeper who lives in Ljubljana.",),
    ("I feel a bit sad today.", "My cat ran away.", "Her name is Minka.", "What is my cat called?"),
    ("What is the capital of Portugal?", "Where is it?", "What is the climate of Norway?"),
    ("Give me three facts about owls.", "Now say only the word moon."),
    ("Rate the answer from 1 to 10.\n\nQuestion: What is a violin?\nAnswer: I like soup.",),
    ("Explain how a computer works.",),
    ("Write a poem about the sea.",),
    ("How do I make pancakes?", "Thank you!"),
    ("Name four animals.", "Make a numbered list of five cities."),
    ("Is this positive or negative? The hotel was dirty and loud.",),
    ("Do you like music?", "I play the cello in an orchestra.", "What do I play?"),
    ("Who was Napoleon?",),
    ("I have a job interview tomorrow and I am nervous.", "It is for a job as a nurse."),
    ("Write a long story.",),
    ("What is love?", "Goodbye."),
)  # fmt: skip


def transcripts(subject: Subject, path: Path) -> None:
    """Write 20 conversations, sampled at temperature 0.7 with seed = number of the conversation."""
    lines: list[str] = []
    for number, asks in enumerate(TRANSCRIPTS, 1):
        torch.manual_seed(number)
        lines.append(f"**{number}.**\n")
        messages: list[corpus.Message] = []
        for ask in asks:
            messages.append({"role": "user", "content": ask})
            answer, ended = subject.answer([messages], limit=400, temperature=0.7)[0]
            messages.append({"role": "assistant", "content": answer})
            for who, text in (("User", ask), ("Model", answer + ("" if ended else " [cut]"))):
                lines.append(f"> **{who}:** " + text.replace("\n", "\n> ") + "\n>")
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")


@torch.no_grad()
def agreement(large: Subject, small: Subject, folder: Path, limit: int) -> None:
    """How often the draft's most likely token is the large model's, in assistants' turns."""
    same = total = 0
    rng = random.Random(5)
    chats = [messages for _, messages in corpus.conversations(folder, "valid_chat.jsonl")]
    made = [probe.messages for probe in (probes.free(rng) for _ in range(limit))]
    answers = large.answer(made)
    own = [[*m, {"role": "assistant", "content": a}] for m, (a, _) in zip(made, answers, strict=True)]
    for name, conversations in (
        ("held-out chat", chats[:limit]),
        ("the large model's own answers", own),
    ):
        same = total = 0
        for messages in conversations:
            ids: list[int] = []
            counted: list[bool] = []
            for text, counts in turns(messages):  # type: ignore[arg-type]
                part = large.tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += part
                counted += [counts] * len(part)
            tokens = torch.tensor([ids[:2048]], device=large.device)
            keep = torch.tensor(counted[1:2048], device=large.device)
            first = large.model(tokens[:, :-1])[0].argmax(-1)
            second = small.model(tokens[:, :-1])[0].argmax(-1)
            same += int((first == second)[keep].sum())
            total += int(keep.sum())
        print(f"draft agrees on {name}: {100 * same / total:.1f} % of {total} tokens", flush=True)


@torch.no_grad()
def check(subject: Subject) -> None:
    """Compare greedy answers with those of `transformers` in float32."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=torch.float32)
    reference = loaded.to(subject.device).eval()
    rng = random.Random(9)
    same = 0
    asked = [
        make(rng)
        for make in (probes.free, probes.structured, probes.react, probes.recall)
        for _ in range(4)
    ]
    for probe in asked:
        ids = subject.prompt(probe.messages)
        out = reference.generate(
            torch.tensor([ids], device=subject.device), max_new_tokens=64, do_sample=False
        )
        mine = generate(subject.model, [ids], 64)[0]
        same += out[0, len(ids) :].tolist() == mine
    print(f"greedy answers equal to those of transformers: {same} of {len(asked)}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of weights")
    parser.add_argument("--corpus", type=Path, help="corpus folder, for the held-out files")
    parser.add_argument("--draft", type=Path, help="folder of the draft model")
    parser.add_argument("--count", type=int, default=500, help="probes for each measure")
    parser.add_argument("--show", type=int, default=2, help="wrong answers to print for each measure")
    parser.add_argument("--transcripts", type=Path, help="file to write 20 conversations to")
    parser.add_argument("--check", action="store_true", help="compare with transformers")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    subject = Subject(args.folder, device)
    size = json.loads((args.folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    print(
        f"{args.folder.name}: {size['metadata']['total_size'] / 2**20:.1f} MiB of weights, on {device}"
    )
    if args.check:
        check(subject)
    if args.corpus:
        held_out_bits(subject, args.corpus, args.count)
    if args.draft and args.corpus:
        agreement(subject, Subject(args.draft, device), args.corpus, min(args.count, 300))
    measure(subject, args.count, args.show)
    stories(subject, min(args.count, 100))
    if args.transcripts:
        transcripts(subject, args.transcripts)
    print(f"evaluated in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
