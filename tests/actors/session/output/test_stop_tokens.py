"""A stop token is never text, however late the session hears that it was the last one.

The scheduler delivers tokens at once and tells an end only when the cache has heard of it, so a
request's last token may arrive long before its end.
"""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.session.branches.segments import OutputSegment
from ramify.protocol import messages as m
from ramify.protocol import wire as w


class Late:
    """Holds the ends of requests back until `tell`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._deliver = engine.scheduler.deliver
        self._held: list[tuple[int, m.Tokens]] = []
        engine.scheduler.deliver = self._split

    def _split(self) -> list[tuple[int, m.Tokens]]:
        told = []
        for number, tokens in self._deliver():
            if tokens.progress:
                told.append((number, m.Tokens(tokens.progress, [])))
            if tokens.finished:
                self._held.append((number, m.Tokens([], tokens.finished)))
        return told

    def tell(self) -> None:
        for number, tokens in self._held:
            self._engine.post_session(number, tokens)
        self._held.clear()


def run(engine: Any, client: Any, **sampling: Any) -> tuple[Late, list[int], int]:
    """Generate until a visible stop token was delivered, and its end was not."""
    client.send(w.Append(id=client.id(), text="hello world"))
    engine.pump()
    prompt = list(engine.cores[1].state.branches["main"].tokens())
    expected = engine.model.expected(prompt, 40)
    at = next(
        i for i in range(3, 40) if expected[i] > 2 and expected.index(expected[i]) == i
    )  # not seen before
    late = Late(engine)
    client.send(
        w.Generate(
            id=client.id(), temperature=0, stop_token_ids=[expected[at]], ignore_eos=True, **sampling
        )
    )
    engine.pump()
    return late, expected[:at], expected[at]


def check(engine: Any, client: Any, output: list[int], stop: int) -> None:
    """Text, marks and tokens say the same, and so do the cache and the reply."""
    done = client.replies[2][0]
    branch = engine.cores[1].state.branches["main"]
    segment = branch.segments[1]
    assert isinstance(segment, OutputSegment)
    assert (done.reason, done.stop) == ("stop", stop)
    assert list(segment.tokens) == output
    assert segment.counts[-1] == len(output)
    assert client.text("main") == segment.text == engine.tokenizer.decode(output)
    assert done.position == branch.position == segment.end
    assert done.usage.output == len(output) + 1
    engine.check_outputs(1)


@pytest.mark.parametrize("max_tokens", ["more", "exactly"])
def test_a_stop_token_whose_end_comes_later_is_not_shown(
    sim: Callable[..., Any], max_tokens: str
) -> None:
    """Also where the same token uses up `max_tokens`: it ended the text, not the length."""
    engine = sim(eos_every=1000)
    probe = engine.session("p")
    _, output, stop = run(engine, probe)
    engine = sim(eos_every=1000)
    client = engine.session()
    count = len(output) + 1 if max_tokens == "exactly" else 100
    late, output, stop = run(engine, client, max_tokens=count)
    assert 2 not in client.replies
    assert client.text("main") == engine.tokenizer.decode(output)
    assert client.have["main"] == engine.cores[1].state.branches["main"].segments[1].start + len(output)
    late.tell()
    engine.pump()
    check(engine, client, output, stop)


@pytest.mark.parametrize("event", ["cancel", "resume", "pause", "pause and back", "nothing"])
def test_what_happens_before_the_end_is_known_changes_nothing(
    sim: Callable[..., Any], event: str
) -> None:
    engine = sim(eos_every=1000)
    client = engine.session(detach="pause" if event.startswith("pause") else "run")
    late, output, stop = run(engine, client)
    if event == "cancel":
        client.send(w.Cancel(id=client.id()))
    elif event != "nothing":
        client.drop()
        if event == "pause":
            late.tell()
            engine.pump()
        client.connect()
    engine.pump()
    late.tell()
    engine.pump()
    check(engine, client, output, stop)


def test_an_engine_that_breaks_before_the_end_is_known_shows_no_stop_token(
    sim: Callable[..., Any],
) -> None:
    engine = sim(eos_every=1000)
    client = engine.session()
    _, output, stop = run(engine, client)
    core = engine.cores[1]
    engine.fail(1)
    assert core.ended is not None
    assert client.replies[2][0].stop == stop
    assert client.text("main") == engine.tokenizer.decode(output)


def test_a_stop_string_before_the_stop_token_wins(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=1000)
    client = engine.session()
    _, output, _ = run(engine, client)
    text = engine.tokenizer.decode(output)
    engine = sim(eos_every=1000)
    client = engine.session()
    late, output, _ = run(engine, client, stop=[text[-2:]])
    late.tell()
    engine.pump()
    done = client.replies[2][0]
    assert done.stop == text[-2:]
    assert client.text("main") == text[: text.find(text[-2:])]


def test_the_turn_of_a_chat_ends_with_the_token_that_the_template_ends_it_with(
    sim: Callable[..., Any],
) -> None:
    engine = sim(eos_every=9)
    client = engine.session()
    late = Late(engine)
    client.send(w.Append(id=1, messages=[w.ChatMessage(role="user", content="hello")]))
    client.send(w.Generate(id=2, temperature=0))
    client.next_id = 3
    engine.pump()
    segment = engine.cores[1].state.branches["main"].segments[2]
    assert segment.tokens[-1] == 2
    shown = client.text("main")
    assert segment.counts[-1] == len(segment.tokens) - 1
    late.tell()
    engine.pump()
    done = client.replies[2][0]
    assert (done.reason, done.stop, segment.eos_text) == ("stop", 2, "<|im_end|>")
    assert segment.counts[-1] == len(segment.tokens)
    assert client.text("main") == shown == segment.text
