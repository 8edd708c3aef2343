"""What a call of a tool has to be, by the tool's schema, written as the model's family writes it. Pure.

Two structures for each family. *Free* (`tool_choice` auto): text is free until a call begins, and the
call is exact. *Forced* (required, or a name): calls alone. The opening and what stands between a tool's
name and its arguments is the template's (`openings`).
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ramify.actors.calls import forms
from ramify.actors.calls.dialects import Dialect
from ramify.actors.calls.literals import QUOTE
from ramify.actors.calls.toolbox import DeclaredTool
from ramify.protocol.structure import (
    JsonPart,
    ListPart,
    ParameterStyle,
    Part,
    RegexPart,
    SequencePart,
    StructureTag,
    TagsPart,
    TextPart,
    ThoughtPart,
    UnionPart,
    UnlessPart,
    XmlPart,
)

CALL_ID = "call00001"  # the id that `openings` lets the template write
_ID = "[0-9A-Za-z]{9}"
_BLANKS = re.compile(r"\s*")
_LEADING = RegexPart(r"[ \t\r\n]*")
_STARTED = "<|start|>assistant"

# What may stand between a tool's name and its arguments in a header of harmony's.
_HEADERS = tuple(
    f"{channel}{json}{forms.MESSAGE}"
    for channel in ("", "<|channel|>commentary")
    for json in (" <|constrain|>json", " json", "")
)


class Written(NamedTuple):
    """How a template writes a call: up to the name, and from there up to the arguments."""

    opening: str
    argument: str


class Calls(NamedTuple):
    """`free` and `forced`: see the module's top. None: the model's form is not known well enough."""

    free: Part | None
    forced: Part


class CallTerms(NamedTuple):
    """What the calls have to be: see `exact_calls`."""

    written: Written
    tools: Sequence[DeclaredTool]
    demanded: bool
    parallel: bool
    ends_output: Callable[[str], bool]

    def tags(
        self, before: str, after: str, content: "Content", end: str, *, quoted: bool = False
    ) -> list[StructureTag]:
        """A tag for each tool, which begins with its name between `before` and `after`.

        `quoted`: the name is a part of a JSON string.
        """
        names = [_json_name(tool) if quoted else tool.name for tool in self.tools]
        return [
            StructureTag(f"{before}{name}{after}", content(tool, self.demanded), end)
            for name, tool in zip(names, self.tools, strict=True)
        ]


Content = Callable[[DeclaredTool, bool], Part]  # of a call; whether its schema must be kept
Writer = Callable[[CallTerms], Calls]


def exact_calls(
    dialect: Dialect,
    written: Written,
    tools: Sequence[DeclaredTool],
    *,
    demanded: bool,
    parallel: bool,
    ends_output: Callable[[str], bool],
) -> Calls | None:
    """The calls of `tools`. None for a dialect without calls.

    `demanded`: a schema that cannot be kept is an error unless the tool says `strict` false; else only
    where it says true.
    `parallel`: several calls in one answer. `ends_output`: whether a mark is a token that ends an
    output, which then does not belong to the call.
    """
    write = _FAMILIES.get(dialect.name)
    if write is None:
        return None
    found = write(CallTerms(written, tools, demanded, parallel, ends_output))
    if dialect.thought is None or dialect.tags or found.free is None:
        return found
    return found._replace(free=ThoughtPart(dialect.thought.begin, dialect.thought.end, found.free))


def after_thought(dialect: Dialect, answer: Part) -> Part:
    """`answer`, before which the model may think, if it is one that does."""
    if dialect.thought is None:
        return answer
    if dialect.tags:  # harmony: an answer has a header
        final = UnionPart(
            [TextPart(f"{head}<|channel|>final{forms.MESSAGE}") for head in ("", _STARTED)]
        )
        answer = SequencePart([final, answer])
    return ThoughtPart(dialect.thought.begin, dialect.thought.end, answer)


# --- families --------------------------------------------------------------------------------------


def _tagged(asked: CallTerms) -> Calls:
    """Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    opening, argument = asked.written
    blank = _blank_behind(opening, forms.TOOL_CALL)
    end = _kept(forms.TOOL_CALL_END, asked.ends_output)
    tags = asked.tags(opening, argument, _object, f"}}{blank}{end}", quoted=True)
    return Calls(_free(tags, [forms.TOOL_CALL], asked.parallel), _forced(tags, blank, asked.parallel))


