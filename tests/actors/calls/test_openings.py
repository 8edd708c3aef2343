"""How a forced call begins, read off templates written here. Published ones: test_templates.py."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ramify.actors.calls import forms
from ramify.actors.calls.dialects import DIALECTS, THOUGHTS, DialectName
from ramify.actors.calls.openings import Openings
from ramify.actors.calls.toolbox import Toolbox
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ChatMessage

TOOLS = Toolbox([{"name": "add"}, {"name": "weather"}])
Write = Callable[[str, dict[str, Any]], str]  # a call of a name with arguments


def template(write: Write, prompt: str = "<a>", begin: str = "<a>") -> Any:
    """`prompt`: the generation prompt; `begin`: what an assistant's turn with a call begins with."""

    def render(messages: Sequence[ChatMessage], tools: Any, generate: bool) -> str:
        assert tools
        text = ""
        for message in messages:
            for call in message.tool_calls or ():
                text += begin + write(call["function"]["name"], call["function"]["arguments"]) + "</a>"
            if not message.tool_calls:
                text += f"<{message.role[0]}>{message.content}"
        return text + (prompt if generate else "")

    return render


def hermes(name: str, arguments: dict[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{forms.TOOL_CALL}\n{call}\n{forms.TOOL_CALL_END}"


def coder(name: str, arguments: dict[str, Any]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"{forms.TOOL_CALL}\n<function={name}>\n{parameters}</function>\n{forms.TOOL_CALL_END}"


def mistral(name: str, arguments: dict[str, Any]) -> str:
    return f"{forms.TOOL_CALLS}{name}{json.dumps(arguments)}"


def bare(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def glm(name: str, arguments: dict[str, Any]) -> str:
    keys = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{''.join(keys)}</tool_call>"


def minimax(name: str, arguments: dict[str, Any]) -> str:
    keys = (f'<parameter name="{k}">{v}</parameter>\n' for k, v in arguments.items())
    invoke = f'<invoke name="{name}">\n{"".join(keys)}</invoke>'
    return f"<minimax:tool_call>\n{invoke}\n</minimax:tool_call>"


def kimi(name: str, arguments: dict[str, Any]) -> str:
    """Its template writes the id, which holds the name."""
    return f"<|tool_calls_section_begin|><|tool_call_begin|>id<|tool_call_argument_begin|>{arguments}"


def openings(write: Write, dialect: DialectName, **given: str) -> tuple[str, str]:
    """For any call, and for one of `add`."""
    found = Openings(template(write, **given), DIALECTS[dialect])
    return found.text("required"), found.text("add")


def test_a_call_begins_as_the_template_writes_it() -> None:
    assert openings(hermes, "hermes") == (
        f'{forms.TOOL_CALL}\n{{"name":',
        f'{forms.TOOL_CALL}\n{{"name": "add", "arguments":',
    )
    assert openings(coder, "qwen3-coder") == (
        f"{forms.TOOL_CALL}\n<function=",
        f"{forms.TOOL_CALL}\n<function=add>\n",
    )
    assert openings(glm, "glm45") == ("<tool_call>", "<tool_call>add\n")
    tight = openings(lambda *call: glm(*call).replace("\n", ""), "glm47")
    assert tight == ("<tool_call>", "<tool_call>add")
    assert openings(minimax, "minimax") == (
        "<minimax:tool_call>\n<invoke name=",
        '<minimax:tool_call>\n<invoke name="add">\n',
    )
    section = f"{forms.SECTION}{forms.KIMI}functions."
    assert openings(kimi, "kimi_k2") == (section, f"{section}add:")
    assert openings(bare, "llama3") == ('{"name":', '{"name": "add", "parameters":')


def test_arguments_may_follow_the_name_at_once() -> None:
    assert openings(mistral, "mistral") == (forms.TOOL_CALLS, f"{forms.TOOL_CALLS}add")


def test_a_prompt_that_a_call_does_not_repeat_ends_before_the_call() -> None:
    """It ends a thought, say, which earlier turns do not show."""
    thought = openings(hermes, "hermes", prompt="<a><think></think>", begin="<a>")
    assert thought[1] == f'{forms.TOOL_CALL}\n{{"name": "add", "arguments":'
    assert openings(hermes, "hermes", begin="<a>\n")[1] == "\n" + thought[1]


@pytest.mark.parametrize(
    "write",
    [
        lambda name, arguments: "nothing",
        lambda name, arguments: f"{forms.TOOL_CALL}{name}",
        lambda name, arguments: f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}',
        lambda name, arguments: f"{forms.TOOL_CALL}{name} with {arguments['p']}",
    ],
)
def test_a_template_that_does_not_tell_leaves_it_to_the_dialect(write: Write) -> None:
    assert openings(write, "hermes") == (
        f'{forms.TOOL_CALL}\n{{"name":',
        f'{forms.TOOL_CALL}\n{{"name": "add", "arguments":',
    )


def test_a_template_that_refuses_calls_leaves_it_to_the_dialect() -> None:
    asked = 0

    def refuses(messages: Sequence[ChatMessage], tools: Any, generate: bool) -> str:
        nonlocal asked
        asked += 1
        raise BadRequest("no")

    found = Openings(refuses, DIALECTS["qwen3-coder"])
    for _ in range(2):
        assert found.text("add") == f"{forms.TOOL_CALL}\n<function=add>\n"
    assert asked == 1  # it is asked once


def test_marks_inside_one_another_belong_to_one_call() -> None:
    """And marks in what stands before it (instructions, say) do not."""

    def instructed(messages: Sequence[ChatMessage], tools: Any, generate: bool) -> str:
        system = f"Write {forms.FUNCTION}NAME> inside of {forms.TOOL_CALL}."
        return system + template(coder, prompt="<a><think></think>")(messages, tools, generate)

    for found in (
        Openings(template(coder, prompt="<a><think></think>"), DIALECTS["qwen3-coder"]),
        Openings(instructed, DIALECTS["qwen3-coder"]),
        Openings(instructed, DIALECTS["any"]),
    ):
        assert found.text("required") == f"{forms.TOOL_CALL}\n<function="
        assert found.text("add") == f"{forms.TOOL_CALL}\n<function=add>\n"


def test_the_last_mark_before_the_name_begins_the_call() -> None:
    def twice(name: str, arguments: dict[str, Any]) -> str:
        return f"{forms.TOOL_CALL}is how calls begin. " + hermes(name, arguments)

    assert openings(twice, "hermes", prompt="<a><think></think>")[0] == f'{forms.TOOL_CALL}\n{{"name":'


@pytest.mark.parametrize(
    ("choice", "tools", "dialect", "chat", "why"),
    [
        ("required", Toolbox(None), "hermes", True, "needs tools"),
        ("required", TOOLS, "none", True, "cannot be forced"),
        ("required", TOOLS, "hermes", False, "needs a chat"),
        ("subtract", TOOLS, "hermes", True, r"none of auto, none, required, .* \(add, weather\)"),
    ],
)
def test_what_cannot_be_forced_is_refused(
    choice: str, tools: Toolbox, dialect: DialectName, chat: bool, why: str
) -> None:
    found = Openings(template(hermes), DIALECTS[dialect])
    with pytest.raises(BadRequest, match=why) as caught:
        found.check(choice, tools, chat=chat)
    assert caught.value.details == {"field": "tool_choice"}
    for free in ("auto", "none"):
        found.check(free, tools, chat=chat)


def test_what_can_be_forced() -> None:
    found = Openings(template(hermes), DIALECTS["hermes"])
    for choice in ("required", "add", "weather"):
        found.check(choice, TOOLS, chat=True)


@pytest.mark.parametrize(("write", "dialect"), [(hermes, "qwen3-coder"), (coder, "hermes")])
def test_calls_of_a_template_of_another_family_are_not_opened_as_it_writes_them(
    write: Write, dialect: DialectName
) -> None:
    """As with `--tool-parser qwen3-coder` and Hermes' template: JSON began, and parameters followed."""
    kind = DIALECTS[dialect]
    found = Openings(template(write), kind)
    assert found.text("required") == kind.opening
    assert found.written().opening.rstrip(' "') == kind.opening


@pytest.mark.parametrize(
    ("prompt", "unthought"),
    [
        ("<a>", "<think>\n\n</think>\n\n"),  # as Qwen3's template has it where thinking is off
        ("<a><think>\n", "\n</think>\n\n"),
        ("<a></think>", ""),
        ("<a><think>\n\n</think>\n\n", ""),
    ],
)
def test_an_empty_thought_keeps_a_model_from_thinking(prompt: str, unthought: str) -> None:
    thinks = DIALECTS["hermes"]._replace(thought=THOUGHTS[0])
    assert Openings(template(hermes, prompt=prompt), thinks).unthought == unthought


def test_an_empty_thought_is_the_templates_own() -> None:
    """As GLM 4.5 and Kimi K2 write it."""

    def render(messages: Sequence[ChatMessage], tools: Any, generate: bool) -> str:
        text = "".join(
            f"<u>{each.content}" if each.role == "user" else f"<a>\n<think></think>\n{each.content}"
            for each in messages
        )
        return text + ("<a>" if generate else "")

    thinks = DIALECTS["glm45"]._replace(thought=THOUGHTS[0])
    assert Openings(render, thinks).unthought == "\n<think></think>\n"


def test_what_needs_no_empty_thought_and_what_has_none() -> None:
    assert Openings(template(hermes), DIALECTS["hermes"]).unthought == ""
    assert Openings(template(hermes), DIALECTS["harmony"]).unthought is None
