"""Train the default model, or its draft companion, on packed rows.

Two stages: `pretrain` learns from every token of text, dialogue and synthetic conversations; `chat`
goes on from a folder and learns from the assistant's turns only. With `--teacher` the model learns to
copy another model's predictions. Resumable (`--resume`), deterministic in its order of data. Knows one
device; does not know how the token files were made.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import model as models
import optimizer
import rows
import torch
import torch.nn.functional as F
from torch import Tensor

# Times that each set of token files is seen in a stage.
MIXES: dict[str, dict[str, float]] = json.loads(
    (Path(__file__).parent / "mixes.json").read_text(encoding="utf-8")
)


@dataclass
class Plan:
    """How long and how fast to learn."""

    steps: int
    batch: int
    rate: float
    warmup: int
    decay_from: float

    def rate_at(self, step: int) -> float:
        """Warm-up, a plateau, then a straight line down to zero."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        return self.rate * min(1.0, (1 - step / self.steps) / (1 - self.decay_from))


def load_mix(folder: Path, mix: dict[str, float], length: int, seed: int) -> rows.Rows:
    """All rows of a mix in one shuffled order."""
    parts = [rows.load(folder, name, epochs, length, seed) for name, epochs in mix.items() if epochs > 0]
    for name, part in zip(mix, parts, strict=True):
        print(f"  {name}: {mix[name]} epochs, {len(part) * length / 1e6:.1f}M positions", flush=True)
    whole = rows.join(parts)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    return whole.take(order)


def wanted(batch: rows.Rows, own_only: bool) -> Tensor:
    """1 where a target counts: inside its document, and in the assistant's turn if `own_only`. [B, T]"""
    same = (batch.documents[:, 1:] == batch.documents[:, :-1]) & (batch.documents[:, 1:] != rows.PADDING)
    return same & (batch.own[:, 1:] > 0) if own_only else same


class Trainer:
    """The model, its loss and its measurements on one device."""

    def __init__(
        self, model: models.Llama, teacher: models.Llama | None, own_only: bool, device: str
    ) -> None:
        self.model, self.teacher, self.own_only, self.device = model, teacher, own_only, device
        self.loss_of = torch.compile(self._loss, dynamic=False) if device == "cuda" else self._loss

    def _loss(self, tokens: Tensor, mask: Any, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the losses in nats that count, and how many there are."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        # A CPU computes only the logits that count; a GPU compiles one shape.
        keep = weights.flatten() > 0 if self.device == "cpu" else slice(None)
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model.head(self.model.hidden(inputs, mask).flatten(0, 1)[keep])
            if self.teacher is not None:
                with torch.no_grad():
                    aim = self.teacher.head(self.teacher.hidden(inputs, mask).flatten(0, 1)[keep])
        if self.teacher is None:
            each = F.cross_entropy(logits.float(), targets.flatten()[keep], reduction="none")
        else:
            soft = F.log_softmax(aim.float(), dim=-1)
            each = -(soft.exp() * F.log_softmax(logits.float(), dim=-1)).sum(-1)
        return (each * weights.flatten()[keep]).sum(), weights.sum()

    def loss(self, batch: rows.Rows) -> Tensor:
        """Mean loss of a batch in nats a token."""
        mask = models.document_mask(batch.documents[:, :-1])
        total, count = self.loss_of(batch.tokens.long(), mask, wanted(batch, self.own_only).float())
        return total / count.clamp(min=1)

    @torch.no_grad()
    def bits_per_byte(self, held: rows.Rows, table: Tensor, own_only: bool, batch: int) -> float:
        """Held-out bits for each byte of the text that counts."""
        nats = bytes_ = 0.0
        for start in range(0, len(held), batch):
            part = held.take(
                torch.arange(start, min(start + batch, len(held)), device=held.tokens.device)
            )
            tokens = part.tokens.long()
            with torch.autocast(self.device, torch.bfloat16):
                dense = _dense_mask(part.documents[:, :-1])
                logits = self.model(tokens[:, :-1], dense)
            each = F.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
            )
            count = wanted(part, own_only).flatten()
            nats += float((each * count).sum())
            bytes_ += float((table[tokens[:, 1:].flatten()] * count).sum())
        return nats / math.log(2) / bytes_


