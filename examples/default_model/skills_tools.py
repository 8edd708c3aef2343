"""Agent-shaped turns: ReAct steps, JSON tool calls, and judging answers.

A dialogue here is a list of messages, because tool results come between the assistant's turns. Two
shapes are taught: ReAct text (`Thought:`, `Action: search[...]`, `Observation:`) and tool calls as
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` answered by a turn of the role `tool`.
"""

from __future__ import annotations

import json
from typing import Any

from corpus import Message
from skills_math import pair, result
from topics import TOPICS, Topic, topic_pool
from words import Chooser

Dialogue = list[Message]

REACT_SYSTEM = (
    "Answer the question step by step. Write a thought and one action. Actions: search[topic], "
    "calculate[sum], finish[answer].",
    "Use Thought, Action and Observation. You can use search[...], calculate[...] and finish[...].",
    "You are an agent. Each turn, write 'Thought:' and 'Action:'. The actions are search[text], "
    "calculate[expression] and finish[answer].",
    "Solve the task with the tools search, calculate and finish. Answer with one Thought and one Action.",
)


def message(role: str, content: str) -> Message:
    """One message."""
    return {"role": role, "content": content}


def _question(choose: Chooser) -> tuple[str, str, str, str, str]:
    """question, tool, tool input, observation, answer."""
    kind = choose.number(0, 4)
    if kind == 0:
        op = choose.one(("+", "-"))
        a, b = pair(choose, op)
        value = str(result(a, op, b))
        word = "plus" if op == "+" else "minus"
        ask = choose.one(
            (f"What is {a} {op} {b}?", f"How much is {a} {word} {b}?", f"Calculate {a} {op} {b}.")
        )
        return ask, "calculate", f"{a} {op} {b}", value, value
    name, place = choose.value("name"), choose.value("city")
    if kind == 1:
        job = choose.value("job")
        ask = choose.one(
            (
                f"What is the job of {name}?",
                f"What does {name} do for a living?",
                f"What is {name}'s job?",
            )
        )
        return ask, "search", name, f"{name} is a {job} who lives in {place}.", job
    if kind == 2:
        ask = choose.one((f"Where does {name} live?", f"In which city does {name} live?"))
        return ask, "search", name, f"{name} is a {choose.value('job')} from {place}.", place
    if kind == 3:
        number = choose.number(2, 900)
        thing = choose.value("thing")
        ask = f"How many {thing}s are in the {choose.value('place')} of {place}?"
        return (
            ask,
            "search",
            f"{thing}s in {place}",
            f"There are {number} {thing}s in {place}.",
            str(number),
        )
    weather = choose.value("weather")
    degrees = choose.number(-5, 35)
    return (
        choose.one((f"What is the weather in {place}?", f"How is the weather in {place} today?")),
        "search", f"weather in {place}", f"It is {weather} in {place}, {degrees} degrees.", weather,
    )  # fmt: skip


def react(choose: Chooser) -> Dialogue:
    """One or two tool steps and a finish, as ReAct text."""
    ask, tool, given, seen, answer = _question(choose)
    thoughts = {
        "calculate": (
            "I need to calculate this.",
            "I should use calculate.",
            "This is a sum, so I calculate it.",
        ),
        "search": (
            f"I need to search for {given}.",
            f"I should search {given}.",
            "I do not know this, so I search.",
        ),
    }
    done = choose.one(
        (
            f"The answer is {answer}.",
            f"Now I know the answer: {answer}.",
            f"The observation says {answer}.",
        )
    )
    first = f"Thought: {choose.one(thoughts[tool])}\nAction: {tool}[{given}]"
    last = f"Thought: {done}\nAction: finish[{answer}]"
    role = choose.one(("user", "tool"))
    prefix = "Observation: " if role == "user" or choose.chance(0.5) else ""
    lead = choose.one(("Question: ", ""))
    system = choose.one(REACT_SYSTEM)
    if choose.chance(0.8):
        dialogue = [message("system", system), message("user", lead + ask)]
    else:
        dialogue = [message("user", f"{system}\n\n{lead}{ask}")]
    if tool == "search" and choose.chance(0.25):
        dialogue += [
            message("assistant", first),
            message(
                role, prefix + choose.one(("Nothing found.", "No result.", "Error: the search failed."))
            ),
        ]
        first = f"Thought: {choose.one(('That did not work. I try again.', 'I found nothing, so I search again.'))}\nAction: search[{given}]"
    return [
        *dialogue,
        message("assistant", first),
        message(role, prefix + seen),
        message("assistant", last),
    ]


