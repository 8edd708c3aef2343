"""ReAct (Yao et al. 2022): a model that thinks, acts, and sees what came of it, in plain text.

Two actions, a calculator and a look-up, and `finish`: a regex makes each step a thought and one of
these, so none has to be guessed at. Each question runs on a fork of one branch that holds the
instructions, so they are computed once. `--data`: react_hotpotqa_traces.jsonl (question, steps with
thought, action, observation); what the model looks up is answered from the question's own trace.
"""

import ast
import asyncio
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from stage import brief, stage, total

from ramify.clients.generation import Result
from ramify.clients.program import AsyncState, assistant, gen, program, system, user

INSTRUCTIONS = (
    "Answer the question step by step. Write a thought and one action. Actions: search[topic], "
    "calculate[sum], finish[answer]."
)
QUESTIONS = ["What is 31 + 47?", "Where does Clara live?", "What is 90 - 34?", "What is Tom's job?"]
PEOPLE = {
    "clara": "Clara is a baker from Lisbon.",
    "tom": "Tom is a painter who lives in Oslo.",
}
STEP = r"Thought: [^\n]{1,200}\nAction: (search|calculate|finish)\[([^\[\]\n]{1,100})\]"
SIGNS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Task(NamedTuple):
    """A question, what a look-up finds, and the right answer if it is known."""

    question: str
    facts: Mapping[str, str]
    answer: str | None = None


class Step(NamedTuple):
    """What the model wrote, what it did, and what it saw."""

    text: str
    action: str
    given: str
    seen: str


def calculate(text: str) -> str:
    """A sum of plain numbers; nothing else is evaluated."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Expression(body):
                return value(body)
            case ast.BinOp(left, sign, right) if type(sign) in SIGNS:
                return float(SIGNS[type(sign)](value(left), value(right)))
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.Constant(float() | int() as number):
                return float(number)
        raise ValueError("this is no sum")

    try:
        return f"{value(ast.parse(text[:200].strip(), mode='eval')):g}"
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError) as error:
        return f"Error: {error}"


def act(action: str, given: str, facts: Mapping[str, str]) -> str:
    """What comes of an action."""
    if action == "calculate":
        return calculate(given)
    asked = given.lower().strip()
    known = next((text for name, text in facts.items() if name in asked or asked in name), None)
    return known if asked and known is not None else "Nothing found."


@program
async def react(s: AsyncState, tasks: list[Task], most: int) -> list[tuple[list[Step], list[Result]]]:
    """All questions at once, each on a fork of its own."""
    s += system(INSTRUCTIONS)
    forks = zip(s.fork(len(tasks)), tasks, strict=True)
    return list(await asyncio.gather(*(answer(fork, task, most) for fork, task in forks)))


async def answer(s: AsyncState, task: Task, most: int) -> tuple[list[Step], list[Result]]:
    """One question, up to `finish` or `most` steps; and what they cost."""
    s += user(f"Question: {task.question}")
    steps: list[Step] = []
    for number in range(most):
        s += assistant(gen(f"step {number}", regex=STEP, max_tokens=100))
        text = await s[f"step {number}"]
        found = re.fullmatch(STEP, text)
        action, given = (found[1], found[2]) if found else ("nothing", "")  # cut at `max_tokens`
        seen = "" if action in ("finish", "nothing") else act(action, given, task.facts)
        steps.append(Step(text, action, given, seen))
        if not seen:
            break
        s += user(f"Observation: {seen}")
    return steps, [await s[f"step {number}"].result() for number in range(len(steps))]


def tasks_of(traces: Iterable[dict[str, Any]]) -> list[Task]:
    """Questions with what was found in their traces."""
    tasks = []
    for trace in traces:
        facts: dict[str, str] = {}
        last = None
        for step in trace["steps"]:
            name, _, given = step["action"].partition("[")
            if name.lower() == "finish":
                last = given.rstrip("]")
            else:
                facts.setdefault(given.rstrip("]").lower(), step.get("observation") or "Nothing found.")
        tasks.append(Task(trace["question"], facts, last))
    return tasks


def show(console: Console, tasks: list[Task], answers: list[list[Step]]) -> None:
    """All steps of each question, and how many came to an answer."""
    for task, steps in zip(tasks, answers, strict=True):
        console.print(f"\n[bold]{brief(task.question)}[/]")
        for step in steps:
            console.print(f"  {step.text.strip()}".replace("\n", "\n  "), markup=False)
            if step.seen:
                console.print(f"  -> {step.seen[:300]}", style="cyan", markup=False)
    finished = [bool(steps) and steps[-1].action == "finish" for steps in answers]
    console.print(f"\n{total(finished)} questions came to an answer")
    if any(task.answer is not None for task in tasks):
        pairs = zip(tasks, answers, finished, strict=True)
        right = [
            done and steps[-1].given.casefold() == (task.answer or "").casefold()
            for task, steps, done in pairs
        ]
        console.print(f"{sum(right)} answers are those of the traces")


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(
        __doc__,
        arguments,
        size=10,
        what="questions, of --data",
        flags=lambda parser: parser.add_argument(
            "--steps", type=int, default=4, help="most steps for a question (default 4)"
        ),
    ) as shown:
        traces = shown.rows("react_hotpotqa_traces", [])[: shown.size]
        tasks = tasks_of(traces) or [Task(question, PEOPLE) for question in QUESTIONS]
        with shown.console.status(f"{len(tasks)} questions at once, each on a fork of its own"):
            run = react.using(shown.url, temperature=0.0).run(tasks, shown.options.steps)
        show(shown.console, tasks, [steps for steps, _ in run.value])
        shown.took(*(result for _, results in run.value for result in results))


if __name__ == "__main__":
    main()
