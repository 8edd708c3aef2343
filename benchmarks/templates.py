"""Do sessions of both template modes hold what `transformers` writes, for published chat templates?

Each kind of conversation is appended to a branch, one `append` a turn and one a message, in append and
in strict mode; the branch's text is compared with one rendering of the whole by `transformers`. A line
says what became of each template: the same text; refused with a way out; told in `state.notes` that it
differs; refused by `transformers` too; or different in silence, which is a fault (exit status 1).

    python benchmarks/templates.py ../shared/data/templates [--show]

FOLDER holds `*.jinja` files and `renderings.json`, which names each template's control tokens.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from ramify.actors.calls.dialects import dialect_of
from ramify.actors.kit.turns import at_once
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.input.branch_writer import BranchWriter
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Append, ChatMessage, JsonObject

OUTCOMES = ("equal", "refused, with a way out", "told in notes", "refused by transformers", "SILENT")
ROOM = 1 << 20
ADD: JsonObject = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}


def ask(number: int) -> ChatMessage:
    return ChatMessage(role="user", content=f"Question {number}?")


def say(number: int) -> ChatMessage:
    return ChatMessage(role="assistant", content=f"Answer {number}.")


def call(*numbers: int) -> ChatMessage:
    calls: list[JsonObject] = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": "add", "arguments": {"a": i}}}
        for i in numbers
    ]
    return ChatMessage(role="assistant", tool_calls=calls)


def results(*numbers: int) -> list[ChatMessage]:
    return [
        ChatMessage(role="tool", content=f"{i}", tool_call_id=f"call0000{i}", name="add")
        for i in numbers
    ]


SYSTEM = ChatMessage(role="system", content="Be brief.")
CALLED = [[call(1)], results(1)]
TWICE = [[call(1, 2)], results(1, 2)]
KINDS: dict[str, list[list[ChatMessage]]] = {
    "one turn": [[ask(1)]],
    "system": [[SYSTEM, ask(1)]],
    "turns": [[ask(1)], [say(1)], [ask(2)]],
    "system, turns": [[SYSTEM, ask(1)], [say(1)], [ask(2)], [say(2)], [ask(3)]],
    "tools": [[ask(1)]],
    "a call": [[ask(1)], *CALLED],
    "system, a call": [[SYSTEM, ask(1)], *CALLED],
    "a call, an answer": [[ask(1)], *CALLED, [say(1)], [ask(2)]],
    "calls": [[ask(1)], *TWICE],
    "calls, an answer": [[ask(1)], *TWICE, [say(1)], [ask(2)]],
    "a call after a call": [[ask(1)], *CALLED, [call(2)], results(2)],
}


class Model:
    """A published template with a tokenizer of bytes, here and in `transformers`."""

    def __init__(self, source: str, tokens: dict[str, str | None]) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        named = {name: tokens[name] for name in ("bos_token", "eos_token") if tokens[name]}
        backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in named.values()])
        reference = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
        reference.chat_template = source
        # Not `apply_chat_template`, which leaves fields out that are null: two templates ask for them.
        self.reference = partial(_compile_jinja_template(source).render, **reference.special_tokens_map)
        self.tokenizer = Tokenizer.of(reference)
        self.template = ChatTemplate(self.tokenizer, dialect_of(source))

    def whole(self, messages: Sequence[ChatMessage], tools: list[JsonObject] | None) -> str | None:
        """By `transformers`; None if the template refuses it."""
        try:
            return self.reference(
                messages=self.template.as_dicts(messages), tools=tools, add_generation_prompt=True
            )
        except Exception:  # a template raises what it likes
            return None

    def appended(
        self, ops: Sequence[list[ChatMessage]], tools: list[JsonObject] | None, *, strict: bool
    ) -> str:
        """The text of a branch that is given these appends. Raises BadRequest."""
        state = SessionState(1, context=ROOM, vocab=ROOM, limits=Limits(), decode=self.tokenizer.decode)
        writer, branch = BranchWriter(state, self.tokenizer, self.template), state.root("main")
        for messages in ops:
            op = Append(id=1, messages=messages)
            prepared = writer.prepare(branch, op, strict=strict, tools=tools, room=ROOM)
            at_once(writer.apply(branch, prepared, 1))
        self.note = writer.rewritten(tools=bool(tools))
        return Tokenizer.unguarded("".join(segment.raw for segment in branch.segments))

    def outcome(self, kind: str, *, strict: bool, single: bool) -> str:
        turns = KINDS[kind]
        needs = self.whole([ask(1)], None) is None  # a template that is for tools only
        tools = [ADD] if needs or "tools" in kind or "call" in kind else None
        whole = self.whole([message for turn in turns for message in turn], tools)
        if whole is None:
            return OUTCOMES[3]
        ops = [[message] for turn in turns for message in turn] if single else turns
        try:
            text = self.appended(ops, tools, strict=strict)
        except BadRequest as error:
            return OUTCOMES[1] if "`append`" in str(error) or "'strict'" in str(error) else OUTCOMES[4]
        if text == whole:
            return OUTCOMES[0]
        return OUTCOMES[4] if strict or self.note is None else OUTCOMES[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--show", action="store_true", help="a line for each that is not equal")
    args = parser.parse_args()
    published = json.loads((args.folder / "renderings.json").read_text())["templates"]
    total: Counter[str] = Counter()
    for name in sorted(published):
        model = Model((args.folder / name).read_text(), published[name])
        counts: Counter[str] = Counter()
        for kind in KINDS:
            for strict in (False, True):
                for single in (False, True):
                    outcome = model.outcome(kind, strict=strict, single=single)
                    counts[outcome] += 1
                    if args.show and outcome != OUTCOMES[0]:
                        mode, way = ("append", "strict")[strict], ("turn", "message")[single]
                        print(f"    {kind}, {mode}, an append a {way}: {outcome}")
        print(f"{name:56}", ", ".join(f"{counts[each]} {each}" for each in OUTCOMES if counts[each]))
        print("    note:", model.template.rewrites and [each.what for each in model.template.rewrites])
        total += counts
    print(sum(total.values()), "comparisons:", ", ".join(f"{total[o]} {o}" for o in OUTCOMES))
    return int(total[OUTCOMES[4]] > 0)


if __name__ == "__main__":
    sys.exit(main())