def _tool(name: str, description: str, parameter: str, kind: str = "string") -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {parameter: {"type": kind}},
            "required": [parameter],
        },
    }


TOOLS = {
    "get_weather": _tool("get_weather", "The weather in a city", "city"),
    "calculator": _tool("calculator", "Work out a sum", "expression"),
    "search": _tool("search", "Look something up", "query"),
    "get_time": _tool("get_time", "The time in a city", "city"),
    "send_message": _tool("send_message", "Send a message to a person", "name"),
    "play_music": _tool("play_music", "Play music of an instrument", "instrument"),
}
TOOLS_LEAD = (
    "You can call these tools. To call one, answer with "
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call>.\n'
)


def _request(choose: Chooser, tool: str) -> tuple[str, str, dict[str, str], str, str]:
    """question, tool, arguments, tool result, final answer."""
    city, name = choose.value("city"), choose.value("name")
    if tool == "get_weather":
        weather, degrees = choose.value("weather"), choose.number(-8, 36)
        ask = choose.one(
            (
                f"What is the weather in {city}?",
                f"Is it warm in {city}?",
                f"How is the weather in {city} now?",
            )
        )
        seen = json.dumps({"weather": weather, "temperature": degrees})
        return ask, tool, {"city": city}, seen, f"It is {weather} in {city}, with {degrees} degrees."
    if tool == "calculator":
        op = choose.one(("+", "-"))
        a, b = pair(choose, op)
        ask = choose.one((f"What is {a} {op} {b}?", f"Please calculate {a} {op} {b}."))
        return (
            ask,
            tool,
            {"expression": f"{a} {op} {b}"},
            str(result(a, op, b)),
            f"{a} {op} {b} = {result(a, op, b)}",
        )
    if tool == "search":
        job = choose.value("job")
        ask = choose.one((f"Who is {name}?", f"Find out what {name} does.", f"Look up {name}."))
        return (
            ask,
            tool,
            {"query": name},
            f"{name} is a {job} in {city}.",
            f"{name} is a {job} in {city}.",
        )
    if tool == "get_time":
        clock = f"{choose.number(0, 23):02d}:{choose.number(0, 59):02d}"
        ask = choose.one((f"What time is it in {city}?", f"Tell me the time in {city}."))
        return ask, tool, {"city": city}, clock, f"It is {clock} in {city}."
    if tool == "send_message":
        ask = choose.one(
            (f"Send a message to {name}.", f"Please write to {name}.", f"Message {name} for me.")
        )
        return ask, tool, {"name": name}, "sent", f"I have sent a message to {name}."
    instrument = choose.value("instrument")
    ask = choose.one((f"Play some {instrument} music.", f"I want to hear {instrument} music."))
    return ask, tool, {"instrument": instrument}, "playing", f"Now playing {instrument} music."


def _listed(choose: Chooser, names: list[str]) -> str:
    """The tools as JSON, one a line, half of the time with what clients' schemas hold besides."""
    tools = [dict(TOOLS[name]) for name in names]
    if choose.chance(0.5):
        return "\n".join(map(json.dumps, tools))
    titles, closed, told, strict, types = (choose.chance(0.4) for _ in range(5))
    for tool in tools:
        ((name, kind),) = tool["parameters"]["properties"].items()
        value = dict(kind)
        if told:
            value["description"] = choose.one(
                (f"The {name}", f"{name.capitalize()} to use", tool["description"])
            )
        if titles:
            value["title"] = name.capitalize()
        parameters: dict[str, Any] = {"type": "object", "properties": {name: value}, "required": [name]}
        if closed:
            parameters["additionalProperties"] = False
        if titles:
            parameters["title"] = f"{tool['name']}Arguments"
        tool["parameters"] = parameters
        if strict:
            tool["strict"] = True
    if types:  # in another order, as a template's `tojson` or a client may write them
        return "\n".join(json.dumps(tool, sort_keys=True) for tool in tools)
    return "\n".join(map(json.dumps, tools))


