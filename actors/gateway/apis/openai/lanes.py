"""Responses over WebSocket: `response.create` in, the events of /v1/responses out.

Responses with the same `stream_id` are a lane: they follow each other. Lanes run side by side. Nothing
of a conversation is sent again: `previous_response_id` forks a branch, as over HTTP. A response that is
not stored can be continued while it is its lane's last one.
"""

import time
from collections import deque
from functools import partial
from typing import Any

import msgspec

from ramify.actors.gateway.apis.openai.errors import Refused, status_and_body, unknown_model
from ramify.actors.gateway.apis.openai.requests import decode
from ramify.actors.gateway.apis.openai.response_output import Events
from ramify.actors.gateway.apis.openai.response_requests import LaneRequest, StreamId
from ramify.actors.gateway.apis.openai.responses import ResponseDialogue
from ramify.actors.gateway.port.dialogues.channel import Channel
from ramify.actors.gateway.port.dialogues.door import Line
from ramify.actors.gateway.port.http import Response
from ramify.actors.gateway.port.hub import Hub
from ramify.protocol.errors import BadRequest, Close, LimitExceeded, Overloaded, RamifyError
from ramify.protocol.wire import Cancel, JsonObject

MOST_LANES = 64  # of a socket, idle ones with a response that can be continued included
MOST_WAITING = 64  # requests of a socket that wait for the one before them in their lane
CANCEL = 1000  # id of the op: above those of a dialogue


class _Envelope(msgspec.Struct, frozen=True):
    """The fields by which a message is routed to its lane."""

    type: str
    stream_id: StreamId = None


