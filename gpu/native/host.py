"""The instructions of this machine's CPU, and the compilation of IR to functions for ctypes.

This file knows LLVM and instruction sets, not what the kernels compute.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding

from ramify.gpu.native.ir import Module
from ramify.gpu.native.kept import CachedCode, folder
from ramify.gpu.native.matrices import granted

_OPTIMISATION = 3
_WITHOUT = "AVX-512 VNNI"
_AT_HWCAP, _HWCAP_ASIMDDP = 16, 1 << 20  # of Linux on aarch64; LLVM does not report dot products there


@dataclass(frozen=True, slots=True)
class Isa:
    """The instructions that kernels may use. `dot`: how 8-bit integers are multiplied and added."""

    name: str  # as the log tells it
    dot: str  # "vnni512", "vnni256", "madd256", "sdot", "plain"
    registers: int  # vector registers of 16 float32 that the compiler can count on
    offset: int = 128  # added to 8-bit activations: VNNI multiplies unsigned by signed ones
    pause: str = "llvm.x86.sse2.pause"  # the intrinsic that waits a few cycles
    matrices: bool = False  # see `matrices`

    @property
    def code_offset(self) -> int:
        """The number added to 8-bit codes of weights in groups: x86 reads them as unsigned."""
        return 0 if self.dot in ("sdot", "plain") else 128


def host_isa() -> Isa | None:
    """Find this machine's instructions; None: it lacks some that the kernels need.

    They need a fused multiply-add, float16, and the threads of POSIX.
    """
    if os.name != "posix":
        return None
    triple = binding.get_default_triple()
    found = isa_of(triple.split("-")[0], _features())
    if found is not None and found.matrices and not granted():
        return replace(found, matrices=False, name=_WITHOUT)
    return found


def isa_of(architecture: str, features: set[str]) -> Isa | None:
    """Derive the instructions of a CPU from its features, in LLVM's names."""
    if architecture in ("x86_64", "amd64"):
        if not {"avx2", "fma", "f16c"} <= features:
            return None
        if {"avx512f", "avx512bw", "avx512vl"} <= features:
            if "avx512vnni" not in features:
                return Isa("AVX-512", "madd256", 32, 0)
            matrices = {"amx-tile", "amx-int8"} <= features
            name = "AVX-512 VNNI and AMX" if matrices else _WITHOUT
            return Isa(name, "vnni512", 32, matrices=matrices)
        vnni = "avxvnni" in features
        return Isa("AVX VNNI", "vnni256", 8) if vnni else Isa("AVX2", "madd256", 8, 0)
    if architecture in ("aarch64", "arm64"):
        hint = "llvm.aarch64.hint"
        if "dotprod" in features:
            return Isa("NEON dot products", "sdot", 8, 0, hint)
        return Isa("NEON", "plain", 8, 0, hint)
    return None


class MachineCode:
    """The machine code of kernels. `address` finds one of them; keep this object while one runs."""

    def __init__(self, name: str, write: Callable[[Module], object], place: Path | None) -> None:
        """`write`: writes the kernels, unless their code is kept in the folder `place`.

        `name`: all that the kernels depend on besides our sources and this machine.
        """
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        features = ",".join(("+" if on else "-") + name for name, on in _all_features().items())
        target = binding.Target.from_default_triple()
        machine = target.create_target_machine(
            cpu=binding.get_host_cpu_name(), features=features, opt=_OPTIMISATION, jit=True
        )
        llvm = ".".join(map(str, binding.llvm_version_info))
        triple, cpu = binding.get_default_triple(), binding.get_host_cpu_name()
        kept = CachedCode(
            (name, llvmlite.__version__, llvm, triple, cpu, features, str(_OPTIMISATION)), place
        )
        code = kept.read()
        text = ""
        if code is None:
            module = Module()
            write(module)
            text = str(module.raw)
        parsed = binding.parse_assembly(text)
        parsed.triple = triple
        parsed.data_layout = str(machine.target_data)
        parsed.verify()
        if code is None:
            options = binding.create_pipeline_tuning_options(speed_level=_OPTIMISATION)
            builder = binding.create_pass_builder(machine, options)
            builder.getModulePassManager().run(parsed, builder)
        self._engine: Any = binding.create_mcjit_compiler(parsed, machine)
        self._engine.set_object_cache(lambda _, code: kept.write(code), lambda _: code)
        self._engine.finalize_object()
        self._engine.set_object_cache()

    def address(self, name: str) -> int:
        found = int(self._engine.get_function_address(name))
        if not found:
            raise KeyError(f"the module has no function {name}")
        return found


_MODULES: dict[str, MachineCode] = {}


def compiled(name: str, write: Callable[[Module], object]) -> MachineCode:
    """Compile, or read code that is kept, once in a process. See `MachineCode`."""
    if name not in _MODULES:
        _MODULES[name] = MachineCode(name, write, folder())
    return _MODULES[name]


def _all_features() -> dict[str, bool]:
    features = dict(binding.get_host_cpu_features())
    if sys.platform == "linux" and platform.machine() == "aarch64":
        features["dotprod"] = bool(_auxiliary(_AT_HWCAP) & _HWCAP_ASIMDDP)
    return features


def _auxiliary(kind: int) -> int:
    """Read an entry of Linux's auxiliary vector, which tells each process about its CPU."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(getauxval(kind))


def _features() -> set[str]:
    return {name for name, on in _all_features().items() if on}
