"""How one model speaks: what its outputs are read with, and what they are held to. Pure.

A constraint that has no structure is compiled as it came. One with structure (tags, calls, a thought
before it) needs to know how the model writes, and which marks are tokens: that is put together here.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from ramify.actors.calls.dialects import Dialect, Thought
from ramify.actors.calls.exact import Calls, after_thought, exact_calls
from ramify.actors.calls.labels import Labels
from ramify.actors.calls.openings import Openings, Render
from ramify.actors.calls.reader import PRIMED_MOST, Reader, TurnPlace
from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import OutputSegment, Tail
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.errors import BadRequest
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
from ramify.protocol.wire import ChatMessage, Constraint, Generate, StructuralTag, Tag

_NO_TOOLS = Toolbox(None)


class Speech:
    """What the sessions of one model share: how its outputs are read, and a call is forced."""

    def __init__(self, render: Render, dialect: Dialect, *, control: bool) -> None:
        """`control`: the marks of calls are control tokens, which a message's text cannot hold."""
        self.dialect = dialect
        self._control = control
        self._openings = Openings(render, dialect)

    def opening(
        self, choice: str, tools: Toolbox, *, chat: bool, begun: bool = False, thinks: bool = True
    ) -> str:
        """The text that the answer has to begin with; "" for none. Raises BadRequest.

        It begins a call that `tool_choice` forces. Without `thinks` an empty thought comes first.
        Where the prompt begins a thought, the call comes behind it. `begun`: the turn is older.
        """
        self._openings.check(choice, tools, chat=chat)
        call = self._openings.text(choice) if choice not in ("auto", "none") else ""
        late = not begun and self._openings.thinks_first
        if thinks or begun or not chat or (call and not late):
            return "" if late else call
        unthought = self._openings.unthought
        if unthought is None:
            raise BadRequest(
                "`thought_tokens` 0: this model cannot be kept from thinking: give it some, or leave "
                "them out",
                details={"field": "thought_tokens"},
            )
        return unthought + call

    @property
    def end_of_thought(self) -> str:
        """The text that ends a thought; "" for a model without thoughts."""
        thought = self.dialect.thought
        if thought is None:
            return ""
        return thought.end if self.dialect.tags else f"\n{thought.end}\n\n"

    @property
    def unthought(self) -> str | None:
        """See `Openings`."""
        return self._openings.unthought

    def calls(
        self,
        choice: str,
        tools: Toolbox,
        *,
        parallel: bool,
        ends_output: Callable[[str], bool],
    ) -> Calls | None:
        """Describe what a call of a tool has to be. `choice`: the tool's name, "auto" or "required"."""
        named = [tool for tool in tools.tools if choice in ("auto", "required", tool.name)]
        if not named or choice == "none":
            return None
        return exact_calls(
            self.dialect,
            self._openings.written(),
            named,
            demanded=choice != "auto",
            parallel=parallel and choice in ("auto", "required"),
            ends_output=ends_output,
        )

    def labels(self, branch: SessionBranch, choice: str, tools: Toolbox, name: str) -> Labels | None:
        """Make the labels of an output that begins at the end of `branch`.

        `name`: see `call_id`. None: there are no thoughts or calls to tell apart.
        """
        if choice == "none":
            tools = _NO_TOOLS
        if not tools and self.dialect.thought is None:
            return None
        reader = Reader(self.dialect, tools, branch.position, name)
        reader.prime(*_turn_so_far(branch))
        return Labels(reader)

    def spoken(
        self, reader: Reader, branch: SessionBranch, segment: OutputSegment
    ) -> ChatMessage | None:
        """Make the turn that ends with `segment`, if its text does not tell the template what it is.

        That is so of calls whose marks are control tokens, and of all that a dialect with tags says.
        """
        if not self._control or not (reader.calls or self.dialect.tags):
            return None
        prompt, said = _turn_so_far(branch, segment)
        if len(said) > PRIMED_MOST:
            return None
        whole = Reader(self.dialect, reader.tools, reader.position, reader.name)
        whole.prime(prompt, "")
        whole.feed(said + segment.text)
        whole.finish()
        return ChatMessage(
            role="assistant",
            content=whole.content,
            tool_calls=whole.calls or None,
            reasoning=whole.reasoning or None,
        )


