"""Which path of the port speaks which protocol over WebSocket, beside ramify.v1's own."""

from ramify.actors.gateway.door import DoorKind
from ramify.actors.gateway.openai.lanes import ResponsesDoor
from ramify.actors.gateway.openai.routes import RESPONSES

DOORS: dict[str, DoorKind] = {RESPONSES: DoorKind(ResponsesDoor)}
