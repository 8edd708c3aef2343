"""Parallel compilation of Triton kernels, before they are launched.

Triton compiles a kernel at its first launch, which takes about half a second on one core, and a server
needs dozens. So steps are run without launching anything (a dry run), and the kernels that they need are
compiled by several threads: LLVM, ptxas and the C compiler do most of the work, outside the interpreter
lock. There is no list of kernels. One that the dry run does not meet is compiled at its first launch, as
usual.

Triton's interpreter compiles nothing, and launches in a dry run are launches there.
"""

# mypy: disable-error-code="import-untyped"

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from types import ModuleType
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime import JITFunction, build

from ramify.gpu.devices import cores

LOAD = "_load_module_from_path"  # of triton.runtime.build: launchers, and more
_load, _LOADING = getattr(build, LOAD), threading.Lock()
_MOST_THREADS = 8  # 16 are no faster (docs/log/gpu.md): Triton's own part holds the interpreter lock


@contextmanager
def compiling(play: Callable[[], None], device: torch.device) -> Iterator[None]:
    """Run `compile_side_by_side` beside the block, whose end waits for it and raises its errors."""
    with ThreadPoolExecutor(1, "play", initializer=_use, initargs=(device,)) as thread:
        compiled = thread.submit(compile_side_by_side, play, device)
        yield
        compiled.result()


def compile_side_by_side(play: Callable[[], None], device: torch.device) -> int:
    """Compile the kernels that `play` would launch on `device`, and load them. Returns how many.

    `play` runs without launching Triton's kernels, so it must not compute addresses from what they
    would have written. Raises what the compiler raises.
    """
    threads = min(_MOST_THREADS, cores())
    with ThreadPoolExecutor(threads, "compile", initializer=_use, initargs=(device,)) as pool:
        loading = _Loading(pool)

        def compile_all() -> None:
            with AsyncCompileMode(loading), nothing_launched():
                play()

        # In a context of its own, because Triton does not leave the mode after a compiler's error.
        copy_context().run(compile_all)
    return loading.kernels


@contextmanager
def nothing_launched() -> Iterator[None]:
    """Keep launches from this thread from reaching the device, within the block.

    Triton offers that only launch by launch (`warmup`), so its launch function is replaced. Other
    threads may do the same at the same time and end in any order: a replacement that outlives its block
    skips nothing.
    """
    patched: Any = JITFunction
    launch, thread, inside = patched.run, threading.get_ident(), True

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        skipped = inside and threading.get_ident() == thread
        return launch(kernel, *args, grid=grid, warmup=warmup or skipped, **options)

    patched.run = run
    try:
        yield
    finally:
        inside = False
        if patched.run is run:
            patched.run = launch


class _Loading(Executor):
    """A pool whose threads load each kernel that they compile, so that it is ready to launch.

    Triton would do so at the first launch, with a C compiler in some versions.
    """

    def __init__(self, pool: Executor) -> None:
        self.kernels = 0
        self._pool = pool

    def submit(self, compile: Callable[[], Any], /) -> "Future[Any]":  # type: ignore[override]
        self.kernels += 1
        return self._pool.submit(_loaded, compile)


def _loaded(compile: Callable[[], Any]) -> Any:
    kernel = compile()
    kernel.run  # noqa: B018  # a property that loads it
    return kernel


def _apart(name: str, path: str) -> ModuleType:
    """Load a C module for one thread at a time, into an object of its own.

    Triton 3.6 has one for each kind of launch, all of one name. Python fills a second copy into whatever
    module has the name: a thread that had just loaded that would launch by the other's function.
    """
    own = ModuleType(name)
    with _LOADING:
        own.__dict__.update(vars(_load(name, path)))
    return own


setattr(build, LOAD, _apart)


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
