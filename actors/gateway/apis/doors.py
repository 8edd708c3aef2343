"""Which path of the port speaks which protocol over WebSocket, beside ramify.v1's own."""

from ramify.actors.gateway.apis.ai.ai_door import AiDoor
from ramify.actors.gateway.apis.openai.lanes import ResponsesDoor
from ramify.actors.gateway.apis.openai.routes import RESPONSES
from ramify.actors.gateway.port.dialogues.door import DoorKind

AI = "/v1/ai"
DOORS: dict[str, DoorKind] = {
    RESPONSES: DoorKind(ResponsesDoor),
    AI: DoorKind(AiDoor, late_tokens=True),
}
