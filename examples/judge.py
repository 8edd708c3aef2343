"""A judge of many dimensions: they are judged side by side, joined on the server, and graded.

One frame, one round trip: fork, judge quietly on each child, `join` what they said, sum it up, and
`select` a grade. --data: news articles (`judge_articles.jsonl`).
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from stage import Stage, brief, stage

import ramify

DIMENSIONS = ("clarity", "depth", "evidence", "structure", "style", "relevance")
GRADES = [" A", " B", " C", " D"]
MADE_UP = [
    {"article": "The bridge over the river was closed on Monday. Workers found cracks in two of its "
     "pillars. The mayor said that repairs will take a month. Ferries run every hour until then."},
    {"article": "Cats sleep a lot. Some say sixteen hours. My cat sleeps on the piano, which is loud "
     "when it wakes up. In short, pianos are a bad place for cats."},
]  # fmt: skip


def frame(article: str) -> list[dict[str, Any]]:
    """The whole program."""
    task = f"Judge this article.\n\n{article}"
    greedy = {"type": "generate", "temperature": 0}
    return [
        {"type": "append", "messages": [{"role": "user", "content": task}]},
        {"type": "fork", "as": [*DIMENSIONS, "verdict"]},
        *(
            op
            for dimension in DIMENSIONS
            for op in (
                {"type": "append", "branch": dimension, "text": f"Its {dimension}:"},
                {**greedy, "branch": dimension, "max_tokens": 30, "quiet": True},
            )
        ),
        {"type": "join", "from": list(DIMENSIONS), "branch": "verdict", "each": "{name}: {text}\n",
         "prefix": "This is what was said of the article:\n", "suffix": "Sum it up in one sentence."},
        {**greedy, "branch": "verdict", "max_tokens": 40},
        {"type": "append", "branch": "verdict", "messages": [{"role": "user", "content": "Its grade?"}]},
        {"type": "append", "branch": "verdict", "text": "Grade:"},
        {"type": "select", "branch": "verdict", "choices": GRADES},
    ]  # fmt: skip


async def judge(shown: Stage, article: str) -> None:
    async with ramify.connect(shown.url) as session:
        ops = frame(article)
        handles = await session.send(ops)
        asked = [h for h, op in zip(handles, ops, strict=True) if op["type"] in ("generate", "select")]
        results: list[Any] = await asyncio.gather(*asked)  # type: ignore[arg-type]
        *judged, summary, grade = results
        shown.took(*judged, summary, grade)
    shown.console.print(f"\n[bold]{brief(article, 100)}[/]")
    for dimension, result in zip(DIMENSIONS, judged, strict=True):
        shown.console.print(f"  [cyan]{dimension:10}[/] {brief(result.text, 120)}")
    shown.console.print(f"  [green]{'verdict':10}[/] {brief(summary.text, 160)}")
    shown.console.print(f"  [green]{'grade':10}[/]{grade.text}")


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=2, what="articles") as shown:
        for row in shown.rows("judge_articles", MADE_UP)[: shown.size]:
            asyncio.run(judge(shown, row["article"][:3000]))


if __name__ == "__main__":
    main()
