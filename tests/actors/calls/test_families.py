"""Texts for each family (70, in a campaign 200), written by a generator that knows which calls it wrote.

It shares no code with the reader. Calls are valid, cut, broken, parallel, between text; arguments hold
quotes, marks of the family, line breaks, any Unicode. The chunks are cut at random.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from ramify.actors.calls.dialects import dialect_of
from ramify.actors.calls.reader import Reader
from ramify.actors.calls.toolbox import Toolbox
from tests.amount import examples

TEXTS = examples(70, 200)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "items": {"type": "array"},
                    "deep": {"type": "object"},
                    "on": {"type": "boolean"},
                },
            },
        },
    }
    for name in ("get_weather", "add", "send-mail", "名前")
]
NAMES = [tool["function"]["name"] for tool in TOOLS]
STRINGS = [
    "Lima", "", 'say "hi"', "it's", "back\\slash", 'a\\"b', "line\nbreak", "tab\t", "é🎉𝄞", "\u2028",
    "</tool_call>", '<tool_call>{"name": "add"}', "[TOOL_CALLS]", "[ARGS]{}", "```", "};{", "]", "{",
    "<｜tool▁call▁end｜>", "<|python_tag|>", '{"name": "add", "arguments": {}}', "\u0000\u001f",
]  # fmt: skip
PROSE = [
    "Let me look.",
    " Well, {that} is [it]",
    "One moment… ",
    "\n\n",
    "1 < 2",
    "Köln 🎉: ",
    '"quoted" ',
]


class Written(NamedTuple):
    """A text, and what it says."""

    text: str
    calls: list[tuple[str, dict[str, Any]]]
    content: str


def arguments(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key in rng.sample(["text", "count", "items", "deep", "on"], rng.randint(0, 4)):
        match key:
            case "text":
                made[key] = rng.choice(STRINGS) + rng.choice(STRINGS)
            case "count":
                made[key] = rng.choice([0, -7, 12, 2**40])
            case "items":
                made[key] = [
                    rng.choice([*STRINGS, 1.5, None, True, []]) for _ in range(rng.randint(0, 3))
                ]
            case "deep":
                made[key] = {rng.choice(STRINGS): {"a": [{"b": rng.choice(STRINGS)}]}}
            case _:
                made[key] = rng.random() < 0.5
    return made


def dumped(rng: random.Random, value: Any) -> str:
    """JSON in one of the ways in which models write it."""
    ways: list[dict[str, Any]] = [
        {}, {"ensure_ascii": False}, {"indent": 2, "ensure_ascii": False}, {"separators": (",", ":")}
    ]  # fmt: skip
    return json.dumps(value, **rng.choice(ways))


def prose(rng: random.Random) -> str:
    return "".join(rng.choices(PROSE, k=rng.randint(1, 3)))


def blank(rng: random.Random) -> str:
    return rng.choice(["", "", " ", "\n", "\n\n  "])


# --- the families: one call, as (text, offset up to which it is incomplete) ---------------------------

Call = Callable[[random.Random, str, dict[str, Any]], tuple[str, int]]


def tagged(rng: random.Random, name: str, given: dict[str, Any]) -> tuple[str, int]:
    members: dict[str, Any] = {"name": name, "arguments": given}
    if rng.random() < 0.2:
        members = {"arguments": given, "name": name}
    if rng.random() < 0.1:
        members["arguments"] = json.dumps(given)
    body = f"<tool_call>{blank(rng)}{dumped(rng, members)}"
    return f"{body}{blank(rng)}</tool_call>", len(body)


def xml(rng: random.Random, name: str, given: dict[str, Any]) -> tuple[str, int]:
    lines = ["<tool_call>", f"<function={name}>"]
    for key, value in given.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={key}>", shown, "</parameter>"]
    body = "\n".join([*lines, "</function>"])
    return f"{body}\n</tool_call>", len(body)


def named(rng: random.Random, name: str, given: dict[str, Any]) -> tuple[str, int]:
    ident = f"[CALL_ID]{rng.randrange(10**8, 10**9)}" if rng.random() < 0.5 else ""
    text = f"[TOOL_CALLS]{name}{ident}[ARGS]{dumped(rng, given)}"
    return text, len(text)


def python_tag(rng: random.Random, name: str, given: dict[str, Any]) -> tuple[str, int]:
    key = rng.choice(["parameters", "arguments"])
    text = f"<|python_tag|>{blank(rng)}{dumped(rng, {'name': name, key: given})}"
    return text, len(text)


def python_literal(value: Any) -> str:
    """As Python writes it, strings in either quotes."""
    if isinstance(value, dict):
        members = (f"{json.dumps(key)}: {python_literal(each)}" for key, each in value.items())
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python_literal, value)) + "]"
    return repr(value)


def pythonic(rng: random.Random, name: str, given: dict[str, Any]) -> tuple[str, int]:
    shown = rng.choice([python_literal, json.dumps])
    pairs = (f"{key}={blank(rng)}{shown(value)}" for key, value in given.items())
    body = f"<|tool_call_start|>{blank(rng)}[{name}({f',{blank(rng)}'.join(pairs)})"
    return f"{body}]<|tool_call_end|>", len(body)


def gemma_literal(value: Any) -> str:
    """As Gemma's template writes it: keys without quotes, strings between marks, as they are."""
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{json.dumps(key)}:{gemma_literal(each)}" for key, each in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_literal, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def gemma(rng: random.Random, name: str, given: dict[str, Any]) -> tuple[str, int]:
    pairs = (f"{key}:{gemma_literal(value)}" for key, value in given.items())
    body = f"<|tool_call>call:{name}{{{','.join(pairs)}}}"
    return f"{body}{blank(rng)}<tool_call|>", len(body)


