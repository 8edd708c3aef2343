"""A response that was stored: who fetches, deletes or cancels it asks the branch that it is.

Of one in the background the branch is all that is needed: its stream is told again from any place, and
its end even if the process that began it did not live to keep the object.
"""

from collections.abc import Sequence
from itertools import count
from urllib.parse import parse_qs

import msgspec

from ramify.actors.gateway.apis.openai.dialogue import Vocabulary
from ramify.actors.gateway.apis.openai.errors import Refused, of_error
from ramify.actors.gateway.apis.openai.requests import bad_request
from ramify.actors.gateway.apis.openai.response_items import within
from ramify.actors.gateway.apis.openai.response_output import Events, OutputWriter
from ramify.actors.gateway.apis.openai.responses import (
    INPUT,
    META,
    UNDER_WAY,
    counted_tokens,
    end_of,
    incompleteness,
    keyed,
    status_of,
)
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue
from ramify.actors.gateway.port.dialogues.exchange import COMMENT
from ramify.actors.gateway.port.http import Response, json_response
from ramify.protocol.errors import BadRequest, RamifyError
from ramify.protocol.stored_response import Stored
from ramify.protocol.wire import (
    BranchState,
    Cancel,
    ClientMessage,
    Delta,
    Done,
    Drop,
    Error,
    Event,
    JsonObject,
    Ok,
    Open,
    ServerMessage,
    Set,
    StateReply,
    Tree,
)

MOST_ITEMS = 100  # in a page, as with OpenAI


def _given(query: str) -> dict[str, str]:
    """Read the fields of a URL. Raises BadRequest."""
    try:
        given = parse_qs(query, keep_blank_values=True, max_num_fields=32)
    except ValueError:
        raise BadRequest("the query has too many fields") from None
    return {name: values[-1] for name, values in given.items()}


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def streamed_after(query: str, stored: Stored) -> int | None:
    """Find the last event that the client has (-1: none); None: it wants the object, no stream.

    Raises BadRequest.
    """
    given = _given(query)
    stream, after = given.get("stream", "false"), given.get("starting_after")
    number = -1 if after is None else _number(after)
    if stream not in ("true", "false"):
        raise bad_request("`stream` must be true or false")
    if number is None:
        raise bad_request("`starting_after` must be an event's `sequence_number`: a number from 0")
    if stream == "false":
        if after is not None:
            raise bad_request("`starting_after` needs `stream=true`")
        return None
    if stored.start is None:
        raise bad_request(
            "`stream` is for responses that were created with `background: true`: fetch this one whole"
        )
    return number


class ItemPage(msgspec.Struct, frozen=True):
    """Which of a response's input items are wanted."""

    limit: int = 20
    order: str = "desc"
    after: str | None = None

    @classmethod
    def of(cls, query: str) -> "ItemPage":
        """Read the page from a URL. Raises BadRequest."""
        given = _given(query)
        limit, order = _number(given.get("limit", "20")) or 0, given.get("order", "desc")
        if not 1 <= limit <= MOST_ITEMS:
            raise BadRequest(f"`limit` must be from 1 to {MOST_ITEMS}", details={"field": "limit"})
        if order not in ("asc", "desc"):
            raise BadRequest("`order` must be asc or desc", details={"field": "order"})
        return cls(limit, order, given.get("after"))

    def cut(self, items: list[JsonObject]) -> JsonObject:
        """Cut the page out of `items`, which are in the order of the input."""
        ordered = items if self.order == "asc" else items[::-1]
        begin = 0
        if self.after is not None:
            places = [i for i, item in enumerate(ordered) if item.get("id") == self.after]
            if not places:
                raise BadRequest("`after` is the id of no item here", details={"field": "after"})
            begin = places[0] + 1
        page = ordered[begin : begin + self.limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": begin + self.limit < len(ordered),
        }


def _opening(stored: Stored) -> Open:
    have = {} if stored.start is None else {stored.branch: stored.start}
    return Open(session=stored.session, key=stored.key, have=have, parts=bool(have))


class _KeptTool(msgspec.Struct):
    type: str
    name: str = ""  # of functions and namespaces
    tools: list["_KeptTool"] = []