class _CancelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ours: ends the response that runs, by its id or in its lane."""

    type: str
    response_id: str | None = None
    stream_id: StreamId = None


class _Waiting(msgspec.Struct, frozen=True):
    """A request whose turn in its lane has not come."""

    request: LaneRequest
    size: int


class _Lane:
    """A lane. `running`: the channel of its response under way; `last`: of one that is not stored."""

    def __init__(self, stream_id: str | None) -> None:
        self.stream_id = stream_id
        self.running: tuple[Channel, ResponseDialogue] | None = None
        self.last: tuple[Channel, ResponseDialogue] | None = None
        self.waiting: deque[_Waiting] = deque()

    @property
    def idle(self) -> bool:
        return self.running is None and not self.waiting

    def forget(self) -> None:
        """Drop the last response, which cannot be continued any more."""
        if self.last is not None:
            channel, dialogue = self.last
            self.last = None
            channel.release(dialogue.forget())


class ResponsesDoor:
    """See `Door`."""

    def __init__(self, hub: Hub, line: Line) -> None:
        self._hub = hub
        self._line = line
        self._lanes: dict[str | None, _Lane] = {}
        self._waiting = 0
        self._waiting_bytes = 0
        self._stopping: str | None = None

    @property
    def busy(self) -> bool:
        """See `Door`."""
        return any(not lane.idle for lane in self._lanes.values())

    def receive(self, message: bytes) -> bool:
        """See `Door`."""
        stream_id: str | None = None
        try:
            envelope = decode(message, _Envelope)
            stream_id = envelope.stream_id
            match envelope.type:
                case "response.create":
                    self._create(decode(message, LaneRequest), len(message))
                case "response.cancel":
                    self._cancel(decode(message, _CancelRequest))
                case "response.steer":
                    self._refuse_steering(message)
                case other:
                    raise BadRequest(
                        f"unknown event {other[:64]!r}: `type` is response.create or response.cancel",
                        details={"field": "type"},
                    )
        except RamifyError as error:
            self._say_error(*status_and_body(error), stream_id)
            return not (error.details or {}).get("parse")
        return True

    def refuse(self, error: RamifyError) -> None:
        """See `Door`."""
        self._say_error(*status_and_body(error), None)

    def throttle(self, throttled: bool) -> None:
        """See `Door`."""
        for lane in self._lanes.values():
            if lane.running is not None:
                lane.running[0].throttle(throttled)

    def drain(self, reason: str) -> None:
        """See `Door`."""
        self._stopping = reason
        self._close_if_done()

    def end(self) -> None:
        """See `Door`."""
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.waiting.clear()
            lane.forget()
            running, lane.running = lane.running, None  # the channel knows its lane
            if running is not None:
                running[0].release()

    # --- what clients ask ---------------------------------------------------------------------

    def _create(self, request: LaneRequest, size: int) -> None:
        """Raises RamifyError."""
        credential = self._line.credential
        if self._stopping is not None:
            raise Overloaded(f"{self._stopping}: connect again", retry_ms=1000)
        if credential is None:
            return
        lane = self._lane(request.stream_id)
        if lane.idle:
            try:
                self._begin(lane, request, size)
            except RamifyError:
                self._clear(lane)
                raise
            return
        room = self._hub.limits.frame_bytes
        if self._waiting >= MOST_WAITING or self._waiting_bytes + size > room:
            raise LimitExceeded(
                f"{self._waiting} requests wait on this socket: at most {MOST_WAITING} may, with "
                f"{room} bytes; wait for answers, or use more lanes",
                details={"max": MOST_WAITING},
            )
        self._waiting += 1
        self._waiting_bytes += size
        lane.waiting.append(_Waiting(request, size))

    def _lane(self, stream_id: str | None) -> _Lane:
        """Raises LimitExceeded."""
        lane = self._lanes.get(stream_id)
        if lane is None:
            if len(self._lanes) >= MOST_LANES:
                self._clear_one()
            lane = self._lanes[stream_id] = _Lane(stream_id)
        return lane

    def _clear_one(self) -> None:
        """Drop the lane that has been idle for longest. Raises LimitExceeded if none is idle."""
        for stream_id, lane in self._lanes.items():
            if lane.idle:
                lane.forget()
                del self._lanes[stream_id]
                return
        raise LimitExceeded(
            f"{MOST_LANES} lanes are busy on this socket: wait for one, or open another socket",
            details={"max": MOST_LANES, "field": "stream_id"},
        )

    def _begin(self, lane: _Lane, request: LaneRequest, size: int) -> None:
        """Raises RamifyError; then the lane is idle."""
        credential = self._line.credential
        assert credential is not None
        served = self._hub.status.model
        if request.model is not None and request.model != served:
            raise unknown_model(request.model, served)
        fields: JsonObject = {} if lane.stream_id is None else {"stream_id": lane.stream_id}
        events = Events(lambda _, data: self._line.frame(data), fields)
        dialogue = ResponseDialogue(
            request, served, int(time.time()), self._hub.vocabulary, events, known=self._hub.served
        )
        if self._line.share is not None:
            self._line.share.admit(len(dialogue.ops), self._hub.clock.now())
        channel = Channel(
            self._hub,
            self._line,
            dialogue,
            credential,
            size,
            partial(self._refused, lane.stream_id),
            partial(self._ended, lane),
            lingers=not request.stores,
        )
        lane.running = (channel, dialogue)
        self._lanes[lane.stream_id] = self._lanes.pop(lane.stream_id)  # the idle ones come first
        channel.start()

    def _cancel(self, request: _CancelRequest) -> None:
        """Raises BadRequest."""
        for lane in self._lanes.values():
            if lane.running is None:
                continue
            channel, dialogue = lane.running
            if request.response_id is not None:
                meant = dialogue.ident == request.response_id
            else:
                meant = lane.stream_id == request.stream_id
            if meant:
                channel.send([Cancel(id=CANCEL, branch=dialogue.branch)])
                return
        field = "response_id" if request.response_id is not None else "stream_id"
        message = f"no response runs here with this `{field}`: it has ended, or is not of this socket"
        raise Refused(404, message, param=field, named="response_not_found")

    def _refuse_steering(self, message: bytes) -> None:
        """Answer as the protocol asks where models cannot be steered."""
        given = msgspec.json.decode(message)
        error = {
            "type": "invalid_request_error",
            "code": "steering_not_supported",
            "message": "a response here takes no input while it runs: send it with `response.create` "
            "and `previous_response_id` when it has ended",
        }
        steer = {key: given.get(key) for key in ("previous_response_id", "input")}
        event = {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer}
        self._say(event)

    # --- what channels tell -------------------------------------------------------------------

    def _refused(self, stream_id: str | None, response: Response) -> None:
        self._say_error(response.status, msgspec.json.decode(response.body), stream_id)

    def _ended(self, lane: _Lane, channel: Channel) -> None:
        running, lane.running = lane.running, None
        if running is not None and running[1].succeeded:
            lane.forget()
        if running is not None and not running[1].stores:
            if running[1].succeeded:
                lane.last = running
            else:
                channel.release()
        while lane.running is None and lane.waiting:
            waiting = lane.waiting.popleft()
            self._waiting -= 1
            self._waiting_bytes -= waiting.size
            try:
                self._begin(lane, waiting.request, waiting.size)
            except RamifyError as error:
                self._say_error(*status_and_body(error), lane.stream_id)
        self._clear(lane)
        self._close_if_done()

    # ---

    def _clear(self, lane: _Lane) -> None:
        """Drop a lane that holds nothing."""
        if lane.idle and lane.last is None and self._lanes.get(lane.stream_id) is lane:
            del self._lanes[lane.stream_id]

    def _close_if_done(self) -> None:
        if self._stopping is not None and not self.busy:
            self._line.close(Close.DRAINING, self._stopping)

    def _say_error(self, status: int, body: dict[str, Any], stream_id: str | None) -> None:
        event: JsonObject = {"type": "error", "status": status, "error": body["error"]}
        if stream_id is not None:
            event["stream_id"] = stream_id
        self._say(event)

    def _say(self, event: JsonObject) -> None:
        self._line.write(self._line.frame(msgspec.json.encode(event)))
