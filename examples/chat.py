"""Multi-turn chat: a turn sends, tokenizes and computes its own text only.

--data: the 80 conversations of MT-bench (`mt_bench.jsonl`).
"""

import asyncio
from collections.abc import Sequence

from stage import Stage, brief, stage

import ramify

MADE_UP = [
    {"turns": ["Tell me a very short story about a dog.", "Give the dog a name.", "How does it end?"]},
    {"turns": ["What is a river?", "Name one.", "Where does a river end?"]},
]


async def talk(shown: Stage, turns: Sequence[str]) -> None:
    """One conversation in a session of its own; the answers stream."""
    async with ramify.connect(shown.url) as session:
        for turn in turns:
            shown.console.print(f"\n[bold]You:[/] {brief(turn)}\n[bold]Model:[/] ", end="")
            answer = session.main.chat(turn, max_tokens=60, temperature=0.0)
            async for delta in answer:
                shown.console.print(delta.text, end="", markup=False)
            result = await answer
            shown.took(result)
            usage = result.usage
            shown.console.print(f"\n[dim]{usage.computed} of {usage.prompt} prompt tokens computed[/]")


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=1, what="conversations") as shown:
        for row in shown.rows("mt_bench", MADE_UP)[: shown.size]:
            asyncio.run(talk(shown, row["turns"]))


if __name__ == "__main__":
    main()
