"""Tools: what a model is told of them, how its arguments are checked, and what runs.

A function's type hints make the schema, its docstring the description; `Annotated[str,
msgspec.Meta(description="...")]` describes a parameter. Arguments are checked and converted by
msgspec: what does not fit is told to the model, which may try again.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_type_hints, overload

import msgspec

from ramify.clients.branch import Branch

_JSON = msgspec.json.Encoder(enc_hook=str)


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model makes. `arguments`: JSON text, as it came."""

    id: str
    name: str
    arguments: str

    @staticmethod
    def of(call: Mapping[str, Any]) -> "ToolCall":
        """Read a call from an entry of `done.tool_calls`."""
        function = call["function"]
        return ToolCall(call["id"], function["name"], function["arguments"])


class Context(msgspec.Struct, frozen=True):
    """The context of a tool call: a parameter with this annotation gets it, and is hidden from the
    model.

    A sub-agent may fork `branch`: the fork has the history up to the call.
    """

    branch: Branch
    call: ToolCall


class BadArguments(Exception):
    """The model's arguments do not fit. The message goes back to it."""


Run = Callable[[dict[str, Any], Context], Awaitable[Any]]


class Tool:
    """A tool that an agent may call.

    `parameters`: a JSON schema. `timeout_s`: how long a call may take, if not as long as the agent says.
    """

    def __init__(
        self,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        run: Run,
        *,
        timeout_s: float | None = None,
        declared: Mapping[str, Any] | None = None,
    ) -> None:
        """`declared`: the function as OpenAI's shape has it, where it was given so."""
        self.name = name
        self.description = description
        self.parameters = dict(parameters)
        self._declared = declared
        self.timeout_s = timeout_s
        self._run = run

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in the form of `open.tools` and OpenAI's API; as declared, where it was."""
        function = dict(self._declared or {})
        if not function:
            about = {"description": self.description} if self.description else {}
            function = {"name": self.name, **about, "parameters": self.parameters}
        return {"type": "function", "function": function}

    async def __call__(self, arguments: dict[str, Any], context: Context) -> str:
        """Run the tool. Returns its result as text. Raises BadArguments, and what the tool raises."""
        return as_text(await self._run(arguments, context))

    @staticmethod
    def declared(
        schema: Mapping[str, Any], run: Callable[..., Any], *, timeout_s: float | None = None
    ) -> "Tool":
        """Make a tool of OpenAI's shape. `run` gets the arguments by name; the required ones are there.

        Raises ValueError for a dict that declares no function.
        """
        function = schema.get("function", schema)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"this declares no function: {schema!r}")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        required = list(parameters.get("required", ()))

        async def call(arguments: dict[str, Any], context: Context) -> Any:
            missing = [name for name in required if name not in arguments]
            if missing:
                raise BadArguments(f"the argument {missing[0]!r} is missing")
            return await called(run, arguments)

        about = function.get("description", "")
        return Tool(function["name"], about, parameters, call, timeout_s=timeout_s, declared=function)

    @staticmethod
    def of(
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float | None = None,
    ) -> "Tool":
        """Make a tool of a Python function. One that is not async runs in a thread.

        Raises TypeError that names a parameter which a model cannot give.
        """
        name = name or function.__name__
        fields, wants = _fields(function, name)
        struct = msgspec.defstruct(f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True)

        async def call(arguments: dict[str, Any], context: Context) -> Any:
            try:
                given = msgspec.convert(arguments, struct, strict=False)
            except msgspec.ValidationError as error:
                raise BadArguments(str(error)) from None
            values = {field: getattr(given, field) for field in struct.__struct_fields__}
            return await called(function, values | dict.fromkeys(wants, context))

        told = inspect.getdoc(function) or ""
        return Tool(
            name,
            told if description is None else description,
            _schema(struct),
            call,
            timeout_s=timeout_s,
        )


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, timeout_s: float | None = None
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **settings: Any) -> Any:
    """Make a tool of a function: `@tool`, or `@tool(name="add", timeout_s=5)`."""
    if function is not None:
        return Tool.of(function)
    return lambda made: Tool.of(made, **settings)


async def called(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function: await it, or run it in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(**values)
    found = await asyncio.to_thread(function, **values)
    return await found if inspect.isawaitable(found) else found


def as_text(value: Any) -> str:
    """Write a value for the model: a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else _JSON.encode(value).decode()


def _fields(function: Callable[..., Any], name: str) -> tuple[list[Any], list[str]]:
    """Make the fields of a struct of its parameters. Returns also which parameters want a `Context`."""
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    wants: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise TypeError(f"{name}({parameter}): a model gives arguments by name, one by one")
        hint = hints.get(parameter.name)
        if hint is None:
            raise TypeError(f"{name}({parameter.name}) has no type hint: the model is told by it")
        if hint is Context:
            wants.append(parameter.name)
        elif parameter.default is parameter.empty:
            fields.append((parameter.name, hint))
        else:
            fields.append((parameter.name, hint, _default(parameter.default)))
    return fields, wants


def _default(value: Any) -> Any:
    """Make msgspec's default. It copies empty containers and refuses others; a function shares them."""
    return (
        msgspec.field(default_factory=lambda: value) if isinstance(value, list | dict | set) else value
    )


def _schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Make the JSON schema of a struct, without a title; what it refers to is in `$defs`."""
    _, components = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    schema: dict[str, Any] = components.pop(struct.__name__)
    schema.pop("title", None)
    if components:
        schema["$defs"] = components
    return schema
