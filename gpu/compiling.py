"""Compiles Triton kernels side by side, before they are needed.

A kernel is compiled at its first launch, for about half a second on one core, and a start needs
dozens. So the launches are played through once with nothing launched that is not compiled, and what
they asked for is compiled on all cores: most of it is LLVM and ptxas, outside the interpreter lock.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton import knobs  # type: ignore[import-untyped]


def compile_side_by_side(play: Callable[[], None]) -> int:
    """Compile the kernels that `play` launches. Returns their number.

    In `play` they are not launched: what they should have written is garbage.
    """
    wanted: dict[tuple[Any, str], str] = {}  # kernel and key -> what `preload` takes

    def skip(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        wanted[fn.jit_function, str(compile["key"])] = compile["specialization_data"]
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = skip
    try:
        play()
    finally:
        knobs.runtime.jit_cache_hook = before
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(
        os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device,)
    ) as pool:
        for done in [pool.submit(kernel.preload, data) for (kernel, _), data in wanted.items()]:
            done.result()
    return len(wanted)