class _KeptResponse(msgspec.Struct):
    """The fields that are read of a kept object."""

    id: str
    status: str
    top_logprobs: int
    tools: list[_KeptTool]


def _kept_as(branch: BranchState, key: str, ident: str) -> JsonObject | None:
    """Return the kept object if it has this id: an id that was altered may open the branch, too."""
    kept = (branch.meta or {}).get(META)
    found = keyed(kept, key) if isinstance(kept, dict) else {}
    try:  # `meta` may be written by whoever has the session
        return found if msgspec.convert(found, _KeptResponse).id == ident else None
    except msgspec.ValidationError:
        return None


class StoredDialogue(Dialogue):
    """DELETE and cancel of a response, or a `page` of its input items. `ask`: of the branch."""

    keeps = True

    def __init__(
        self, stored: Stored, ident: str, ask: "Cancel | Drop | None", page: ItemPage | None = None
    ) -> None:
        self.ops: list[ClientMessage] = [_opening(stored)]
        if ask is not None:
            self.ops.append(ask)
        self._branch = stored.branch
        self._key = stored.key
        self._ident = ident
        self._ask = ask
        self._page = page
        self._object: JsonObject | None = None
        self._input: list[JsonObject] | None = None

    def receive(self, messages: Sequence[ServerMessage]) -> Response | None:
        """See `Dialogue`."""
        for message in messages:
            match message:
                case StateReply():
                    self._object = self._kept(message)
                    if self._object is None:
                        return self._answer(of_error(not_found(self._ident)))
                    if self._page is not None:
                        return self._answer(self._items(self._page))
                case Ok() | Done() if self._object is not None:
                    return self._answer(self._done(self._object))
                case Error(code="no_session" | "no_branch"):
                    return self._answer(of_error(not_found(self._ident)))
                case Error():
                    return self._answer(of_error(message))
        return None

    def fail(self, error: RamifyError) -> Response:
        """See `Dialogue`."""
        return self._answer(of_error(error))

    def _kept(self, state: StateReply) -> JsonObject | None:
        for branch in state.branches:
            if branch.branch == self._branch:
                self._input = (branch.meta or {}).get(INPUT)
                return _kept_as(branch, self._key, self._ident)
        return None

    def _items(self, page: ItemPage) -> Response:
        if self._input is None:
            message = "the input was too long to be kept with the response"
            return of_error(Refused(404, message, param=None, named="input_items_not_found"))
        try:
            return json_response(200, page.cut(self._input))
        except BadRequest as error:
            return of_error(error)

    def _done(self, kept: JsonObject) -> Response:
        if isinstance(self._ask, Drop):
            return json_response(200, {"id": self._ident, "object": "response", "deleted": True})
        status = "cancelled" if kept["status"] in UNDER_WAY else kept["status"]
        return json_response(200, {**kept, "status": status})

    def _answer(self, response: Response) -> Response:
        self.over = True
        return response


