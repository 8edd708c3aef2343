"""The short ways of `interpreter.py` give what the interpreter's own give."""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion=None if torch.cuda.is_available() else "3.7")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU interprets nothing")

FORMATS = ("bool", "int32", "int64", "uint32", "float16", "bfloat16", "float32")
SHAPES = ((), (1,), (4,), (2, 4), (2, 1))
NUMBERS = (0, 1, 3, True, 0.0, -0.0, 1.5)
OPERATIONS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor_", "minimum", "maximum",
    "less_than", "less_equal", "equal", "greater_than", "greater_equal", "not_equal",
)  # fmt: skip


def own(method: Any) -> Any:
    """What the interpreter did before."""
    return inspect.getclosurevars(method).nonlocals["own"]


@pytest.fixture
def interpreter() -> Iterator[Any]:
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(None)  # as in a kernel
    yield interpreter
    scope.restore()


def tensor(interpreter: Any, name: str, shape: tuple[int, ...], seed: int) -> Any:
    tl = interpreter.tl
    element = getattr(tl, {"bool": "int1"}.get(name, name))
    numbers = np.random.default_rng(seed).integers(-5, 9, shape or (1,))
    if name == "bfloat16":
        data = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        data = numbers.astype(name)
    handle = interpreter.TensorHandle(data, element)
    return tl.core.tensor(handle, tl.block_type(element, list(shape)) if shape else element)


def outcome(call: Any) -> Any:
    """Bits, formats, types and shapes; or the kind of error."""
    try:
        with np.errstate(all="ignore"):
            made = call()
    except Exception as error:
        return type(error)
    data = made.handle.data
    kinds = made.type.name, made.dtype.name, made.handle.dtype.name, made.numel.value
    return kinds, data.dtype, data.shape, data.tobytes()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_two(interpreter: Any, name: str) -> None:
    """Learnt from one pair, it is right for the next ones."""
    semantic = interpreter.interpreter_semantic
    method = getattr(type(semantic), name)
    more = {"minimum": "NONE", "maximum": "NONE"}.get(name)
    last: tuple[Any, ...] = (interpreter.tl.PropagateNan.NONE,) if more else ()
    last = (True,) if name in ("add", "sub", "mul") else last
    kinds = [(format, shape) for format in FORMATS for shape in SHAPES]
    for seed, left in enumerate(kinds):
        others: list[Any] = [*kinds[seed % 8 :: 8], *NUMBERS[seed % 2 :: 2]]
        for right in others:
            for again in range(2):
                a = tensor(interpreter, *left, seed + again)
                b = tensor(interpreter, *right, again) if isinstance(right, tuple) else right
                expected = outcome(lambda a=a, b=b: own(method)(semantic, a, b, *last))
                assert outcome(lambda a=a, b=b: method(semantic, a, b, *last)) == expected, (left, right)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_casts_choices_and_indices(interpreter: Any) -> None:
    semantic, tl = interpreter.interpreter_semantic, interpreter.tl
    cast, where = type(semantic).cast, type(semantic).where
    for format in FORMATS:
        for shape in SHAPES:
            for seed in range(2):
                a = tensor(interpreter, format, shape, seed)
                for element in (tl.int1, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32):
                    expected = outcome(lambda a=a, to=element: own(cast)(semantic, a, to))
                    assert outcome(lambda a=a, to=element: cast(semantic, a, to)) == expected
                for other in (tensor(interpreter, "float32", (2, 4), seed), 0.0, -0.0, 2):
                    condition = tensor(interpreter, "bool", shape, seed + 1)
                    expected = outcome(lambda a=a, b=other, c=condition: own(where)(semantic, c, a, b))
                    found = outcome(lambda a=a, b=other, c=condition: where(semantic, c, a, b))
                    assert found == expected
