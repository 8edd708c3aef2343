"""Tool calls and thoughts through a whole session: streamed, forced, cut, resumed, rolled back."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ramify.actors.calls.dialects import THOUGHTS, dialect_of
from ramify.actors.calls.reader import TurnPlace
from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.grammar.compile import compile_constraint
from ramify.actors.grammar.vocabulary import packed
from ramify.actors.session.branches.segments import Tail
from ramify.actors.session.input.speech import Constraints, Demand, _turn_so_far
from ramify.actors.session.input.template import ChatTemplate
from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.grammar import GrammarVocabulary
from ramify.gpu.constraints.loads import read_vocabulary
from ramify.gpu.executors.fake_model import FakeModel
from ramify.protocol import wire as w

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "add")
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
BOX = Toolbox(TOOLS)
EOS = 2


class Scripted(FakeModel):
    """Says what a test wants, behind tokens that the test names; else as the fake model."""

    def script(self, tokens: list[int], output: list[int]) -> None:
        chain = np.zeros(1, dtype=np.uint64)
        for token in tokens:
            chain = self.advance(chain, np.array([token], dtype=np.uint64))
        for token in output:
            self.lines[int(chain[0])] = token
            chain = self.advance(chain, np.array([token], dtype=np.uint64))

    @property
    def lines(self) -> dict[int, int]:
        return LINES

    def choose(self, chain: Any, salts: Any) -> Any:
        tokens = super().choose(chain, salts)
        for i, each in enumerate(chain):
            tokens[i] = LINES.get(int(each), tokens[i])
        return tokens

    def choose_among(self, chain: Any, salts: Any, legal: Any) -> Any:
        tokens = super().choose_among(chain, salts, legal)
        for i, each in enumerate(chain):
            said = LINES.get(int(each))
            if said is not None and legal[i, said]:
                tokens[i] = said
        return tokens


LINES: dict[int, int] = {}


class Told:
    """A session whose model says what it is told to; its client has asked something."""

    def __init__(self, engine: Any, thinks: bool = False, **opened: Any) -> None:
        LINES.clear()
        self.engine = engine
        engine.model = engine.executor.model = Scripted(engine.tokenizer.vocab_size, eos=EOS, first=3)
        if thinks:
            dialect = dialect_of("")._replace(thought=THOUGHTS[0])
            engine.template = ChatTemplate(engine.tokenizer, dialect)
        self.client = engine.session(**({"tools": TOOLS, "parts": True} | opened))
        self.client.send(w.Append(id=1, messages=[w.ChatMessage(role="user", content="Q")]))
        engine.pump()

    @property
    def branch(self) -> Any:
        return self.engine.cores[1].state.branches["main"]

    def says(self, text: str, opening: str = "", *, ends: bool = True) -> None:
        """What the model says next, behind `opening` if that is forced."""
        encode = self.engine.tokenizer.encode
        before = [*self.branch.tokens(), *encode(opening)]
        self.engine.model.script(before, [*encode(text), *([EOS] if ends else [])])

    def calls(self, text: str, opening: str, choice: str) -> None:
        """The same under the constraint of a forced call: forced tokens are spelled as that wants."""
        constraints = Constraints(self.engine.template.speech, self.engine.tokenizer)
        op = w.Generate(id=1, tool_choice=choice)
        spec = constraints.spec(Demand("required", TurnPlace("answer", ""), opening), op, BOX)
        assert spec is not None
        words = read_vocabulary(packed(self.engine.tokenizer), self.engine.tokenizer.vocab_size)
        body = compile_constraint(spec).body
        matcher = constraint_of(body, words, lambda: GrammarVocabulary(words)).matcher()
        data, tokens = text.encode(), list[int]()
        while data:
            forced = matcher.plan().forced
            tokens.append(forced[0] if forced else words.encode(data.decode())[0])
            assert matcher.advance(tokens[-1])
            assert data.startswith(words.tokens[tokens[-1]])
            data = data[len(words.tokens[tokens[-1]]) :]
        before = [*self.branch.tokens(), *self.engine.tokenizer.encode(opening)]
        self.engine.model.script(before, [*tokens, EOS])

    def generate(self, ident: int, **options: Any) -> Any:
        self.client.send(w.Generate(id=ident, temperature=0, **{"max_tokens": 400} | options))
        self.engine.pump()
        (reply,) = self.client.replies[ident]
        return reply


@pytest.fixture
def told(sim: Callable[..., Any]) -> Callable[..., Told]:
    return lambda **options: Told(sim(eos_every=0), **options)


def names(done: w.Done) -> list[str]:
    return [call["function"]["name"] for call in done.tool_calls or ()]


def test_a_call_ends_the_turn_with_tool(told: Callable[..., Told]) -> None:
    chat = told()
    chat.says(f"Let me see. {CALL}")
    done = chat.generate(2)
    assert (done.reason, done.content, done.reasoning) == ("tool", "Let me see.", None)
    assert names(done) == ["weather"]
    assert json.loads(done.tool_calls[0]["function"]["arguments"]) == {"city": "Köln"}
    assert chat.client.text("main") == f"Let me see. {CALL}"


@pytest.mark.parametrize("control", [False, True])
def test_what_was_called_is_known_where_its_marks_are_no_text(
    sim: Callable[..., Any], control: bool
) -> None:
    """Of a session of append mode too: its template may show the results with the names called."""
    engine = sim(eos_every=0)
    engine.template = ChatTemplate(engine.tokenizer, dialect_of(""), control=control)
    chat = Told(engine)
    chat.says(CALL)
    assert names(chat.generate(2)) == ["weather"]
    spoken = [each.spoken for each in chat.branch.segments if hasattr(each, "spoken")]
    assert [names(each) for each in spoken if each is not None] == ([["weather"]] if control else [])


def test_an_old_client_hears_what_it_heard(told: Callable[..., Told]) -> None:
    chat = told(parts=False)
    chat.says(f"Let me see. {CALL}")
    done = chat.generate(2)
    assert (done.reason, done.content, names(done)) == ("tool", None, ["weather"])
    assert all(delta.parts is None for delta in chat.client.deltas)


def test_deltas_say_what_their_text_is(told: Callable[..., Told]) -> None:
    chat = told(thinks=True)
    chat.says(f"<think>Hm.</think>\n\nWell, {CALL}{CALL} so.")
    done = chat.generate(2)
    seen = [part for delta in chat.client.deltas for part in delta.parts or ()]
    assert "".join(part.text for part in seen) == chat.client.text("main")
    assert "".join(part.text for part in seen if part.kind == "reasoning") == "Hm." == done.reasoning
    assert "".join(part.text for part in seen if part.kind == "text") == "Well,  so."
    assert done.content == "Well,  so."
    for number, call in enumerate(done.tool_calls):
        mine = [part for part in seen if part.call == number]
        assert [(p.id, p.name) for p in mine if p.name] == [(call["id"], "weather")]
        assert json.loads("".join(p.arguments or "" for p in mine)) == {"city": "Köln"}
    assert len(chat.client.deltas) > 20  # it was streamed


def test_what_may_be_a_mark_waits_for_those_who_want_parts_alone(told: Callable[..., Told]) -> None:
    chat = told()
    chat.says("a <tool_c", ends=False)
    chat.client.send(
        w.Generate(id=2, temperature=0, max_tokens=len(chat.engine.tokenizer.encode("a <tool_c")))
    )
    while "a <tool" not in chat.branch.text():
        chat.engine.pump(1)
    assert chat.client.text("main") == "a "
    chat.engine.pump()
    assert chat.client.text("main") == "a <tool_c"
    assert chat.client.replies[2][0].reason == "length"


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_call_is_forced(told: Callable[..., Told], choice: str) -> None:
    chat = told()
    opening = chat.engine.template.speech.opening(choice, BOX, chat=True)
    rest = ' "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    if choice == "weather":
        rest = ' {"city": "Rom"}}\n</tool_call>'
    chat.calls(rest, opening, choice)
    before = chat.branch.position
    done = chat.generate(2, tool_choice=choice)
    assert (done.reason, names(done)) == ("tool", ["weather"])
    opened = len(chat.engine.tokenizer.encode(opening))
    assert done.usage.prompt == before + opened  # the opening is input
    assert chat.client.text("main") == rest
    (named,) = [part for delta in chat.client.deltas for part in delta.parts or () if part.name]
    assert (named.name, named.id) == ("weather", done.tool_calls[0]["id"])
    assert opening + rest in chat.branch.text()


def test_none_leaves_calls_text(told: Callable[..., Told]) -> None:
    chat = told()
    chat.says(CALL)
    done = chat.generate(2, tool_choice="none")
    assert (done.reason, done.tool_calls, done.content) == ("stop", None, CALL)


def test_what_cannot_be_forced_changes_nothing(told: Callable[..., Told]) -> None:
    chat = told()
    before = chat.branch.position
    refused = chat.generate(2, tool_choice="nobody")
    assert refused.code == "bad_request"
    assert "weather, add" in refused.message
    assert chat.branch.position == before
    raw = told(tools=None)
    assert "needs tools" in raw.generate(2, tool_choice="required").message


def test_a_call_that_was_cut_goes_on(told: Callable[..., Told]) -> None:
    chat = told()
    chat.says(CALL)
    done = chat.generate(2, max_tokens=len(chat.engine.tokenizer.encode(CALL)) // 2)
    assert (done.reason, done.tool_calls) == ("length", None)
    done = chat.generate(3)
    assert (done.reason, names(done)) == ("tool", ["weather"])
    (named,) = [
        p
        for d in chat.client.deltas
        for p in d.parts or ()
        if p.name and p.id == done.tool_calls[0]["id"]
    ]
    assert named.name == "weather"


def test_a_resume_in_mid_thought(told: Callable[..., Told]) -> None:
    chat = told(thinks=True)
    text = f"<think>Hm, so it is.</think>Yes. {CALL}"
    chat.says(text)
    chat.client.send(w.Generate(id=2, temperature=0, max_tokens=400))
    while "Hm, so" not in chat.client.text("main"):
        chat.engine.pump(1)
    chat.client.drop()
    chat.engine.pump()
    chat.client.connect()
    chat.engine.pump()
    (done,) = chat.client.replies[2]
    assert (done.reasoning, done.content, names(done)) == ("Hm, so it is.", "Yes.", ["weather"])
    seen = [part for delta in chat.client.deltas for part in delta.parts or ()]
    assert "".join(part.text for part in seen) == text
    assert "".join(part.text for part in seen if part.kind == "reasoning") == "Hm, so it is."


def test_a_rollback_into_a_thought(told: Callable[..., Told]) -> None:
    chat = told(thinks=True)
    start = chat.branch.position
    chat.says("<think>Hm, so it is.</think>Yes.")
    chat.generate(2)
    to = start + len(chat.engine.tokenizer.encode("<think>Hm, so"))
    chat.client.send(w.Rollback(id=3, to=to))
    chat.engine.pump()
    assert chat.branch.text().endswith("<think>Hm, so")
    chat.says(" be it.</think>No.")
    done = chat.generate(4)
    assert (done.reasoning, done.content) == ("be it.", "No.")
    late = [part for delta in chat.client.deltas[-6:] for part in delta.parts or ()]
    assert {"text", "markup"} <= {part.kind for part in late}


def test_a_stop_string_in_a_thought(told: Callable[..., Told]) -> None:
    chat = told(thinks=True)
    chat.says("<think>Hm, so. END of it</think>")
    done = chat.generate(2, stop=["END"])
    assert (done.reason, done.stop) == ("stop", "END")
    assert (done.reasoning, done.content) == ("Hm, so.", "")


def test_a_strict_session_thinks_and_calls(told: Callable[..., Told]) -> None:
    chat = told(thinks=True, template="strict")
    text = f"<think>Hm.</think>Well. {CALL}"
    chat.says(text)
    done = chat.generate(2)
    assert (done.reason, done.reasoning, done.content) == ("tool", "Hm.", "Well.")
    result = w.ChatMessage(role="tool", content="sunny", tool_call_id=done.tool_calls[0]["id"])
    chat.client.send(w.Append(id=3, messages=[result]))
    chat.engine.pump()
    assert chat.client.replies[3][0].result is None  # nothing of it is rendered otherwise
    chat.says("<think>So.</think>Sunny.")
    done = chat.generate(4)
    assert (done.reason, done.reasoning, done.content) == ("stop", "So.", "Sunny.")


def test_children_are_forced_each(told: Callable[..., Told]) -> None:
    chat = told()
    opening = chat.engine.template.speech.opening("add", BOX, chat=True)
    chat.calls(" {}}\n</tool_call>", opening, "add")
    chat.client.send(
        w.Generate(id=2, n=2, as_=["a", "b"], temperature=0, tool_choice="add", max_tokens=60),
        replies={2: 2},
    )
    chat.engine.pump()
    assert [names(done) for done in chat.client.replies[2]] == [["add"], ["add"]]


def test_a_refused_generation_takes_its_opening_back(told: Callable[..., Told]) -> None:
    chat = told()
    before = chat.branch.position
    chat.client.send(w.Generate(id=2, temperature=0, tool_choice="add"))
    chat.engine.pump(1)
    assert chat.branch.position > before
    chat.engine.fail(1)
    (refused,) = chat.client.replies[2]
    assert refused.code == "internal"
    assert chat.branch.position == before


def test_memory_is_given_back(told: Callable[..., Told]) -> None:
    chat = told(thinks=True)
    meter = chat.engine.cores[1].state.meter
    chat.says(f"<think>{'Hm. ' * 20}</think>{CALL}")
    chat.generate(2)
    chat.client.send(w.Drop(id=3, branch=["main"]))
    chat.engine.pump()
    held = meter.held
    fresh = told().engine.cores[1].state.meter
    assert held < fresh.held + 20_000


def test_joins_and_prunes_read_answers_without_thoughts(told: Callable[..., Told]) -> None:
    chat = told(thinks=True)
    chat.client.send(w.Fork(id=2, as_=["a"]))
    chat.engine.pump()
    chat.says("<think>Is it 9? Or 8.</think>\n\nIt is 7.")
    answer = w.Generate(id=3, branch="a", temperature=0, max_tokens=400, keep_open=True)
    chat.client.send(answer, w.Prune(id=4, from_=["a"], by="number", keep=True))
    chat.client.send(w.Join(id=5, from_=["a"], branch="main", each="{text}", role=None))
    chat.engine.pump()
    assert chat.client.replies[4][0].result["scores"] == {"a": 7.0}
    assert chat.branch.text().endswith("It is 7.")
    assert "Is it 9" not in chat.branch.text()


@pytest.mark.parametrize(
    ("tail", "role", "chat", "said"),
    [
        (Tail.OPEN, "assistant", False, "an answer"),
        (Tail.CLOSED, "assistant", False, "answer"),
        (Tail.OPEN, "user", False, "answer"),
        (Tail.OPEN, "assistant", True, "answer"),
    ],
)
def test_the_turn_goes_back_to_where_somebody_else_spoke(
    tail: Tail, role: str, chat: bool, said: str
) -> None:
    def segment(text: str, tail: Tail, role: str, *, chat: bool) -> Any:
        return SimpleNamespace(text=text, tail=tail, role=role, chat=chat)

    before = segment("an ", tail, role, chat=chat)
    branch: Any = SimpleNamespace(
        segments=[before, segment("answer", Tail.OPEN, "assistant", chat=False)]
    )
    assert _turn_so_far(branch) == ("", said)
    branch.segments.insert(0, segment("<prompt>", Tail.PROMPT, "assistant", chat=True))
    assert _turn_so_far(branch) == ("<prompt>" if said == "an answer" else "", said)
