"""Questions the evaluation asks, and how an answer is judged.

Every probe draws its words and numbers from the held-out split, so none of them was in a training
conversation. Does not know how answers are produced.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import skills_json
import skills_math
import skills_recall
import skills_story
import skills_talk
import skills_tools
from corpus import Message
from synthesize import filler
from words import Chooser


@dataclass
class Probe:
    """One question: the conversation so far, and a judge of the answer."""

    messages: list[Message]
    right: Callable[[str], bool]
    wanted: str


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def last_number(answer: str) -> str:
    """The last whole number of an answer."""
    found = re.findall(r"-?\d+", answer)
    return str(found[-1]) if found else ""


def arithmetic(rng: random.Random, op: str) -> Probe:
    """A held-out two-digit sum or difference."""
    choose = Chooser(rng, "held")
    a, b = skills_math.pair(choose, op)
    value = str(skills_math.result(a, op, b))
    asks = skills_math.ASK_PLUS if op == "+" else skills_math.ASK_MINUS
    ask = choose.one(asks).format(a=a, b=b)
    return Probe([_user(ask)], lambda answer: last_number(answer) == value, value)


def recall(rng: random.Random, between: int = 3) -> Probe:
    """A fact with held-out words, told before `between` other turns (their answers are given)."""
    choose = Chooser(rng, "held", made_up=0.2)
    fact = skills_recall.draw(choose)
    turns = [skills_recall.tell(choose, fact)]
    turns += [filler(Chooser(rng, "held", made_up=0.2)) for _ in range(between)]
    messages: list[Message] = []
    for ask, say in turns:
        messages += [_user(ask), {"role": "assistant", "content": say}]
    question, _ = skills_recall.ask(choose, fact, plain=True)
    value = fact.value.lower()
    return Probe([*messages, _user(question)], lambda answer: value in answer.lower(), fact.value)


def structured(rng: random.Random) -> Probe:
    """JSON extraction of held-out words; right means that the values are right as well."""
    choose = Chooser(rng, "held", made_up=0.2)
    while True:
        make = skills_json.extract if choose.chance(0.8) else skills_json.several
        ask, say = make(choose)
        if json.loads(say):
            return Probe([_user(ask)], partial(_same_json, say), say)


def _same_json(say: str, answer: str) -> bool:
    return bool(parsed(answer) == json.loads(say))


def _same_text(say: str, answer: str) -> bool:
    return answer.strip().lower() == say.lower()


def parsed(answer: str) -> Any:
    """The JSON value of an answer, or None."""
    try:
        return json.loads(answer)
    except json.JSONDecodeError:
        return None


def react(rng: random.Random) -> Probe:
    """The first step of a ReAct dialogue about held-out words."""
    dialogue = skills_tools.react(Chooser(rng, "held", made_up=0.2))
    first = next(place for place, one in enumerate(dialogue) if one["role"] == "assistant")
    wanted = dialogue[first]["content"].split("Action: ")[-1]
    return Probe(dialogue[:first], lambda answer: answer.split("Action: ")[-1].strip() == wanted, wanted)


def react_finish(rng: random.Random) -> Probe:
    """The last step of a ReAct dialogue: the observation holds the answer."""
    dialogue = skills_tools.react(Chooser(rng, "held", made_up=0.2))
    wanted = dialogue[-1]["content"].split("Action: ")[-1]
    return Probe(dialogue[:-1], lambda answer: answer.split("Action: ")[-1].strip() == wanted, wanted)


def tool_call(rng: random.Random) -> Probe:
    """A tool call as JSON with held-out arguments."""
    dialogue = skills_tools.tool_call(Chooser(rng, "held", made_up=0.2))
    first = next(p for p, one in enumerate(dialogue) if one["content"].startswith("<tool_call>"))
    wanted = dialogue[first]["content"]
    return Probe(dialogue[:first], lambda answer: answer.strip() == wanted, wanted)


def score(rng: random.Random) -> Probe:
    """Rate an answer about a held-out topic; right means within two points."""
    dialogue = skills_tools.score(Chooser(rng, "held"))
    points = int(last_number(dialogue[-1]["content"].split("Score:")[-1].split("\n")[0]))

    def close(answer: str) -> bool:
        given = re.search(r"Score: (\d+)", answer) or re.fullmatch(r"\s*(\d+)\s*", answer)
        return given is not None and 1 <= int(given[1]) <= 10 and abs(int(given[1]) - points) <= 2

    return Probe(dialogue[:-1], close, str(points))


def instruction(rng: random.Random) -> Probe:
    """A short order, to be followed to the letter."""
    while True:
        ask, say = skills_talk.instruction(Chooser(rng, "held", made_up=0.2))
        if "sentence" not in ask:
            return Probe([_user(ask)], partial(_same_text, say), say)


def story(rng: random.Random) -> Probe:
    """A story request with held-out words; judged by its repetition, not here."""
    choose = Chooser(rng, "held", made_up=0.1)
    if choose.chance(0.6):
        return Probe([_user(choose.one(skills_story.LONG))], bool, "")
    return Probe([_user(skills_story.turn(choose)[0])], bool, "")


FREE = (
    "What do you think about trains?", "Can you recommend a film?", "My dog is barking all the time.",
    "Tell me about Paris.", "What is the meaning of life?", "How do I fix a broken chair?",
    "I went to the zoo with my aunt yesterday.", "What makes a good friend?", "Explain photosynthesis.",
    "Write an email to my boss.", "Who won the match?", "Is coffee healthy?", "I want to learn the piano.",
    "What is the best way to travel?", "Give me some advice for a job interview.", "Do ghosts exist?",
    "Tell me about the history of Rome.", "I do not like Mondays.", "What is a black hole?",
    "How many stars are there?", "Translate good morning into French.", "What is your opinion on cats?",
    "Can you explain how a car works?", "I had a strange dream last night.", "What should I name my boat?",
    "My computer does not start.", "Why do people laugh?", "Tell me about dinosaurs.", "What is love?",
    "Describe your perfect day.", "How do I become rich?", "What is the largest country?",
)  # fmt: skip


def free(rng: random.Random) -> Probe:
    """Talk that no generator makes: it only has to end by itself."""
    choose = Chooser(rng, "held", made_up=0.2)
    if choose.chance(0.5):
        return Probe([_user(choose.one(FREE))], bool, "")
    return Probe([_user(filler(choose)[0])], bool, "")


def repetition(text: str, width: int = 4) -> float:
    """Share of the runs of `width` words that occurred before in the same text."""
    words = text.lower().split()
    runs = Counter(tuple(words[start : start + width]) for start in range(len(words) - width + 1))
    total = sum(runs.values())
    return (total - len(runs)) / total if total else 0.0
