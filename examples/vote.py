"""Self-consistency: several solutions of a problem, and the answer that most of them give.

One frame: fork, let each child think and then answer, and `prune` by vote; the winner takes the place of
the main branch. --data: school mathematics (`gsm8k_test.jsonl`).
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from stage import Stage, brief, stage

import ramify

MADE_UP = [
    {"question": "Tom has 3 apples and gets 4 more. How many apples has he?", "answer": "#### 7"},
    {"question": "A box holds 6 eggs. How many eggs are in 2 boxes?", "answer": "#### 12"},
]


def frame(question: str, tries: Sequence[str]) -> list[dict[str, Any]]:
    """The whole program."""
    ask = f"{question} Think step by step."
    again = [{"role": "user", "content": "So, the number?"}]
    return [
        {"type": "append", "messages": [{"role": "user", "content": ask}]},
        {"type": "fork", "as": list(tries)},
        # A list of branches: each has a seed of its own.
        {"type": "generate", "branch": list(tries), "max_tokens": 60, "temperature": 0.8, "seed": 1},
        {"type": "append", "branch": list(tries), "messages": again},
        {"type": "append", "branch": list(tries), "text": "The answer is"},
        {"type": "generate", "branch": list(tries), "max_tokens": 8, "temperature": 0, "stop": ["."]},
        {"type": "prune", "from": list(tries), "by": "vote", "into": "main"},
    ]  # fmt: skip


async def solve(shown: Stage, tries: int, row: dict[str, Any]) -> None:
    names = [f"try-{number}" for number in range(1, tries + 1)]
    async with ramify.connect(shown.url) as session:
        handles = await session.send(frame(row["question"], names))
        thoughts, answers, pruned = handles[2], handles[5], handles[6]
        results: list[Any] = []
        for several in (thoughts, answers):
            results.append(await asyncio.gather(*(several if isinstance(several, list) else [several])))
            shown.took(*results[-1])
        (outcome,) = await pruned  # type: ignore[misc]
    scores = outcome.result["scores"]
    kept = outcome.result["kept"][0]["from"]
    shown.console.print(f"\n[bold]{brief(row['question'])}[/]")
    for name, thought, answer in zip(names, *results, strict=True):
        style = "green" if name == kept else "dim"
        votes = scores[name]
        counted = "1 vote " if votes == 1 else f"{votes} votes"
        shown.console.print(
            f"  [{style}]{brief(thought.text, 48):48} so: {brief(answer.text, 12):12} {counted}[/]"
        )
    shown.console.print(f"  right is {row['answer'].rsplit('#### ', 1)[-1]}")


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=5, what="solutions of each problem") as shown:
        for row in shown.rows("gsm8k_test", MADE_UP)[:2]:
            asyncio.run(solve(shown, shown.size, row))


if __name__ == "__main__":
    main()
