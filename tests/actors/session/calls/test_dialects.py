"""Which marks a model writes, read off its chat template."""

import pytest

from ramify.actors.session.calls import forms
from ramify.actors.session.calls.dialects import DIALECTS, THOUGHTS, dialect_of


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("no calls at all", "any"),
        (f"{forms.TOOL_CALL}{{{{ call }}}}", "hermes"),
        (f"{forms.TOOL_CALL}{forms.FUNCTION}name>", "qwen3-coder"),
        (f"{forms.FUNCTION}name>", "any"),
        (f"{forms.TOOL_CALLS}[", "mistral"),
        (f"{forms.CALLS_BEGIN}{forms.CALL_BEGIN}", "deepseek"),
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
