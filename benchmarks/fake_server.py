"""A Ramify server with the fake executor in a process of its own, and what it costs.

`FakeServer` starts this file as a script, on which `_serve` runs the real engine. Each line on the
script's stdin is answered by one JSON line on stdout: CPU time, memory, and latencies since the
snapshot before. At the end of stdin the server stops.

It does not know what its clients do.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ramify.actors.engine import Engine, running_engine
from ramify.actors.executor.spec import FactorySpec
from ramify.actors.kit.collector import Collector
from ramify.actors.kit.log import configure
from ramify.gpu.executors.fake import FakeExecutor, FakePendingStep
from ramify.gpu.executors.fake_model import FakeModel
from ramify.gpu.step.rows import StepRows
from ramify.protocol.config import EngineConfig, LogConfig, ModelConfig, ServerConfig
from ramify.protocol.plan import StepPlan, StepResult

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.actors.cache.integrity import checked_when_idle

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BUNDLED = Path(__file__).resolve().parents[1] / "gpu" / "default_model"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = 2048  # tokens of four letters: what the fake samples
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeServer:
    """The server process, seen from the benchmark. Use with `with`."""

    def __init__(self, **settings: float | int | str) -> None:
        """`settings`: the flags of `_arguments`, with underscores."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # So that an executor in a process of its own finds `bench_executor`.
            env={**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"},
        )
        self.port: int = self._answer()["port"]
        self.pid = self._process.pid

    def snapshot(self) -> dict[str, Any]:
        """See `Probe.snapshot`."""
        assert self._process.stdin is not None
        self._process.stdin.write("snapshot\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


def search_path() -> str:
    """This folder, before whatever is searched already."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


# --- in the server's process ----------------------------------------------------------------------


class _StampedStep:
    """A fake step whose result says in `elapsed_us` when it was handed over (`perf_counter`)."""

    def __init__(self, step: FakePendingStep) -> None:
        self._step = step

    def ready(self) -> bool:
        return self._step.ready()

    def result(self) -> StepResult:
        r = self._step.result()
        now = int(time.perf_counter() * 1e6)
        return msgspec.structs.replace(r, elapsed_us=now)


class BenchExecutor(FakeExecutor):
    """A token of a prompt takes `prompt_us`; 0: steps are stamped. Made by `bench_executor`."""

    prompt_us = 0.0

    def launch(self, plan: StepPlan) -> FakePendingStep:
        step = super().launch(plan)
        return step if self.prompt_us else _StampedStep(step)  # type: ignore[return-value]

    def seconds(self, step: StepRows) -> float:
        return super().seconds(step) + 1e-6 * self.prompt_us * step.computed


def bench_executor(*, model: dict[str, Any], prompt_us: float, **settings: Any) -> BenchExecutor:
    """What `FactorySpec` names."""
    executor = BenchExecutor(FakeModel(**model), **settings)
    executor.prompt_us = prompt_us
    return executor


class Probe:
    """Listens at the doors of the scheduler: when results arrive and when plans leave."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arrived = self._handed_over = 0.0
        self._plan: list[float] = []
        self._from_thread: list[float] = []
        self._longest = 0.0
        mailbox, executor = engine.core._to_scheduler, engine.executor
        assert executor is not None
        drain_with, tell_executor = mailbox.drain_with, executor.tell

        def arrives(message: Any) -> list[Any]:
            if type(message) is StepResult and not self._arrived:
                self._arrived = time.perf_counter()
                self._handed_over = message.elapsed_us * 1e-6
            return drain_with(message)

        def departs(message: Any) -> None:
            tell_executor(message)
            if self._arrived:
                now = time.perf_counter()
                self._plan.append(now - self._arrived)
                self._from_thread.append(now - self._handed_over)
                self._arrived = 0.0

        # Instance attributes hide the methods: the engine's own code stays as it is.
        mailbox.drain_with = arrives  # type: ignore[method-assign]
        executor.tell = departs  # type: ignore[method-assign]

    def time_callbacks(self) -> None:
        """Note the CPU time of each callback of event loops from now on, for `longest`."""
        handle: Any = asyncio.Handle
        run = handle._run

        def timed(each: Any) -> None:
            begin = time.thread_time()
            run(each)
            self._longest = max(self._longest, time.thread_time() - begin)

        handle._run = timed

    def snapshot(self) -> dict[str, Any]:
        """Totals (`cpu`, `loop_cpu`, ...), the present state, and samples since the last snapshot.

        `plan`: seconds from a result's arrival at the scheduler's mailbox to the next plan's
        departure; `from_thread`: from the moment the executor's thread had the result. `longest`:
        of the callbacks that were timed, seconds.
        """
        engine = self._engine
        usage = resource.getrusage(resource.RUSAGE_SELF)
        assert engine.cache is not None
        free, evictable, referenced = engine.cache.free, engine.cache.evictable, engine.cache.referenced
        taken = {"plan": self._plan, "from_thread": self._from_thread, "longest": self._longest}
        self._plan, self._from_thread, self._longest = [], [], 0.0
        return {
            "cpu": usage.ru_utime + usage.ru_stime,
            "gateways": [_cpu_of(pid) for pid in getattr(engine.front, "pids", [])],
            "loop_cpu": time.thread_time(),
            "sessions": engine.metrics.live_sessions,
            "sockets": engine.metrics.open_sockets,
            "running": engine.metrics.running,
            "tasks": len(asyncio.all_tasks()),
            "fds": len(os.listdir("/proc/self/fd")),
            "steps": engine.metrics._steps,
            "kv": [free, evictable, referenced],
            **taken,
        }


def _cpu_of(pid: int) -> float:
    """Seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_model_folder(folder: Path) -> tuple[int, int]:
    """A tokenizer and no weights. The fake samples whole words of four letters.

    Returns the vocabulary's size and the first word's id.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pairs = [a + b for a in LETTERS for b in LETTERS]
    merges = [(pair[0], pair[1]) for pair in pairs]
    quads = [(pairs[i * 7 % len(pairs)], pairs[i * 13 // 7 % len(pairs)]) for i in range(WORDS)]
    quads = list(dict.fromkeys(quads))
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + pairs
    first = len(tokens)
    tokens += [a + b for a, b in quads]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges + quads))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2, "vocab_size": len(tokens)}))
    return len(tokens), first


