"""ReAct (Yao et al. 2022): a model that thinks, acts, and sees what came of it, in plain text.

Two actions, a calculator and a look-up, and `finish`. Each question runs on a fork of one branch that
holds the instructions, so they are computed once. `--data`: a file with traces (question, steps with
thought, action, observation); what the model looks up is answered from the question's own trace.
"""

import argparse
import ast
import asyncio
import json
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ramify import ConnectionLost
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
ACTION = re.compile(r"(\w+)\s*\[([^\]\n]*)\]?")
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
async def react(s: AsyncState, tasks: list[Task], most: int) -> list[list[Step]]:
    """All questions at once, each on a fork of its own."""
    s += system(INSTRUCTIONS)
    forks = zip(s.fork(len(tasks)), tasks, strict=True)
    return list(await asyncio.gather(*(answer(fork, task, most) for fork, task in forks)))


async def answer(s: AsyncState, task: Task, most: int) -> list[Step]:
    """One question, up to `finish` or `most` steps."""
    s += user(f"Question: {task.question}")
    steps: list[Step] = []
    for number in range(most):
        s += assistant(gen(f"step {number}", max_tokens=80, stop="\nObservation"))
        text = await s[f"step {number}"]
        found = ACTION.search(text.partition("Action:")[2])
        action, given = (found[1].lower(), found[2]) if found else ("nothing", "")
        seen = "" if action in ("finish", "nothing") else act(action, given, task.facts)
        steps.append(Step(text, action, given, seen))
        if not seen:
            break
        s += user(f"Observation: {seen}")
    return steps


def tasks_of(path: Path, limit: int) -> list[Task]:
    """Questions with what was found in their traces."""
    tasks = []
    for line in path.read_text().splitlines()[:limit]:
        trace = json.loads(line)
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


async def main(options: argparse.Namespace) -> None:
    console = Console(highlight=False)
    known = [Task(question, PEOPLE) for question in QUESTIONS]
    tasks = known if options.data is None else tasks_of(options.data, options.limit)
    run = await react.using(options.url, temperature=0.0).arun(tasks, options.steps)
    for task, steps in zip(tasks, run.value, strict=True):
        console.print(f"\n[bold]{task.question}[/]", markup=True)
        for step in steps:
            console.print(step.text.strip(), markup=False)
            if step.seen:
                console.print(f"  -> {step.seen[:300]}", style="cyan", markup=False)
    finished = sum(steps[-1].action == "finish" for steps in run.value if steps)
    console.print(f"\n{finished} of {len(tasks)} questions came to an answer")
    if options.data is not None:
        right = sum(
            bool(steps) and steps[-1].action == "finish" and steps[-1].given == task.answer
            for task, steps in zip(tasks, run.value, strict=True)
        )
        console.print(f"{right} answers are those of the traces")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="ws://127.0.0.1:8765/v1/ws")
    parser.add_argument("--data", type=Path, help="a file of traces, like react_hotpotqa_traces.jsonl")
    parser.add_argument("--limit", type=int, default=10, help="questions of the file")
    parser.add_argument("--steps", type=int, default=4, help="most steps for a question")
    try:
        asyncio.run(main(parser.parse_args()))
    except ConnectionLost as lost:
        raise SystemExit(str(lost)) from None
