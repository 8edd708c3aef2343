"""From the messages of a request to the turns of a chat template.

Turns of one role that follow each other are one turn, results of tools are turns of their own in front
of what the user says beside them, and a thought is the assistant's if it has our signature. A system's
turn between others, which half of the published templates refuse, is a part of the user's turn or of the
result in front of it. The last turn of the assistant is a prefill: the answer goes on with it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ramify.actors.gateway.apis.anthropic.blocks import (
    MOST_MESSAGES,
    Block,
    Message,
    RedactedThinkingBlock,
    System,
    TextBlock,
    ThinkingBlock,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
)
from ramify.actors.gateway.apis.anthropic.signatures import Signer
from ramify.protocol.errors import InvalidField
from ramify.protocol.wire import ChatMessage, JsonObject

BILLING = "x-anthropic-billing-header:"  # a line of Claude Code that changes with each request
REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # as agents mark what no user said
ERROR = "Error: "  # in front of a result with `is_error`, which templates have no place for


class Conversation(NamedTuple):
    """`prefill`: text that the answer begins with. `billed`: a billing header was taken out. `forgot`: a
    thought was left out because it is not ours."""

    messages: list[ChatMessage]
    prefill: str
    billed: bool
    forgot: bool


def conversation_of(
    system: System | None, messages: Sequence[Message], signer: Signer, *, joins: bool = False
) -> Conversation:
    """`joins`: the template takes no user's turn behind results: what is said there joins the last one.

    Raises InvalidField, which names the block that cannot stand where it does.
    """
    told, billed = _system(system)
    turns = _Turns(signer, joins=joins)
    first = next((i for i, each in enumerate(messages) if each.role != "system"), len(messages))
    told += ["\n".join(map(_text_of, each.blocks)) for each in messages[:first]]
    if told:
        turns.made.append(ChatMessage(role="system", content="\n".join(told)))
    for number, message in enumerate(messages[first:], first):
        turns.take(message, f"messages[{number}]")
    prefill = turns.end()
    if len(turns.made) > MOST_MESSAGES:
        raise InvalidField(f"`messages` are over {MOST_MESSAGES} turns: send fewer")
    return Conversation(turns.made, prefill, billed, turns.forgot)


def _system(system: System | None) -> tuple[list[str], bool]:
    """The texts, and whether a billing header stood at their head."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    billed = bool(texts) and texts[0].startswith(BILLING)
    if billed:
        texts[0] = texts[0].partition("\n")[2]
    return [text for text in texts if text], billed


class _Turns:
    """Collects the turn that is open. `asked`: calls without results yet, names by id."""

    def __init__(self, signer: Signer, *, joins: bool) -> None:
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
        self._place = ""  # of the turn's first message

    def take(self, message: Message, place: str) -> None:
        role = "user" if message.role == "system" else message.role
        if role != self._role:
            self._close()
            self._role, self._place = role, place
            if role == "assistant" and self._asked:
                self._demand_results()
        if message.role == "system":
            self._remind("\n".join(map(_text_of, message.blocks)))
            return
        for number, block in enumerate(message.blocks):
            self._add(block, f"{place}.content[{number}]")

    def end(self) -> str:
        """No more messages: the prefill, "" if there is none."""
        if self._asked or self._calls:
            self._demand_results()
        if self._role != "assistant":
            self._close()
            return ""
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
                self._texts.append(block.text)
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

    def _remind(self, text: str) -> None:
        """A system's turn."""
        behind = bool(self.made) and self.made[-1].role == "tool" and not self._texts
        (self._behind if behind else self._texts).append(REMINDER.format(text))

    def _settle(self) -> None:
        """Nothing more stands behind the last result."""
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
        text = _result_text(block)
        if block.is_error and not text[: len(ERROR)].lower().startswith("error"):
            text = ERROR + text
        self.made.append(
            ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id, name=name)
        )

    def _close(self) -> None:
        """The turn is over."""
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
        self._texts, self._thoughts, self._calls = [], [], []

    def _answer(self) -> ChatMessage:
        """The assistant's turn. Raises InvalidField in words of this API."""
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
    """Of a block in a system's turn."""
    if isinstance(block, TextBlock):
        return block.text
    kind = block.__struct_config__.tag
    raise InvalidField(f"`messages`: a {kind} block cannot stand in a system message")


def _result_text(block: ToolResultBlock) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    return "\n".join(
        part.tool_name if isinstance(part, ToolReference) else part.text for part in block.content
    )