async def _serve(options: argparse.Namespace, folder: Path) -> None:
    model = dict(zip(("vocab_size", "first"), write_model_folder(folder), strict=True))
    config = EngineConfig(
        model=ModelConfig(path=folder),
        server=ServerConfig(
            port=0,
            session_ttl_s=options.ttl,
            grace_s=1.0,
            ping_interval_s=30.0,
            store=options.store,
            tokens=(options.token,) if options.token else (),
        ),
        executor=options.executor,
        gateways=options.gateways,
    )
    settings = {
        "model": {**model, "eos": 2, "eos_every": 0},
        "verify": bool(options.verify),
        "step_seconds": options.step_ms / 1e3,
        "pages": 1 << 18,
        "context": 4096,
        "step_tokens": 2048,
        "prompt_us": options.prompt_us,
        "sees": options.look_ms is not None,
        "look_seconds": (options.look_ms or 0.0) / 1e3,
    }
    spec = FactorySpec(f"{Path(__file__).stem}:bench_executor", settings)
    async with running_engine(config, spec=spec) as engine:
        probe = Probe(engine)
        if options.look_ms is not None:
            probe.time_callbacks()
        Collector(engine.clock).begin()  # as `serve` does; the process ends with it
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        _say({"port": engine.port})
        while await reader.readline():
            _say(probe.snapshot())


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--prompt-us", type=float, default=0.0, help="of a step, for each prompt token")
    parser.add_argument("--look-ms", type=float, help="of a tower, for each picture; none: no tower")
    parser.add_argument("--executor", choices=["thread", "process"], default="thread")
    parser.add_argument("--gateways", type=int, default=0)
    parser.add_argument("--ttl", type=float, default=600.0, help="of sessions without sockets, s")
    parser.add_argument("--store", help="the file or the URL that keeps sessions")
    parser.add_argument("--token", help="the only one that is accepted")
    parser.add_argument("--verify", type=int, default=0, help="check KV and cache all the time")
    return parser.parse_args()


def main() -> None:
    options = _arguments()
    configure(LogConfig(level="warning"))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as checks:
        if options.verify:
            checks.enter_context(checked_when_idle())
        asyncio.run(_serve(options, Path(folder)))


if __name__ == "__main__":
    main()
