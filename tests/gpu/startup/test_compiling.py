"""Kernels compiled side by side, for a GPU that need not be there: a driver that only takes notes.

In processes of their own, because the other tests have their kernels interpreted.
"""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.forked import Forked, forked

pytest.importorskip("triton", minversion="3.6")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")

PROGRAM = """
import threading, types, torch, triton, triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from ramify.gpu.startup.compiling import LOAD, build, compile_side_by_side, compiling, nothing_launched

launched, compiled, threads = [], [], set()

class Notes:
    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        load_binary=lambda name, *rest: (threads.add(threading.current_thread()), name, 0, 0, 1024),
    )
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def launcher_cls(self, src, metadata): return lambda *rest: launched.append(src.name)

driver.set_active(Notes())
knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
cpu = torch.device("cpu")
x = torch.zeros(64)

@triton.jit
def double(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) * 2)

@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 1, "no such block")

def play():
    for block in (16, 32, 16, 32):
        double[(1,)](x, BLOCK=block)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    with forked(PROGRAM, tmp_path_factory.mktemp("imported")) as process:
        yield process


@pytest.fixture
def run(imported: Forked, tmp_path: Path) -> Callable[[str], None]:
    """Run a program behind `PROGRAM`. It must not fail."""

    def run(program: str) -> None:
        done = imported.run(program, tmp_path)
        assert done.code == 0, done.said

    return run


def test_each_kernel_is_compiled_once_and_nothing_is_launched(run: Callable[[str], None]) -> None:
    run(
        """
assert compile_side_by_side(play, cpu) == 2
assert len(compiled) == 2
assert launched == []
assert threading.main_thread() not in threads  # they were loaded where they were compiled
play()
assert launched == ["double"] * 4
assert len(compiled) == 2
assert compile_side_by_side(play, cpu) == 0
assert len(launched) == 4
"""
    )


def test_there_are_no_more_threads_than_cores(run: Callable[[str], None]) -> None:
    run(
        """
from concurrent.futures import ThreadPoolExecutor
from ramify.gpu.startup import compiling as module

made = []
module.ThreadPoolExecutor = lambda count, *rest, **more: (
    made.append(count) or ThreadPoolExecutor(count, *rest, **more)
)
module.cores = lambda: 3  # as a control group's share says
compile_side_by_side(lambda: None, cpu)
module.cores = lambda: 100
compile_side_by_side(lambda: None, cpu)
assert made == [3, 8]
"""
    )


def test_the_compilers_error_is_raised_and_leaves_nothing_behind(run: Callable[[str], None]) -> None:
    run(
        """
def fail():
    play()
    broken[(1,)](x, BLOCK=2)

try:
    compile_side_by_side(fail, cpu)
except triton.compiler.errors.CompileTimeAssertionFailure as error:
    assert "no such block" in str(error)
else:
    raise AssertionError("no error")
play()
assert launched == ["double"] * 4
"""
    )


def test_what_other_threads_launch_is_launched(run: Callable[[str], None]) -> None:
    run(
        """
play()
other = threading.Thread(target=play)
with nothing_launched():
    play()
    assert len(launched) == 4
    other.start()
    other.join()
assert len(launched) == 8
"""
    )


def test_plays_of_two_threads_may_end_in_any_order(run: Callable[[str], None]) -> None:
    run(
        """
play()
first, second = nothing_launched(), nothing_launched()
begun, go_on = threading.Event(), threading.Event()

def other():
    with second:
        begun.set()
        assert go_on.wait(60)
        play()
    play()

thread = threading.Thread(target=other)
with first:
    thread.start()
    assert begun.wait(60)
go_on.set()
thread.join()
assert len(launched) == 8  # the other's second ones
play()
assert len(launched) == 12
"""
    )


def test_other_work_goes_on_meanwhile(run: Callable[[str], None]) -> None:
    run(
        """
begun, go_on = threading.Event(), threading.Event()

def held():
    begun.set()
    assert go_on.wait(60)
    play()

with compiling(held, cpu):
    assert begun.wait(60)
    double[(1,)](x, BLOCK=64)
    assert launched == ["double"]  # what this thread launches is
    go_on.set()
assert len(compiled) == 3
play()
assert len(compiled) == 3

def fail():
    broken[(1,)](x, BLOCK=2)

try:
    with compiling(fail, cpu):
        pass
except triton.compiler.errors.CompileTimeAssertionFailure:
    pass
else:
    raise AssertionError("no error")
"""
    )


MODULE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(
    not shutil.which("cc") or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="needs a C compiler and Python's headers",
)
def test_c_modules_of_one_name_stay_apart(imported: Forked, tmp_path: Path) -> None:
    """As with Triton's launchers: the second copy of one module must not change another's functions."""
    (tmp_path / "launcher.c").write_text(MODULE)
    for number in (1, 2):
        told = [f"-DNUMBER={number}", "-I" + sysconfig.get_paths()["include"], "launcher.c"]
        command = ["cc", "-shared", "-fPIC", *told, "-o", f"{number}.so"]
        subprocess.run(command, cwd=tmp_path, check=True)
    done = imported.run(
        """
load = getattr(build, LOAD)
first, second, again = (load("launcher", f"./{n}.so") for n in (1, 2, 1))
print(first.launch(), second.launch(), again.launch())
""",
        tmp_path,
    )
    assert done == (0, "1 2 1\n"), done.said