def glm(gap: str) -> Call:
    """As GLM's templates write it; `gap`: 4.5 breaks lines, 4.7 does not."""

    def one(rng: random.Random, name: str, given: dict[str, Any]) -> tuple[str, int]:
        body = f"<tool_call>{name}{gap}"
        for key, value in given.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            body += f"<arg_key>{key}</arg_key>{gap}<arg_value>{shown}</arg_value>{gap}"
        return f"{body}</tool_call>", len(f"{body}</tool_call>")

    return one


def nemotron(rng: random.Random) -> Written:
    """Mistral's list between tags."""
    text, calls, content = nemo(rng)
    mark, end = "<TOOLCALL>", "</TOOLCALL>"
    text, content = (each.replace("[TOOL_CALLS]", mark, 1) for each in (text, content))
    if mark in content or rng.random() < 0.2 or not text.endswith("]") or content.endswith("]"):
        return Written(text, calls, content)
    return Written(f"{text}{blank(rng)}{end}!", calls, f"{content}!")


def granite(rng: random.Random) -> Written:
    """Mistral's list behind another mark."""
    text, calls, content = nemo(rng)
    return Written(
        text.replace("[TOOL_CALLS]", "<|tool_call|>", 1), calls,
        content.replace("[TOOL_CALLS]", "<|tool_call|>", 1),
    )  # fmt: skip


def separate(one: Call) -> Callable[[random.Random], Written]:
    """Text with calls of which each has its own marks."""

    def write(rng: random.Random) -> Written:
        text, content = "", ""
        calls: list[tuple[str, dict[str, Any]]] = []
        if rng.random() < 0.6:
            text = content = prose(rng)
        for _ in range(rng.choice([1, 1, 2, 3, 5])):
            name, given = rng.choice(NAMES), arguments(rng)
            kind = rng.random()
            if kind < 0.12:
                shown, _ = one(rng, "unknown_tool", {"count": 1})
                content += shown
            elif kind < 0.2:
                shown, whole = one(rng, name, {"count": 1})
                shown = shown[: whole - 1] + "!" + shown[whole:]  # its last bracket is gone
                content += shown
            else:
                shown, _ = one(rng, name, given)
                calls.append((name, given))
            text += shown
            if rng.random() < 0.4:
                between = prose(rng)
                text, content = text + between, content + between
        if rng.random() < 0.25:  # cut in the middle of a call
            shown, whole = one(rng, "add", arguments(rng))
            shown = shown[: rng.randint(4, whole - 1)]
            text, content = text + shown, content + shown
        return Written(text, calls, content)

    return write


def nemo(rng: random.Random) -> Written:
    """One list of calls behind the mark."""
    before = prose(rng) if rng.random() < 0.5 else ""
    made = [(rng.choice(NAMES), arguments(rng)) for _ in range(rng.randint(1, 4))]
    items = [dumped(rng, {"name": n, "arguments": a, "id": "abcdefghi"}) for n, a in made]
    head = f"{before}[TOOL_CALLS]{blank(rng)}[{blank(rng)}"
    kind = rng.random()
    if kind < 0.2:  # cut inside the last one
        last = items.pop()
        made.pop()
        joined = "".join(f"{item}, " for item in items)
        cut = last[: rng.randint(1, len(last) - 1)]
        left = f" {cut}" if items else f"[TOOL_CALLS]{head.partition('[TOOL_CALLS]')[2]}{cut}"
        return Written(head + joined + cut, made, before + left)
    after = prose(rng) if rng.random() < 0.3 else ""
    return Written(head + f",{blank(rng)}".join(items) + f"{blank(rng)}]" + after, made, before + after)


