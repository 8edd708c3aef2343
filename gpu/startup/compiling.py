"""Compiles Triton kernels side by side, before they are launched.

A kernel is compiled where it is first launched, for about half a second on one core, and a server
needs dozens. So launches are played through, without launching anything, and whatever they ask for
is compiled by several threads: most of it is LLVM, ptxas and the C compiler, outside the interpreter
lock. Which kernels these are nobody lists: what is not met in the play is compiled at its first
launch, as ever.

With Triton's interpreter there is nothing to compile, and launches in a play are launches.
"""

# mypy: disable-error-code="import-untyped"

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime import JITFunction

_MOST_THREADS = 8  # 16 are no faster (docs/log.md): Triton's own part holds the interpreter lock


@contextmanager
def compiling(play: Callable[[], None], device: torch.device) -> Iterator[None]:
    """`compile_side_by_side` while the block runs, whose end waits for it and raises its errors."""
    with ThreadPoolExecutor(1, "play", initializer=_use, initargs=(device,)) as thread:
        compiled = thread.submit(compile_side_by_side, play, device)
        yield
        compiled.result()


def compile_side_by_side(play: Callable[[], None], device: torch.device) -> int:
    """Compile the kernels that `play` launches on `device`, and load them. Returns how many.

    Nothing of Triton's is launched in `play`, which must therefore not compute addresses from what
    its kernels would have written. Raises what the compiler raises.
    """
    with ThreadPoolExecutor(_threads(), "compile", initializer=_use, initargs=(device,)) as pool:
        loading = _Loading(pool)

        def compile_all() -> None:
            with AsyncCompileMode(loading), nothing_launched():
                play()

        # In a context of its own, because Triton does not leave the mode after a compiler's error.
        copy_context().run(compile_all)
    return loading.kernels


@contextmanager
def nothing_launched() -> Iterator[None]:
    """Launches from this thread end where the kernel would be sent to the device.

    Triton can be told so only launch by launch (`warmup`), hence the substitution. Other threads may
    do the same meanwhile, and end in any order: then what is substituted stays, and does nothing.
    """
    launch, thread, inside = JITFunction.run, threading.get_ident(), True

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        skipped = inside and threading.get_ident() == thread
        return launch(kernel, *args, grid=grid, warmup=warmup or skipped, **options)

    JITFunction.run = run
    try:
        yield
    finally:
        inside = False
        if JITFunction.run is run:
            JITFunction.run = launch


class _Loading(Executor):
    """Sees to it that the thread that compiles a kernel also makes it ready to launch.

    Triton would do that at the first launch, with a C compiler in some versions.
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


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_THREADS, cores)
