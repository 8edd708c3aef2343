"""A tree of thoughts: propose several next steps, keep the likeliest, go on from there.

Each round forks the best branches, so what they share is computed once; all proposals of a round
are generated at the same time. The score is the proposal's mean log-probability.
"""

import argparse
import asyncio

from rich.console import Console
from rich.tree import Tree

from ramify.clients.program import AsyncState, gen, program, user


@program
async def tree_of_thought(s: AsyncState, task: str, width: int, keep: int, depth: int) -> Tree:
    """The tree of all proposals; those that were kept are green."""
    shown = Tree(task)
    s += user(f"{task} Think in short steps, one sentence each.")
    front = [(s, shown)]
    for level in range(depth):
        proposals = []
        for state, node in front:
            for child in state.fork(width):
                child += gen(f"step {level}", max_tokens=24, stop=".", logprobs=1, keep_open=True) + ". "
                proposals.append((child, node))
        results = await asyncio.gather(*(child[f"step {level}"].result() for child, _ in proposals))
        ranked = sorted(
            zip(results, proposals, strict=True), key=lambda each: -(each[0].mean_logprob or 0.0)
        )
        front = []
        for rank, (result, (child, node)) in enumerate(ranked):
            style = "green" if rank < keep else "dim"
            score = result.mean_logprob or 0.0
            leaf = node.add(f"[{style}]{score:6.2f} {result.text.strip()}.[/]")
            if rank < keep:
                front.append((child, leaf))
    return shown


async def main(url: str, options: argparse.Namespace) -> None:
    run = tree_of_thought.using(url, temperature=0.9)
    found = await run.arun(options.task, options.width, options.keep, options.depth)
    Console().print(found.value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="?", default="Tell how a small boat gets home in a storm.")
    parser.add_argument("--width", type=int, default=4, help="proposals for each branch")
    parser.add_argument("--keep", type=int, default=2, help="branches that go on")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--url", default="ws://127.0.0.1:8765/v1/ws")
    chosen = parser.parse_args()
    asyncio.run(main(chosen.url, chosen))