def _turn_so_far(branch: SessionBranch, before: OutputSegment | None = None) -> tuple[str, str]:
    """Find the generation prompt of the open turn of the assistant, and the text since; "" for none.

    `before`: a segment of the turn, where it has gone on since.
    """
    said: list[str] = []
    segments = reversed(branch.segments)
    while before is not None and next(segments, before) is not before:
        pass
    for segment in segments:
        if segment.tail is Tail.PROMPT:
            return segment.text, "".join(reversed(said))
        written = isinstance(segment, OutputSegment) or not segment.chat
        if segment.tail is not Tail.OPEN or segment.role != "assistant" or not written:
            break
        said.append(segment.text)
    return "", "".join(reversed(said))


class Demand(NamedTuple):
    """A generation that is held to something. `place`: where its output begins.

    `by`: the client's constraint, begun or continued; else tools, of which calls have to be exact where
    one says `strict` or where a call is forced (`required`). `opening`: what stands there of it already.
    """

    by: Literal["constraint", "strict", "required", "auto"]
    place: TurnPlace
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
        self, op: Generate, tools: Toolbox, place: TurnPlace, opening: str, *, chat: bool
    ) -> Demand | None:
        """Find what the output of `op` is held to, if anything, unless it continues another one."""
        if op.constraint is not None and op.constraint.names_one:
            return Demand("constraint", place if chat else TurnPlace("answer", ""), "")
        if not tools or op.tool_choice == "none" or op.ignore_eos or not chat:
            return None
        loose = all(tool.strict is False for tool in tools.tools)
        if op.tool_choice == "auto" and loose and op.parallel_tool_calls:
            return None  # the client wants them as the model likes
        if any(tool.strict for tool in tools.tools):
            return Demand("strict", place, opening)
        return Demand("auto" if op.tool_choice == "auto" else "required", place, opening)

    def spec(self, held: Demand, op: Generate, tools: Toolbox) -> ConstraintSpec | None:
        """Make what is compiled; None: how this model writes calls is not known well enough."""
        if op.constraint is None or not op.constraint.names_one:
            return self._calls(held, op, tools)
        constraint = op.constraint
        thinks = constraint.after_thought and held.place.part != "answer"
        if not thinks or self._speech.dialect.thought is None:
            return _plain(constraint) or self._structure(_answer(constraint), "")
        answer = after_thought(self._speech.dialect, _answer(constraint))
        return self._structure(answer, self._thought_begun(held.place))

    def _calls(self, held: Demand, op: Generate, tools: Toolbox) -> ConstraintSpec | None:
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

    def _thought_begun(self, place: TurnPlace) -> str:
        """The text with which the open thought begins."""
        thought = self._speech.dialect.thought
        return thought.begin + place.pending if place.part == "thought" and thought is not None else ""

    def _structure(self, root: Part, after: str) -> ConstraintSpec:
        structure = Structure(root, after=after)
        said = encode_structure(structure).replace('\\"', '"')  # a mark may hold quotes
        marks = self._tokenizer.marks_in(said)
        return ConstraintSpec(
            "structure", encode_structure(msgspec.structs.replace(structure, marks=marks))
        )


def continued(branch: SessionBranch, op: Generate) -> OutputSegment | None:
    """Find the constrained output that `op` continues, if it does. Raises BadRequest."""
    begun, wanted = branch.unfinished, op.constraint
    if wanted is None:  # what does not go with a constraint asks for free text
        return None if op.ignore_eos or op.tool_choice not in ("auto", "none") else begun
    if wanted.continue_ and begun is None:
        raise BadRequest(
            f"branch {branch.name!r} does not end inside a constrained output that could go on: "
            "name the constraint",
            details={"field": "constraint.continue"},
        )
    return begun if wanted.continue_ else None


def _behind(opening: str, thought: Thought | None) -> str:
    """The part of an opening that belongs to the call: it may end a thought first."""
    if thought is None or thought.end not in opening:
        return opening
    return opening.rpartition(thought.end)[2].lstrip()


def _plain(constraint: Constraint) -> ConstraintSpec | None:
    """Make what is compiled of a constraint without structure.

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
