"""Text to token ids and back, for one model folder. Thread-safe after `load`.

Three things a serving engine needs beyond a fast tokenizer:

* *Continuing.* `encode(text)` tokenizes text that stands behind other tokens: SentencePiece-like
  tokenizers put a space in front of a text, which is right at position 0 only, and for some of them
  ("legacy") behind each added token as well. So text is tokenized together with the added token it
  stands behind (`after`); other tokens do not change what follows them.
* *Guarded contents.* What a message says must not become a control token: a user who writes
  "<|im_end|>" must not end their turn. `render` puts U+FDD0 (a Unicode noncharacter, "GUARD")
  inside each control token that it finds in a message or a tool; the guard is an added token of
  the tokenizer, so it splits the text there, and its id is dropped. All else is tokenized exactly
  as `transformers` does it. One flaw: tokenizers that put a space before *every* piece of text
  (Llama-2's "legacy" normalizer) show a space after the guard, inside the hostile string.
* *Bounds.* `least_tokens` says how many tokens a text has at least, without tokenizing it.
* *Bytes.* `token_bytes` says which bytes each id stands for, so that output can be decoded
  incrementally and exactly, without the tokenizer.

Only local files are read. This file does not know of sessions, branches or turns.
"""

import copy
import re
import unicodedata
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers

from ramify.actors.tokenizer.chat_jinja import ChatTemplates
from ramify.actors.tokenizer.pipeline import COMPOSED, bytes_bound, bytes_of_ids, without_prefix_space
from ramify.actors.tokenizer.pretrained import Pretrained, of_transformers, read_pretrained
from ramify.protocol.checkpoint.files import json_files
from ramify.protocol.errors import BadRequest, InvalidField, ModelError, brief
from ramify.protocol.sampling import SamplingParams

