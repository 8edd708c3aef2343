"""Random sessions: all that the meter counts is given back, and every op ends once, also while its
text is tokenized.

Nothing here waits for Python's garbage collector: a charge that a cycle of references keeps counts
against its client for as long as nobody collects.
"""

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramify.actors.kit.memory import SESSION
from ramify.actors.session.branches import tasks
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.errors import Overloaded, RamifyError

NAMES = ["main", "a", "b", "c"]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def all_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly every append is tokenized off the event loop."""
    monkeypatch.setattr(tasks, "ON_THE_LOOP", 4)


def simulation(sim_class: Any, tokenizer: Tokenizer, **settings: Any) -> Any:
    """A simulated engine in which texts are tokenized when the test says so."""

    class Slow(sim_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.jobs: list[tuple[int, Any]] = []
            super().__init__(*args, **kwargs)

        def flush(self, number: int) -> None:
            out = self.cores[number].state.out
            self.jobs += [(number, job) for job in out.encode]
            out.encode.clear()
            super().flush(number)

        def encode(self, rng: random.Random) -> None:
            """Finish one of the jobs; some are refused because too much waits."""
            number, job = self.jobs.pop(rng.randrange(len(self.jobs)))
            core = self.cores[number]
            if core.ended is not None:
                return
            try:
                if rng.random() < 0.1:
                    raise Overloaded("too much waits")
                core.encoded(job.ticket, job.run(), None, self.now)
            except RamifyError as error:
                core.encoded(job.ticket, None, error.with_traceback(None), self.now)
            self.flush(number)

        def settle(self, rng: random.Random) -> None:
            """Until nothing is left to do."""
            while True:
                self.pump()
                if not self.jobs:
                    return
                self.encode(rng)

    return Slow(tokenizer, **settings)


def random_op(rng: random.Random, client: Any) -> w.Op:
    name, ident = rng.choice(NAMES), client.id()
    deadline = rng.choice([None, None, 1, 20, 500])
    match rng.randrange(12):
        case 0 | 1:
            return w.Append(id=ident, branch=name, text="some words " * rng.randrange(1, 9))
        case 2:
            message = w.ChatMessage(role="user", content="one two three")
            return w.Append(id=ident, branch=rng.sample(NAMES, 2), messages=[message])
        case 3:
            return w.Append(id=ident, branch=name, tokens=[rng.randrange(3, 300)] * 90)
        case 4 | 5:
            return w.Generate(
                id=ident,
                branch=name,
                max_tokens=rng.randrange(1, 25),
                stop=rng.choice([[], ["e"]]),
                logprobs=rng.choice([0, 2]),
                quiet=rng.random() < 0.2,
                deadline_ms=deadline,
            )
        case 6:
            return w.Generate(id=ident, branch=name, n=2, max_tokens=5, deadline_ms=deadline)
        case 7:
            return w.Fork(id=ident, branch=rng.choice([None, name]), as_=rng.sample(NAMES, 2))
        case 8:
            return w.Rollback(id=ident, branch=name, to=rng.randrange(0, 60))
        case 9:
            new = rng.choice([None, *NAMES])
            return w.Set(id=ident, branch=name, name=new, meta={"k": "v" * rng.randrange(50)})
        case 10:
            return w.Drop(id=ident, branch=name)
        case _:
            ids = rng.choice([None, [rng.randrange(1, client.next_id)]])
            return w.Cancel(id=ident, ops=ids, branch=None if ids else name)


@pytest.mark.usefixtures("no_collector", "all_in_threads")
@settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_what_is_held_is_given_back(sim_class: Any, tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    engine = simulation(
        sim_class,
        tokenizer,
        context=256,
        step_tokens=48,
        max_rows=4,
        eos_every=20,
        seed=seed,
        limits=Limits(running=rng.choice([1, 4]), session_bytes=rng.choice([60_000, 1 << 28])),
    )
    template = rng.choice(["append", "strict"])
    client = engine.session(detach=rng.choice(["run", "pause", "cancel"]), template=template)
    client.send(w.Append(id=client.id(), tokens=[5, 6, 7]))
    engine.settle(rng)
    core = engine.cores[1]
    for _ in range(25):
        chance = rng.random()
        if client.socket is None:
            client.connect()
        elif chance < 0.1:
            client.drop()
        elif chance < 0.2:
            engine.post_session(1, m.Throttled(client.socket))
        elif chance < 0.3:
            engine.post_session(1, m.Drained(client.socket))
        else:
            client.send(*(random_op(rng, client) for _ in range(rng.randrange(1, 5))))
        engine.pump(rng.randrange(0, 30))
        if engine.jobs and rng.random() < 0.6:
            engine.encode(rng)
        if rng.random() < 0.3:
            engine.now += 0.05
            engine.post_session(1, m.Tick())
    if client.socket is not None:
        client.drop()
    engine.pump()
    client.connect()
    engine.settle(rng)
    assert client.unanswered == {}, client.unanswered
    assert core.runner.queued == 0
    client.send(w.Cancel(id=client.id()))
    names = list(core.state.branches)
    client.send(*(w.Drop(id=client.id(), branch=name) for name in names))
    engine.settle(rng)
    assert not core.state.branches
    assert len(core.runner) == 0
    client.drop()
    engine.settle(rng)
    kept = sum(reply_log.held for reply_log in core.publisher.reply_logs.values())
    assert core.state.meter.held == SESSION + kept


@pytest.mark.usefixtures("all_in_threads")
@settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_an_engine_that_breaks_while_texts_are_tokenized(
    sim_class: Any, tokenizer: Tokenizer, seed: int
) -> None:
    """Every op that waits for one, or runs, ends once."""
    rng = random.Random(seed)
    engine = simulation(sim_class, tokenizer, context=256, step_tokens=48, max_rows=4, seed=seed)
    client = engine.session()
    client.send(w.Append(id=client.id(), tokens=[5, 6, 7]))
    engine.settle(rng)
    for _ in range(rng.randrange(1, 6)):
        client.send(*(random_op(rng, client) for _ in range(rng.randrange(1, 5))))
        engine.pump(rng.randrange(0, 30))
        if engine.jobs and rng.random() < 0.3:
            engine.encode(rng)
    counts: dict[tuple[int, str | None], int] = {}
    receive = client.receive

    def counting(messages: list[w.ServerMessage]) -> None:
        for message in messages:
            if isinstance(message, w.Ok | w.Done | w.Error) and message.id is not None:
                key = (message.id, message.branch)
                counts[key] = counts.get(key, 0) + 1
        receive(messages)

    client.receive = counting
    engine.fail(1)
    assert client.unanswered == {}
    assert not counts or max(counts.values()) == 1
