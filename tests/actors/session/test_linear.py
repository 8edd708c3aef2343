"""Frames with many names or many ops: limits first, and work that is linear in what is sent.

Work is counted, not timed: lines of the session's code that run, and comparisons that a list makes.
"""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from ramify.actors.session.branches import tasks
from ramify.actors.session.ops.running.queues import OpQueues
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits

SLACK = 1.25  # of twice the work for twice the names


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of `actors/session` run in `call`, without finalizers of earlier sessions."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "session" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


def grows_linearly(work: Callable[[int], int], n: int = 100) -> bool:
    once, twice = work(n), work(2 * n)
    assert once > n / 2, "nothing was counted"
    return twice <= 2 * SLACK * once


class Op:
    """A task that counts comparisons with others."""

    compared = 0

    def __init__(self, *touched: str) -> None:
        self.touched = touched

    def __eq__(self, other: object) -> bool:
        Op.compared += 1
        return self is other

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("order", ["first to last", "last to first"])
def test_a_queue_is_left_in_any_order(order: str) -> None:
    def work(n: int) -> int:
        queues: Any = OpQueues()
        ops = [Op("a", f"b{i}") for i in range(n)]
        Op.compared = 0

        def run() -> None:
            for op in ops:
                queues.add(op)
            for op in ops if order == "first to last" else reversed(ops):
                queues.start(op)
                queues.finish(op)

        return lines_of(run) + Op.compared

    assert grows_linearly(work)


def test_a_task_on_many_branches_waits_for_many_others() -> None:
    def work(n: int) -> int:
        queues: Any = OpQueues()
        ops = [Op(f"b{i}") for i in range(n)]
        join = Op(*(f"b{i}" for i in range(n)))
        Op.compared = 0

        def run() -> None:
            for op in (*ops, join):
                queues.add(op)
            for op in ops:
                assert queues.start(op)
            for i, op in enumerate(ops):
                freed = queues.finish(op)
                assert bool(freed) == (i == n - 1)
                assert queues.start(join) == bool(freed)

        return lines_of(run) + Op.compared

    assert grows_linearly(work)


def running(sim: Callable[..., Any], ops: list[w.Op], **limits: int) -> tuple[Any, Any]:
    """A session in which `ops` were taken up, and nothing has been sampled yet."""
    engine = sim(limits=Limits(**limits))
    engine.integrity = False
    client = engine.session()
    engine.pump()
    core = engine.cores[1]
    core.frame(client.socket, ops, engine.now)
    return core, client


def test_cancelling_many_generations(sim: Callable[..., Any]) -> None:
    def work(n: int) -> int:
        names = [f"b{i}" for i in range(n)]
        core, client = running(
            sim,
            [
                w.Append(id=1, text="hello"),
                w.Fork(id=2, as_=names),
                w.Generate(id=3, branch=names, max_tokens=5),
            ],
            running=1,
        )
        cancel: list[w.ClientMessage] = [w.Cancel(id=4, branch=names)]
        return lines_of(lambda: core.frame(client.socket, cancel, 101.0))

    assert grows_linearly(work)


def test_a_branch_that_is_named_many_times_is_looked_at_once(sim: Callable[..., Any]) -> None:
    def work(n: int) -> int:
        queued = [w.Append(id=i + 3, text="x") for i in range(n)]
        start: list[w.Op] = [w.Append(id=1, text="hello"), w.Generate(id=2, max_tokens=5), *queued]
        core, client = running(sim, start)
        cancel: list[w.ClientMessage] = [w.Cancel(id=1000, branch=["main"] * n)]
        return n + lines_of(lambda: core.frame(client.socket, cancel, 101.0))

    assert grows_linearly(work)


