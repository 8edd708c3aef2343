"""Triton's interpreter for tests: it computes the same, most of what it does beside that is left out."""

import dataclasses
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any


def quicken(interpreter: Any) -> None:
    """Make `triton.runtime.interpreter` take a third of its time, for the rest of the process.

    By itself it changes the language anew for each call, works each sum of integers out a second time to
    see whether it overflows (the tests' sizes are far from that), copies memory that is the host's
    already onto itself, and makes each value's type and shape anew.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = Language(interpreter).patch
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    core = interpreter.tl.core
    interpreter._get_np_dtype = _once(interpreter._get_np_dtype)
    core.block_type.with_element_ty = _once(core.block_type.with_element_ty)
    shape_of = cache(lambda sizes: (core.constexpr(prod(sizes)), core.tuple(map(core.constexpr, sizes))))

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = make_tensor


def _once(function: Any) -> Any:
    """Its results are kept, by the names of the types that it is called with."""
    kept: dict[tuple[str, ...], Any] = {}

    def call(*types: Any) -> Any:
        key = tuple(each.name for each in types)
        if key not in kept:
            kept[key] = function(*types)
        return kept[key]

    return call


class Language:
    """`triton.language` as the interpreter changes it for a kernel: found out once, not for each call.

    A function that a kernel calls needs no more changes than the kernel had.
    """

    def __init__(self, interpreter: Any) -> None:
        everything = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
        scope = interpreter._patch_lang(everything)
        before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, value in scope._changes:
            before.setdefault((id(owner), name), (owner, name, value))
        self._before = list(before.values())
        self._changed = [(owner, name, getattr(owner, name)) for owner, name, _ in self._before]
        self._missing = interpreter._MISSING
        self._in_kernel = False
        scope.restore()

    def patch(self, _: object) -> Any:
        if self._in_kernel:
            return SimpleNamespace(restore=lambda: None)
        self._in_kernel = True
        for owner, name, value in self._changed:
            setattr(owner, name, value)
        return SimpleNamespace(restore=self._restore)

    def _restore(self) -> None:
        self._in_kernel = False
        for owner, name, value in self._before:
            if value is self._missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