def bare(rng: random.Random) -> Written:
    """The whole text is calls, or none is."""
    made = [(rng.choice(NAMES), arguments(rng)) for _ in range(rng.choice([1, 1, 2, 3]))]
    items = [dumped(rng, {"name": n, "parameters": a}) for n, a in made]
    text = blank(rng) + f"{blank(rng)};{blank(rng)}".join(items) + blank(rng)
    kind = rng.random()
    if kind < 0.15:
        text = text.rstrip()[: -rng.randint(1, 5)]
    elif kind < 0.3:
        text += " That is how to call it."
    elif kind < 0.4:
        text = "Like this: " + text
    elif kind < 0.5:
        text = dumped(rng, {"name": "nobody", "parameters": {}})
    else:
        return Written(text, made, "")
    return Written(text, [], text)


Many = Callable[[random.Random, list[tuple[str, str, dict[str, Any]]]], tuple[str, str]]


def minimax(_: random.Random, calls: list[tuple[str, str, dict[str, Any]]]) -> tuple[str, str]:
    text = "<minimax:tool_call>\n"
    for name, _ident, given in calls:
        text += f'<invoke name="{name}">\n'
        for key, value in given.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f'<parameter name="{key}">{shown}</parameter>\n'
        text += "</invoke>\n"
    return text, "</minimax:tool_call>"


def kimi(rng: random.Random, calls: list[tuple[str, str, dict[str, Any]]]) -> tuple[str, str]:
    text = f"<|tool_calls_section_begin|>{blank(rng)}"
    for name, ident, given in calls:
        body = f"{ident}<|tool_call_argument_begin|>{blank(rng)}{dumped(rng, given)}"
        text += f"<|tool_call_begin|>{body.replace('NAME', name)}<|tool_call_end|>{blank(rng)}"
    return text, "<|tool_calls_section_end|>"


def together(many: Many) -> Callable[[random.Random], Written]:
    """Calls between marks for all, of which the last may be cut or of no tool."""

    def write(rng: random.Random) -> Written:
        before = prose(rng) if rng.random() < 0.5 else ""
        made = [(rng.choice(NAMES), arguments(rng)) for _ in range(rng.randint(1, 4))]
        named = [(name, f"functions.NAME:{i}", given) for i, (name, given) in enumerate(made)]
        text, end = many(random.Random(5), named)
        if rng.random() < 0.6:
            after = rng.choice(["", end, f"{end} And so on."])
            return Written(f"{before}{text}{after}", made, before + after.removeprefix(end))
        short = many(random.Random(5), named[:-1])[0].rstrip()
        unknown, _ = many(random.Random(5), [*named[:-1], ("nobody", *named[-1][1:])])
        text = rng.choice([unknown, text.rstrip()[: max(len(short) + 3, len(text.rstrip()) - 9)]])
        return Written(before + text, made[:-1], before + (text[len(short) :] if made[1:] else text))

    return write


def deepseek(fenced: bool) -> Callable[[random.Random], Written]:
    begin, end, sep = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

    def one(rng: random.Random, name: str, given: dict[str, Any]) -> str:
        if fenced:
            return f"{begin}function{sep}{name}\n```json\n{dumped(rng, given)}\n```{end}"
        return f"{begin}{name}{sep}{dumped(rng, given)}{end}"

    def write(rng: random.Random) -> Written:
        before = prose(rng) if rng.random() < 0.5 else ""
        made = [(rng.choice(NAMES), arguments(rng)) for _ in range(rng.randint(1, 4))]
        text = f"{before}<｜tool▁calls▁begin｜>" + blank(rng)
        kind = rng.random()
        if kind < 0.25:  # the last one is cut, or of no tool
            name, given = made.pop()
            last = one(rng, name, given)
            last = (
                last[: rng.randint(3, len(last) - len(end) - 1)]
                if kind < 0.15
                else one(rng, "no", given)
            )
            shown = [one(rng, *each) for each in made]
            gap = "\n" if shown else ""
            content = gap + last if shown else text[len(before) :] + last
            return Written(text + "\n".join(shown) + gap + last, made, before + content)
        text += blank(rng).join(one(rng, *each) for each in made)
        after = prose(rng) if rng.random() < 0.3 else ""
        return Written(text + blank(rng) + "<｜tool▁calls▁end｜>" + after, made, before + after)

    return write


