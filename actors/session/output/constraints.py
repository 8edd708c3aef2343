"""What an output is held to: the client's constraint, or the schemas of the tools that it calls. Pure.

A constraint that has no structure is compiled as it came. One with structure (tags, calls, a thought
before it) needs to know how the model writes, and which marks are tokens: that is put together here.
"""

from typing import Literal, NamedTuple

import msgspec

from ramify.actors.calls.dialects import Thought
from ramify.actors.calls.exact import after_thought
from ramify.actors.calls.reader import Place
from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.session.input.speech import Speech
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.structure import (
    JsonPart,
    Part,
    RegexPart,
    Structure,
    TagsPart,
    TextPart,
    ThoughtPart,
    UnionPart,
    encode_structure,
)
from ramify.protocol.structure import StructureTag as TagOfPart
from ramify.protocol.wire import Constraint, Generate, StructuralTag, Tag


class Held(NamedTuple):
    """A generation that is held to something. `place`: where its output begins.

    `by`: the client's constraint, begun or continued; else tools, of which calls have to be exact where
    one says `strict` or where a call is forced (`required`). `opening`: what stands there of it already.
    """

    by: Literal["constraint", "strict", "required", "auto"]
    place: Place
    opening: str

    def refuses(self, code: str) -> bool:
        """Whether it cannot be generated if the constraint cannot be had, for a reason of this kind."""
        return self.by in ("constraint", "strict") or (
            self.by == "required" and code == "bad_constraint"
        )


class Constraints:
    """Makes what is compiled for the generations of one session."""

    def __init__(self, speech: Speech, tokenizer: Tokenizer) -> None:
        self._speech = speech
        self._tokenizer = tokenizer

    def held(
        self, op: Generate, tools: Toolbox, place: Place, opening: str, *, chat: bool
    ) -> Held | None:
        """What the output of `op` is held to, if anything, where it continues none."""
        if op.constraint is not None and op.constraint.names_one:
            return Held("constraint", place if chat else Place("answer", ""), "")
        if not tools or op.tool_choice == "none" or op.ignore_eos or not chat:
            return None
        loose = all(tool.strict is False for tool in tools.tools)
        if op.tool_choice == "auto" and loose and op.parallel_tool_calls:
            return None  # the client wants them as the model likes
        if any(tool.strict for tool in tools.tools):
            return Held("strict", place, opening)
        return Held("auto" if op.tool_choice == "auto" else "required", place, opening)

    def spec(self, held: Held, op: Generate, tools: Toolbox) -> ConstraintSpec | None:
        """What is compiled; None: nothing, calls of this model are not known well enough."""
        if op.constraint is None or not op.constraint.names_one:
            return self._calls(held, op, tools)
        constraint = op.constraint
        thinks = constraint.after_thought and held.place.part != "answer"
        if not thinks or self._speech.dialect.thought is None:
            return _plain(constraint) or self._structure(_answer(constraint), "")
        answer = after_thought(self._speech.dialect, _answer(constraint))
        return self._structure(answer, self._thought_begun(held.place))

    def _calls(self, held: Held, op: Generate, tools: Toolbox) -> ConstraintSpec | None:
        speech, place = self._speech, held.place
        calls = speech.calls(
            op.tool_choice,
            tools,
            parallel=op.parallel_tool_calls,
            ends_output=self._tokenizer.ends_output,
        )
        if calls is None:
            return None
        if op.tool_choice != "auto":
            thought = speech.dialect.thought
            if held.opening or thought is None:
                return self._structure(calls.forced, _behind(held.opening, thought))
            whole = ThoughtPart(thought.begin, thought.end, calls.forced)
            return self._structure(whole, self._thought_begun(place))
        free = calls.free
        if free is None:
            return None
        if not isinstance(free, ThoughtPart):
            return self._structure(free, place.pending)
        if place.part == "answer":
            return self._structure(free.part, place.pending)
        return self._structure(free, self._thought_begun(place))

    def _thought_begun(self, place: Place) -> str:
        """The beginning of a thought that is open."""
        thought = self._speech.dialect.thought
        return thought.begin + place.pending if place.part == "thought" and thought is not None else ""

    def _structure(self, root: Part, after: str) -> ConstraintSpec:
        structure = Structure(root, after=after)
        marks = self._tokenizer.marks_in(encode_structure(structure))
        return ConstraintSpec(
            "structure", encode_structure(msgspec.structs.replace(structure, marks=marks))
        )


def _behind(opening: str, thought: Thought | None) -> str:
    """What an opening has of the call: it may end a thought first."""
    if thought is None or thought.end not in opening:
        return opening
    return opening.rpartition(thought.end)[2].lstrip()


def _plain(constraint: Constraint) -> ConstraintSpec | None:
    """What is compiled of a constraint without structure.

    JSON is spaced as most models write it: `{"a": 1, "b": 2}`.
    """
    if constraint.regex is not None:
        return ConstraintSpec("regex", constraint.regex)
    if constraint.choices is not None:
        return ConstraintSpec("choices", msgspec.json.encode(constraint.choices).decode())
    if constraint.grammar is not None:
        return ConstraintSpec("lark", constraint.grammar)
    schema = constraint.json_schema
    if schema is None:
        return None
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return ConstraintSpec("json_schema", text, spaced=True)


def _answer(constraint: Constraint) -> Part:
    if constraint.structural_tag is not None:
        return _tags(constraint.structural_tag)
    return _content(constraint, "")


def _tags(given: StructuralTag) -> Part:
    tags = [
        TagOfPart(tag.begin, _content(tag, f"structural_tag.tags[{i}]"), tag.end)
        for i, tag in enumerate(given.tags)
    ]
    return TagsPart(tags, list(given.triggers), given.at_least_one, given.stop_after_first)


def _content(given: Constraint | Tag, at: str) -> Part:
    if given.regex is not None:
        return RegexPart(given.regex, at)
    if given.choices is not None:
        return UnionPart([TextPart(choice) for choice in given.choices])
    return JsonPart(given.json_schema, at)