def _dense_mask(documents: Tensor) -> Tensor:
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def train(args: argparse.Namespace) -> None:
    """Run one stage and write its folder."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    shape = models.SHAPES[args.shape]
    shape = replace(shape, context=max(shape.context, args.length))
    model = models.load_folder(args.start, args.length) if args.start else models.Llama(shape)
    model = model.to(device)
    teacher = None
    if args.teacher:
        teacher = models.load_folder(args.teacher, args.length).to(device).requires_grad_(False)
    print(models.describe(model), flush=True)
    length = args.length
    data = load_mix(args.data, MIXES[args.mix], length, args.seed).to(device)
    steps = min(args.steps or 10**9, len(data) // args.batch)
    plan = Plan(steps, args.batch, args.rate, args.warmup, args.decay_from)
    print(
        f"{steps} steps of {args.batch * length} positions, {steps * args.batch * length / 1e6:.0f}M in all",
        flush=True,
    )
    trainer = Trainer(model, teacher, args.own_only, device)
    learner = optimizer.Optimizer(model, args.decay, muon=not args.adam)
    first = 0
    checkpoint = args.out / "checkpoint.pt"
    if args.resume and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        learner.restore(saved["learner"])
        first = saved["step"]
    held = {
        name: rows.load(args.data, name, 1, length, 0, shuffle=False).to(device)
        for name in ("valid_text", "valid_chat")
        if args.measure
    }
    table = rows.byte_lengths(args.tokenizer).to(device)
    args.out.mkdir(parents=True, exist_ok=True)
    began = last = time.perf_counter()
    for step in range(first, steps):
        batch = data.take(torch.arange(step * args.batch, (step + 1) * args.batch, device=device))
        loss = trainer.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        learner.step(plan.rate_at(step))
        if (step + 1) % args.report == 0 or step + 1 == steps:
            value = float(loss.detach())
            now = time.perf_counter()
            speed = args.report * args.batch * length / (now - last)
            last = now
            print(
                f"step {step + 1}/{steps} loss {value:.4f} rate {plan.rate_at(step):.2e} {speed:.0f} tokens/s {now - began:.0f} s",
                flush=True,
            )
        if args.measure and ((step + 1) % args.measure == 0 or step + 1 == steps):
            text = trainer.bits_per_byte(held["valid_text"], table, False, 8)
            chat = trainer.bits_per_byte(held["valid_chat"], table, True, 8)
            print(f"held-out bits per byte at {step + 1}: text {text:.4f}, chat {chat:.4f}", flush=True)
            last = time.perf_counter()
        if args.save_every and (step + 1) % args.save_every == 0:
            torch.save(
                {"model": model.state_dict(), "learner": learner.state(), "step": step + 1}, checkpoint
            )
        if args.seconds and time.perf_counter() - began > args.seconds:
            torch.save(
                {"model": model.state_dict(), "learner": learner.state(), "step": step + 1}, checkpoint
            )
            print("out of time: saved; go on with --resume", flush=True)
            return
    models.save_folder(model, args.tokenizer, args.out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that prepare.py pack wrote")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(models.SHAPES), default="default")
    parser.add_argument("--mix", choices=sorted(MIXES), default="pretrain")
    parser.add_argument("--start", type=Path, help="folder of weights to go on from")
    parser.add_argument("--teacher", type=Path, help="folder of a model to copy")
    parser.add_argument("--own-only", action="store_true", help="learn from the assistant's turns only")
    parser.add_argument("--adam", action="store_true", help="AdamW instead of Muon")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64, help="rows a step")
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the mix has")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument(
        "--decay-from", type=float, default=0.5, help="where the learning rate starts to fall"
    )
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay")
    parser.add_argument("--report", type=int, default=50)
    parser.add_argument("--measure", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="stop and save after this time")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
