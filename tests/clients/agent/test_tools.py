"""Tools: their schemas, and what arguments of a model become."""

import asyncio
from typing import Annotated, Any, Literal, cast

import msgspec
import pytest

from ramify.clients.agent.calls import RESULT_MOST, Called, Returned, Runner
from ramify.clients.agent.tools import BadArguments, Context, Tool, ToolCall, tool
from ramify.clients.agent.transcript import Did


class Place(msgspec.Struct):
    city: str
    country: str = "Peru"


@tool
def weather(
    place: Place,
    unit: Literal["celsius", "fahrenheit"] = "celsius",
    days: Annotated[int, msgspec.Meta(ge=1, le=7, description="how many days")] = 1,
    tags: list[str] = [],  # noqa: B006
) -> dict[str, Any]:
    """The weather in a place.

    For the next days.
    """
    return {"city": place.city, "unit": unit, "days": days, "tags": tags}


@tool(name="add", timeout_s=5)
async def sum_up(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def context(name: str = "t", arguments: str = "{}", ident: str = "1") -> Context:
    return Context(cast(Any, None), ToolCall(ident, name, arguments))


async def test_the_schema_is_read_off_the_hints() -> None:
    function = weather.schema["function"]
    assert function["description"].startswith("The weather in a place.\n\nFor")
    parameters = function["parameters"]
    assert parameters["required"] == ["place"]
    assert parameters["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert parameters["$defs"]["Place"]["properties"]["country"]["default"] == "Peru"
    assert parameters["properties"]["unit"]["enum"] == ["celsius", "fahrenheit"]
    assert parameters["properties"]["days"]["description"] == "how many days"
    assert "title" not in parameters
    assert sum_up.name == "add"
    assert sum_up.timeout_s == 5


async def test_arguments_are_checked_and_converted() -> None:
    text = await weather({"place": {"city": "Lima"}, "days": "3", "tags": ["x"]}, context())
    assert text == '{"city":"Lima","unit":"celsius","days":3,"tags":["x"]}'
    assert await sum_up({"a": 1, "b": 2.5}, context()) == "3.5"
    for arguments, why in (
        ({}, "missing required field `place`"),
        ({"place": {"city": "Lima"}, "days": 9}, r"<= 7 - at `\$.days`"),
        ({"place": {"city": "Lima"}, "cities": 1}, "unknown field `cities`"),
        ({"place": "Lima"}, r"at `\$.place`"),
    ):
        with pytest.raises(BadArguments, match=why):
            await weather(cast(Any, arguments), context())


async def test_a_context_is_given_and_not_told() -> None:
    @tool
    async def where(question: str, at: Context) -> str:
        return f"{question} {at.call.id}"

    assert list(where.parameters["properties"]) == ["question"]
    assert await where({"question": "Where?"}, context(ident="c7")) == "Where? c7"


def test_what_a_model_cannot_give() -> None:
    def untyped(a, b: int):  # type: ignore[no-untyped-def]
        pass

    def many(*names: str) -> None:
        pass

    with pytest.raises(TypeError, match=r"untyped\(a\) has no type hint"):
        Tool.of(untyped)
    with pytest.raises(TypeError, match="one by one"):
        Tool.of(many)


async def test_a_tool_of_openais_shape() -> None:
    schema = {
        "type": "function",
        "function": {"name": "cd", "parameters": {"type": "object", "required": ["folder"]}},
    }
    cd = Tool.declared(schema, lambda folder: f"in {folder}")
    assert cd.schema == schema
    assert await cd({"folder": "a"}, context()) == "in a"
    with pytest.raises(BadArguments, match="'folder' is missing"):
        await cd({}, context())
    with pytest.raises(ValueError, match="declares no function"):
        Tool.declared({"name": 3}, print)


# --- the calls of one step --------------------------------------------------------------------------


class Calls:
    """A runner, and what it told."""

    def __init__(self, *tools: Tool, **settings: Any) -> None:
        given = {"timeout_s": 5.0, "approve": None, "parallel": 8} | settings
        self.runner = Runner({each.name: each for each in tools}, **given)
        self.told: list[Called | Returned] = []
        self.done: dict[str, Did] = {}

    async def run(self, *calls: tuple[str, str]) -> list[tuple[str, bool]]:
        given = [context(name, text, str(i)) for i, (name, text) in enumerate(calls)]
        await self.runner.run(given, self.told.append, self.done)
        return [(self.done[str(i)].text, self.done[str(i)].ok) for i in range(len(calls))]


async def test_whatever_goes_wrong_is_told_to_the_model() -> None:
    @tool
    def broken() -> str:
        raise RuntimeError("no disk")

    found = await Calls(sum_up, broken).run(
        ("add", '{"a": 1, "b": 2}'),
        ("sub", "{}"),
        ("add", '{"a": 1'),
        ("add", "[]"),
        ("add", '{"a": "x", "b": 2}'),
        ("broken", "{}"),
    )
    assert found[0] == ("3.0", True)
    assert [ok for _, ok in found[1:]] == [False] * 5
    for (text, _), part in zip(
        found[1:],
        (
            "there is no tool 'sub'; there is add, broken",
            "the arguments are no JSON",
            "must be an object",
            "do not fit: Expected `float`",
            "RuntimeError: no disk",
        ),
        strict=True,
    ):
        assert text.startswith("Error: ")
        assert part in text


async def test_calls_run_side_by_side_as_many_as_may() -> None:
    running = most = 0
    free = asyncio.Event()

    @tool
    async def wait() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            free.set()
        await free.wait()
        running -= 1
        return "ok"

    calls = Calls(wait, parallel=3)
    assert await calls.run(*[("wait", "{}")] * 6) == [("ok", True)] * 6
    assert most == 3


async def test_a_call_that_takes_too_long_is_stopped() -> None:
    ended = []

    @tool(timeout_s=0.01)
    async def slow() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return "never"

    ((text, ok),) = await Calls(slow).run(("slow", "{}"))
    assert (text, ok) == ("Error: slow took longer than 0.01 s and was stopped", False)
    assert ended == [True]


async def test_a_tools_own_timeout_is_an_error_of_its() -> None:
    @tool
    async def fetch() -> str:
        raise TimeoutError("the site did not answer")

    ((text, _),) = await Calls(fetch).run(("fetch", "{}"))
    assert text == "Error: TimeoutError: the site did not answer"


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (True, "3.0"),
        (False, "Error: the call was not approved"),
        ("too costly", "Error: the call was not approved: too costly"),
    ],
)
async def test_calls_are_approved(verdict: bool | str, text: str) -> None:
    async def later(call: ToolCall) -> bool | str:
        return verdict

    for approve in (lambda call: verdict, later):
        calls = Calls(sum_up, approve=approve)
        assert (await calls.run(("add", '{"a": 1, "b": 2}')))[0][0] == text
        assert any(isinstance(each, Called) for each in calls.told) == (verdict is True)


async def test_a_long_result_is_shortened() -> None:
    @tool
    def read() -> str:
        return "x" * (RESULT_MOST + 7)

    ((text, ok),) = await Calls(read).run(("read", "{}"))
    assert ok
    assert text.endswith("\n[7 characters more were left out]")


async def test_cancelling_ends_what_runs_and_keeps_what_is_done() -> None:
    began = asyncio.Event()

    @tool
    async def hang() -> str:
        began.set()
        await asyncio.Event().wait()
        return ""

    calls = Calls(sum_up, hang)
    task = asyncio.create_task(calls.run(("add", '{"a": 1, "b": 2}'), ("hang", "{}")))
    await began.wait()
    while "0" not in calls.done:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls.done.keys() == {"0"}
