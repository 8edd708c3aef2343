"""Chat templates against `transformers`, and their bounds."""

from datetime import datetime
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from ramify.actors.tokenizer import chat_jinja
from ramify.actors.tokenizer.chat_jinja import ChatTemplates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"é": ["<", "&", 1.5, True, None]}}}
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " be <b>brief</b> "},
    {"role": "user", "content": "Q é\n中"},
    {"role": "assistant", "content": "A", "reasoning_content": "hm"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    {"role": "tool", "content": "1", "thinking": "odd"},
]
TEMPLATES = {
    "variables": "{{ bos_token }}{{ eos_token }}{{ image_token }}"
    "{{ add_generation_prompt }}{{ documents }}",
    "undefined": "{{ nothing }}[{{ messages[0].nothing }}]{% if nothing is defined %}x{% endif %}",
    "blocks are trimmed": "  {% if true %}\n  a\n  {% endif %}\n  {# c #}\nb\n",
    "tojson": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(sort_keys=true) }}"
    "{{ tools | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "loops": "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
    "{{ loop.previtem }}{{ loop.nextitem }}{{ loop.revindex }}"
    "{% if loop.index == 4 %}{% break %}{% endif %}"
    "{% if m.role == 'user' %}{% continue %}{% endif %}"
    "{{ m['content'] | trim }}{% else %}none{% endfor %}",
    "loops over what has no length": "{% for m in messages | selectattr('content') %}"
    "{{ loop.index }}{{ loop.last }}{{ m }}{% endfor %}"
    "{% for k, v in messages[0].items() %}{{ k }}{% endfor %}",
    "loops with a condition": "{% for m in messages if m.role != 'tool' %}"
    "{{ loop.index }}{{ m.role }}{% endfor %}"
    "{% for c in 'abc' %}{{ c }}{% endfor %}{% for n in range(3) %}{{ n }}{% endfor %}"
    "{% for n in [3, 4] %}{{ n }}{% endfor %}{% for n in nothing %}{{ n }}{% else %}!{% endfor %}",
    "loops that call themselves": "{% for m in [[1, [2]], [3]] recursive %}"
    "{% if m is sequence %}({{ loop(m) }}){% else %}{{ m }}{{ loop.depth }}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}\n"
    "{% endgeneration %}"
    "{{ x }}{% endfor %}",
    "macros": "{% macro f(a, b='z') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}"
    "{{ f(1) }}{{ f(1, b=2) }}{% call f(3) %}in{% endcall %}",
    "namespaces": "{% set ns = namespace(a=1, self=2) %}"
    "{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}"
    "{{ ns.a }}{{ ns.self }}{{ dict(a=1) }}{{ dict.fromkeys('ab', 0) }}",
    "strings": "{{ 'x' * 3 }}{{ 2 ** 8 }}{{ 'a,b'.split(',') | join('-') }}{{ '%s!' | format('q') }}"
    "{{ messages[0].content.strip().startswith('be') }}{{ ('a' ~ 1)[::-1] }}{{ '<' | e }}",
    "dates": "{{ strftime_now('%d %b %Y') }}",
    "thoughts": "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.thinking }}"
    "|{{ m.reasoning }}]{% endfor %}",
    "nulls": "{% for m in messages %}{{ m.content is none }}{{ 'content' in m }}{% endfor %}",
}
REFUSED = {
    "its own words": "{{ raise_exception('roles must ' + 'alternate') }}",
    "syntax": "{% if %}",
    "division": "{{ 1 / 0 }}",
    "Python's inside": "{{ ''.__class__.__mro__ }}",
    "changes of a message": "{{ messages.append(1) }}",
    "changes of a field": "{{ messages[0].update({'role': 'x'}) }}",
    "names of Python in a namespace": "{% set ns = namespace(__class__=1) %}",
    "names of Python in a namespace, later": "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "a number as a loop": "{% for x in 5 %}{% endfor %}",
    "a long range": "{% for x in range(1000000) %}{% endfor %}",
}


def theirs(source: str, messages: list[dict[str, Any]], tools: Any, generate: bool) -> str:
    rendered: Any = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=generate, **SPECIAL
    )
    return str(rendered[0][0])


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pinned(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 2, 3)

    monkeypatch.setattr(chat_jinja, "datetime", Pinned)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Pinned)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("generate", [False, True])
def test_as_transformers(name: str, tools: Any, generate: bool) -> None:
    source = TEMPLATES[name]
    ours = ChatTemplates(source, SPECIAL)
    for count in (1, len(MESSAGES)):
        expected = theirs(source, MESSAGES[:count], tools, generate)
        assert ours.render(MESSAGES[:count], tools, generate) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_by_transformers(name: str) -> None:
    source = REFUSED[name]
    try:
        theirs(source, MESSAGES, None, False)
    except Exception as error:
        expected = error
    with pytest.raises(type(expected)) as found:
        ChatTemplates(source, SPECIAL).render(MESSAGES, None, False)
    if not isinstance(expected, SecurityError):
        assert str(found.value) == str(expected)


def test_messages_are_left_as_they_were() -> None:
    before = [dict(message) for message in MESSAGES]
    ChatTemplates("{{ messages }}", {}).render(MESSAGES, None, False)
    assert before == MESSAGES


def test_templates_by_name() -> None:
    templates = ChatTemplates({"default": "d", "tool_use": "t", "rag": "r"}, {})
    assert templates.render(MESSAGES, None, False) == "d"
    assert templates.render(MESSAGES, TOOLS, False) == "t"
    assert ChatTemplates({"default": "d"}, {}).render(MESSAGES, TOOLS, False) == "d"
    with pytest.raises(TemplateError, match="default"):
        ChatTemplates({"rag": "r"}, {}).render(MESSAGES, None, False)


def test_no_message() -> None:
    with pytest.raises(TemplateError, match="no message"):
        ChatTemplates("x", {}).render([], None, False)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(n) %}{{ f(n - 1) + f(n - 1) if n }}{% endmacro %}{{ f(40) }}", "steps"),
        (
            "{% for a in range(999) | map('string') %}{% for b in range(9999) | map('string') %}"
            "{% endfor %}{% endfor %}",
            "steps",
        ),
        ("{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "characters"),
        ("{{ 'x' * 10 ** 10 }}", "repeats"),
        ("{{ 10 ** 10 * [1] }}", "repeats"),
        ("{{ 9 ** 9 ** 9 }}", "power"),
    ],
)  # fmt: skip
def test_what_a_template_does_is_bounded(source: str, why: str) -> None:
    with pytest.raises(TemplateError, match=why):
        ChatTemplates(source, {}).render(MESSAGES, None, False)


def test_the_bound_is_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_jinja, "MOST_STEPS", 40)
    templates = ChatTemplates("{% for a in messages %}{{ a.role.upper() }}{% endfor %}", {})
    for _ in range(3):
        assert templates.render(MESSAGES, None, False).startswith("SYSTEM")
    with pytest.raises(TemplateError, match="40 steps"):
        templates.render([*MESSAGES, *MESSAGES], None, False)
