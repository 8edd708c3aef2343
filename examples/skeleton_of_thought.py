"""Skeleton of thought: an outline first, then all of its points are written at the same time.

--data: the 80 questions of the method's authors (`skeleton_vicuna80.jsonl`).
"""

from collections.abc import Sequence

from rich.columns import Columns
from rich.panel import Panel
from stage import brief, stage

from ramify.clients.generation import Result
from ramify.clients.program import State, assistant, gen, program, user

POINTS = 4
MADE_UP = [{"request": "How can I sleep better?"}, {"request": "How do I learn to cook?"}]


@program
def skeleton_of_thought(s: State, question: str) -> list[Result]:
    """The points."""
    s += user(f"{question} First give an outline of {POINTS} points of three to five words each.")
    s += assistant(gen("outline", max_tokens=60))
    points = s.fork(POINTS)  # they share the question and the outline
    for number, point in enumerate(points, 1):
        point += user(f"Write one or two sentences on point {number} of the outline, and nothing else.")
        point += assistant(gen("point", max_tokens=50))
    return [point.result("point") for point in points]


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=2, what="questions") as shown:
        questions = [row["request"] for row in shown.rows("skeleton_vicuna80", MADE_UP)][: shown.size]
        for question in questions:
            run = skeleton_of_thought.using(shown.url, temperature=0.0).run(question)
            shown.took(*run.results.values(), *run.value)
            shown.console.print(f"\n[bold]{brief(question)}[/]\n{brief(run['outline'], 400)}")
            texts = [Panel(brief(point.text, 300), width=38) for point in run.value]
            shown.console.print(Columns(texts))


if __name__ == "__main__":
    main()
