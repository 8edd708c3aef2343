"""Questions over documents: each document is read once, its questions are answered side by side.

--data: fairy tales with ten questions each (`rag_fairytale_documents.jsonl`, `..._questions.jsonl`).
"""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from stage import brief, stage

from ramify.clients.generation import Result
from ramify.clients.program import Failed, State, assistant, gen, program, system, user

QUESTIONS = 10
MADE_UP_DOCUMENTS: list[dict[str, Any]] = [
    {"doc_id": "boat", "sections": [
        "Anna has a small red boat. It is called Lily. Every Sunday she sails to the island with her "
        "brother Tom. On the island lives a fisherman who gives them bread and fish."]},
]  # fmt: skip
MADE_UP_QUESTIONS = [
    {"doc_id": "boat", "question": question}
    for question in (
        "Who has a boat?", "What colour is the boat?", "What is the boat called?", "Who is Tom?",
        "When does Anna sail?", "Where does she sail to?", "Who lives on the island?",
        "What does the fisherman give them?", "Is the boat large?", "Who sails with Anna?",
    )
]  # fmt: skip


@program
def answers(s: State, document: str, questions: list[str]) -> list[Result]:
    s += system(f"Answer questions about this text in a few words.\n\n{document}")
    asked = s.fork(len(questions))
    for child, question in zip(asked, questions, strict=True):
        child += user(question) + assistant(gen("answer", max_tokens=24))
    return [child.result("answer") for child in asked]


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=1, what="documents") as shown:
        asked: dict[str, list[str]] = {}
        for row in shown.rows("rag_fairytale_questions", MADE_UP_QUESTIONS):
            asked.setdefault(row["doc_id"], []).append(row["question"])
        documents = [
            {
                "document": "\n".join(row["sections"])[:3500],
                "questions": asked[row["doc_id"]][:QUESTIONS],
            }
            for row in shown.rows("rag_fairytale_documents", MADE_UP_DOCUMENTS)
            if len(asked.get(row["doc_id"], ())) >= QUESTIONS
        ][: shown.size]
        runs = answers.using(shown.url, temperature=0.0).run_batch(documents)
        for item, run in zip(documents, runs, strict=True):
            if isinstance(run, Failed):
                raise run.error
            table = Table("question", "answer", title=brief(str(item["document"]), 60))
            shown.took(*run.value)
            for question, answer in zip(item["questions"], run.value, strict=True):
                table.add_row(brief(question, 70), brief(answer.text, 90))
            shown.console.print(table)


if __name__ == "__main__":
    main()
