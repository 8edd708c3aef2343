"""How many tokens ops are going to add, about; and what a session tells the scheduler of it."""

from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.session.branches.tasks import ON_THE_LOOP, FrameRun
from ramify.actors.session.ops import HANDLERS
from ramify.actors.session.ops.generate import OUTPUT
from ramify.protocol.messages import Submit
from ramify.protocol.wire import Append, ChatMessage, Drop, Generate, Join, Op, Open, Select


def told(op: Op) -> list[int]:
    tasks = HANDLERS[type(op)].tasks(op, FrameRun(Open(client="c"), lambda: Toolbox(())))
    return [task.expects for task in tasks]


def test_what_ops_add():
    assert told(Append(id=1, text="x" * 41)) == [10]
    assert told(Append(id=1, tokens=[1, 2, 3], branch=["a", "b"])) == [3, 3]
    said = [ChatMessage(role="user", content="x" * 8), ChatMessage(role="user", content="x" * 8)]
    assert told(Append(id=1, messages=said)) == [4]
    assert told(Generate(id=1, max_tokens=20)) == [20]
    assert told(Generate(id=1, max_tokens=20_000)) == [OUTPUT] == [64]
    assert told(Generate(id=1, max_tokens=20, n=2)) == [0, 20, 20]  # the fork adds nothing
    join = Join(id=1, from_=["a", "b"], prefix="x" * 10, suffix="x" * 10)
    assert told(join) == [5 + 64]
    assert told(Drop(id=1, branch="a")) == [0]
    assert told(Select(id=1, choices=["a", "b"])) == [0]  # its branches go again


def test_the_text_of_an_append_is_measured_once_for_all_its_branches():
    """A frame of 1,000 branches and 16,384 messages took 0.3 s, in one turn of the loop."""
    looked_at = []

    class Said(list):
        def __iter__(self):
            looked_at.append(len(self))
            return super().__iter__()

    messages = Said([ChatMessage(role="user", content="x" * 4)] * 100)
    op = Append(id=1, branch=[f"b{i}" for i in range(100)], messages=messages)
    assert told(op) == [100] * 100
    assert looked_at == [100]


def test_a_session_says_what_waits_behind_a_request(sim, monkeypatch):
    engine, said = sim(), []
    handle = engine.scheduler.handle

    def heard(event, now):
        if isinstance(event, Submit):
            said.append((event.max_tokens, event.expects))
        handle(event, now)

    monkeypatch.setattr(engine.scheduler, "handle", heard)
    client = engine.session()
    client.send(
        Append(id=1, text="hello"),
        Generate(id=2, max_tokens=5, ignore_eos=True),
        Append(id=3, text=" and goodbye"),
        Generate(id=4, max_tokens=7, ignore_eos=True),
    )
    engine.pump()
    assert said == [(5, 5 + 3 + 7), (7, 7)]
    assert engine.cores[1].state.expects == 0


def test_a_frame_may_work_on_the_loop_each_time_that_it_goes_on():
    frame = FrameRun(Open(client="c"), lambda: Toolbox(()))
    assert frame.spend(ON_THE_LOOP, 1.0)
    assert not frame.spend(1, 1.0)
    assert frame.spend(1, 2.0)
    assert not frame.spend(ON_THE_LOOP, 2.0)
    assert frame.spend(ON_THE_LOOP - 1, 2.0)
    assert not frame.spend(ON_THE_LOOP + 1, 3.0)