@pytest.mark.parametrize("kind", ["join", "race", "vote"])
def test_joining_and_pruning_many_branches(sim: Callable[..., Any], kind: str) -> None:
    """The op comes in, hears of each of its branches, and ends."""

    def work(n: int) -> int:
        names = [f"b{i}" for i in range(n)]
        op: w.Op = w.Join(id=4, from_=names)
        if kind != "join":
            by: Any = "first" if kind == "race" else "vote"
            op = w.Prune(id=4, from_=names, by=by, k=n // 2, into=[f"c{i}" for i in range(n // 2)])
        core, client = running(sim, [w.Append(id=1, text="hello"), w.Fork(id=2, as_=names)], running=n)
        core.frame(client.socket, [w.Generate(id=3, branch=names, max_tokens=5)], 101.0)

        def run() -> None:
            core.frame(client.socket, [op], 101.0)
            core.frame(client.socket, [w.Cancel(id=5)], 102.0)

        ended = core.generations.finished
        requests = [each.request for each in core.state.out.scheduler if isinstance(each, m.Submit)]
        lines = lines_of(run)
        ends = [
            m.Finished(
                request=request,
                reason="cancelled",
                output=0,
                prompt=3,
                cached=0,
                computed=0,
                arrived=0.0,
                started=0.0,
                first_token=0.0,
                ended=0.0,
            )
            for request in requests
        ]
        lines += lines_of(lambda: [ended(end) for end in ends])
        lines += lines_of(lambda: core.go_on(102.0))
        assert not core.runner._queues.on(), "it has not ended"
        return lines

    assert grows_linearly(work)


def test_forking_to_many_names(sim: Callable[..., Any]) -> None:
    def work(n: int) -> int:
        fork: list[w.ClientMessage] = [w.Fork(id=2, as_=[f"b{i}" for i in range(n)])]
        core, client = running(sim, [w.Append(id=1, text="hello")])
        return lines_of(lambda: core.frame(client.socket, fork, 101.0))

    assert grows_linearly(work)


def test_the_limit_comes_before_the_tasks(sim: Callable[..., Any], monkeypatch: Any) -> None:
    """256 ops on 1,000 branches each are 256,000 tasks: more than 1,024 are never made."""
    made = 0

    make = tasks.Task.__init__

    def counted(self: tasks.Task, *args: Any, **fields: Any) -> None:
        nonlocal made
        made += 1
        make(self, *args, **fields)

    monkeypatch.setattr(tasks.Task, "__init__", counted)
    core, client = running(sim, [])
    names = [f"b{i}" for i in range(1000)]
    core.frame(client.socket, [w.Append(id=i, branch=names, text="x") for i in range(1, 257)], 101.0)
    assert made <= 1024
    replies = core.subscribers[client.socket].out
    assert {reply.code for reply in replies} == {"limit"}
    assert [reply.id for reply in replies] == list(range(1, 257))


@pytest.mark.parametrize(
    ("op", "field"),
    [
        (w.Fork(id=1, as_=[f"b{i}" for i in range(17)]), "as"),
        (w.Set(id=1, meta={"k": "x" * 100}), "meta"),
        (w.Generate(id=1, n=17), "n"),
    ],
)
def test_limits_of_a_server_are_named(sim: Callable[..., Any], op: w.Op, field: str) -> None:
    core, client = running(sim, [op, w.Append(id=2, text="x")], branches=16, n=16, meta_bytes=64)
    first, second = core.subscribers[client.socket].out
    assert (first.code, second.code) == ("limit", "skipped")
    assert f"$[0].{field}" in first.message
    assert first.details["max"] in (16, 64)
    assert list(core.state.branches) == ["main"]


def test_a_name_that_is_given_twice_exists(sim: Callable[..., Any]) -> None:
    core, client = running(sim, [w.Fork(id=1, as_=["a", "b", "a"])])
    (reply,) = core.subscribers[client.socket].out
    assert reply.code == "exists"
    assert "'a'" in reply.message


MANY_TOOLS = [
    {"name": f"f{i}", "description": "what it does " * 8, "parameters": {"properties": {"x": {}}}}
    for i in range(200)
]


class Renders:
    """The tokenizer, which counts how often the template was shown many tools."""

    def __init__(self, tokenizer: Any) -> None:
        self.count = 0
        self._render = tokenizer.render

    def __call__(self, messages: Any, tools: Any = None, *more: Any) -> str:
        self.count += len(tools or ()) > 2
        text: str = self._render(messages, tools, *more)
        return text


@pytest.mark.parametrize("template", ["append", "strict"])
def test_many_tools_are_shown_to_the_template_off_the_loop(
    sim: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """They are as long as a text, at each append that renders all turns; so are the calls of a message.
    Append mode does not show them again."""
    engine = sim(context=1 << 16, pages=1 << 13)
    client = engine.session(tools=MANY_TOOLS, template=template)
    client.send(
        w.Append(id=1, messages=[w.ChatMessage(role="system", content="s")]),
        w.Append(id=2, messages=[w.ChatMessage(role="user", content="u")]),
    )
    engine.pump()
    core, renders = engine.cores[1], Renders(engine.tokenizer)
    monkeypatch.setattr(engine.tokenizer, "render", renders)
    calls = [{"function": {"name": "f1", "arguments": {"x": "y" * 5000}}}]
    for message in (
        w.ChatMessage(role="user", content="again"),
        w.ChatMessage(role="assistant", content="", tool_calls=calls),
    ):
        renders.count = 0
        core.frame(client.socket, [w.Append(id=client.id() + 9, messages=[message])], engine.now)
        assert renders.count == 0
        assert len(core.state.out.encode) == (template == "strict" or message.tool_calls is not None)
        engine.pump()
        assert (renders.count > 0) == (template == "strict")


@pytest.mark.parametrize("template", ["append", "strict"])
def test_the_prompt_behind_a_system_turn_is_rendered_once_for_all_branches(
    sim: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    engine = sim(context=1 << 16, pages=1 << 13)
    client = engine.session(tools=MANY_TOOLS, template=template)
    names = [f"b{i}" for i in range(20)]
    client.send(
        w.Append(id=1, messages=[w.ChatMessage(role="system", content="s")]), w.Fork(id=2, as_=names)
    )
    engine.pump()
    renders = Renders(engine.tokenizer)
    monkeypatch.setattr(engine.tokenizer, "render", renders)
    engine.cores[1].frame(client.socket, [w.Generate(id=3, branch=names, max_tokens=2)], engine.now)
    assert renders.count == 0
    assert not [
        out for s in engine.cores[1].subscribers.values() for out in s.out if isinstance(out, w.Error)
    ]
