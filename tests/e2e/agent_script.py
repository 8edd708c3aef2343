"""A fake model with a script: which token follows which history, and the histories by `transformers`.

`Rendering` keeps a conversation as `transformers` renders it, and gives what the model has to say in the
form of the chat template. `ScriptedModel` says it, if what it is asked to go on from is that history.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

from ramify.actors.calls.toolbox import call_id
from ramify.gpu.executors.fake_model import FACTOR, FakeModel, Hashes
from ramify.protocol.wire import ChatMessage
from tests.e2e.agent_records import ExpectedCall, RecordedStep

_MASK = (1 << 64) - 1
_MARKS = re.compile(r"<\|[\w/]+\|>|<｜[^｜\n]+｜>|\[/?[A-Z_]{3,}\]")


_TOOL = {
    "type": "function",
    "function": {
        "name": "fname",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"b": {"type": "integer", "description": "d"}},
            "required": [],
        },
    },
}
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # one token each, where models have them


class Unfit(Exception):
    """A template cannot say what a record wants."""


@dataclass(frozen=True)
class ScriptedModel(FakeModel):
    """Says what `script` has behind a history, by the fake's own hash of that; else anything."""

    script: dict[int, int] = field(default_factory=dict)

    def choose(self, chain: Hashes, salts: Hashes) -> npt.NDArray[np.int32]:
        """See `FakeModel`."""
        tokens = super().choose(chain, salts)
        for i, one in enumerate(chain.tolist()):
            tokens[i] = self.script.get(one, tokens[i])
        return tokens


class TokenHistory:
    """Tokens that grow, with the hash of each prefix of them."""

    def __init__(self, model: ScriptedModel) -> None:
        self._model = model
        self._tokens: list[int] = []
        self._chains: list[int] = [0]

    def script(self, prompt: list[int], output: list[int]) -> None:
        """Behind `prompt` comes `output`."""
        tokens = prompt + output
        same = _common(self._tokens, tokens)
        del self._chains[same + 1 :]
        fresh = np.array(tokens[same:], dtype=np.uint64)
        gains = self._model.advance(np.zeros(len(fresh), dtype=np.uint64), fresh).tolist()
        chain = self._chains[-1]
        for gain in gains:  # `advance`, with numbers of Python
            chain = (chain * FACTOR + gain) & _MASK
            self._chains.append(chain)
        self._tokens = tokens
        for at, token in enumerate(output, len(prompt)):
            self._model.script[self._chains[at]] = token


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    if other[: len(one)] == one:
        return len(one)
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


class Rendering:
    """How one model folder's template writes conversations. `parallel`: several calls in one turn."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, model_max_length=1 << 30)
        # As `apply_chat_template` does it, but for contents that are null: it leaves them out.
        self._template: Any = _compile_jinja_template(self._tokenizer.chat_template)
        shown = [(shape, text) for shape in _SHAPES if (text := self._try(shape, 1))]
        if not shown:
            raise Unfit("`transformers` renders no call with this template")
        self._shape = min(shown, key=lambda each: len(each[1]))[0]
        self.ends = [
            end for end in (self._tokenizer.eos_token, "<|call|>") if end in self._tokenizer.get_vocab()
        ]
        one, three = (self._try(self._shape, calls) for calls in (1, 3))
        if not any(end in one[one.index("akey") :] for end in self.ends):
            raise Unfit("the template shows no end of a turn with one call")
        self.parallel = bool(three) and all(one.count(end) == three.count(end) for end in self.ends)
        self.vocab = len(self._tokenizer)
        self.eos: int = self._tokenizer.eos_token_id
        self.stops: list[int] = self._tokenizer.convert_tokens_to_ids(self.ends)

    def of(self, tools: list[dict[str, Any]]) -> "ScriptState":
        """An empty conversation with these tools."""
        return ScriptState(self, tools)

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, prompt: bool) -> str:
        """What `transformers` renders."""
        shown: str = self._template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=prompt,
            **self._tokenizer.special_tokens_map,
        )
        return shown

    def tokens(self, text: str) -> list["Token"]:
        """Of a rendered text."""
        made = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(made["input_ids"], made["offset_mapping"], strict=True)
        return [Token(token, start, end) for token, (start, end) in pairs]

    def called(self, step: RecordedStep, position: int) -> dict[str, Any]:
        """The assistant's turn of a step that begins at `position`."""
        return _turn(step, position, *self._shape)

    def _try(self, shape: tuple[bool, str | None], calls: int) -> str:
        """A small conversation with calls; "" where the template refuses, or does not show them."""
        turn = _turn(RecordedStep([ExpectedCall("fname", {"akey": 1}, "")] * calls, ""), 9, *shape)
        try:
            text = self.text([{"role": "user", "content": "x"}, turn], [_TOOL], prompt=False)
        except Exception:
            return ""
        return text if text.count("akey") >= calls else ""


_SHAPES: list[tuple[bool, str | None]] = [(False, ""), (False, None), (True, ""), (True, None)]


