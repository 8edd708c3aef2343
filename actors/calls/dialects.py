"""Which marks a model writes around thoughts and tool calls, read off its chat template. Pure.

To add a family: its form in `forms.py`, and one entry here.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ramify.actors.calls import forms
from ramify.actors.calls.forms import Form
from ramify.actors.calls.literals import QUOTE

DialectName = Literal[
    "hermes", "qwen3-coder", "llama3", "mistral", "granite", "deepseek", "harmony", "lfm2", "gemma4",
    "glm45", "glm47", "kimi_k2", "minimax", "nemotron", "any", "none",
]  # fmt: skip


class Thought(NamedTuple):
    """The tags around what a model thinks before it answers."""

    begin: str
    end: str


class Dialect(NamedTuple):
    """`openings`: marks that begin calls. `bare`: how calls without a mark are written, where they are.

    `marks`: all that belong to the form; in some tokenizers they are control tokens, which have no text
    otherwise. `tags`: marks that say nothing of what is called; where there are some, thoughts may begin
    anywhere. `opening`, `argument`: how a forced call begins, up to its name, and what stands between
    the name and the arguments, where the template does not tell.
    """

    name: DialectName
    openings: Mapping[str, Form] = {}
    bare: Form | None = None
    marks: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    thought: Thought | None = None
    opening: str = ""
    argument: str = ""


THOUGHTS = (Thought("<think>", "</think>"), Thought("[THINK]", "[/THINK]"))

_TAGGED = {forms.TOOL_CALL: forms.tagged}
_XML = {**_TAGGED, forms.FUNCTION: forms.function}
_DEEPSEEK = (forms.CALLS_BEGIN, forms.CALLS_END, forms.CALL_BEGIN, forms.CALL_END, forms.CALL_SEP)
_GLM = Dialect(
    "glm47",
    {forms.TOOL_CALL: forms.glm},
    marks=(
        forms.TOOL_CALL,
        forms.TOOL_CALL_END,
        forms.ARG_KEY,
        forms.ARG_KEY_END,
        forms.ARG_VALUE,
        forms.ARG_VALUE_END,
    ),
    opening=forms.TOOL_CALL,
)
_MISTRAL = (forms.TOOL_CALLS, forms.CALL_ID, forms.ARGS)
_NAME, _ARGUMENT = '{"name":', '", "arguments":'

DIALECTS: dict[DialectName, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            "hermes",
            _TAGGED,
            marks=(forms.TOOL_CALL, forms.TOOL_CALL_END),
            opening=f"{forms.TOOL_CALL}\n{_NAME}",
            argument=_ARGUMENT,
        ),
        Dialect(
            "qwen3-coder",
            _XML,
            marks=(forms.TOOL_CALL, forms.TOOL_CALL_END),
            opening=f"{forms.TOOL_CALL}\n{forms.FUNCTION}",
            argument=">\n",
        ),
        Dialect(
            "llama3",
            {forms.PYTHON_TAG: forms.python_tag},
            forms.bare,
            marks=(forms.PYTHON_TAG,),
            opening=_NAME,
            argument='", "parameters":',
        ),
        Dialect(
            "mistral",
            {forms.TOOL_CALLS: forms.mistral},
            marks=_MISTRAL,
            opening=f"{forms.TOOL_CALLS}[{_NAME}",
            argument=_ARGUMENT,
        ),
        Dialect(
            "granite",
            {forms.CALL_LIST: forms.mistral},
            marks=(forms.CALL_LIST,),
            opening=f"{forms.CALL_LIST}[{_NAME}",
            argument=_ARGUMENT,
        ),
        Dialect(
            "lfm2",
            {forms.PYTHONIC: forms.pythonic},
            marks=(forms.PYTHONIC, forms.PYTHONIC_END),
            opening=f"{forms.PYTHONIC}[",
            argument="(",
        ),
        Dialect(
            "gemma4",
            {forms.GEMMA: forms.gemma},
            marks=(forms.GEMMA, forms.GEMMA_END, QUOTE, "<|channel>", "<channel|>"),
            thought=Thought("<|channel>thought", "<channel|>"),
            opening=f"{forms.GEMMA}call:",
            argument="{",
        ),
        Dialect(
            "deepseek",
            {forms.CALLS_BEGIN: forms.deepseek},
            marks=_DEEPSEEK,
            opening=f"{forms.CALLS_BEGIN}{forms.CALL_BEGIN}",
            argument=forms.CALL_SEP,
        ),
        _GLM._replace(name="glm45", argument="\n"),
        _GLM,
        Dialect(
            "kimi_k2",
            {forms.SECTION: forms.kimi},
            marks=(forms.SECTION, forms.SECTION_END, forms.KIMI, forms.KIMI_ARGUMENT, forms.KIMI_END),
            opening=f"{forms.SECTION}{forms.KIMI}functions.",
            argument=":",
        ),
        Dialect(
            "minimax",
            {forms.MINIMAX: forms.minimax},
            marks=(forms.MINIMAX, forms.MINIMAX_END),
            opening=f"{forms.MINIMAX}\n{forms.INVOKE}",
            argument='">\n',
        ),
        Dialect(
            "nemotron",
            {forms.TOOLCALL: forms.nemotron},
            marks=(forms.TOOLCALL, forms.TOOLCALL_END),
            opening=f"{forms.TOOLCALL}[{_NAME}",
            argument=_ARGUMENT,
        ),
        Dialect(
            "harmony",  # messages with a header each, which says to which channel they go
            {forms.COMMENTARY: forms.harmony, forms.RECIPIENT: forms.harmony},
            marks=(
                "<|start|>",
                "<|channel|>",
                "<|constrain|>",
                forms.MESSAGE,
                "<|end|>",
                "<|return|>",
                forms.CALL,
            ),
            tags=(
                "<|start|>assistant",
                "<|channel|>final<|message|>",
                "<|channel|>commentary<|message|>",
                "<|end|>",
                "<|return|>",
            ),
            thought=Thought("<|channel|>analysis<|message|>", "<|end|>"),
            opening=f" {forms.RECIPIENT}",
            argument=f"<|channel|>commentary json{forms.MESSAGE}",
        ),
        Dialect(
            "any",
            {**_XML, forms.TOOL_CALLS: forms.mistral, forms.PYTHON_TAG: forms.python_tag},
            forms.bare,
            marks=(forms.TOOL_CALL, forms.TOOL_CALL_END, *_MISTRAL, forms.PYTHON_TAG),
            opening=f"{forms.TOOL_CALL}\n{_NAME}",
            argument=_ARGUMENT,
        ),
        Dialect("none"),
    )
}


def dialect_of(template: str, name: str = "auto") -> Dialect:
    """The dialect that a chat template asks for; `name`: another one, whatever it says.

    A template that mentions no calls leaves it to the model: then all forms are understood.
    """
    found = DIALECTS[_named(template) if name == "auto" else name]  # type: ignore[index]
    thought = found.thought or next((each for each in THOUGHTS if each.end in template), None)
    marks = (*found.marks, *(thought or ()))
    return found._replace(thought=thought, marks=marks)


_BY_MARK: dict[str, DialectName] = {
    forms.CALLS_BEGIN: "deepseek",
    forms.SECTION: "kimi_k2",
    forms.MINIMAX: "minimax",
    forms.TOOLCALL: "nemotron",
    forms.TOOL_CALLS: "mistral",
    forms.CALL_LIST: "granite",
    forms.PYTHONIC: "lfm2",
    "<|tool_list_start|>": "lfm2",
    forms.GEMMA: "gemma4",
}


def _named(template: str) -> DialectName:
    if "<|channel|>" in template:
        return "harmony"
    if forms.ARG_KEY in template:
        return "glm45" if f"\n{forms.ARG_KEY}" in template else "glm47"
    for mark, name in _BY_MARK.items():
        if mark in template:
            return name
    if forms.FUNCTION in template and forms.TOOL_CALL in template:
        return "qwen3-coder"
    if forms.TOOL_CALL in template:
        return "hermes"
    if forms.PYTHON_TAG in template or '"parameters": ' in template:
        return "llama3"
    return "any"
