"""The packing of weights on some threads, by kernels of `packing` that are compiled on first use.

This file knows tensors and addresses, not which weights belong together.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramify.gpu.native import packing
from ramify.gpu.native.grouped import GROUP, Grouping, PackedGroups
from ramify.gpu.native.host import Isa, compiled
from ramify.gpu.native.ir import LANES, Module
from ramify.gpu.native.linear import PANEL, PackedWeight, padded_inputs

_PART = 1 << 20  # numbers that a thread packs at a time, about
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
FLOAT_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class Packer:
    """Packer for instructions `isa`. Tables have the address of each packed output's row, 0: none."""

    def __init__(self, isa: Isa) -> None:
        self.isa = isa
        self._pool: ThreadPoolExecutor | None = None

    def blocks(
        self, parts: Sequence[tuple[str, Tensor]], inputs: int, grouping: Grouping, bias: Tensor | None
    ) -> PackedGroups:
        """Pack blocks. `parts`: kinds of blocks, each with the table of its rows."""
        outputs, size = len(parts[0][1]), padded_inputs(inputs)
        shape = (outputs // PANEL, size // GROUP, PANEL)
        bytes_ = GROUP * grouping.bits // 8
        packed = PackedGroups(
            grouping, _zeros((*shape[:2], bytes_ // 4, PANEL, 4), np.uint8), _zeros(shape, np.float16),
            _zeros(shape, np.float16) if grouping.offsets else None, bias, size, outputs,
        )  # fmt: skip
        for kind, rows in parts:

            def write(module: Module, kind: str = kind) -> str:
                return packing.emit_packing(module, self.isa, kind, grouping)

            given = {packing.GROUPS: inputs // GROUP, packing.PADDED: size // GROUP}
            tensors = {packing.PANELS: packed.panels, packing.SCALES: packed.scales}
            if packed.offsets is not None:
                tensors[packing.OFFSETS] = packed.offsets
            self._run(f"pack_{kind}_{grouping.name}", write, rows, tensors, given, size)
        return packed

    def rounded(
        self, dtype: torch.dtype, rows: Tensor, inputs: int, bias: Tensor | None
    ) -> PackedWeight:
        """Round floats to 8 bits with a scale for each output. inputs: a multiple of 16."""
        outputs, size, kind = len(rows), padded_inputs(inputs), FLOAT_KINDS[dtype]
        packed = PackedWeight(
            _zeros((outputs // PANEL, size // 4, PANEL, 4), np.int8), torch.zeros(outputs),
            torch.zeros(outputs, dtype=torch.int32), bias, size, outputs,
        )  # fmt: skip
        tensors = {packing.PANELS: packed.panels, packing.SCALES: packed.scales,
                   packing.SUMS: packed.sums}  # fmt: skip
        given = {packing.GROUPS: inputs // LANES, packing.PADDED: size // LANES}

        def write(module: Module) -> str:
            return packing.emit_rounding(module, self.isa, kind)

        self._run(f"round_{kind}", write, rows, tensors, given, size)
        return packed

    def _run(
        self, name: str, write: Callable[[Module], str], rows: Tensor, tensors: dict[int, Tensor],
        given: dict[int, int], size: int,
    ) -> None:  # fmt: skip
        kernel = _KERNEL(compiled(f"{name} {self.isa}", write).address(name))
        args = np.zeros(packing.PADDED + 1, dtype=np.int64)
        args[packing.ROWS] = rows.data_ptr()
        for place, number in given.items():
            args[place] = number
        for place, tensor in tensors.items():
            args[place] = tensor.data_ptr()
        panels = len(rows) // PANEL
        step = max(1, _PART // (PANEL * size))
        starts = range(0, panels, step)

        def run(begin: int) -> None:
            kernel(args.ctypes.data, begin, min(begin + step, panels))

        threads = torch.get_num_threads()
        if threads == 1 or len(starts) == 1:
            kernel(args.ctypes.data, 0, panels)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, "packing")
        list(self._pool.map(run, starts))


def _zeros(shape: Sequence[int], dtype: npt.DTypeLike) -> Tensor:
    """Allocate zeros from the system: torch would write each page before the kernel does."""
    return torch.from_numpy(np.zeros(shape, dtype))
