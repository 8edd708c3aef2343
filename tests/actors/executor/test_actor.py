"""Both placements of the executor, by one suite."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import ramify.actors.executor.thread_executor as thread_module
from ramify.actors.executor.actor import start_executor
from ramify.actors.executor.handle import ExecutorHandle
from ramify.actors.executor.messages import StartExecutor, ToExecutor
from ramify.actors.executor.process_executor import ProcessExecutor, loading
from ramify.actors.executor.spec import (
    ExecutorSpec,
    FactorySpec,
    FakeSpec,
    ModelSpec,
    build,
)
from ramify.actors.kit.mailbox import Mailbox, MailboxClosed
from ramify.actors.processes.messages import NotStarted, decoder, encoder
from ramify.gpu.executors.fake_model import FakeModel
from ramify.protocol.config import EngineConfig, ModelConfig
from ramify.protocol.errors import ConfigError, ModelError
from ramify.protocol.messages import SchedulerEvent
from ramify.protocol.plan import (
    ExecutorDown,
    ExtendRow,
    OpenRow,
    StepPlan,
    StepResult,
    StopExecutor,
    pack,
    unpack,
)
from ramify.protocol.replicas_config import ReplicasConfig
from ramify.protocol.sampling import SamplingParams
from tests.forked_children import FRESH

Placement = Literal["thread", "process"]
BOTH = pytest.mark.parametrize("placement", ["thread", "process"])


def fds() -> int:
    gc.collect()  # of other tests, too, whose sockets would close in the midst of one
    return len(os.listdir("/proc/self/fd"))


async def collect(mailbox: Mailbox[SchedulerEvent], count: int) -> list[Any]:
    events: list[Any] = []
    while len(events) < count:
        events += await asyncio.wait_for(mailbox.drain(), 60)
    return events


def inbox(capacity: int = 1000) -> Mailbox[SchedulerEvent]:
    return Mailbox("scheduler", capacity)


@BOTH
async def test_plans_are_answered_in_order(placement: Placement, scripted: FactorySpec) -> None:
    mailbox = inbox()
    handle = await start_executor(scripted, placement, mailbox)
    assert handle.info.model == "fake"
    assert handle.alive
    for step in range(40):
        handle.tell(StepPlan(step))
    events = await collect(mailbox, 40)
    assert [event.step for event in events] == list(range(40))
    assert list(unpack(events[7].tokens)) == [7]
    assert await handle.stop(10)


@BOTH
async def test_fake_model_says_what_it_must(placement: Placement) -> None:
    spec = FakeSpec({"pages": 64, "step_seconds": 0.001}, {"vocab_size": 50, "eos": 3})
    mailbox = inbox()
    async with await start_executor(spec, placement, mailbox) as handle:
        assert (handle.info.pages, handle.info.vocab_size, handle.info.eos_token_ids) == (64, 50, [3])
        greedy = SamplingParams(temperature=0.0)
        opened = OpenRow(0, 1, pack(range(10)), 0, greedy)
        handle.tell(StepPlan(0, opens=[opened], extends=[ExtendRow(0, 0, pack([5, 6, 7]), True)]))
        for step in range(1, 5):  # two and more in flight: inputs stay with the executor
            handle.tell(StepPlan(step, decodes=pack([0])))
        events = await collect(mailbox, 5)
    expected = FakeModel(vocab_size=50, eos=3).expected([5, 6, 7], 5)
    assert [unpack(event.tokens)[0] for event in events] == expected


@BOTH
async def test_results_wait_for_a_scheduler(placement: Placement, scripted: FactorySpec) -> None:
    async with await start_executor(scripted, placement) as handle:
        handle.tell(StepPlan(1))
        handle.tell(StepPlan(2))
        mailbox = inbox()
        handle.connect(mailbox)
        assert [event.step for event in await collect(mailbox, 2)] == [1, 2]


@BOTH
async def test_full_scheduler_loses_no_result(placement: Placement, scripted: FactorySpec) -> None:
    mailbox = inbox(capacity=1)
    async with await start_executor(scripted, placement, mailbox) as handle:
        for step in range(10):
            handle.tell(StepPlan(step))
        assert [event.step for event in await collect(mailbox, 10)] == list(range(10))


@BOTH
async def test_stop_finishes_outstanding_plans(
    placement: Placement, scripted: FactorySpec, tmp_path: Path
) -> None:
    mailbox = inbox()
    handle = await start_executor(scripted, placement, mailbox)
    for step in range(30):
        handle.tell(StepPlan(step))
    stops = await asyncio.gather(handle.stop(10), handle.stop(10))
    assert stops == [True, True]
    events: list[Any] = mailbox.drain_nowait()
    assert [event.step for event in events] == list(range(30))
    assert (tmp_path / "closed").read_text() == "closed\n"
    assert not handle.alive
    with pytest.raises(MailboxClosed):
        handle.tell(StepPlan(99))
    assert await handle.stop(0)


@BOTH
async def test_stop_can_be_told(placement: Placement, scripted: FactorySpec) -> None:
    mailbox = inbox()
    handle = await start_executor(scripted, placement, mailbox)
    handle.tell(StepPlan(1))
    handle.tell(StopExecutor())
    with pytest.raises(MailboxClosed):
        handle.tell(StepPlan(2))
    assert await handle.stop(10)
    events: list[Any] = mailbox.drain_nowait()
    assert [event.step for event in events] == [1]


@BOTH
async def test_error_in_a_step_is_executor_down(
    placement: Placement, scripted: FactorySpec, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    mailbox = inbox()
    handle = await start_executor(scripted, placement, mailbox)
    for step in (1, 1000, 2):
        handle.tell(StepPlan(step))
    result, down = await collect(mailbox, 2)
    assert isinstance(result, StepResult)
    assert down == ExecutorDown("RuntimeError: step 1000 broke")
    with pytest.raises(MailboxClosed):
        handle.tell(StepPlan(3))
    assert not await handle.stop(10)
    assert mailbox.drain_nowait() == []
    assert "the executor failed" in caplog.text
    if placement == "thread":
        assert "Traceback" in caplog.text
    assert (tmp_path / "closed").read_text() == "closed\n"


@BOTH
async def test_model_error_reaches_the_starter(placement: Placement, stand_ins: None) -> None:
    with pytest.raises(ModelError, match="no such architecture") as caught:
        await start_executor(FactorySpec("stand_ins:fails", {"kind": "model"}), placement)
    assert caught.value.details == {"file": "config.json"}
    with pytest.raises(ConfigError, match="kv-tokens"):
        await start_executor(FactorySpec("stand_ins:fails", {"kind": "config"}), placement)


@BOTH
async def test_missing_model_folder_is_a_model_error(placement: Placement, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        await start_executor(ModelSpec(ModelConfig(path=tmp_path / "nowhere")), placement)


@BOTH
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (FactorySpec("stand_ins:fails", {"kind": "bug"}), "did not start: RuntimeError: a bug"),
        (FactorySpec("stand_ins:nothing"), "did not start: AttributeError"),
        (FactorySpec("no_such_module:x"), "did not start: ModuleNotFoundError"),
        (FakeSpec({"pagse": 3}), "did not start: TypeError.*pagse"),
    ],
)
async def test_other_errors_of_a_start_are_named(
    placement: Placement, spec: ExecutorSpec, message: str, stand_ins: None
) -> None:
    with pytest.raises(NotStarted, match=message):
        await start_executor(spec, placement)


@BOTH
async def test_progress_is_reported_before_the_start_returns(
    placement: Placement, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import ramify.actors.executor.spec as spec\n"
        "build = spec.build\n"
        "def noisy(what, progress):\n"
        "    progress('weights', 0.5)\n"
        "    progress('weights', 1.0)\n"
        "    return build(what, progress)\n"
        "spec.build = noisy\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # for the process
    monkeypatch.setenv(FRESH, "1")

    def noisy(spec: ExecutorSpec, progress: Callable[[str, float], None]) -> Any:
        progress("weights", 0.5)
        progress("weights", 1.0)
        return build(spec, progress)

    monkeypatch.setattr(thread_module, "build", noisy)
    reports: list[tuple[str, float]] = []
    handle = await start_executor(
        FakeSpec(), placement, progress=lambda what, done: reports.append((what, done))
    )
    assert reports == [("weights", 0.5), ("weights", 1.0)]
    await handle.stop(10)


@BOTH
async def test_nothing_is_left_after_many_starts(placement: Placement, scripted: FactorySpec) -> None:
    rounds = 50 if placement == "thread" else 5
    await (await start_executor(scripted, placement)).stop(10)
    before = fds(), threading.active_count()
    for _ in range(rounds):
        mailbox = inbox()
        async with await start_executor(scripted, placement, mailbox) as handle:
            handle.tell(StepPlan(1))
        assert len(mailbox) == 1
    for thread in threading.enumerate():  # asyncio's child watcher of 3.11 has one per process
        if "waitpid" in thread.name:
            thread.join(5)
    assert (fds(), threading.active_count()) <= before
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@BOTH
async def test_failed_starts_leave_nothing(placement: Placement, stand_ins: None) -> None:
    before = fds()
    for _ in range(3):
        with pytest.raises(ModelError):
            await start_executor(FactorySpec("stand_ins:fails", {"kind": "model"}), placement)
    assert fds() == before
    assert not [thread for thread in threading.enumerate() if "ramify" in thread.name]


# --- the process placement ------------------------------------------------------------------------


async def start_process(spec: ExecutorSpec, mailbox: Mailbox[SchedulerEvent]) -> ProcessExecutor:
    handle: ExecutorHandle = await start_executor(spec, "process", mailbox)
    assert isinstance(handle, ProcessExecutor)
    return handle


async def test_kill_in_mid_step_is_executor_down_at_once(scripted: FactorySpec) -> None:
    mailbox = inbox()
    handle = await start_process(scripted, mailbox)
    handle.tell(StepPlan(1))
    await collect(mailbox, 1)
    handle.tell(StepPlan(3000))  # hangs
    start = asyncio.get_running_loop().time()
    os.kill(handle.pid, signal.SIGKILL)
    (down,) = await collect(mailbox, 1)
    assert asyncio.get_running_loop().time() - start < 2.0
    assert down == ExecutorDown(f"its process {handle.pid} was killed by SIGKILL")
    with pytest.raises(MailboxClosed):
        handle.tell(StepPlan(4))
    assert not await handle.stop(10)


async def test_exit_in_mid_step_is_executor_down(scripted: FactorySpec) -> None:
    mailbox = inbox()
    handle = await start_process(scripted, mailbox)
    handle.tell(StepPlan(1))
    handle.tell(StepPlan(2000))
    result, down = await collect(mailbox, 2)
    assert result.step == 1
    assert "ended with exit code 7" in down.reason
    assert not await handle.stop(10)


async def test_hung_process_is_killed_after_the_grace(scripted: FactorySpec) -> None:
    mailbox = inbox()
    handle = await start_process(scripted, mailbox)
    handle.tell(StepPlan(3000))
    assert not await handle.stop(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(handle.pid, 0)


async def test_hung_thread_is_left_and_reported(
    stand_ins: None, caplog: pytest.LogCaptureFixture
) -> None:
    mailbox = inbox()
    handle = await start_executor(FakeSpec({"step_seconds": 0.3}), "thread", mailbox)
    handle.tell(StepPlan(1))
    assert not await handle.stop(0.01)
    assert mailbox.drain_nowait() == [ExecutorDown("its thread did not end within 0.01 s")]
    assert "the executor failed" in caplog.text
    assert not await handle.stop(10)  # the step ends meanwhile, and the thread is joined
    assert mailbox.drain_nowait() == []
    assert not [thread for thread in threading.enumerate() if "ramify" in thread.name]


async def test_cancelled_start_ends_the_thread_at_its_next_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cancelled = threading.Event()

    def slow(spec: ExecutorSpec, progress: Callable[[str, float], None]) -> Any:
        cancelled.wait(10)
        progress("weights", 0.5)
        raise AssertionError("the report should have ended this load")

    monkeypatch.setattr(thread_module, "build", slow)
    start = asyncio.create_task(start_executor(FakeSpec(), "thread"))
    await asyncio.sleep(0)
    thread = next(thread for thread in threading.enumerate() if thread.name == "ramify-executor")
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    cancelled.set()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


async def test_death_while_loading_is_a_readable_error(stand_ins: None) -> None:
    with pytest.raises(NotStarted, match=r"did not start: its process .* exit code 9"):
        await start_executor(FactorySpec("stand_ins:fails", {"kind": "exit"}), "process")


async def test_cancelled_start_kills_the_process(stand_ins: None, tmp_path: Path) -> None:
    spec = FactorySpec("stand_ins:fails", {"kind": "hang"})
    before = fds()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(start_executor(spec, "process"), 0.3)
    assert fds() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signals_are_the_engines(scripted: FactorySpec, number: signal.Signals) -> None:
    """A service manager may signal every process of a service: answers have their grace time still."""
    mailbox = inbox()
    async with await start_process(scripted, mailbox) as handle:
        assert isinstance(handle, ProcessExecutor)
        os.kill(handle.pid, number)
        handle.tell(StepPlan(1))
        assert len(await collect(mailbox, 1)) == 1
        assert os.getsid(handle.pid) != os.getsid(0)


async def test_process_imports_neither_asyncio_nor_torch(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FRESH, "1")
    async with await start_executor(FactorySpec("stand_ins:modules"), "process") as handle:
        assert handle.info.model == ""


async def test_an_executor_that_begins_before_its_engine_ends_with_a_start_that_fails(
    tmp_path: Path,
) -> None:
    before = fds()
    with pytest.raises(ConfigError, match="the port"):
        async with loading(EngineConfig(model=ModelConfig(path=tmp_path))) as begun:
            raise ConfigError("the port is taken")
    assert begun is not None
    with pytest.raises(ProcessLookupError):
        os.kill(begun.pid, 0)
    del begun
    assert fds() == before


async def test_a_begun_executor_that_failed_says_so_to_whoever_waits(
    stand_ins: None, caplog: pytest.LogCaptureFixture
) -> None:
    spec = FactorySpec("stand_ins:fails", {"kind": "model"})
    unawaited, begun = await ProcessExecutor.begin(spec), await ProcessExecutor.begin(spec)
    for each in (unawaited, begun):
        while each.failure is None:
            await asyncio.sleep(0.01)
    with pytest.raises(ModelError):
        await begun.until_ready(lambda what, done: None)
    await unawaited.end_unawaited()
    del unawaited, each
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("elsewhere", [{"executor": "thread"}, {"replicas": ReplicasConfig(count=2)}])
async def test_no_process_begins_for_an_executor_elsewhere(elsewhere: Any, tmp_path: Path) -> None:
    async with loading(EngineConfig(model=ModelConfig(path=tmp_path), **elsewhere)) as begun:
        assert begun is None


def test_process_ends_with_its_parent(scripted: FactorySpec) -> None:
    """A parent that is killed: the process sees the end of the socket, reports and leaves."""
    parent = (
        "import asyncio, sys\n"
        "from ramify.actors.executor.actor import start_executor\n"
        "from ramify.actors.executor.spec import FactorySpec\n"
        "from ramify.actors.kit.log import configure\n"
        "from ramify.protocol.config import LogConfig\n"
        "configure(LogConfig(format='json'))  # the process logs like its parent\n"
        "async def main():\n"
        f"    spec = FactorySpec({scripted.factory!r}, {scripted.settings!r})\n"
        "    handle = await start_executor(spec, 'process')\n"
        "    print(handle.pid, flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        pid = int(process.stdout.readline())
        os.kill(pid, 0)
        process.kill()
        log = process.stderr.read()  # to its end: the child holds the pipe as long as it lives
    assert b'"message": "the engine has gone"' in log


def test_process_refuses_nonsense() -> None:
    ours, theirs = socket.socketpair()
    lifeline, held = os.pipe()
    with ours, theirs:
        fds = (theirs.fileno(), lifeline)
        module = "ramify.actors.executor.executor_program"
        command = [sys.executable, "-m", module, *map(str, fds), "null"]
        ours.sendall(b"GET / HTTP/1.1\r\n\r\n")
        done = subprocess.run(command, pass_fds=fds, stderr=subprocess.PIPE, timeout=20, check=False)
    os.close(lifeline)
    os.close(held)
    assert done.returncode == 3
    assert b"cannot be understood" in done.stderr


# --- what is sent ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec(ModelConfig(path=Path("/models/x"), kv_tokens=100, dtype="bfloat16")),
        FakeSpec({"step_seconds": 0.002, "verify": False, "pages": 7}, {"eos": 5}),
        FactorySpec("a.b:c", {"x": [1, 2]}),
    ],
)
def test_specs_survive_the_way(spec: ExecutorSpec) -> None:
    start = StartExecutor(spec)
    assert decoder(ToExecutor).decode(encoder().encode(start)) == start