def tool_call(choose: Chooser, tool: str | None = None) -> Dialogue:
    """Tools in the system turn, a call as JSON (of any tool, or `tool`), its result, and an answer from it."""
    ask, tool, arguments, seen, answer = _request(choose, tool or choose.one(list(TOOLS)))
    others = [name for name in TOOLS if name != tool]
    names = [*choose.rng.sample(others, choose.number(0, 3)), tool]
    choose.rng.shuffle(names)
    system = TOOLS_LEAD + _listed(choose, names)
    if choose.chance(0.4):
        system = (
            choose.one(("You are a helpful assistant.", "Help the user. Be brief.")) + "\n\n" + system
        )
    call = json.dumps({"name": tool, "arguments": arguments})
    dialogue = [message("system", system)]
    if choose.chance(0.2):
        dialogue += [
            message("user", choose.one(("Hello", "Hi there!", "Good morning."))),
            message(
                "assistant", choose.one(("Hello! How can I help you?", "Hi! What can I do for you?"))
            ),
        ]
    return [
        *dialogue,
        message("user", ask),
        message("assistant", f"<tool_call>{call}</tool_call>"),
        message("tool", seen),
        message("assistant", answer),
    ]


def _answers(choose: Chooser, topic: Topic) -> tuple[str, int, str]:
    """An answer of known quality: text, score from 1 to 10, reason."""
    other = choose.rng.choice([one for one in TOPICS if one.kind != topic.kind])
    kind = choose.number(0, 5)
    if kind == 0:
        return " ".join(topic.facts), choose.number(9, 10), "The answer is correct, clear and complete."
    if kind == 1:
        return topic.facts[0], choose.number(7, 8), "The answer is correct but short."
    if kind == 2:
        return (
            choose.one(topic.facts[1:]),
            choose.number(5, 6),
            "The answer is true but does not say everything.",
        )
    if kind == 3:
        return " ".join(other.facts[:2]), choose.number(1, 2), "The answer is about something else."
    if kind == 4:
        return (
            choose.one(("I don't know.", "No idea.", "Maybe.", "Hmm.")),
            1,
            "The answer does not help.",
        )
    return topic.name.capitalize() + ".", choose.number(2, 3), "The answer is much too short."


def score(choose: Chooser) -> Dialogue:
    """Rate one answer from 1 to 10."""
    topic = choose.rng.choice(topic_pool(choose.split))
    answer, points, reason = _answers(choose, topic)
    ask = choose.one(
        (
            f"What is {topic.a_name}?",
            f"Tell me about {topic.a_name}.",
            f"Explain what {topic.a_name} is.",
        )
    )
    prompt = choose.one(
        (
            "Rate the answer from 1 to 10.\n\nQuestion: {q}\nAnswer: {a}",
            "Question: {q}\nAnswer: {a}\n\nHow good is this answer from 1 to 10? Give a reason.",
            "Please act as a judge. Score the answer on a scale of 1 to 10.\n\nQuestion: {q}\n\nAnswer: {a}",
            "Give a score from 1 to 10 for the answer below.\n\n[Question]\n{q}\n\n[Answer]\n{a}",
            "Question: {q}\nAnswer: {a}\n\nAnswer with a number from 1 to 10 only.",
        )
    )
    if prompt.endswith("only."):
        reply = str(points)
    else:
        reply = choose.one(
            (f"{reason}\nScore: {points}", f"{reason} Score: {points}", f"Score: {points}\n{reason}")
        )
    return [
        message("user", prompt.replace("{q}", ask).replace("{a}", answer)),
        message("assistant", reply),
    ]


def duel(choose: Chooser) -> Dialogue:
    """Which of two answers is better."""
    topic = choose.rng.choice(topic_pool(choose.split))
    while True:
        (one, first, _), (two, second, _) = _answers(choose, topic), _answers(choose, topic)
        if abs(first - second) >= 3:
            break
    best = "A" if first > second else "B"
    prompt = choose.one(
        (
            "Which answer is better, A or B?\n\nQuestion: {q}\nA: {a}\nB: {b}",
            "Question: {q}\n\nAnswer A: {a}\n\nAnswer B: {b}\n\nWhich one is better? Say A or B.",
        )
    )
    ask = f"Tell me about {topic.a_name}."
    text = prompt.replace("{q}", ask).replace("{a}", one).replace("{b}", two)
    return [message("user", text), message("assistant", choose.one((best, f"Answer {best} is better.")))]


def dialogue(choose: Chooser) -> Dialogue:
    """Any agent-shaped dialogue."""
    make = choose.rng.choices((react, tool_call, score, duel), weights=(40, 30, 22, 8))[0]
    return make(choose)
