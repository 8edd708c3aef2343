"""From the messages of a request to the turns of a chat template.

Turns of one role that follow each other are one turn, results of tools are turns of their own in front
of what the user says beside them, and a thought is the assistant's if it has our signature. A system's
turn between others, which half of the published templates refuse, is a part of the user's turn or of the
result in front of it. The last turn of the assistant is a prefill: the answer goes on with it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from ramify.actors.gateway.apis.anthropic.blocks import (
    MOST_MESSAGES,
    Block,
    CacheControl,
    ImageBlock,
    MessageParam,
    RedactedThinkingBlock,
    System,
    TextBlock,
    ThinkingBlock,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from ramify.actors.gateway.apis.anthropic.signatures import Signer
from ramify.actors.gateway.apis.pictures import RequestPictures
from ramify.protocol.errors import InvalidField
from ramify.protocol.wire import ChatMessage, JsonObject, MessagePlace

BILLING = "x-anthropic-billing-header:"  # a line of Claude Code that changes with each request
REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # as agents mark what no user said
END = 1 << 30  # characters: all of a turn
ERROR = "Error: "  # in front of a result with `is_error`, which templates have no place for


class RequestConversation(NamedTuple):
    """The turns of a request. `prefill`: text that the answer begins with.

    `billed`: a billing header was taken out. `forgot`: a thought was left out because it is not ours.
    `marks`: the breakpoints of the system's text and of `messages`, in order, with the turn and the
    characters of it in front of them.
    """

    messages: list[ChatMessage]
    prefill: str
    billed: bool
    forgot: bool
    marks: "list[tuple[CacheControl, MessagePlace]]" = []
    images: list[bytes] = []
    places: list[str] = []  # the fields that have them

    @property
    def head(self) -> MessagePlace:
        """Where tools and the system's text end: templates write tools behind that text, too."""
        return MessagePlace(int(bool(self.messages) and self.messages[0].role == "system"))


def conversation_of(
    system: System | None,
    messages: Sequence[MessageParam],
    signer: Signer,
    *,
    joins: bool = False,
    reads: bool = False,
    fetches: bool = False,
) -> RequestConversation:
    """`joins`: the template takes no user's turn behind results: what is said there joins the last one.
    `reads`, `fetches`: see `RequestPictures`.

    Raises InvalidField, which names the block that cannot stand where it does.
    """
    told, billed = _system(system)
    pictures = RequestPictures(reads, fetches)
    turns = _Turns(signer, pictures, joins=joins)
    first = next((i for i, each in enumerate(messages) if each.role != "system"), len(messages))
    told += ["\n".join(map(_text_of, each.blocks)) for each in messages[:first]]
    if told:
        turns.made.append(ChatMessage(role="system", content=pictures.text("\n".join(told))))
    turns.marks += _system_marks(system, messages[:first], len(turns.made))
    for number, message in enumerate(messages[first:], first):
        turns.take(message, f"messages[{number}]")
    prefill = turns.end()
    if len(turns.made) > MOST_MESSAGES:
        raise InvalidField(f"`messages` are over {MOST_MESSAGES} turns: send fewer")
    return RequestConversation(
        turns.made,
        prefill,
        billed,
        turns.forgot,
        turns.marks,
        pictures.images,
        pictures.places,
    )


def _system(system: System | None) -> tuple[list[str], bool]:
    """Return the texts, and whether a billing header stood at their head."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    billed = bool(texts) and texts[0].startswith(BILLING)
    if billed:
        texts[0] = texts[0].partition("\n")[2]
    return [text for text in texts if text], billed


def _system_marks(
    system: System | None, first: Sequence[MessageParam], turns: int
) -> Iterator[tuple[CacheControl, MessagePlace]]:
    """Find the breakpoints of the system's text. `turns`: how many it is; `first`: those of its role."""
    blocks = system if isinstance(system, list) else []
    for number, block in enumerate(blocks, 1):
        if block.cache_control is not None and number < len(blocks):
            text = "\n".join(_system(blocks[:number])[0])
            yield block.cache_control, MessagePlace(0, len(text))
        elif block.cache_control is not None:
            yield block.cache_control, MessagePlace(turns)
    for each in (block for message in first for block in message.blocks):
        if (mark := getattr(each, "cache_control", None)) is not None:
            yield mark, MessagePlace(turns)