def harmony(rng: random.Random, name: str, given: dict[str, Any]) -> tuple[str, int]:
    """A message to a tool: the recipient behind the channel, or as the template writes it."""
    if rng.random() < 0.5:
        head = f"<|channel|>commentary to=functions.{name} {rng.choice(['json', '<|constrain|>json'])}"
    else:
        head = f" to=functions.{name}<|channel|>commentary json"
    body = f"{head}<|message|>{dumped(rng, given)}"
    return f"{body}{rng.choice(['<|call|>', '<|call|>', ''])}", len(body)


def messages(rng: random.Random) -> Written:
    """Messages in channels: thoughts, words before a call, calls, an answer."""
    text, content, thought = "", "", ""
    calls: list[tuple[str, dict[str, Any]]] = []
    start = ""
    for _ in range(rng.randint(0, 3)):
        kind = rng.random()
        said = prose(rng)
        if kind < 0.4:
            text += f"{start}<|channel|>analysis<|message|>{said}<|end|>"
            thought += said
        elif kind < 0.6:
            text += f"{start}<|channel|>commentary<|message|>{said}<|end|>"
            content += said
        else:
            name, given = rng.choice(NAMES), arguments(rng)
            shown, whole = harmony(rng, name, given)
            calls.append((name, given))
            text += start + shown[:whole] + "<|call|>"
            content += " " * (shown[0] == " ")
        start = "<|start|>assistant"
    kind = rng.random()
    name, given = rng.choice(NAMES), arguments(rng)
    shown, whole = harmony(rng, name, given)
    if kind < 0.4:
        said = prose(rng)
        text += f"{start}<|channel|>final<|message|>{said}" + rng.choice(["", "<|return|>", "<|end|>"])
        content += said
    elif kind < 0.8:
        calls.append((name, given))
        text += start + shown
        content += " " * (shown[0] == " ")
    elif kind < 0.9:  # cut in the middle of a call
        shown = shown[: rng.randint(shown.index("functions.") + len("functions."), whole - 1)]
        text, content = text + start + shown, content + shown
    else:  # of no tool
        shown, whole = harmony(rng, "unknown_tool", {})
        text, content = text + start + shown[:whole], content + shown[:whole]
    return Written(text, calls, content)


FAMILIES: dict[str, tuple[str, Callable[[random.Random], Written]]] = {
    "qwen, hermes, default": ("hermes", separate(tagged)),
    "qwen3-coder, qwen3.5": ("qwen3-coder", separate(xml)),
    "mistral nemo": ("mistral", nemo),
    "mistral small 3": ("mistral", separate(named)),
    "llama 3, bare": ("llama3", bare),
    "llama 3, python_tag": ("llama3", separate(python_tag)),
    "granite 3": ("granite", granite),
    "lfm2": ("lfm2", separate(pythonic)),
    "gemma 4": ("gemma4", separate(gemma)),
    "glm 4.5": ("glm45", separate(glm("\n"))),
    "glm 4.7": ("glm47", separate(glm(""))),
    "minimax m2": ("minimax", together(minimax)),
    "kimi k2": ("kimi_k2", together(kimi)),
    "nemotron 2": ("nemotron", nemotron),
    "deepseek r1, v3": ("deepseek", deepseek(True)),
    "deepseek v3.1": ("deepseek", deepseek(False)),
    "gpt-oss": ("harmony", messages),
}


def read(text: str, parser: str, cuts: list[int]) -> Reader:
    reader = Reader(dialect_of("", parser), Toolbox(TOOLS), 7)
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        reader.feed(text[begin:end])
    reader.finish()
    return reader


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_found_whatever_the_chunks(family: str) -> None:
    parser, write = FAMILIES[family]
    with_calls = 0
    for number in range(TEXTS):
        rng = random.Random(f"{family} {number}")
        written = write(rng)
        with_calls += bool(written.calls)
        many = sorted(rng.randint(0, len(written.text)) for _ in range(rng.randint(1, 30)))
        for cuts in ([], list(range(1, len(written.text))), many):
            reader = read(written.text, parser, cuts)
            found = [
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in reader.calls
            ]
            assert found == written.calls, (number, written.text)
            assert reader.content == written.content.strip(), (number, written.text)
            labelled = list(reader.take())
            assert "".join(part.text for part in labelled) == written.text
            for call in reader.calls:  # what was streamed is what was called
                (index,) = [p.call for p in labelled if p.id == call["id"]]
                told = "".join(p.arguments or "" for p in labelled if p.call == index)
                assert json.loads(told, strict=False) == json.loads(call["function"]["arguments"])
    assert with_calls > TEXTS // 3
