"""Which marks a model writes, read off its chat template."""

import pytest

from ramify.actors.calls import forms
from ramify.actors.calls.dialects import DIALECTS, THOUGHTS, DialectName, dialect_of
from ramify.actors.calls.forms import Form


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("no calls at all", "any"),
        (f"{forms.TOOL_CALL}{{{{ call }}}}", "hermes"),
        (f"{forms.TOOL_CALL}{forms.FUNCTION}name>", "qwen3-coder"),
        (f"{forms.FUNCTION}name>", "any"),
        (f"{forms.TOOL_CALLS}[", "mistral"),
        (f"{forms.CALLS_BEGIN}{forms.CALL_BEGIN}", "deepseek"),
        (f"{forms.CALL_LIST} followed by a list", "granite"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        (f"{forms.PYTHONIC}[", "lfm2"),
        (f"{forms.GEMMA}call:", "gemma4"),
        (f"{forms.TOOL_CALL}{{name}}\n{forms.ARG_KEY}", "glm45"),
        (f"{forms.TOOL_CALL}{{name}}{forms.ARG_KEY}", "glm47"),
        (f"{forms.SECTION}{forms.KIMI}", "kimi_k2"),
        (f"{forms.MINIMAX}{forms.INVOKE}", "minimax"),
        (f"{forms.TOOLCALL}[", "nemotron"),
        (f"{forms.PYTHON_TAG}", "llama3"),
        ('{"name": ..., "parameters": {', "llama3"),
        (f"{forms.TOOL_CALL} and {forms.PYTHON_TAG}", "hermes"),
    ],
)
def test_the_marks_in_a_template_name_its_dialect(template: str, name: str) -> None:
    assert dialect_of(template).name == name
    assert dialect_of(template, "none").name == "none"  # unless one is asked for


def test_thoughts_are_read_off_the_template_too() -> None:
    think, brackets = THOUGHTS
    assert dialect_of("plain").thought is None
    assert dialect_of("<think> without an end").thought is None
    for thought in (think, brackets):
        found = dialect_of(f"... {thought.end} ...")
        assert found.thought == thought
        assert found.marks == (*DIALECTS["any"].marks, *thought)


# What a family writes; a change here is a change of what is read, or forced.
CALL, NAME, ARGUMENT = "<tool_call>", '{"name":', '", "arguments":'


@pytest.mark.parametrize(
    ("name", "openings", "bare", "opening", "argument"),
    [
        ("hermes", {CALL: forms.tagged}, None, f"{CALL}\n{NAME}", ARGUMENT),
        (
            "qwen3-coder",
            {CALL: forms.tagged, "<function=": forms.function},
            None,
            f"{CALL}\n<function=",
            ">\n",
        ),
        ("llama3", {"<|python_tag|>": forms.python_tag}, forms.bare, NAME, '", "parameters":'),
        ("mistral", {"[TOOL_CALLS]": forms.mistral}, None, f"[TOOL_CALLS][{NAME}", ARGUMENT),
        ("granite", {"<|tool_call|>": forms.mistral}, None, f"<|tool_call|>[{NAME}", ARGUMENT),
        ("lfm2", {"<|tool_call_start|>": forms.pythonic}, None, "<|tool_call_start|>[", "("),
        ("gemma4", {"<|tool_call>": forms.gemma}, None, "<|tool_call>call:", "{"),
        (
            "harmony",
            {forms.COMMENTARY: forms.harmony, forms.RECIPIENT: forms.harmony},
            None,
            f" {forms.RECIPIENT}",
            "<|channel|>commentary json<|message|>",
        ),
        ("glm45", {CALL: forms.glm}, None, CALL, "\n"),
        ("glm47", {CALL: forms.glm}, None, CALL, ""),
        (
            "kimi_k2",
            {"<|tool_calls_section_begin|>": forms.kimi},
            None,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
            ":",
        ),
        (
            "minimax",
            {"<minimax:tool_call>": forms.minimax},
            None,
            '<minimax:tool_call>\n<invoke name="',
            '">\n',
        ),
        ("nemotron", {"<TOOLCALL>": forms.nemotron}, None, f"<TOOLCALL>[{NAME}", ARGUMENT),
        (
            "any",
            {
                CALL: forms.tagged,
                "<function=": forms.function,
                "[TOOL_CALLS]": forms.mistral,
                "<|python_tag|>": forms.python_tag,
            },
            forms.bare,
            f"{CALL}\n{NAME}",
            ARGUMENT,
        ),
        ("none", {}, None, "", ""),
    ],
)
def test_what_each_family_writes(
    name: DialectName, openings: dict[str, Form], bare: Form | None, opening: str, argument: str
) -> None:
    found = dialect_of("", name)
    assert (found.name, dict(found.openings), found.bare) == (name, openings, bare)
    assert (found.opening, found.argument) == (opening, argument)


def test_gemma_thinks_in_a_channel() -> None:
    assert dialect_of(forms.GEMMA).thought == ("<|channel>thought", "<channel|>")


def test_deepseek_begins_all_calls_and_then_each() -> None:
    found = DIALECTS["deepseek"]
    assert dict(found.openings) == {forms.CALLS_BEGIN: forms.deepseek}
    assert (found.opening, found.argument) == (forms.CALLS_BEGIN + forms.CALL_BEGIN, forms.CALL_SEP)


@pytest.mark.parametrize("name", DIALECTS)
def test_what_opens_a_call_is_among_the_marks_where_it_is_one(name: DialectName) -> None:
    """Marks that are control tokens have no text unless they are named here."""
    found = DIALECTS[name]
    for opening in found.openings:
        parts = [mark for mark in found.marks if mark in opening]
        assert parts or opening in (forms.FUNCTION, forms.RECIPIENT)
    assert bool(found.tags) == (name == "harmony")


def test_only_harmony_may_think_anywhere() -> None:
    found = dialect_of("<|channel|> ... </think>")
    assert found.name == "harmony"
    assert found.thought == ("<|channel|>analysis<|message|>", "<|end|>")
    assert found.marks[-2:] == found.thought
    assert set(found.tags) == {
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        "<|channel|>commentary<|message|>",
        "<|end|>",
        "<|return|>",
    }
