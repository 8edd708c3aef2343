"""Few-shot classification: the label is one of a list, by `select`; the examples are computed once.

--data: what customers ask a bank (`classify_banking77_fewshot.jsonl`, `..._test.jsonl`).
"""

from collections.abc import Sequence
from typing import Any

from stage import brief, stage, total

from ramify.clients.program import Failed, State, program, select

LABELS, SHOTS = 8, 2
MADE_UP_SHOTS: list[dict[str, Any]] = [
    {"label": "weather", "examples": ["Will it rain today?", "How cold is it outside?"]},
    {"label": "food", "examples": ["What is for dinner?", "How do I bake bread?"]},
    {"label": "travel", "examples": ["When does the train leave?", "I need a hotel in Rome."]},
]
MADE_UP_TEXTS = [
    {"text": "Is it sunny in May?", "category": "weather"},
    {"text": "How long do eggs boil?", "category": "food"},
    {"text": "Which bus goes to the airport?", "category": "travel"},
    {"text": "Will there be snow tomorrow?", "category": "weather"},
    {"text": "What goes well with rice?", "category": "food"},
]


@program
def classify(s: State, shots: list[tuple[str, str]], text: str, labels: list[str]) -> str:
    s += "".join(f"Text: {example}\nLabel: {label}\n\n" for example, label in shots)
    s += f"Text: {text}\nLabel:" + select("label", choices=[f" {label}" for label in labels])
    return s["label"].strip()


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=20, what="texts") as shown:
        kinds = shown.rows("classify_banking77_fewshot", MADE_UP_SHOTS)[:LABELS]
        labels = [kind["label"] for kind in kinds]
        shots = [(kind["examples"][i], kind["label"]) for i in range(SHOTS) for kind in kinds]
        texts = [
            row
            for row in shown.rows("classify_banking77_test", MADE_UP_TEXTS)
            if row["category"] in labels
        ][: shown.size]
        items = [{"shots": shots, "text": row["text"], "labels": labels} for row in texts]
        runs = classify.using(shown.url).run_batch(items)
        right = []
        for row, run in zip(texts, runs, strict=True):
            if isinstance(run, Failed):
                raise run.error
            shown.took(*run.results.values())
            right.append(run.value == row["category"])
            mark = "[green]✓[/]" if right[-1] else "[red]✗[/]"
            shown.console.print(f"{mark} {brief(row['text'], 70)} [dim]→[/] {run.value}")
        shown.console.print(f"[bold]{total(right)} right[/]")


if __name__ == "__main__":
    main()