GUARD = "\ufdd0"


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What `generation_config.json` recommends; neutral values where it is silent.

    A file that says `do_sample: false` means greedy: temperature 0.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Tokenizer:
    """A model's fast tokenizer with its chat template.

    `vocab_size`: ids that `token_bytes` covers (the model's padded vocabulary, if larger).
    `start_ids`: what the tokenizer puts before a text at position 0 (usually BOS, or nothing).
    `special_ids`: control tokens; they have no text. `spelling`: how they are written in prompts.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        """`pretrained`: what this object owns from now on."""
        config, generation_config = config or {}, generation_config or {}
        self._backend = pretrained.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._templates = ChatTemplates(pretrained.templates, pretrained.special_tokens)
        self.has_chat_template = bool(self._templates.source)
        self.bos_id = pretrained.token_id("bos_token")
        self.eos_ids = _eos_ids(pretrained.token_id("eos_token"), generation_config, config)
        self.special_ids = frozenset(
            [i for i, token in added.items() if token.special]
            + pretrained.special_ids()
            + list(self.eos_ids)
        )
        self.token_bytes = bytes_of_ids(self._backend, self.special_ids, _model_vocab(config))
        self.vocab_size = len(self.token_bytes)
        self._size = 1 + max([*self._backend.get_vocab().values(), *added], default=-1)
        self.generation_defaults = _generation_defaults(generation_config)
        self.start_ids = self._prefix_ids()
        contents = {i: token.content for i, token in added.items()}
        self._contents = contents
        self._strips = frozenset(i for i, token in added.items() if token.rstrip)
        self._bound = bytes_bound(self._backend, self.token_bytes)
        special = [text for i, text in contents.items() if i in self.special_ids]
        self.spelling = {i: contents[i].encode() for i in self.special_ids & contents.keys()}
        source = self._templates.source
        written = [t for t in contents.values() if t in source and not t.isspace()]
        self._special = _alternatives(special)
        self._control = _alternatives([*special, *written])
        self._added = _alternatives([*contents.values(), GUARD])
        self._longest = max(map(len, [*contents.values(), GUARD]))
        self._continuing = without_prefix_space(self._backend)
        self._sizes: npt.NDArray[np.int32] | None = None  # bytes of each token, once they are asked for
        self._guard_ids = set()
        for backend in (self._backend, self._continuing):
            backend.add_special_tokens([tokenizers.AddedToken(GUARD, normalized=False, special=True)])
            self._guard_ids.add(backend.token_to_id(GUARD))

    @staticmethod
    def load(path: Path) -> "Tokenizer":
        """That of a model folder or a GGUF file. Raises ModelError that names what is wrong."""
        files = json_files(path)
        config, generation = files("config.json"), files("generation_config.json")
        return Tokenizer(read_pretrained(path, files), config=config, generation_config=generation)

    @staticmethod
    def of(fast: Any) -> "Tokenizer":
        """That of a `transformers.PreTrainedTokenizerFast`, which it owns from now on."""
        return Tokenizer(of_transformers(fast))

    @property
    def words(self) -> tuple[list[bytes], list[int], str]:
        """What a constrained output is made of: the bytes of each id, the ids that end it, and the
        tokenizer of text that stands behind other tokens, as JSON.

        Added tokens are marks, even where they have text: their bytes are 0xFF, the name, 0xFE.
        """
        table = list(self.token_bytes)
        for i, name in self._contents.items():
            if i < len(table):
                table[i] = b"\xff%b\xfe" % name.encode()
        return table, sorted(self.eos_ids), self._continuing.to_str()

    def marks_in(self, text: str) -> list[str]:
        """The names of tokens that are no text which occur in `text`, but those that end an output."""
        found = {each[0] for each in self._added.finditer(text)} - {GUARD}
        return sorted(found - {self._contents.get(i) for i in self.eos_ids})

    @property
    def eos_texts(self) -> tuple[str, ...]:
        """The names of the tokens that end an output."""
        return tuple(self._contents[i] for i in sorted(self.eos_ids) if i in self._contents)

    def ends_output(self, name: str) -> bool:
        """Whether a token of this name ends an output."""
        return name in self.eos_texts

    @property
    def template_source(self) -> str:
        """The chat template as it was written; "" without one."""
        return self._templates.source

    def showing(self, marks: Iterable[str]) -> "Tokenizer":
        """A copy to which the control tokens among `marks` have text, as in an output they are part of.

        They stay control tokens: what a message says does not become one.
        """
        shown = {i: text for i, text in self._contents.items() if text in set(marks)}
        missing = [i for i in shown if i < len(self.token_bytes) and not self.token_bytes[i]]
        if not missing:
            return self
        twin = copy.copy(self)
        twin.token_bytes = list(self.token_bytes)
        for i in missing:
            twin.token_bytes[i] = shown[i].encode()
        return twin

    # --- text to ids ----------------------------------------------------------------------------

    def encode(
        self, text: str, *, start: bool = False, special: bool = True, after: int | None = None
    ) -> list[int]:
        """Token ids of raw text. `start`: at position 0 (adds BOS if this tokenizer does).

        `special`: strings like "<|im_end|>" become control tokens; False: they stay text.
        `after`: see `encode_chat`.
        """
        if not special:
            text = self._guarded(text, self._control)
        ids = self.encode_chat(text, start=start, after=after)
        return [*self.start_ids, *ids] if start else ids

    def encode_chat(self, rendered: str, *, start: bool = False, after: int | None = None) -> list[int]:
        """Token ids of template-rendered text, which brings its own BOS. `start`: at position 0.

        `after`: the token that the text stands behind, where it is known. Other threads run meanwhile.
        """
        if start:
            return self._ids(self._backend, rendered)
        after = self.context(after)
        if after is not None:
            ids = self._ids(self._backend, self._contents[after] + rendered)
            if ids[:1] == [after]:  # else the two texts together are another added token
                return ids[1:]
        if self._continuing is self._backend:
            return self._ids(self._backend, rendered)
        first = self._added.search(rendered)
        if first is None:
            return self._ids(self._continuing, rendered)
        at = first.start()
        head = self._ids(self._continuing, rendered[:at]) if at else []
        return head + self._ids(self._backend, rendered[at:])

    def context(self, token: int | None) -> int | None:
        """`token` if it changes how a text behind it is tokenized, else None."""
        if token not in self._contents:
            return None
        return token if token in self._strips or self._continuing is not self._backend else None

    def is_added(self, token: int) -> bool:
        """Whether text is always split before and behind it: a control token, or one that was added."""
        return token in self._contents or token in self.special_ids

    def least_tokens(self, text: str) -> int:
        """A lower bound on the tokens of `text` (rendered or raw), in a fraction of the time.

        Each token stands for so many bytes at most; 0 where this tokenizer has no such bound.
        """
        if not self._bound.bytes:
            return 0
        if self._bound.strips:  # white space may disappear, any amount of it
            text = "".join(text.split())
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        size -= text.count(GUARD) * len(GUARD.encode())
        shrinks = any(not unicodedata.is_normalized(form, text) for form in self._bound.forms)
        return -(-size // (self._bound.bytes * (COMPOSED if shrinks else 1)))

    def tokens_before(
        self, tokens: "array[int]", text: str, places: Sequence[int | None]
    ) -> list[int | None]:
        """How many of `tokens`, which are `text` (rendered), lie before each place, a character of it.

        By the bytes that tokens stand for: a token off where the tokenizer does not keep white space.
        """
        if all(place is None for place in places):
            return list(places)
        if self._sizes is None:
            spelt = self.spelling
            sizes = [len(spelt.get(i) or data) for i, data in enumerate(self.token_bytes)]
            self._sizes = np.array(sizes, dtype=np.int32)
        ends = np.cumsum(self._sizes[np.frombuffer(tokens, dtype=np.int32)])
        before = [len(self.unguarded(text[: place or 0]).encode("utf-8", "replace")) for place in places]
        counts = np.searchsorted(ends, before, side="right").tolist()
        return [None if place is None else n for place, n in zip(places, counts, strict=True)]

    def inside_token(self, text: str, at: int) -> bool:
        """Whether an added token that is spelled in `text` spans the border before character `at`."""
        longest = self._longest
        window = text[max(0, at - longest) : at + longest]
        at = min(at, longest)
        return any(match.start() < at < match.end() for match in self._added.finditer(window))

    def beyond(self, vocab: int) -> dict[int, str]:
        """The tokens whose ids a model with `vocab` ids does not have, by id."""
        if vocab >= self._size:  # the usual case, for each session anew
            return {}
        return {
            i: token
            for token, i in self._backend.get_vocab().items()
            if i >= vocab and i not in self._guard_ids
        }

    def _ids(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        # Not `encode`, which keeps the interpreter's lock: 1 MB stops every other thread for 0.8 s.
        encoding = backend.encode_batch_fast([text], add_special_tokens=False)[0]
        ids: list[int] = encoding.ids
        if GUARD in text:
            return [i for i in ids if i not in self._guard_ids]
        return ids

    # --- ids to text ----------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`: U+FFFD for bytes that are not UTF-8, control tokens left out.

        `special`: with control tokens, as templates spell them. Byte-exact: unlike
        `transformers`, no leading space is cut off. Raises IndexError for ids past `vocab_size`.
        """
        table = self.token_bytes
        if special:
            spelt = self.spelling
            pieces = [spelt.get(i) or table[i] for i in ids]
        else:
            pieces = [table[i] for i in ids]
        return b"".join(pieces).decode("utf-8", "replace")

    # --- chat template --------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        generate: bool = False,
        effort: str | None = None,
    ) -> str:
        """The chat template's text for `messages`, guarded (see the top); for `encode_chat`.

        Raises BadRequest with the template's own words where it refuses the conversation.
        """
        if not self.has_chat_template:
            raise BadRequest(
                "this model has no chat template: append `text` or `tokens`, or put a "
                "chat_template.jinja into the model's folder"
            )
        guarded = [self._guarded_message(message) for message in messages]
        try:
            known = self._guarded_value(list(tools), self._control) if tools else None
            return self._templates.render(guarded, known, generate, effort)
        except Exception as error:  # jinja2 errors, and whatever a template's expressions raise
            reason = brief(self.unguarded(str(error))) or type(error).__name__
            raise BadRequest(f"the model's chat template refuses this conversation: {reason}") from error

    @staticmethod
    def unguarded(rendered: str) -> str:
        """`rendered` as people should read it."""
        return rendered.replace(GUARD, "")

    def _guarded_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        # An assistant's own turns may hold markers like <think>, which models emit themselves.
        pattern = self._special if message["role"] == "assistant" else self._control
        return {
            key: value if key == "role" else self._guarded_value(value, pattern)
            for key, value in message.items()
        }

    def _guarded_value(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return self._guarded(value, pattern)
        if isinstance(value, Mapping):
            return {key: self._guarded_value(item, pattern) for key, item in value.items()}
        if isinstance(value, list):
            return [self._guarded_value(item, pattern) for item in value]
        return value

    @staticmethod
    def _guarded(text: str, pattern: re.Pattern[str]) -> str:
        text = text.replace(GUARD, "")
        while pattern.search(text):  # again: tokens may overlap, and what is left may match another
            text = pattern.sub(lambda match: match[0][0] + GUARD + match[0][1:], text)
        return text

    def _prefix_ids(self) -> tuple[int, ...]:
        """The ids that the post-processor puts before a text."""
        plain = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        for at in range(len(whole) - len(plain) + 1):
            if whole[at : at + len(plain)] == plain:
                return tuple(whole[:at])
        return ()


# --- the folder's files -------------------------------------------------------------------------


def _eos_ids(own: int | None, *configs: Mapping[str, Any]) -> frozenset[int]:
    found = {own}
    for config in configs:
        for part in (config, config.get("text_config") or {}):
            value = part.get("eos_token_id")
            found.update(value if isinstance(value, list) else [value])
    return frozenset(i for i in found if isinstance(i, int))


def _model_vocab(config: Mapping[str, Any]) -> int:
    text = config.get("text_config") or {}
    size = config.get("vocab_size") or text.get("vocab_size") or 0
    return size if isinstance(size, int) else 0


def _generation_defaults(config: Mapping[str, Any]) -> GenerationDefaults:
    names = GenerationDefaults.__struct_fields__
    given = {name: config[name] for name in names if config.get(name) is not None}
    if config.get("do_sample") is False:
        given = {"temperature": 0.0} | {k: v for k, v in given.items() if k == "repetition_penalty"}
    try:
        defaults = msgspec.convert(given, GenerationDefaults, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"generation_config.json: {error}") from error
    try:
        SamplingParams(**msgspec.structs.asdict(defaults))
    except InvalidField as error:
        raise ModelError(f"generation_config.json: {error.message}") from error
    return defaults


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `texts`, longest first. One-character tokens cannot be guarded."""
    longest_first = sorted(
        {text for text in texts if len(text) > 1 or text == GUARD}, key=len, reverse=True
    )
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
