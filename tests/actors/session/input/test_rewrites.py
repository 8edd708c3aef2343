"""What a template writes otherwise as a conversation grows is found out, and told to who opens so."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.calls.dialects import THOUGHTS, dialect_of
from ramify.actors.calls.templates import Rewrite, note, rewrites
from ramify.actors.session.input.template import ChatTemplate
from tests.actors.session.input.test_template import TEMPLATES, TOOLS, tokenizer

PLAIN = dialect_of("", "none")
THINKING = PLAIN._replace(thought=THOUGHTS[0])


def found(name: str, dialect: Any = PLAIN) -> list[str]:
    template = ChatTemplate(tokenizer(TEMPLATES[name]), dialect)
    return [each.what for each in rewrites(template, dialect)]


@pytest.mark.parametrize("name", ["chatml", "llama-3", "qwen-2.5", "names calls", "marks first"])
def test_templates_that_never_rewrite(name: str) -> None:
    assert found(name) == []


def test_what_templates_rewrite() -> None:
    assert "answers that turns follow" in found("qwen-3")
    assert "tools that turns follow" in found("mistral")
    assert "a system turn that others follow" in found("mistral")


def test_thoughts_that_a_template_forgets_or_keeps() -> None:
    thoughts = "thoughts of earlier answers"
    assert thoughts in found("qwen-3", THINKING)
    assert found("chatml", THINKING) == []  # it shows the whole content
    assert thoughts not in found("qwen-3")  # a model that does not think


def test_only_what_concerns_a_session_is_told() -> None:
    every = [Rewrite("calls", True), Rewrite("answers", False)]
    assert "rewrites answers; " in (note(every, tools=False) or "")
    assert "rewrites calls, answers; " in (note(every, tools=True) or "")
    assert note(every[:1], tools=False) is None


@pytest.mark.parametrize("name", ["chatml", "mistral"])
@pytest.mark.parametrize("mode", ["append", "strict"])
def test_the_answer_to_open_tells(sim: Callable[..., Any], name: str, mode: Any) -> None:
    engine = sim()
    engine.template = ChatTemplate(tokenizer(TEMPLATES[name]), PLAIN)
    client = engine.session(template=mode, tools=TOOLS)
    engine.pump()
    if (name, mode) == ("mistral", "append"):
        assert "template 'strict'" in client.notes[0]
    else:
        assert client.notes is None