class RetoldDialogue(Dialogue):
    """GET of a response, from its branch.

    `after`: a stream is wanted, behind the event of this number (-1: from its beginning); None: the
    object. What was said in the background comes as deltas; an op behind its end says that it is all.
    """

    keeps = True

    def __init__(
        self, stored: Stored, ident: str, vocabulary: Vocabulary, after: int | None = None
    ) -> None:
        self.ops = [_opening(stored)]
        self.streams = after is not None
        self._stored = stored
        self._ident = ident
        self._vocabulary = vocabulary
        self._events = Events(after=after if after is not None else -1)
        self._output: OutputWriter | None = None
        self._kept: JsonObject = {}
        self._more: list[ClientMessage] = []
        self._ids = count(1)  # of ops
        self._fence: int | None = None  # id of the op behind whose answer all is said
        self._behind: int | None = None  # and of the look that is taken then
        self._began = False

    def receive(self, messages: Sequence[ServerMessage]) -> bytes | Response | None:
        """See `Dialogue`."""
        out: list[bytes] = []
        for message in messages:
            match message:
                case StateReply():
                    found = [each for each in message.branches if each.branch == self._stored.branch]
                    kept = _kept_as(found[0], self._stored.key, self._ident) if found else None
                    if kept is None:
                        return self._fails(out, not_found(self._ident))
                    self._kept = kept
                    if (ended := self._look(out, found[0], message.id)) is not None:
                        return ended
                case Delta() if message.branch == self._stored.branch and self._output is not None:
                    out.append(self._output.say(message))
                case Event(op="generate" | "set" | "drop") if message.branch == self._stored.branch:
                    if self._fence is None:  # it may be over
                        self._more.append(Tree(id=next(self._ids), branch=self._stored.branch))
                case Ok() if message.id == self._fence:
                    self._behind = next(self._ids)
                    self._more.append(Tree(id=self._behind, branch=self._stored.branch))
                case Error():
                    gone = message.code in ("no_session", "no_branch")
                    return self._fails(out, not_found(self._ident) if gone else message)
        return self._pieces(out)

    def fail(self, error: RamifyError) -> bytes | Response | None:
        """See `Dialogue`."""
        return self._fails([], error)

    # ---

    def _look(self, out: list[bytes], branch: BranchState, op: int | None) -> bytes | Response | None:
        """Look at the branch. Returns the end of the answer, if the response is over and all is told."""
        over = self._kept["status"] not in UNDER_WAY
        if not self.streams and (over or branch.running is not None or branch.reason is None):
            self.over = True
            return json_response(200, self._kept)
        if self._output is None:
            out.append(self._begin())
        if op is not None and op == self._behind:
            return self._ends(out, branch, None if over else status_of(branch.reason))
        if self._fence is None and (over or (branch.running is None and branch.reason is not None)):
            self._fence = next(self._ids)
            self._more.append(Set(id=self._fence, branch=self._stored.branch))
        return None

    def _begin(self) -> bytes:
        kept = self._kept
        spaces = {
            within(space.name, tool.name): (space.name, tool.name)
            for space in msgspec.convert(kept["tools"], list[_KeptTool])
            if space.type == "namespace"
            for tool in space.tools
        }
        events = self._events if self.streams else None
        unique, top = self._stored.unique, kept["top_logprobs"]
        self._output = OutputWriter(unique, events, self._vocabulary, top, spaces, even=True)
        if events is None:
            return b""
        told: JsonObject = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        begun = {**kept, "status": "in_progress", **told}
        created = events.of("response.created", response=begun)
        return created + events.of("response.in_progress", response=begun)

    def _ends(self, out: list[bytes], branch: BranchState, status: str | None) -> bytes | Response:
        """End the answer. `status`: of a response whose object was not kept as it ended."""
        assert self._output is not None
        self.over = True
        whole, events = self._kept, self._events
        ended = status or whole["status"]
        out.append(self._output.end(completed=ended == "completed", spoken=ended != "failed"))
        if status is not None:
            failed = {"code": "server_error", "message": "the generation failed"}
            whole |= {
                "status": status,
                "error": failed if status == "failed" else None,
                "incomplete_details": incompleteness(status),
                "output": self._output.shown(status),
                "usage": counted_tokens(branch.usage) if branch.usage is not None else None,
            }
        if not self.streams:
            return json_response(200, whole)
        out.append(events.of(end_of(ended), response=whole))
        if events.after > events.last:
            message = f"`starting_after` is over the end: the last event is {events.last}"
            return of_error(bad_request(message))
        return self._pieces(out) or (b"" if self._began else COMMENT)

    def _fails(self, out: list[bytes], error: Error | RamifyError) -> bytes | Response:
        self.over = True
        if self._pieces(out) is None and not self._began:
            return of_error(error)
        return b"".join(out) + self._events.broken(error)

    def _pieces(self, out: list[bytes]) -> bytes | None:
        data = b"".join(out)
        self._began = self._began or bool(data)
        return data or None


def not_found(ident: str) -> Refused:
    """Make the 404: the response was never kept, or is not any more."""
    message = (
        f"the response {ident[:64]!r} is not kept here: it had `store: false`, was too long to be "
        "kept, was deleted, or its session has ended"
    )
    return Refused(404, message, param=None, named="response_not_found")
