"""Which path of the port speaks which protocol over WebSocket, beside ramify.v1's own."""

from ramify.actors.gateway.ai.ai_door import AiDoor
from ramify.actors.gateway.door import DoorKind
from ramify.actors.gateway.openai.lanes import ResponsesDoor
from ramify.actors.gateway.openai.routes import RESPONSES

AI = "/v1/ai"
DOORS: dict[str, DoorKind] = {
    RESPONSES: DoorKind(ResponsesDoor),
    AI: DoorKind(AiDoor, late_tokens=True),
}
