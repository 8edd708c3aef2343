"""The OpenAI Agents SDK: an agent with a tool, over both APIs, whole and streamed. Usage: URL MODEL"""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

url, name = sys.argv[1:]


@function_tool
def calculator(expression: str) -> str:
    """Work out a sum"""
    left, _, right = expression.split()
    return str(int(left) + int(right))


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="Adder",
            model=kind(model=name, openai_client=client),
            model_settings=ModelSettings(temperature=0),
            tools=[calculator],
        )
        result = await Runner.run(agent, "What is 31 + 47?")
        assert "78" in result.final_output, result
        streamed = Runner.run_streamed(agent, "What is 31 + 47?")
        kinds = [event.type async for event in streamed.stream_events()]
        assert "run_item_stream_event" in kinds
        assert streamed.final_output == result.final_output
    print("ok")


asyncio.run(main())