def _xml(asked: CallTerms) -> Calls:
    """Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""
    opening, argument = asked.written
    blank = _blank_behind(opening, forms.TOOL_CALL)
    end = _kept(forms.TOOL_CALL_END, asked.ends_output)
    tags = asked.tags(opening, argument, _parameters, f"{forms.FUNCTION_END}{blank}{end}")
    bare = asked.tags(forms.FUNCTION, argument, _parameters, forms.FUNCTION_END)
    free = _free([*tags, *bare], [forms.TOOL_CALL, forms.FUNCTION], asked.parallel)
    return Calls(free, _forced(tags, blank, asked.parallel))


def _llama3(asked: CallTerms) -> Calls:
    """Llama 3: `{"name": ..., "parameters": {...}}` as the whole answer, or behind `<|python_tag|>`."""
    opening, argument = asked.written
    opening = opening.removeprefix(forms.PYTHON_TAG)
    tags = asked.tags(opening, argument, _object, "}", quoted=True)
    forced = _forced(tags, "; ", asked.parallel)
    marked = [StructureTag(f"{forms.PYTHON_TAG}{tag.begin}", tag.content, tag.end) for tag in tags]
    free = TagsPart(marked, [forms.PYTHON_TAG + "{"], stop_after_first=True)
    begun = [
        f"{opening.replace(': ', space)}{_json_name(tool)}"
        for tool in asked.tools
        for space in (": ", ":")
    ]
    bare = SequencePart([_LEADING, forced])
    return Calls(UnionPart([bare, UnlessPart(free, begun)]), forced)


def _mistral(asked: CallTerms) -> Calls:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}`.

    Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`; Nemotron 2 has tags around it.
    """
    opening, argument = asked.written
    list_begin, bracket, head = opening.partition("[{")
    marks = (forms.CALL_LIST, forms.TOOLCALL, forms.TOOL_CALLS)
    mark = next(each for each in marks if opening.startswith(each) or each == marks[-1])
    end = "]" + (_kept(forms.TOOLCALL_END, asked.ends_output) if mark == forms.TOOLCALL else "")
    if bracket:
        ident = UnionPart([TextPart(""), _sequence(StructureTag(', "id": "', RegexPart(_ID), '"'))])

        def content(tool: DeclaredTool, demanded: bool) -> Part:
            return SequencePart([_object(tool, demanded), ident])

        each = asked.tags("{" + head, argument, content, "}", quoted=True)
        return _section(mark, f"{list_begin}[", _forced(each, ", ", asked.parallel), end)
    before, marked, behind = argument.partition(CALL_ID)
    tags = []
    for tool in asked.tools:
        called: Part = _object(tool, asked.demanded)
        if marked:
            called = SequencePart([RegexPart(_ID), TextPart(behind), called])
        tags.append(StructureTag(f"{opening}{tool.name}{before}", called, ""))
    return Calls(_free(tags, [forms.TOOL_CALLS], asked.parallel), _forced(tags, "", asked.parallel))


def _glm(asked: CallTerms) -> Calls:
    """GLM: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""
    opening, argument = asked.written
    end = _kept(forms.TOOL_CALL_END, asked.ends_output)
    style: ParameterStyle = "glm45" if argument else "glm47"  # with line breaks
    tags = asked.tags(opening, argument, partial(_parameters, style=style), end)
    free = _free(tags, [forms.TOOL_CALL], asked.parallel)
    return Calls(free, _forced(tags, argument, asked.parallel))


def _minimax(asked: CallTerms) -> Calls:
    """MiniMax: `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`, in tags."""
    begin, _, _ = asked.written.opening.partition(forms.INVOKE)
    content = partial(_parameters, style="minimax")
    each = asked.tags(forms.INVOKE, asked.written.argument, content, f"{forms.INVOKE_END}\n")
    end = _kept(forms.MINIMAX_END, asked.ends_output)
    return _section(forms.MINIMAX, begin, _forced(each, "", asked.parallel), end)


def _kimi(asked: CallTerms) -> Calls:
    """Kimi: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""
    number: list[Part] = [RegexPart("[0-9]{1,4}"), TextPart(forms.KIMI_ARGUMENT)]

    def content(tool: DeclaredTool, demanded: bool) -> Part:
        return SequencePart([*number, _object(tool, demanded)])

    each = asked.tags(f"{forms.KIMI}functions.", ":", content, forms.KIMI_END)
    end = _kept(forms.SECTION_END, asked.ends_output)
    return _section(forms.SECTION, forms.SECTION, _forced(each, "", asked.parallel), end)


def _lfm2(asked: CallTerms) -> Calls:
    """LFM2: `<|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>`."""
    opening, argument = asked.written
    each = asked.tags("", argument, partial(_parameters, style="python"), ")")
    end = "]" + _kept(forms.PYTHONIC_END, asked.ends_output)
    return _section(forms.PYTHONIC, opening, _forced(each, ", ", asked.parallel), end)


