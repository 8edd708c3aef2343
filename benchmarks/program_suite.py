"""Programs of the SGLang paper (arXiv 2312.07104, section 6) as data: calls that wait for others.

A `Work` is one program: calls that go on from each other. It says nothing of servers, so the same JSON
line runs as branches of a session or as prompts that are sent whole. Outputs have a fixed length, so
every engine does the same work, whatever it says. All of this is pure.

`build(name, number, source)` makes the `number`-th program of a kind from real data sets where `source`
has a folder of them, else from made-up words of about the same lengths.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """Go on from the end of the call `parent` (null: from nothing), append, and generate or choose.

    Appended is `text`, then the outputs of the calls `joins`, a line each, then `tail`. `after`: calls
    that have to end first, as where somebody judges them. `output`: tokens to generate, whatever they
    are. `choices`: instead, the likeliest of these texts. Neither: nothing but input that others share.
    """

    parent: int | None = None
    text: str = ""
    joins: tuple[int, ...] = ()
    tail: str = ""
    after: tuple[int, ...] = ()
    output: int = 0
    choices: tuple[str, ...] = ()

    @property
    def asks(self) -> bool:
        """Whether the model has anything to do."""
        return bool(self.output or self.choices)


class Work(msgspec.Struct, frozen=True):
    """One program. A call names earlier ones by their place in `calls`."""

    program: str
    calls: list[Call]

    def __post_init__(self) -> None:
        for place, call in enumerate(self.calls):
            before = [*call.joins, *call.after, *([] if call.parent is None else [call.parent])]
            if not all(0 <= other < place for other in before):
                raise ValueError(f"calls[{place}] names a call that is not before it: {before}")
            if call.output < 0 or (call.output and call.choices):
                raise ValueError(f"calls[{place}] has either an output of tokens or choices")
            if any(not self.calls[other].output for other in call.joins):
                raise ValueError(f"calls[{place}] joins a call without an output")


def write(path: Path, works: Iterable[Work]) -> None:
    """A JSON line for each program."""
    path.write_bytes(b"".join(msgspec.json.encode(work) + b"\n" for work in works))


def read(path: Path) -> list[Work]:
    """Programs from JSON lines. Raises ValueError that names the line."""
    works = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                works.append(msgspec.json.decode(line, type=Work))
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return works


# --- where texts come from ------------------------------------------------------------------------

WORDS = (
    *("river", "house", "green", "small", "bird", "table", "water", "story", "morning", "doctor"),
    *("garden", "window", "paper", "letter", "stone", "summer", "market", "silver", "engine", "winter"),
    *("bridge", "music", "island", "number", "painter", "orange", "valley", "captain"),
)


class Source:
    """Rows of the real data sets in `folder`; without one, made-up words.

    `room`: the tokens of the longest context, about; shared examples are left out until they fit.
    """

    def __init__(self, folder: Path | None = None, room: int = 1 << 20) -> None:
        self.folder = folder
        self.room = room
        self._rows = cache(self._read)

    def _read(self, name: str) -> list[dict[str, Any]]:
        assert self.folder is not None
        with (self.folder / f"{name}.jsonl").open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def row(self, name: str, number: int) -> dict[str, Any]:
        """One of a data set, going round."""
        rows = self._rows(name)
        return rows[number % len(rows)]

    def rows(self, name: str) -> list[dict[str, Any]]:
        return self._rows(name)

    def cut(self, text: str, share: float = 1.0) -> str:
        """As much as fits into a share of the room: 3 characters to a token, to be safe."""
        return text[: int(3 * self.room * share)]


def words(count: int, *seed: object) -> str:
    """Made-up text, the same for the same seed."""
    dice = Random(str(seed))
    return " ".join(dice.choices(WORDS, k=count)).capitalize() + "."


def fit(source: Source, shots: Sequence[str], rest: int) -> str:
    """As many examples as leave room for `rest` tokens."""
    kept: list[str] = []
    for shot in shots:
        if sum(map(len, kept)) + len(shot) > 2.6 * (source.room - rest):
            break
        kept.append(shot)
    return "".join(kept)


# --- the programs ---------------------------------------------------------------------------------

BRANCHING, DEPTH = 5, 3
PROPOSE = """Use the numbers and basic arithmetic operations to reach 24. Each step takes two of the
numbers that are left, and puts their result in their place.
Input: 2 8 8 14
Step: 2 + 8 = 10 (left: 8 10 14)
Step: 14 - 10 = 4 (left: 4 8)
Input: 4 9 10 13
Step: 13 - 10 = 3 (left: 3 4 9)
"""
VERDICTS = (" sure", " likely", " impossible")


def tree_of_thought(number: int, source: Source) -> list[Call]:
    """Game of 24: five next steps for each of up to five states, each judged, three levels deep."""
    dice = Random(f"24 {number}")
    given = " ".join(str(dice.randint(1, 13)) for _ in range(4))
    if source.folder is not None:
        given = source.row("game24", number)["Puzzles"]
    calls = [Call(text=f"{PROPOSE}Input: {given}\n")]
    front: list[int] = [0]
    judged: tuple[int, ...] = ()
    for _ in range(DEPTH):
        steps = []
        for state in front:
            for _ in range(BRANCHING):
                steps.append(len(calls))
                calls.append(Call(state, "Step:", after=judged, output=16))
        judged = tuple(range(len(calls), len(calls) + len(steps)))
        calls += [Call(step, "\nCan these reach 24?", choices=VERDICTS) for step in steps]
        front = steps[:: max(1, len(steps) // BRANCHING)][:BRANCHING]  # who wins is not the model's say
    return calls


DIMENSIONS = ("clarity", "depth", "evidence", "structure", "style", "relevance")


def judge(number: int, source: Source) -> list[Call]:
    """An article, judged on six dimensions at once; the judgements are joined into a verdict."""
    article = words(500, "article", number)
    if source.folder is not None:
        article = source.cut(source.row("judge_articles", number)["article"], 0.55)
    calls = [Call(text=f"Read this article, then judge it.\n\n{article}\n\n")]
    for dimension in DIMENSIONS:
        calls.append(Call(0, f"Judgement of its {dimension}, in one sentence:", output=32))
    joins = tuple(range(1, len(calls)))
    calls.append(Call(0, "The judgements:\n", joins, "The verdict in one sentence:", output=32))
    calls.append(Call(len(calls) - 1, "\nThe grade:", choices=(" A", " B", " C", " D")))
    return calls


QUESTIONS = 10


def rag(number: int, source: Source) -> list[Call]:
    """A document, and ten questions about it."""
    document = words(900, "document", number)
    questions = [words(12, "question", number, i) for i in range(QUESTIONS)]
    if source.folder is not None:
        asked: dict[str, list[str]] = {}
        for row in source.rows("rag_fairytale_questions"):
            asked.setdefault(row["doc_id"], []).append(row["question"])
        known = [
            d
            for d in source.rows("rag_fairytale_documents")
            if len(asked.get(d["doc_id"], ())) >= QUESTIONS
        ]
        chosen = known[number % len(known)]
        document = source.cut("\n".join(chosen["sections"])[:12_000], 0.85)
        questions = asked[chosen["doc_id"]][:QUESTIONS]
    calls = [Call(text=f"{document}\n\n")]
    return calls + [Call(0, f"Question: {q}\nAnswer:", output=24) for q in questions]


LETTERS = (" A", " B", " C", " D")


def _exam(row: dict[str, Any], answer: str = "") -> str:
    lines = [f"{letter}.{choice}" for letter, choice in zip("ABCD", row["choices"], strict=True)]
    return "\n".join([f"Question: {row['question']}", *lines, f"Answer:{answer}"])


def _made_up(answer: str, *seed: object) -> str:
    choices = [words(5, *seed, number) for number in range(4)]
    return _exam({"question": words(24, *seed), "choices": choices}, answer)


def mmlu(number: int, source: Source) -> list[Call]:
    """A question of an exam behind five answered ones of its subject."""
    subject = f"subject {number % 8}"
    shots = [_made_up(" B", subject, i) for i in range(5)]
    asked: dict[str, Any] = {
        "question": words(24, number),
        "choices": [words(5, number, j) for j in range(4)],
    }
    if source.folder is not None:
        # As in a batch of the test set: neighbours are of one subject.
        tested = source.rows("mmlu_test_sample")
        asked = tested[number % len(tested)]
        subject = asked["subject"]
        few = next(row for row in source.rows("mmlu_dev_fewshot") if row["subject"] == subject)
        # The first row of some files is their header.
        rows = [row for row in few["examples"] if row["question"] != "question"]
        shots = [_exam(row, LETTERS[int(row["answer"])]) for row in rows]
    prefix = f"Questions about {subject.replace('_', ' ')}.\n\n"
    prefix += fit(source, [f"{shot}\n\n" for shot in shots], 300)
    return [Call(text=prefix), Call(0, source.cut(_exam(asked), 0.3), choices=LETTERS)]


SHOTS = 20


def hellaswag(number: int, source: Source) -> list[Call]:
    """The likeliest end of a scene, behind twenty scenes with their ends."""
    shots = [f"{words(40, 'scene', i)} {words(20, 'end', i)}" for i in range(SHOTS)]
    scene, ends = words(40, number), [words(20, number, j) for j in range(4)]
    if source.folder is not None:
        rows = source.rows("hellaswag_val_sample")
        shots = [f"{row['context']} {row['endings'][int(row['label'])]}" for row in rows[:SHOTS]]
        row = rows[SHOTS + number % (len(rows) - SHOTS)]
        scene, ends = row["context"], row["endings"]
    prefix = fit(source, [f"{shot}\n\n" for shot in shots], 350)
    return [Call(text=prefix), Call(0, scene, choices=tuple(f" {end}" for end in ends))]


STEPS = 4


def react(number: int, source: Source) -> list[Call]:
    """Thought and action, then what the look-up found, and so on, behind an example."""
    shots = [f"Question: {words(15, 'react')}\n"]
    for i in range(1, 4):
        shots.append(f"Thought {i}: {words(20, i)}\nAction {i}: Search[{words(2, i)}]\n")
        shots.append(f"Observation {i}: {words(60, i)}\n")
    question, found = words(15, number), [words(60, number, i) for i in range(STEPS)]
    if source.folder is not None:
        examples = source.row("react_prompts", 0)["text"].strip().split("\nQuestion:")
        shots = [example if i == 0 else f"\nQuestion:{example}" for i, example in enumerate(examples)]
        rows = [r for r in source.rows("react_hotpotqa_traces") if len(r["steps"]) >= STEPS]
        row = rows[number % len(rows)]
        question = row["question"]
        found = [str(step["observation"])[:400] for step in row["steps"][:STEPS]]
    text = (
        f"Answer a question with thoughts, actions and observations.\n\n{fit(source, shots, 1100)}\n\n"
    )
    calls = [Call(text=text), Call(0, f"Question: {question}\nThought 1:", output=32)]
    for step, observation in enumerate(found, 1):
        seen = f"\nObservation {step}: {observation}\nThought {step + 1}:"
        calls.append(Call(len(calls) - 1, seen, output=32))
    return calls


ROUNDS = 3


def agents(number: int, source: Source) -> list[Call]:
    """A small town: each round its people say what they do, then hear what the others did."""
    town, people = words(120, "town"), [words(30, "person", i) for i in range(4)]
    names = ["Ada", "Ben", "Cleo", "Dan"]
    if source.folder is not None:
        rows = source.rows("generative_agents_town")
        areas = [r for r in rows if r["kind"] == "area"]
        town = "\n".join(f"{row['name']}: {row['description']}" for row in areas)
        found = [row for row in rows if row["kind"] == "person"]
        people, names = [row["description"][:400] for row in found], [row["name"] for row in found]
    # A day of its own for each program; the town and its people are the same.
    calls = [Call(text=f"This is a small town.\n{town}\nIts people:\n")]
    last = []
    for name, person in zip(names, people, strict=True):
        start = f"You are {name}. {person}\nIt is day {number}, 8 o'clock. What do you do?"
        last.append(len(calls))
        calls.append(Call(0, start, output=24))
    for hour in range(9, 8 + ROUNDS):
        now = []
        for i, mine in enumerate(last):
            others = tuple(last[:i] + last[i + 1 :])
            ask = f"It is {hour} o'clock. What do you do?"
            now.append(len(calls))
            calls.append(Call(mine, "\nMeanwhile, others:\n", others, ask, output=24))
        last = now
    return calls


POINTS = 4


def skeleton_of_thought(number: int, source: Source) -> list[Call]:
    """An outline, then all of its points written at once, then a last word over them."""
    question = words(15, "skeleton", number)
    if source.folder is not None:
        question = source.row("skeleton_vicuna80", number)["request"]
    rules = words(60, "rules")
    outline = f"{rules}\nQuestion: {question}\nAn outline of {POINTS} points, a few words each:"
    calls = [Call(text=outline, output=48)]
    for point in range(1, POINTS + 1):
        calls.append(Call(0, f"\nPoint {point} in one or two sentences:", output=40))
    joins = tuple(range(1, POINTS + 1))
    calls.append(Call(0, "\nThe answer:\n", joins, "In short:", output=24))
    return calls


PROGRAMS: dict[str, Callable[[int, Source], list[Call]]] = {
    "tree of thought": tree_of_thought,
    "judge": judge,
    "RAG": rag,
    "MMLU 5-shot": mmlu,
    "HellaSwag 20-shot": hellaswag,
    "ReAct": react,
    "generative agents": agents,
    "skeleton of thought": skeleton_of_thought,
}


def build(name: str, number: int, source: Source) -> Work:
    """The `number`-th program called `name`."""
    return Work(name, PROGRAMS[name](number, source))


def waves(work: Work) -> Iterator[list[int]]:
    """Calls by rounds: all calls of one can run at once, when those before have ended."""
    level: list[int] = []
    for call in work.calls:
        before = [*call.joins, *call.after, *([] if call.parent is None else [call.parent])]
        depths = [level[other] + work.calls[other].asks for other in before]
        level.append(max(depths, default=0))
    for depth in range(max(level) + 1):
        yield [place for place, own in enumerate(level) if own == depth]
