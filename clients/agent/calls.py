"""The calls of one step: looked up, approved, checked, run side by side, each with its time.

Whatever goes wrong with a call is told to the model as its result, so that each call has one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable

import msgspec

from ramify.clients.agent.tools import BadArguments, Context, Tool, ToolCall
from ramify.clients.agent.transcript import Did

# True: run it; False, or a reason: do not.
Verdict = bool | str
Approve = Callable[[ToolCall], Verdict | Awaitable[Verdict]]
RESULT_MOST = 32_768  # characters of a result; what a tool says beyond them is left out


class Called(msgspec.Struct, frozen=True):
    """An event: a tool begins to run."""

    call: ToolCall


class Returned(msgspec.Struct, frozen=True):
    """An event: a call has its result. `ok`: the tool ran, and raised nothing."""

    call: ToolCall
    text: str
    ok: bool


class Runner:
    """Runs calls of `tools`, at most `parallel` at once. `timeout_s`: for tools that do not say."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        timeout_s: float | None,
        approve: Approve | None,
        parallel: int,
    ) -> None:
        self._tools = tools
        self._timeout_s = timeout_s
        self._approve = approve
        self._parallel = parallel

    async def run(
        self, calls: Sequence[Context], told: Callable[[Called | Returned], None], done: dict[str, Did]
    ) -> None:
        """Run all calls. `done` has the result of each as it comes, also if this is cancelled."""
        places = asyncio.Semaphore(self._parallel)

        async def one(context: Context) -> None:
            async with places:
                did = done[context.call.id] = await self._one(context, told)
            told(Returned(did.call, did.text, did.ok))

        tasks = [asyncio.create_task(one(each), name=f"tool {each.call.name}") for each in calls]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, context: Context, told: Callable[[Called | Returned], None]) -> Did:
        call = context.call
        try:
            return Did(call, shortened(await self._result(context, told)), True)
        except _Failed as error:
            return Did(call, shortened(f"Error: {error}"), False)

    async def _result(self, context: Context, told: Callable[[Called | Returned], None]) -> str:
        call = context.call
        tool = self._tools.get(call.name)
        if tool is None:
            raise _Failed(f"there is no tool {call.name!r}; there is {', '.join(self._tools) or 'none'}")
        try:
            arguments = msgspec.json.decode(call.arguments)
        except msgspec.DecodeError as error:
            raise _Failed(f"the arguments are no JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise _Failed("the arguments must be an object")
        await self._permit(call)
        told(Called(call))
        limit = tool.timeout_s if tool.timeout_s is not None else self._timeout_s
        time = asyncio.timeout(limit)
        try:
            async with time:
                return await tool(arguments, context)
        except BadArguments as error:
            raise _Failed(f"these arguments do not fit: {error}") from None
        except Exception as error:
            if time.expired():
                raise _Failed(f"{call.name} took longer than {limit:g} s and was stopped") from None
            raise _Failed(f"{type(error).__name__}: {error}") from error

    async def _permit(self, call: ToolCall) -> None:
        if self._approve is None:
            return
        try:
            found = self._approve(call)
            verdict = await found if isawaitable(found) else found
        except Exception as error:
            raise _Failed(f"the call could not be approved: {error}") from error
        if verdict is not True:
            raise _Failed("the call was not approved" + (f": {verdict}" if verdict else ""))


class _Failed(Exception):
    """Why a call has no result."""


def shortened(text: str) -> str:
    """Shorten a result to what a context can hold."""
    over = len(text) - RESULT_MOST
    return text if over <= 0 else f"{text[:RESULT_MOST]}\n[{over} characters more were left out]"
