"""What a turn of a chat computes: only what is new. Real conversations, real weights, exact counts.

    python benchmarks/chat_turns.py --data FOLDER [--model DIR] [--conversations N] [--at-once 50]
        [--output 16] [--kv-tokens 65536] [--tight TOKENS] [--threads N] [--json FILE]

FOLDER holds mt_bench_101.jsonl (a JSON line for each conversation, its users' texts under `history`).
The users' texts are sent to a real engine, turn by turn, so many conversations at once, each on a
socket of its own; the answers are the served model's, greedy, at most --output tokens. Checked:

    each turn       from the second on, `usage.cached` is what the turn before ran: its prompt and
                    its output but the last token, which was sampled and never run. That is the
                    branch's position less one, but where a stop token ended the turn that is not the
                    template's own: it leaves the branch, and the template's end of turn comes.
                    Only conversations that begin with the same text may find more: each other's;
                    cached + computed = prompt, and the position is prompt + output (but as above)
    all together    the tokens that the executor says it ran (the sum of StepResult.computed) are the
                    turns' `computed`, one less than the output tokens of each turn, and at most one
                    more for each turn that a stop token ended: the step that was under way

With --tight the conversations run again in a KV pool of so many tokens, so small that histories are
evicted between turns: every text must stay the same, while less is found in the cache.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from report import headline, machine, table, write_json

from ramify.actors.engine import Engine, running_engine
from ramify.actors.kit.log import LogConfig, configure
from ramify.clients import connect
from ramify.protocol.config import EngineConfig, ModelConfig, ServerConfig
from ramify.protocol.errors import TooLong

DATA = "mt_bench_101.jsonl"
Conversation = list[str]  # what the user says, turn by turn
LAST: Conversation = ["(the last step)"]


@dataclass(frozen=True)
class Turn:
    """What the server said of one turn."""

    prompt: int
    cached: int
    computed: int
    output: int
    position: int
    reason: str
    text: str

    @property
    def length(self) -> int:
        """Tokens of the branch whose KV is there after the turn."""
        return self.prompt + self.output - 1

    @property
    def run(self) -> int:
        """Tokens that had to go through the model: all but the last one, which is only sampled."""
        return self.computed + self.output - 1


@dataclass(frozen=True)
class Run:
    """Conversations that were held. `executor`: tokens that went through the model."""

    conversations: list[Conversation]
    chats: list[list[Turn]]
    executor: int
    unfinished: int  # conversations that outgrew the context
    seconds: float

    @property
    def turns(self) -> list[Turn]:
        return [turn for chat in self.chats for turn in chat]

    @property
    def surplus(self) -> int:
        """Tokens that were run and that no turn accounts for."""
        return self.executor - sum(turn.run for turn in self.turns)

    def total(self, field: str) -> int:
        return sum(getattr(turn, field) for turn in self.turns)

    def summary(self) -> dict[str, Any]:
        """Totals. `stateless`: what a server would run that reads each turn's whole history."""
        turns = self.turns
        return {
            "conversations": len(self.chats),
            "unfinished": self.unfinished,
            "turns": len(turns),
            "reasons": dict(Counter(turn.reason for turn in turns)),
            "prompt": self.total("prompt"),
            "cached": self.total("cached"),
            "computed": self.total("computed"),
            "output": self.total("output"),
            "executor": self.executor,
            "surplus": self.surplus,
            "stateless": sum(turn.prompt + turn.output - 1 for turn in turns),
            "seconds": round(self.seconds, 1),
        }


# --- run ----------------------------------------------------------------------------------------


async def hold(
    config: EngineConfig, conversations: Sequence[Conversation], at_once: int, output: int
) -> Run:
    """All conversations, `at_once` of them at any time, on an engine of their own."""
    async with running_engine(config) as engine:
        before = _executor_tokens(engine)
        begin = time.perf_counter()
        places = asyncio.Semaphore(at_once)
        unfinished: list[Conversation] = []

        async def one(conversation: Conversation) -> list[Turn]:
            async with places:
                chat = await _chat(engine.url, conversation, output)
                if len(chat) < len(conversation):
                    unfinished.append(conversation)
                return chat

        chats = await asyncio.gather(*map(one, conversations))
        seconds = time.perf_counter() - begin
        # Steps come back in order: once this one has, so have those that were still under way.
        chats.append(await _chat(engine.url, LAST, 1))
        executor = _executor_tokens(engine) - before
    return Run([*conversations, LAST], chats, executor, len(unfinished), seconds)


