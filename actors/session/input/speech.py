"""How one model speaks: what its outputs are read with, and how a call is forced. Sessions share it."""

from collections.abc import Callable

from ramify.actors.calls.dialects import Dialect
from ramify.actors.calls.exact import Calls, exact_calls
from ramify.actors.calls.labels import Labels
from ramify.actors.calls.openings import Openings, Render
from ramify.actors.calls.reader import PRIMED_MOST, Reader
from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.session.branches.branch import Branch
from ramify.actors.session.branches.segments import OutputSegment, Tail
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ChatMessage

_NO_TOOLS = Toolbox(None)


class Speech:
    """See the module's top."""

    def __init__(self, render: Render, dialect: Dialect, *, control: bool) -> None:
        """`control`: the marks of calls are control tokens, which a message's text cannot hold."""
        self.dialect = dialect
        self._control = control
        self._openings = Openings(render, dialect)

    def opening(
        self, choice: str, tools: Toolbox, *, chat: bool, begun: bool = False, thinks: bool = True
    ) -> str:
        """What the answer is to begin with; "" for nothing: a call that `tool_choice` forces, without
        `thinks` behind an empty thought. Raises BadRequest.

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
        """What ends a thought; "" where there are none."""
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
        """What a call of one of the tools (`choice`: that one, "auto" or "required") has to be."""
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

    def labels(self, branch: Branch, choice: str, tools: Toolbox, name: str) -> Labels | None:
        """For an output that begins at the end of `branch`; None if there is nothing to tell apart.
        `name`: see `call_id`."""
        if choice == "none":
            tools = _NO_TOOLS
        if not tools and self.dialect.thought is None:
            return None
        reader = Reader(self.dialect, tools, branch.position, name)
        reader.prime(*_turn_so_far(branch))
        return Labels(reader)

    def spoken(self, reader: Reader, branch: Branch, segment: OutputSegment) -> ChatMessage | None:
        """The turn that ends with `segment`, if its text does not tell the template what it is.

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


def _turn_so_far(branch: Branch, before: OutputSegment | None = None) -> tuple[str, str]:
    """(the generation prompt, what was said since) of the assistant's turn that is open, if one is.

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
