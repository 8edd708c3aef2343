"""How long a model may think, through a whole engine without a loop: `generate.thought_tokens`."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.calls.dialects import THOUGHTS, dialect_of
from ramify.actors.session.input.template import ChatTemplate
from ramify.protocol import wire as w
from ramify.protocol.wire import Constraint
from tests.actors.session.output.test_exact_calls import QUESTION, SCHEMA, check, ends, tool

END = THOUGHTS[0].end


class _Thinking:
    """The template of a model that thinks; `begins`: its prompt begins the thought."""

    def __init__(self, tokenizer: Any, *, begins: bool) -> None:
        self._tokenizer, self._begins = tokenizer, begins

    def render(
        self, messages: Any, tools: Any = None, generate: bool = False, effort: str | None = None
    ) -> str:
        text: str = self._tokenizer.render(messages, tools, generate)
        return text + "<think>\n" if generate and self._begins else text

    def unguarded(self, rendered: str) -> str:
        text: str = self._tokenizer.unguarded(rendered)
        return text


def thinking(sim: Callable[..., Any], *, begins: bool = True, **options: Any) -> Any:
    engine = sim(eos_every=0, **options)
    dialect = dialect_of("", "hermes")._replace(thought=THOUGHTS[0])
    engine.template = ChatTemplate(_Thinking(engine.tokenizer, begins=begins), dialect)
    return engine


def asked(sim: Callable[..., Any], *, begins: bool = True, tools: Any = None, **options: Any) -> Any:
    engine = thinking(sim, begins=begins)
    client = engine.session(tools=tools, parts=True)
    client.send(QUESTION, w.Generate(id=2, **{"max_tokens": 60} | options))
    engine.pump()
    return engine, client, ends(client)[0]


def test_a_thought_is_ended_and_the_answer_follows(sim: Callable[..., Any]) -> None:
    _, _, free = asked(sim, temperature=0.0)
    assert (free.reason, free.content, free.usage.output) == ("length", "", 60)
    _, client, done = asked(sim, temperature=0.0, thought_tokens=20)
    assert done.reason == "length"
    assert done.usage.output == 60
    assert 0 < done.usage.forced < 20
    assert done.content
    assert (done.usage.thought, free.usage.thought) == (21, 60)  # with the line break that ends it
    assert free.reasoning.startswith(done.reasoning)
    said = "".join(delta.text for delta in client.deltas)
    assert said.count(END) == 1
    kinds = [part.kind for delta in client.deltas for part in delta.parts or ()]
    assert list(dict.fromkeys(kinds)) == ["reasoning", "markup", "text"]


@pytest.mark.parametrize("budget", [1, 59, 60, 4000])
def test_a_budget_without_room_behind_it_bounds_nothing(sim: Callable[..., Any], budget: int) -> None:
    _, _, done = asked(sim, temperature=0.0, thought_tokens=budget)
    assert (done.reason, done.usage.output) == ("length", 60)
    assert (done.content == "") == (budget != 1)


@pytest.mark.parametrize("begins", [True, False])
def test_without_a_thought(sim: Callable[..., Any], *, begins: bool) -> None:
    engine, client, done = asked(sim, begins=begins, temperature=0.0, thought_tokens=0)
    assert done.content
    assert not done.reasoning
    branch = engine.cores[1].state.branches["main"]
    text = "".join(segment.text for segment in branch.segments)
    assert text.count("<think>") == text.count(END) == 1
    client.send(w.Generate(id=3, max_tokens=5, thought_tokens=0))  # the turn goes on
    engine.pump()
    assert ends(client, 3)[0].reason == "length"


@pytest.mark.parametrize("budget", [0, 9])
@pytest.mark.parametrize("begins", [True, False])
def test_what_comes_behind_a_thought_is_exact(
    sim: Callable[..., Any], budget: int, *, begins: bool
) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "thought_tokens": budget, "begins": begins}
    once = {"tool_choice": "open", "parallel_tool_calls": False, "max_tokens": 400}
    _, _, done = asked(sim, tools=[tool()], **options, **once)
    assert done.reason == "tool"
    check(done.tool_calls)
    held = Constraint(json_schema=SCHEMA, after_thought=True)
    _, _, done = asked(sim, constraint=held, **options, max_tokens=400)
    assert done.reason == "stop"
    check([{"function": {"arguments": done.content}}])


def test_log_probabilities_are_of_every_token(sim: Callable[..., Any]) -> None:
    _, client, done = asked(sim, temperature=0.0, thought_tokens=20, logprobs=1)
    entries = [each for delta in client.deltas for each in delta.logprobs or ()]
    assert len(entries) == done.usage.output
    assert sum(each.logprob == 0.0 for each in entries) >= done.usage.forced


def test_a_stop_that_the_end_of_a_thought_completes(sim: Callable[..., Any]) -> None:
    _, _, done = asked(sim, temperature=0.0, thought_tokens=20, stop=[END])
    assert (done.reason, done.stop) == ("stop", END)


def test_children_have_a_budget_each(sim: Callable[..., Any]) -> None:
    _, client, _ = asked(sim, temperature=1.0, seed=1, thought_tokens=20, n=3, as_=["a", "b", "c"])
    for done in ends(client):
        assert done.content
        assert done.usage.output == 60
    assert len(ends(client)) == 3


@pytest.mark.parametrize("at", range(0, 40, 3))
def test_another_engine_goes_on_with_it(sim: Callable[..., Any], at: int) -> None:
    _, told, whole = asked(sim, temperature=0.0, thought_tokens=12, max_tokens=30)
    engine = thinking(sim)
    client = engine.session(parts=True)
    asking = w.Generate(id=2, max_tokens=30, temperature=0.0, thought_tokens=12)
    client.send(QUESTION, asking)
    engine.pump(at)
    engine.move()
    engine.pump()
    (done,) = ends(client)
    assert client.text("main") == told.text("main")
    assert (done.content, done.usage.output) == (whole.content, whole.usage.output)
    assert done.usage.forced == whole.usage.forced


def test_who_cannot_be_kept_from_thinking_is_not(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    engine.template = ChatTemplate(engine.tokenizer, dialect_of("", "harmony"))
    client = engine.session(parts=True)
    client.send(QUESTION, w.Generate(id=2, max_tokens=4, thought_tokens=0))
    engine.pump()
    (error,) = ends(client)
    assert error.details == {"field": "thought_tokens"}
    assert engine.template.speech.end_of_thought == "<|end|>"