async def _chat(url: str, conversation: Conversation, output: int) -> list[Turn]:
    """One conversation. It ends early where the context is full."""
    turns: list[Turn] = []
    async with connect(url) as session:
        for text in conversation:
            try:
                result = await session.main.chat(
                    text, max_tokens=output, temperature=0.0, repetition_penalty=1.0
                )
            except TooLong:
                break
            usage = result.usage
            turns.append(
                Turn(
                    prompt=usage.prompt,
                    cached=usage.cached,
                    computed=usage.computed,
                    output=usage.output,
                    position=result.position,
                    reason=result.reason,
                    text=result.text,
                )
            )
    return turns


def _executor_tokens(engine: Engine) -> int:
    """`ramify_executor_tokens_total`, as anybody can read it at /metrics."""
    for line in engine.metrics.render().decode().splitlines():
        if line.startswith("ramify_executor_tokens_total "):
            return int(float(line.split()[1]))
    raise LookupError("ramify_executor_tokens_total is not among the metrics")


# --- check --------------------------------------------------------------------------------------


def faults(run: Run, *, evicting: bool = False) -> list[str]:
    """What is not as the module says; empty if all is well.

    `evicting`: the pool is too small, so a turn may find less than its history.
    """
    found = []
    begins = Counter(conversation[0] for conversation in run.conversations)
    for i, chat in enumerate(run.chats):
        kept = 0
        alone = begins[run.conversations[i][0]] == 1
        for k, turn in enumerate(chat, 1):
            where = f"conversation {i}, turn {k}: {turn}"
            if k > 1 and ((turn.cached < kept and not evicting) or (turn.cached > kept and alone)):
                found.append(f"cached is not {kept}: {where}")
            if turn.cached + turn.computed != turn.prompt or turn.computed < 1:
                found.append(f"the prompt does not add up: {where}")
            if turn.position != turn.length + 1 and (
                turn.reason != "stop" or turn.position < turn.length
            ):
                found.append(f"the position does not add up: {where}")
            kept = turn.length
    stops = sum(turn.reason == "stop" for turn in run.turns)
    if not evicting and not 0 <= run.surplus <= stops:
        found.append(f"the executor ran {run.surplus} tokens more than the turns: {stops} stops")
    return found


def differences(one: Run, other: Run) -> list[str]:
    """Turns whose texts differ."""
    return [
        f"conversation {i}, turn {k}: {a.text!r} and {b.text!r}"
        for i, (x, y) in enumerate(zip(one.chats, other.chats, strict=True))
        for k, (a, b) in enumerate(zip(x, y, strict=True), 1)
        if a.text != b.text
    ]


# --- command ------------------------------------------------------------------------------------


def read(lines: Iterable[str]) -> list[Conversation]:
    """The users' texts of each line."""
    return [[turn["user"] for turn in json.loads(line)["history"]] for line in lines]


def show(runs: dict[str, Run]) -> str:
    summaries = {name: run.summary() for name, run in runs.items()}
    first = next(iter(summaries.values()))
    rows = [[key, *[str(summary[key]) for summary in summaries.values()]] for key in first]
    lines = [table(["", *summaries], rows)]
    for name, summary in summaries.items():
        saved = summary["stateless"] / summary["executor"]
        lines.append(f"{name}: a stateless server would have run {saved:.2f} times as many tokens")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {DATA}")
    parser.add_argument("--model", type=Path, help="default: the bundled one")
    parser.add_argument("--conversations", type=int, help="only the first so many")
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--output", type=int, default=16, help="most tokens of an answer")
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--tight", type=int, metavar="TOKENS", help="run again in so small a pool")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", help="write all turns to this file")
    options = parser.parse_args()
    configure(LogConfig(level="warning"))
    about = machine(["ramify", "torch", "websockets"])
    print(headline(about), flush=True)
    with (options.data / DATA).open(encoding="utf-8") as file:
        conversations = read(file)[: options.conversations]
    model = options.model or Path(str(files("ramify.gpu") / "default_model"))

    def hold_in(kv_tokens: int) -> Run:
        config = EngineConfig(
            model=ModelConfig(path=model, device="cpu", threads=options.threads, kv_tokens=kv_tokens),
            server=ServerConfig(port=0),
        )
        return asyncio.run(hold(config, conversations, options.at_once, options.output))

    runs = {f"{options.kv_tokens} tokens": hold_in(options.kv_tokens)}
    wrong = faults(*runs.values())
    if options.tight is not None:
        (roomy,) = runs.values()
        tight = runs[f"{options.tight} tokens"] = hold_in(options.tight)
        wrong += faults(tight, evicting=True) + differences(roomy, tight)
    print(show(runs))
    results = {name: {**run.summary(), "chats": [[asdict(t) for t in chat] for chat in run.chats]}
               for name, run in runs.items()}  # fmt: skip
    write_json(options.json, about, results)
    print("\n".join([f"{len(wrong)} faults:", *wrong[:20]]) if wrong else "every count is exact")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