def _turn(step: RecordedStep, position: int, as_text: bool, no_content: str | None) -> dict[str, Any]:
    calls = []
    for index, call in enumerate(step.calls):
        arguments: Any = call.arguments
        if as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        calls.append({"id": call_id("", position, index), "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": step.text}
    return {"role": "assistant", "content": no_content, "tool_calls": calls}


class Token(NamedTuple):
    """A token, and where its text is in the whole."""

    id: int
    start: int
    end: int


class ScriptState:
    """One conversation, as it stands.

    A history is never tokenized anew as far as its text stays: what the model has said keeps its tokens,
    which may be others than those of the whole text.
    """

    def __init__(self, rendering: Rendering, tools: list[dict[str, Any]]) -> None:
        self._rendering = rendering
        self._tools = tools
        self._messages: list[dict[str, Any]] = []
        self._text = ""
        self._held: list[Token] = []  # of the last prompt and what was said behind it
        self.parallel = rendering.parallel

    def say(self, messages: Sequence[ChatMessage]) -> None:
        """Somebody else's turns."""
        self._messages += [{"role": each.role, "content": each.content} for each in messages]

    def speak(self, step: RecordedStep) -> tuple[list[int], list[int]]:
        """The prompt, and what the model says behind it; the results of its calls stand there then.

        Raises Unfit.
        """
        rendering = self._rendering
        before = rendering.text(self._messages, self._tools, prompt=True)
        self._go_on(before)
        prompt = self.tokens
        turn = rendering.called(step, len(prompt))
        after = rendering.text([*self._messages, turn], self._tools, prompt=False)
        try:
            said = _said(before, rendering.text(self._messages, self._tools, prompt=False), after)
        except Unfit:  # some templates write the first call alone as the model does: a new conversation
            start = [{"role": "user", "content": "x"}]
            asked, closed = (
                rendering.text(start, self._tools, prompt=prompt) for prompt in (True, False)
            )
            said = _said(asked, closed, rendering.text([*start, turn], self._tools, prompt=False))
        output = rendering.tokens(said)
        ends = [i for i, token in enumerate(output) if token.id in rendering.stops]
        if not ends:
            raise Unfit(f"the turn does not end: {said[-40:]!r}")
        self._add(said, output[: ends[0] + 1])
        self._messages.append(turn)
        for call, made in zip(step.calls, turn.get("tool_calls", ()), strict=True):
            self._messages.append(
                {"role": "tool", "content": call.result, "name": call.name, "tool_call_id": made["id"]}
            )
        return prompt, self.tokens[len(prompt) :]

    @property
    def tokens(self) -> list[int]:
        """All of them."""
        return [token.id for token in self._held]

    def _go_on(self, text: str) -> None:
        """The history is `text` now."""
        same = _common(self._text, text)
        kept = len(self._held)
        while kept and (self._held[kept - 1].end > same or self._split(kept)):
            kept -= 1
        del self._held[kept:]
        start = self._held[-1].end if self._held else 0
        self._text = self._text[:start]
        self._add(text[start:], self._rendering.tokens(text[start:]))

    def _split(self, at: int) -> bool:
        """Whether a character is in the tokens on both sides."""
        return at < len(self._held) and self._held[at].start < self._held[at - 1].end

    def _add(self, text: str, tokens: Sequence[Token]) -> None:
        begin = len(self._text)
        self._text += text[: tokens[-1].end]
        self._held += [Token(each.id, begin + each.start, begin + each.end) for each in tokens]


def _said(before: str, closed: str, after: str) -> str:
    """What the model says in a turn: of the text `after` it, what is not of the prompt. Raises Unfit."""
    if after.startswith(before):
        return after[len(before) :]
    prompt = before[_common(closed, before) :]
    if prompt and prompt in after:  # the turn before it is shown otherwise when one follows
        return after[after.rindex(prompt) + len(prompt) :]
    opened = before.rfind("<think>")
    if opened < 0 or not after.startswith(before[:opened]):
        raise Unfit("what the model says does not follow its prompt")
    said = after[opened:].lstrip()  # the prompt opens a thought, which the turn does not show later on
    return said if "</think>" in before[opened:] else f"</think>\n\n{said}"


def model_folder(folder: Path, model: Path, template: Path) -> Path:
    """A folder like `model` without weights, with a published template and its control tokens."""
    known = json.loads((template.parent / "renderings.json").read_text())["templates"][template.name]
    source = template.read_text()
    ends = [known[key] for key in ("bos_token", "eos_token") if known[key]]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    marks = dict.fromkeys([*ends, *_MARKS.findall(source)])
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tags = dict.fromkeys(tag for tag in _TAGS if tag in source)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": known["bos_token"],
        "eos_token": known["eos_token"],
        "chat_template": source,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((model / "config.json").read_text())
    config["eos_token_id"] = tokenizer.token_to_id(known["eos_token"])
    config["vocab_size"] = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(config))
    return folder