def _gemma4(asked: CallTerms) -> Calls:
    """Gemma 4: `<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`, its strings between `<|"|>`."""
    opening, _ = asked.written
    end = "}" + _kept(forms.GEMMA_END, asked.ends_output)
    tags = asked.tags(opening, "{", partial(_parameters, style="gemma", quote=QUOTE), end)
    return Calls(_free(tags, [forms.GEMMA], asked.parallel), _forced(tags, "", asked.parallel))


def _deepseek(asked: CallTerms) -> Calls:
    """DeepSeek: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, in marks for all."""
    opening, argument = asked.written
    opening = opening.removeprefix(forms.CALLS_BEGIN)
    fenced = "```" in argument
    end = ("\n```" if fenced else "") + forms.CALL_END
    each = asked.tags(opening, argument, _object, end)
    several = _forced(each, "\n" if fenced else "", asked.parallel)
    ended = UnionPart([TextPart(""), TextPart(_kept(forms.CALLS_END, asked.ends_output))])
    # some templates leave the end out
    return _section(forms.CALLS_BEGIN, forms.CALLS_BEGIN, SequencePart([several, ended]), "")


def _harmony(asked: CallTerms) -> Calls:
    """gpt-oss: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.

    One call in an answer: what ends it ends the output.
    """
    opening, argument = asked.written
    end = _kept(forms.CALL, asked.ends_output)
    headers = UnionPart([TextPart(header) for header in _HEADERS])
    begins = (forms.COMMENTARY, f"{_STARTED} {forms.RECIPIENT}")

    def headed(tool: DeclaredTool, demanded: bool) -> Part:
        return SequencePart([headers, _object(tool, demanded)])

    tags = [tag for begin in begins for tag in asked.tags(begin, "", headed, end)]
    first = asked.tags(forms.RECIPIENT, "", headed, end)
    free = UnionPart(
        [
            SequencePart([_LEADING, _forced(first, "", False)]),
            UnlessPart(TagsPart(tags, list(begins), stop_after_first=True), [forms.RECIPIENT]),
        ]
    )
    forced = asked.tags(opening, argument, _object, end)
    return Calls(free, _forced(forced, "", False))


def _any(asked: CallTerms) -> Calls:
    """A template that mentions no calls: forced and strict ones are Hermes', others are free."""
    found = _tagged(asked)
    return found if any(tool.strict for tool in asked.tools) else found._replace(free=None)


_FAMILIES: dict[str, Writer] = {
    "hermes": _tagged,
    "qwen3-coder": _xml,
    "llama3": _llama3,
    "mistral": _mistral,
    "granite": _mistral,
    "nemotron": _mistral,
    "glm45": _glm,
    "glm47": _glm,
    "minimax": _minimax,
    "kimi_k2": _kimi,
    "lfm2": _lfm2,
    "gemma4": _gemma4,
    "deepseek": _deepseek,
    "harmony": _harmony,
    "any": _any,
}


# --- what they are made of -------------------------------------------------------------------------


def _object(tool: DeclaredTool, demanded: bool) -> JsonPart:
    if tool.strict is False and not demanded:
        return JsonPart({"type": "object"})
    return JsonPart(tool.schema, tool.place, strict=demanded if tool.strict is None else tool.strict)


def _parameters(
    tool: DeclaredTool, demanded: bool, style: ParameterStyle = "tags", quote: str = ""
) -> XmlPart:
    if tool.strict is False and not demanded:
        return XmlPart(None, style=style, quote=quote)
    strict = demanded if tool.strict is None else tool.strict
    return XmlPart(tool.schema, tool.place, strict, style, quote)


def _json_name(tool: DeclaredTool) -> str:
    return json.dumps(tool.name, ensure_ascii=False)[1:-1]


def _blank_behind(opening: str, mark: str) -> str:
    """The blanks that the template writes behind a mark; it writes the same before the closing one."""
    found = _BLANKS.match(opening, opening.find(mark) + len(mark))
    return found[0] if found is not None and mark in opening else ""


def _kept(mark: str, ends_output: Callable[[str], bool]) -> str:
    return "" if ends_output(mark) else mark


def _sequence(tag: StructureTag) -> SequencePart:
    return SequencePart([TextPart(tag.begin), tag.content, TextPart(tag.end)])


def _section(mark: str, begin: str, calls: Part, end: str) -> Calls:
    """All calls together, between `begin` and `end`. `mark`: what triggers them where text is free."""
    whole = StructureTag(begin, calls, end)
    return Calls(_free([whole], [mark], False), _sequence(whole))


def _forced(tags: Sequence[StructureTag], separator: str, parallel: bool) -> Part:
    calls = UnionPart([_sequence(tag) for tag in tags])
    return ListPart(calls, separator) if parallel else calls


def _free(tags: list[StructureTag], triggers: list[str], parallel: bool) -> TagsPart:
    return TagsPart(tags, triggers, stop_after_first=not parallel)
