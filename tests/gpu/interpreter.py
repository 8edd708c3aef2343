"""Triton's interpreter for tests: it computes the same, most of what it does beside that is left out."""

import builtins
import dataclasses
import operator
from collections.abc import Callable
from functools import cache
from math import copysign, prod
from types import SimpleNamespace
from typing import Any

import numpy as np

SLOW = object()  # an operation on types for which the interpreter's own way is taken


def quicken(interpreter: Any) -> None:
    """Make `triton.runtime.interpreter` take a fifth of its time, for the rest of the process.

    By itself it changes the language anew for each call, works each sum of integers out a second time to
    see whether it overflows (the tests' sizes are far from that), copies memory that is the host's
    already onto itself, makes each value's type and shape anew, and finds out for each operation how
    its operands' types become one.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    core = interpreter.tl.core
    for owner, name, keeps in (
        (interpreter, "_get_np_dtype", _once),
        (core.block_type, "with_element_ty", _once),
        (core, "_normalize_cache_policy", cache),
    ):
        setattr(owner, name, keeps(getattr(owner, name)))
    core.block_type.__init__ = _known_types(core)
    shape_of = cache(lambda sizes: (core.constexpr(prod(sizes)), core.tuple(map(core.constexpr, sizes))))

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(builtins.tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = make_tensor
    quick = Quick(interpreter)
    interpreter._patch_lang = Language(interpreter, quick).patch


def _once(function: Any) -> Any:
    """Its results are kept, by the names of the types that it is called with."""
    kept: dict[tuple[str, ...], Any] = {}

    def call(*types: Any) -> Any:
        key = tuple(each.name for each in types)
        if key not in kept:
            kept[key] = function(*types)
        return kept[key]

    return call


def _known_types(core: Any) -> Any:
    """`block_type.__init__`: a type that there was is not checked and named again."""
    make = core.block_type.__init__
    kept: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, builtins.tuple(map(operator.index, shape))
        if key not in kept:
            make(self, element_ty, shape)
            kept[key] = dict(self.__dict__)
        self.__dict__.update(kept[key])

    return init


class Quick:
    """Operations of tensors, learnt once for the types of their operands.

    The first time the interpreter's own way is gone, and a short one tried: NumPy's function on the
    operands as they are, or in another number format. Where it gives the same bits, it stays.
    """

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self._tl = interpreter.tl
        self._core = interpreter.tl.core
        self._tensor = self._core.tensor
        self._semantic = interpreter.interpreter_semantic
        semantic = type(self._semantic)
        least, most = self._least_or_most(np.minimum, np.fmin), self._least_or_most(np.maximum, np.fmax)
        functions: dict[str, Any] = {
            "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide,
            "floordiv": lambda a, b: (a - np.fmod(a, b)) // b, "mod": np.fmod,
            "less_than": np.less, "less_equal": np.less_equal, "equal": np.equal,
            "greater_than": np.greater, "greater_equal": np.greater_equal, "not_equal": np.not_equal,
            "and_": np.bitwise_and, "or_": np.bitwise_or, "xor_": np.bitwise_xor,
            "minimum": least, "maximum": most,
        }  # fmt: skip
        for name, function in functions.items():
            setattr(semantic, name, self._binary(getattr(semantic, name), function, name))
        semantic.where = self._where(semantic.where)
        semantic.load = self._load(semantic.load)
        semantic.broadcast_impl_value = self._broadcast(semantic.broadcast_impl_value)
        semantic.to_tensor = self._to_tensor(semantic.to_tensor)
        semantic.cast = self._cast(semantic.cast)
        add, sub, mul = semantic.add, semantic.sub, semantic.mul
        # what the language has in place of its own functions
        self.functions = {
            "__add__": self._of_two(add), "__radd__": self._of_two(add, turned=True),
            "__sub__": self._of_two(sub), "__rsub__": self._of_two(sub, turned=True),
            "__mul__": self._of_two(mul), "__rmul__": self._of_two(mul, turned=True),
            "__getitem__": self._getitem(self._core.tensor.__getitem__.__wrapped__),
        }  # fmt: skip

    def _least_or_most(self, whole: Any, floating: Any) -> Any:
        return lambda a, b: (floating if a.dtype.kind == "f" else whole)(a, b)

    def _key(self, operand: Any) -> Any:
        """Of an operand: a type's name, or a number's class and value."""
        if operand.__class__ is self._tensor:
            return operand.type.name
        if isinstance(operand, float) and not operand:
            return float, copysign(1, operand), 0.0
        return operand.__class__, operand

    def _made(self, data: Any, like: Any, of: Any = None) -> Any:
        """A tensor of `data` with the types of `like`, and the handle's type of `of`."""
        handle = object.__new__(self._interpreter.TensorHandle)
        handle.data, handle.dtype, handle.attr = data, (like.handle if of is None else of).dtype, {}
        made = object.__new__(self._tensor)
        made.handle, made.type, made.dtype = handle, like.type, like.dtype
        made.numel, made.shape = like.numel, like.shape
        return made

    def _plain(self, type: Any) -> bool:
        """Whether NumPy has its numbers."""
        return not (type.scalar.is_ptr() or type.scalar.is_bf16() or type.scalar.is_fp8())

    def _operand(self, given: Any, used: Any) -> Any:
        """How the data of an operand is had: None (as it is), a format, or a number's array."""
        if given.__class__ is not self._tensor:
            return np.ascontiguousarray(used.handle.data.reshape(-1)[:1])
        if given.dtype == used.dtype:
            return None
        if not self._plain(given.type) or not self._plain(used.type) or used.dtype.is_int1():
            return SLOW
        return used.handle.data.dtype

    def _data(self, operand: Any, how: Any) -> Any:
        if how is None:
            return operand.handle.data
        return how if how.__class__ is np.ndarray else operand.handle.data.astype(how)

    def _same(self, result: Any, tried: Any) -> bool:
        data = result.handle.data
        return bool(
            tried.dtype == data.dtype and tried.shape == data.shape and tried.tobytes() == data.tobytes()
        )

    def _binary(self, own: Any, function: Any, name: str) -> Any:
        ways: dict[Any, Any] = {}
        offset = name == "add"

        def learn(lhs: Any, rhs: Any, more: Any, result: Any) -> Any:
            if offset and result.type.scalar.is_ptr():
                return self._offset(lhs, rhs, result)
            if name in ("minimum", "maximum") and more != (self._core.PropagateNan.NONE,):
                return SLOW
            return self._learnt(lhs, rhs, function, result, name) if self._plain(result.type) else SLOW

        def call(_: Any, lhs: Any, rhs: Any, *more: Any, **named: Any) -> Any:
            more = more or tuple(named.values())
            key = self._key(lhs), self._key(rhs), more
            way = ways.get(key)
            if way is None:
                result = own(self._semantic, lhs, rhs, *more)
                with np.errstate(all="ignore"):
                    ways[key] = learn(lhs, rhs, more, result)
                return result
            if way is SLOW:
                return own(self._semantic, lhs, rhs, *more)
            left, right, apply, like = way
            data = apply(self._data(lhs, left), self._data(rhs, right))
            return self._made(data, like, None if left is not None else lhs.handle)

        return call

    def _learnt(self, lhs: Any, rhs: Any, function: Any, result: Any, name: str) -> Any:
        division = name in ("truediv", "floordiv", "mod")
        used = self._semantic.binary_op_type_checking_impl(lhs, rhs, False, False, True, division)
        if not all(self._plain(each.type) for each in used):
            return SLOW
        if used[0].dtype.is_int1() and name not in ("and_", "or_", "xor_", "equal", "not_equal"):
            return SLOW
        left, right = map(self._operand, (lhs, rhs), used)
        if left is SLOW or right is SLOW:
            return SLOW
        data = self._data(lhs, left), self._data(rhs, right)
        if (
            name in ("minimum", "maximum")
            and not data[0].shape == data[1].shape == result.handle.data.shape
        ):
            return SLOW  # of 0 and -0 NumPy gives the one or the other
        return (
            (left, right, function, self._like(result)) if self._same(result, function(*data)) else SLOW
        )

    def _like(self, result: Any) -> Any:
        """What is kept of a result, without its data."""
        handle = SimpleNamespace(dtype=result.handle.dtype)
        return SimpleNamespace(
            handle=handle, type=result.type, dtype=result.dtype, numel=result.numel, shape=result.shape,
            format=result.handle.data.dtype,
        )  # fmt: skip

    def _offset(self, lhs: Any, rhs: Any, result: Any) -> Any:
        """A pointer and an offset."""
        if lhs.__class__ is not self._tensor or not lhs.dtype.is_ptr():
            return SLOW
        width = max(1, lhs.dtype.element_ty.primitive_bitwidth // 8)
        if rhs.__class__ is self._tensor:
            if rhs.dtype.is_int_unsigned():
                return SLOW
            right, apply = None, lambda a, b: a + width * b.astype(np.uint64)
        else:
            right, apply = width * np.array([rhs], dtype=np.int64).astype(np.uint64), np.add
        tried = apply(self._data(lhs, None), self._data(rhs, right))
        return (None, right, apply, self._like(result)) if self._same(result, tried) else SLOW

    def _where(self, own: Any) -> Any:
        ways: dict[Any, Any] = {}

        def learn(condition: Any, x: Any, y: Any, result: Any) -> Any:
            if condition.__class__ is not self._tensor or not condition.dtype.is_int1():
                return SLOW
            used = self._semantic.binary_op_type_checking_impl(x, y, True, True)
            if not all(self._plain(each.type) for each in used):
                return SLOW
            left, right = map(self._operand, (x, y), used)
            if left is SLOW or right is SLOW:
                return SLOW
            tried = np.where(condition.handle.data, self._data(x, left), self._data(y, right))
            return (left, right, self._like(result)) if self._same(result, tried) else SLOW

        def call(_: Any, condition: Any, x: Any, y: Any) -> Any:
            key = self._key(condition), self._key(x), self._key(y)
            way = ways.get(key)
            if way is None:
                result = own(self._semantic, condition, x, y)
                with np.errstate(all="ignore"):
                    ways[key] = learn(condition, x, y, result)
                return result
            if way is SLOW:
                return own(self._semantic, condition, x, y)
            left, right, like = way
            data = np.where(condition.handle.data, self._data(x, left), self._data(y, right))
            return self._made(data, like, None if right is not None else y.handle)

        return call

    def _load(self, own: Any) -> Any:
        ways: dict[Any, Any] = {}
        core = self._core
        builder = self._semantic.builder

        @cache
        def full(shape: Any, value: Any, dtype: Any, element: Any) -> Any:
            return self._interpreter.TensorHandle(np.full(shape, value, dtype=dtype), element)

        def spread(tensor: Any, shape: Any) -> Any:
            handle = tensor.handle
            if handle.data.shape == shape:
                return handle
            return self._interpreter.TensorHandle(np.broadcast_to(handle.data, shape), handle.dtype)

        def learn(ptr: Any, mask: Any, result: Any) -> Any:
            data, element = result.handle.data, result.dtype
            if ptr.dtype.element_ty.is_int1() or ptr.handle.data.shape != data.shape:
                return SLOW
            if mask is not None and not mask.dtype.is_int1():
                return SLOW
            everywhere = full(data.shape, True, np.bool_, core.int1)
            return data.shape, everywhere, full(data.shape, 0, data.dtype, element), self._like(result)

        def call(_: Any, ptr: Any, mask: Any, other: Any, policy: Any, volatile: Any) -> Any:
            key = tuple(each if each is None else each.type.name for each in (ptr, mask, other))
            way = ways.get(key)
            if way is None or way is SLOW:
                result = own(self._semantic, ptr, mask, other, policy, volatile)
                ways[key] = way or learn(ptr, mask, result)
                return result
            shape, everywhere, zeros, like = way
            wanted = everywhere if mask is None else spread(mask, shape)
            instead = zeros if other is None else spread(self._semantic.cast(other, like.dtype), shape)
            return self._made(
                builder.create_masked_load(ptr.handle, wanted, instead, None, None).data, like
            )

        return call

    def _of_two(self, operation: Any, turned: bool = False) -> Any:

        def call(lhs: Any, rhs: Any) -> Any:
            if rhs.__class__ is self._core.constexpr:
                rhs = rhs.value
            return operation(None, rhs, lhs, True) if turned else operation(None, lhs, rhs, True)

        return call

    def _getitem(self, own: Any) -> Any:
        ways: dict[Any, Any] = {}
        every = slice(None)

        def call(tensor: Any, places: Any) -> Any:
            if places.__class__ is not builtins.tuple:
                return own(tensor, places, _semantic=self._semantic)
            key = tensor.type.name, *(None if each is None else each == every for each in places)
            way = ways.get(key)
            if way is None or way is SLOW:
                result = own(tensor, places, _semantic=self._semantic)
                quick = tensor.type.is_block() and self._same(result, tensor.handle.data[places])
                ways[key] = self._like(result) if quick else SLOW
                return result
            return self._made(tensor.handle.data[places], way, tensor.handle)

        return call

    def _to_tensor(self, own: Any) -> Any:
        kept: dict[Any, Any] = {}

        def call(_: Any, x: Any, check_type: bool = True) -> Any:
            if x.__class__ is self._tensor:
                return x
            if x.__class__ not in (bool, int, float) or x != x:
                return own(self._semantic, x, check_type)
            key = self._key(x)
            if key not in kept:
                kept[key] = own(self._semantic, x, check_type)
            return kept[key]

        return call

    def _cast(self, own: Any) -> Any:
        ways: dict[Any, Any] = {}

        def call(_: Any, tensor: Any, wanted: Any, rounding: Any = None) -> Any:
            if tensor.dtype.name == wanted.scalar.name:
                return tensor
            key = tensor.type.name, wanted.scalar.name, rounding
            way = ways.get(key)
            if way is None or way is SLOW:
                result = own(self._semantic, tensor, wanted, rounding)
                quick = (
                    self._plain(tensor.type) and self._plain(result.type) and not result.dtype.is_int1()
                )
                if quick:
                    with np.errstate(all="ignore"):
                        data = tensor.handle.data.astype(result.handle.data.dtype)
                    quick = self._same(result, data)
                ways[key] = self._like(result) if quick else SLOW
                return result
            return self._made(tensor.handle.data.astype(way.format), way)

        return call

    def _broadcast(self, own: Any) -> Any:
        as_they_are: set[tuple[str, str]] = set()

        def call(_: Any, lhs: Any, rhs: Any) -> Any:
            key = lhs.type.name, rhs.type.name
            if key in as_they_are:
                return lhs, rhs
            made = own(self._semantic, lhs, rhs)
            if made[0] is lhs and made[1] is rhs:
                as_they_are.add(key)
            return made

        return call


class Language:
    """`triton.language` as the interpreter changes it for a kernel: found out once, not for each call.

    A function that a kernel calls needs no more changes than the kernel had.
    """

    def __init__(self, interpreter: Any, quick: Quick) -> None:
        everything = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
        scope = interpreter._patch_lang(everything)
        before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, value in scope._changes:
            before.setdefault((id(owner), name), (owner, name, value))
        self._before = list(before.values())
        semantic = interpreter.interpreter_semantic
        self._changed = [
            (owner, name, quick.functions.get(name) or _direct(getattr(owner, name), semantic))
            for owner, name, _ in self._before
        ]
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


def _direct(value: Any, semantic: Any) -> Callable[..., Any]:
    """A function of the language that is called with the interpreter's semantics, without wrappers."""
    member = (getattr(value, "__kwdefaults__", None) or {}).get("member")
    if member is None or not hasattr(member, "__wrapped__"):
        return value
    function = member.__wrapped__

    def call(*arguments: Any, _semantic: Any = None, **options: Any) -> Any:
        return function(*arguments, _semantic=semantic, **options)

    return call
