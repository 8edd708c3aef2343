"""/tokenize and /detokenize, as vLLM and llama.cpp have them: text or a chat as token ids, and back.

What is tokenized is what the model would read: with what the tokenizer puts in front of a text, or with
the chat template around messages, up to where the answer begins.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from ramify.actors.gateway.apis.openai.dialogue import Vocabulary, word
from ramify.actors.gateway.apis.openai.errors import of_error
from ramify.actors.gateway.apis.openai.requests import Message, chat_of
from ramify.actors.gateway.apis.pictures import RequestPictures
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue
from ramify.actors.gateway.port.http import Response, json_response
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import BadRequest, InvalidField, RamifyError
from ramify.protocol.json_value import check_json
from ramify.protocol.wire import (
    Append,
    ClientMessage,
    Error,
    Ok,
    Open,
    Place,
    ServerMessage,
    ShortText,
    StateReply,
    Text,
    TokenId,
    Tools,
    Tree,
)

TOKENIZE = ("/v1/tokenize", "/tokenize")
DETOKENIZE = ("/v1/detokenize", "/detokenize")
_TEXT_ALONE = RequestPictures(False, told="text alone is tokenized here: leave pictures out")


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a text (`content` is llama.cpp's name for it), or a chat."""

    MENDS: ClassVar[dict[str, str]] = {
        "add_generation_prompt": "only true is served: ids are those of the prompt that is computed",
        "add_special_tokens": "only true is served: ids are those that the model reads",
        "add_special": "ids are as the model reads them: leave it out",
        "parse_special": "only true is served: control tokens that the text spells count as such",
        "with_pieces": "use `return_token_strs`",
    }

    model: ShortText | None = None
    prompt: Text | None = None
    content: Text | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1 << 14)] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    add_special_tokens: Literal[True] | None = None
    add_special: Literal[True] | None = None
    parse_special: Literal[True] | None = None

    def __post_init__(self) -> None:
        given = [each for each in (self.prompt, self.content, self.messages) if each is not None]
        if len(given) != 1:
            raise InvalidField("give one of `prompt`, `content` and `messages`")
        if self.tools is not None:
            if self.messages is None:
                raise InvalidField("`tools` goes with `messages`: a text has none")
            check_json(self.tools, "tools")

    def ops(self) -> list[ClientMessage]:
        """Make the frame that puts the text or chat on a branch."""
        text = self.content if self.prompt is None else self.prompt
        told = None if self.messages is None else chat_of(self.messages, _TEXT_ALONE)
        opened = Open(detach="cancel", ttl_s=0.0, tools=self.tools or None)
        return [opened, Append(id=1, text=text, messages=told)]


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    model: ShortText | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=1 << 24)]


class TokenizeAnswers(Dialogue):
    """Collects the ids of a branch. See `Dialogue`."""

    def __init__(self, request: TokenizeRequest, vocabulary: Vocabulary, served: Served) -> None:
        self.ops = request.ops()
        self._spells = bool(request.return_token_strs)
        self._vocabulary = vocabulary
        self._served = served
        self._tokens: list[int] = []
        self._last = 1  # the id of the last op
        self._more: list[ClientMessage] = []

    def receive(self, messages: Sequence[ServerMessage]) -> Response | None:
        """See `Dialogue`."""
        for message in messages:
            match message:
                case Ok():  # all of it is on the branch
                    self._look(None)
                case StateReply() if message.id == self._last:
                    for turn in message.branches[0].turns or ():
                        self._tokens += turn.tokens or ()
                    if message.next is None:
                        return self._whole()
                    self._look(message.next)
                case Error() if message.code != "skipped":
                    return self.fail(message)
        return None

    def fail(self, error: Error | RamifyError) -> Response:
        """See `Dialogue`."""
        self.over = True
        return of_error(error)

    def _look(self, after: Place | None) -> None:
        self._last += 1
        self._more.append(Tree(id=self._last, branch="main", tokens=True, after=after))

    def _whole(self) -> Response:
        self.over = True
        ids = self._tokens
        texts = _spelled(ids, self._vocabulary, self._served) if self._spells else None
        told = {
            "count": len(ids),
            "max_model_len": self._served.context,
            "tokens": ids,
            "token_strs": [word(each) for each in texts] if texts is not None else None,
        }
        return json_response(200, told)


def detokenized(request: DetokenizeRequest, vocabulary: Vocabulary, served: Served) -> Response:
    """Make the text of some ids, under vLLM's name and llama.cpp's. Raises BadRequest."""
    ids = request.tokens
    if len(ids) > served.context:
        message = f"`tokens` holds {len(ids)} ids, and a context {served.context}: send fewer"
        raise BadRequest(message, details={"field": "tokens"})
    unknown = next((each for each in ids if each >= len(vocabulary)), None)
    if unknown is not None:
        message = f"`tokens` holds {unknown}, and the model's ids end at {len(vocabulary) - 1}"
        raise BadRequest(message, details={"field": "tokens"})
    text = b"".join(_spelled(ids, vocabulary, served)).decode(errors="replace")
    return json_response(200, {"prompt": text, "content": text})


def _spelled(ids: Sequence[int], vocabulary: Vocabulary, served: Served) -> list[bytes]:
    """Return the bytes of each id. Control tokens are spelled as prompts spell them."""
    return [served.control.get(each) or vocabulary[each] for each in ids]