class _Turns:
    """Collects the turn that is open. `asked`: calls without results yet, names by id."""

    def __init__(self, signer: Signer, pictures: RequestPictures, *, joins: bool) -> None:
        self._pictures = pictures
        self._joins = joins
        self.made: list[ChatMessage] = []
        self.forgot = False
        self._signer = signer
        self._role = ""
        self._texts: list[str] = []
        self._behind: list[str] = []  # what a system said behind the last result
        self._thoughts: list[str] = []
        self._calls: list[JsonObject] = []
        self._asked: dict[str, str] = {}
        self.marks: list[tuple[CacheControl, MessagePlace]] = []
        self._marked: list[
            tuple[CacheControl, int]
        ] = []  # in the turn that is open: at a character of it
        self._place = ""  # of the turn's first message

    def take(self, message: MessageParam, place: str) -> None:
        role = "user" if message.role == "system" else message.role
        if role != self._role:
            self._close()
            self._role, self._place = role, place
            if role == "assistant" and self._asked:
                self._demand_results()
        if message.role == "system":
            before = len("\n".join(self._texts))  # what a mark ends there goes on
            self._marked = [(each, END if at == before else at) for each, at in self._marked]
            self._remind(self._pictures.text("\n".join(map(_text_of, message.blocks))))
            found = [getattr(block, "cache_control", None) for block in message.blocks]
            self._marked += [(each, END) for each in found if each is not None]
            return
        for number, block in enumerate(message.blocks):
            self._add(block, f"{place}.content[{number}]")
            self._mark(block)

    def end(self) -> str:
        """End the last turn. Returns the prefill, "" if there is none."""
        if self._asked or self._calls:
            self._demand_results()
        if self._role != "assistant":
            self._close()
            return ""
        self.marks += [(mark, MessagePlace(len(self.made))) for mark, _ in self._marked]
        if self._thoughts:
            raise InvalidField(f"`{self._place}` is a prefill, which is text: leave its thinking out")
        return "".join(self._texts)

    def _demand_results(self) -> None:
        idents = list(self._asked)[:4] or [str(call["id"]) for call in self._calls[:4]]
        raise InvalidField(
            f"`messages`: tool_use {', '.join(ident[:64] for ident in idents)} has no tool_result in "
            "the message behind it: send one for each call"
        )

    def _add(self, block: Block, place: str) -> None:
        match block:
            case TextBlock():
                self._texts.append(self._pictures.text(block.text))
            case ImageBlock() if self._role == "user":
                self._texts.append(self._picture(block, place))
            case ToolResultBlock() if self._role == "user":
                self._result(block, place)
            case ToolUseBlock() if self._role == "assistant":
                function = {"name": block.name, "arguments": block.input}
                self._calls.append({"id": block.id, "type": "function", "function": function})
            case ThinkingBlock() if self._role == "assistant":
                self._think(block, place)
            case RedactedThinkingBlock() if self._role == "assistant":
                self.forgot = True
            case _:
                kind = block.__struct_config__.tag
                raise InvalidField(f"`{place}`: a {kind} block cannot stand in a {self._role} message")

    def _picture(self, block: ImageBlock, place: str) -> str:
        """Add a picture. Returns its mark."""
        source = block.source
        if isinstance(source, UrlSource):
            return self._pictures.add_url(source.url, "image", place, "source.url")
        return self._pictures.add(source.data, "image", place, "source.data")

    def _mark(self, block: Block) -> None:
        """Note where its breakpoint stands."""
        parts = block.content if isinstance(block, ToolResultBlock) else None
        inside = [part.cache_control for part in parts] if isinstance(parts, list) else []
        for mark in (*inside, getattr(block, "cache_control", None)):
            if mark is None:
                continue
            if isinstance(block, ToolResultBlock):
                self.marks.append((mark, MessagePlace(len(self.made) - 1, END)))
            else:
                glue = "" if self._role == "assistant" else "\n"
                self._marked.append((mark, len(glue.join(self._texts))))

    def _remind(self, text: str) -> None:
        """Add a system turn."""
        behind = bool(self.made) and self.made[-1].role == "tool" and not self._texts
        (self._behind if behind else self._texts).append(REMINDER.format(text))

    def _settle(self) -> None:
        """Note that nothing more stands behind the last result."""
        if self._behind:
            content = "\n".join([self.made[-1].content, *self._behind])
            self.made[-1] = msgspec.structs.replace(self.made[-1], content=content)
            self._behind = []

    def _think(self, block: ThinkingBlock, place: str) -> None:
        verdict = self._signer.verify(block.thinking, block.signature)
        if verdict == "altered":
            raise InvalidField(
                f"`{place}.signature` is of another thought: send thinking blocks back as they came, or "
                "leave them out"
            )
        if verdict == "ours":
            self._thoughts.append(block.thinking)
        self.forgot = self.forgot or verdict == "foreign"

    def _result(self, block: ToolResultBlock, place: str) -> None:
        name = self._asked.pop(block.tool_use_id, None)
        if name is None:
            raise InvalidField(
                f"`{place}.tool_use_id` {block.tool_use_id[:64]!r} is of no tool_use in the message "
                "before: send results right behind their calls, one for each"
            )
        self._settle()
        text = self._result_text(block, place)
        if block.is_error and not text[: len(ERROR)].lower().startswith("error"):
            text = ERROR + text
        self.made.append(
            ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id, name=name)
        )

    def _result_text(self, block: ToolResultBlock, place: str) -> str:
        told = list[str]()
        parts = block.content if isinstance(block.content, list) else []
        for number, part in enumerate(parts):
            match part:
                case ImageBlock():
                    told.append(self._picture(part, f"{place}.content[{number}]"))
                case ToolReference():
                    told.append(part.tool_name)
                case TextBlock():
                    told.append(self._pictures.text(part.text))
        return "\n".join(told) if parts else self._pictures.text(str(block.content or ""))

    def _close(self) -> None:
        """Close the turn."""
        marked, self._marked = self._marked, []
        if self._joins and self._role == "user" and self.made and self.made[-1].role == "tool":
            self._behind += self._texts
            self._texts = []
        self._settle()
        match self._role:
            case "user" if self._texts:
                self.made.append(ChatMessage(role="user", content="\n".join(self._texts)))
            case "assistant":
                self._asked = {str(call["id"]): call["function"]["name"] for call in self._calls}
                self.made.append(self._answer())
        last, calls = len(self.made) - 1, self._role == "assistant" and self._calls
        for mark, at in marked:  # calls have no place of their own: what follows them has
            place = MessagePlace(last + 1) if calls else MessagePlace(last, at)
            self.marks.append((mark, place))
        self._texts, self._thoughts, self._calls = [], [], []

    def _answer(self) -> ChatMessage:
        """Make the assistant's turn. Raises InvalidField in words of this API."""
        try:
            return ChatMessage(
                role="assistant",
                content="".join(self._texts),
                tool_calls=self._calls or None,
                reasoning="\n".join(thought for thought in self._thoughts if thought) or None,
            )
        except InvalidField as error:  # of an input that is no plain JSON
            place = f"`{self._place}: tool_use["
            told = error.message.replace("`tool_calls[", place).replace(
                "].function.arguments", "].input"
            )
            raise InvalidField(told) from None


def _text_of(block: Block) -> str:
    """Return the text of a block in a system turn."""
    if isinstance(block, TextBlock):
        return block.text
    kind = block.__struct_config__.tag
    raise InvalidField(f"`messages`: a {kind} block cannot stand in a system message")
