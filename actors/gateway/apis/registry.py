"""The APIs that this server speaks: a line each. The one file that knows them all."""

from functools import partial

from ramify.actors.gateway.apis.ai.ai_door import AiDoor
from ramify.actors.gateway.apis.ai.chats import Chats
from ramify.actors.gateway.apis.anthropic import errors as anthropic_errors
from ramify.actors.gateway.apis.anthropic.routes import AnthropicApi
from ramify.actors.gateway.apis.mcp import McpApi
from ramify.actors.gateway.apis.ollama import routes as ollama
from ramify.actors.gateway.apis.openai import errors as openai_errors
from ramify.actors.gateway.apis.openai import routes as openai
from ramify.actors.gateway.apis.openai.lanes import ResponsesDoor
from ramify.actors.gateway.port.dialogues.api import Api, Apis
from ramify.actors.gateway.port.dialogues.door import DoorKind

AI = "/v1/ai"


def apis() -> Apis:
    """Make the APIs of one gateway, with what they remember between requests."""
    anthropic, mcp = AnthropicApi(), McpApi()
    answers = openai.refuse, openai.respond, openai_errors.reshaped
    return Apis(
        http=(
            Api(openai.serves, *answers),
            Api(mcp.spoken_at, mcp.refuse, mcp.respond, lambda fault: fault),
            Api(anthropic.spoken_at, anthropic.refuse, anthropic.respond, anthropic_errors.reshaped),
            Api(openai.spoken_at, *answers),  # all else of /v1/
            Api(ollama.spoken_at, ollama.refuse, ollama.respond, ollama.reshaped),
        ),
        doors={
            openai.RESPONSES: DoorKind(ResponsesDoor),
            AI: DoorKind(partial(AiDoor, Chats()), late_tokens=True),
        },
    )
