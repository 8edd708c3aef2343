"""MMLU, 5-shot: questions of an exam behind answered ones of its subject, by `select`.

--data: 1,425 questions of 57 subjects (`mmlu_test_sample.jsonl`, `mmlu_dev_fewshot.jsonl`).
"""

from collections.abc import Sequence
from typing import Any

from stage import brief, stage, total

from ramify.clients.program import Failed, State, program, select

LETTERS = [" A", " B", " C", " D"]
MADE_UP_SHOTS: list[dict[str, Any]] = [
    {"subject": "animals", "examples": [
        {"question": "What do cows eat?", "choices": ["grass", "stones", "fish", "ink"], "answer": 0},
        {"question": "Which one can fly?", "choices": ["dog", "bird", "cow", "snake"], "answer": 1},
        {"question": "How many legs has a spider?", "choices": ["2", "4", "6", "8"], "answer": 3},
        {"question": "Which one can swim?", "choices": ["cat", "hen", "fish", "bee"], "answer": 2},
        {"question": "What is a young dog?", "choices": ["puppy", "calf", "foal", "lamb"], "answer": 0},
    ]},
]  # fmt: skip
MADE_UP_QUESTIONS = [
    {"subject": "animals", "question": "Which one gives milk?", "choices": ["hen", "cow", "frog", "bee"],
     "answer": 1},
    {"subject": "animals", "question": "A young cat?", "choices": ["kitten", "calf", "egg", "foal"],
     "answer": 0},
    {"subject": "animals", "question": "Which one is a bird?", "choices": ["cat", "bat", "duck", "bee"],
     "answer": 2},
]  # fmt: skip


def written(row: dict[str, Any]) -> str:
    """A question up to its answer."""
    pairs = zip(LETTERS, row["choices"], strict=True)
    return f"{row['question']}\n" + "\n".join(f"{a.strip()}. {text}" for a, text in pairs) + "\nAnswer:"


@program
def answer(s: State, subject: str, shots: list[str], question: str) -> str:
    s += f"The following are multiple choice questions about {subject}.\n\n"
    s += "".join(f"{shot}\n\n" for shot in shots)
    s += question + select("answer", choices=LETTERS)
    return s["answer"]


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=12, what="questions") as shown:
        shots: dict[str, list[str]] = {}
        for row in shown.rows("mmlu_dev_fewshot", MADE_UP_SHOTS):
            examples = [
                each for each in row["examples"] if each["question"] != "question"
            ]  # a file's head
            shots[row["subject"]] = [written(e) + LETTERS[int(e["answer"])] for e in examples]
        rows = shown.rows("mmlu_test_sample", MADE_UP_QUESTIONS)[: shown.size]
        items = [
            {"subject": (kind := row["subject"]).replace("_", " "), "shots": shots[kind],
             "question": written(row)}
            for row in rows
        ]  # fmt: skip
        right = []
        for row, run in zip(rows, answer.using(shown.url).run_batch(items), strict=True):
            if isinstance(run, Failed):
                raise run.error
            shown.took(*run.results.values())
            right.append(run.value == LETTERS[int(row["answer"])])
            mark = "[green]✓[/]" if right[-1] else "[red]✗[/]"
            shown.console.print(f"{mark}{run.value} {brief(row['question'], 80)}")
        shown.console.print(f"[bold]{total(right)} right[/]; a guess is right one time in four")


if __name__ == "__main__":
    main()
