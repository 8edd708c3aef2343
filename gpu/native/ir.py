"""A writer of LLVM IR from Python: values with operators, loops and branches as `with` blocks.

Vectors have 16 lanes whatever the machine's registers hold: LLVM splits them. Nothing here lets the
compiler change the order of a sum, so a kernel gives the same bits on every machine that has a fused
multiply-add. This file does not know what the kernels compute.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
PTR = ir.PointerType()
VOID = ir.VoidType()
CACHE_LINE = 64


def vector(element: Any, lanes: int = LANES) -> Any:
    """Make the type <lanes x element>."""
    return ir.VectorType(element, lanes)


def _is_float(kind: Any) -> bool:
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return isinstance(element, (ir.FloatType, ir.HalfType, ir.DoubleType))


class IrValue:
    """A value of a function that is being written. Python numbers become constants of its type."""

    __slots__ = ("f", "raw")

    def __init__(self, f: "Function", raw: Any) -> None:
        self.f = f
        self.raw = raw

    @property
    def kind(self) -> Any:
        return self.raw.type

    def __add__(self, other: "IrValue | float") -> "IrValue":
        return self._binary("fadd", "add", other)

    def __sub__(self, other: "IrValue | float") -> "IrValue":
        return self._binary("fsub", "sub", other)

    def __mul__(self, other: "IrValue | float") -> "IrValue":
        return self._binary("fmul", "mul", other)

    def __truediv__(self, other: "IrValue | float") -> "IrValue":
        return self._binary("fdiv", "sdiv", other)

    def __floordiv__(self, other: "IrValue | int") -> "IrValue":
        return self._binary("", "sdiv", other)

    def __mod__(self, other: "IrValue | int") -> "IrValue":
        return self._binary("", "srem", other)

    def __and__(self, other: "IrValue | int") -> "IrValue":
        return self._binary("", "and_", other)

    def __lshift__(self, other: int) -> "IrValue":
        return self._binary("", "shl", other)

    def __lt__(self, other: "IrValue | float") -> "IrValue":
        return self._compare("<", other)

    def __le__(self, other: "IrValue | float") -> "IrValue":
        return self._compare("<=", other)

    def __gt__(self, other: "IrValue | float") -> "IrValue":
        return self._compare(">", other)

    def __ge__(self, other: "IrValue | float") -> "IrValue":
        return self._compare(">=", other)

    def equals(self, other: "IrValue | float") -> "IrValue":
        return self._compare("==", other)

    def differs(self, other: "IrValue | float") -> "IrValue":
        return self._compare("!=", other)

    def both(self, other: "IrValue") -> "IrValue":
        """Tell where two conditions hold."""
        return IrValue(self.f, self.f.builder.and_(self.raw, other.raw))

    def either(self, other: "IrValue") -> "IrValue":
        """Tell where one of two conditions holds."""
        return IrValue(self.f, self.f.builder.or_(self.raw, other.raw))

    def opposite(self) -> "IrValue":
        """Tell where a condition does not hold."""
        return IrValue(self.f, self.f.builder.not_(self.raw))

    def as_pointer(self) -> "IrValue":
        """Convert an int64 to an address."""
        return IrValue(self.f, self.f.builder.inttoptr(self.raw, PTR))

    def as_number(self) -> "IrValue":
        """Convert an address to int64."""
        return IrValue(self.f, self.f.builder.ptrtoint(self.raw, I64))

    def lane(self, index: int) -> "IrValue":
        """Extract an element of a vector."""
        return IrValue(self.f, self.f.builder.extract_element(self.raw, ir.Constant(I32, index)))

    def bits_as(self, kind: Any) -> "IrValue":
        """Read the same bits as another type."""
        return IrValue(self.f, self.f.builder.bitcast(self.raw, kind))

    def _binary(self, floating: str, integer: str, other: "IrValue | float") -> "IrValue":
        name = floating if _is_float(self.kind) else integer
        return IrValue(self.f, getattr(self.f.builder, name)(self.raw, self.f.like(other, self).raw))

    def _compare(self, sign: str, other: "IrValue | float") -> "IrValue":
        compare = self.f.builder.fcmp_ordered if _is_float(self.kind) else self.f.builder.icmp_signed
        return IrValue(self.f, compare(sign, self.raw, self.f.like(other, self).raw))


class Variable:
    """A value that changes in loops. LLVM keeps it in a register."""

    def __init__(self, f: "Function", initial: IrValue) -> None:
        self._f = f
        with f.builder.goto_entry_block():
            self._place = f.builder.alloca(initial.kind)
        self._kind = initial.kind
        self.set(initial)

    def get(self) -> IrValue:
        return IrValue(self._f, self._f.builder.load(self._place, typ=self._kind))

    def set(self, value: IrValue) -> None:
        self._f.builder.store(value.raw, self._place)


class Module:
    """A set of functions that are compiled together."""

    def __init__(self) -> None:
        self.raw = ir.Module("ramify")
        self._declared: dict[str, Any] = {}

    def external(self, name: str, result: Any, params: Sequence[Any]) -> Any:
        """Declare an intrinsic, or a function of the C library."""
        if name not in self._declared:
            self._declared[name] = ir.Function(self.raw, ir.FunctionType(result, params), name)
        return self._declared[name]


class Function:
    """A function that is being written, and the values that its body makes."""

    def __init__(
        self, module: Module, name: str, params: Sequence[Any], result: Any = VOID, private: bool = False
    ) -> None:
        self.module = module
        self.raw = ir.Function(module.raw, ir.FunctionType(result, params), name)
        if private:
            self.raw.linkage = "internal"
        self.builder = ir.IRBuilder(self.raw.append_basic_block("entry"))
        self.args = [IrValue(self, arg) for arg in self.raw.args]

    @property
    def name(self) -> str:
        return str(self.raw.name)

    # --- values ---

    def constant(self, kind: Any, number: float) -> IrValue:
        if isinstance(kind, ir.VectorType):
            return IrValue(self, ir.Constant(kind, [number] * kind.count))
        return IrValue(self, ir.Constant(kind, number))

    def i64(self, number: int) -> IrValue:
        return self.constant(I64, number)

    def like(self, value: "IrValue | float", other: IrValue) -> IrValue:
        """Convert `value` to the type of `other`: a number or a scalar becomes a vector if need be."""
        if not isinstance(value, IrValue):
            return self.constant(other.kind, value)
        if isinstance(other.kind, ir.VectorType) and not isinstance(value.kind, ir.VectorType):
            return self.splat(value, other.kind.count)
        return value

    def splat(self, scalar: IrValue, lanes: int = LANES) -> IrValue:
        kind = vector(scalar.kind, lanes)
        one = self.builder.insert_element(
            ir.Constant(kind, ir.Undefined), scalar.raw, ir.Constant(I32, 0)
        )
        zeros = ir.Constant(vector(I32, lanes), [0] * lanes)
        return IrValue(self, self.builder.shuffle_vector(one, one, zeros))

    def shuffle(self, a: IrValue, b: IrValue, order: Sequence[int]) -> IrValue:
        """Pick the lanes `order` of a and b, one after another."""
        mask = ir.Constant(vector(I32, len(order)), list(order))
        return IrValue(self, self.builder.shuffle_vector(a.raw, b.raw, mask))

    def numbers(self, kind: Any, values: Sequence[int]) -> IrValue:
        return IrValue(self, ir.Constant(vector(kind, len(values)), list(values)))

    def call(self, name: str, result: Any, *args: IrValue) -> IrValue:
        """Call an intrinsic or an external function."""
        target = self.module.external(name, result, [arg.kind for arg in args])
        return IrValue(self, self.builder.call(target, [arg.raw for arg in args]))

    def effect(self, name: str, *args: IrValue) -> None:
        """Call an intrinsic that returns nothing."""
        self.call(name, VOID, *args)

    def invoke(self, function: "Function", *args: IrValue) -> IrValue:
        """Call another function of the module."""
        return IrValue(self, self.builder.call(function.raw, [arg.raw for arg in args]))

    def jump(self, address: IrValue, params: Sequence[Any], *args: IrValue) -> None:
        """Call the function at an address."""
        kind = ir.FunctionType(VOID, params).as_pointer()
        self.builder.call(self.builder.inttoptr(address.raw, kind), [arg.raw for arg in args])

    def fma(self, a: IrValue, b: IrValue, c: IrValue) -> IrValue:
        """Compute a * b + c, rounded once."""
        a, b = self.like(a, c), self.like(b, c)
        return self.call(f"llvm.fma.{_suffix(c.kind)}", c.kind, a, b, c)

    def select(self, condition: IrValue, yes: IrValue, no: IrValue) -> IrValue:
        return IrValue(self, self.builder.select(condition.raw, yes.raw, no.raw))

    def shifted(self, value: IrValue, count: IrValue) -> IrValue:
        """Compute value << count."""
        return IrValue(self, self.builder.shl(value.raw, count.raw))

    def unshifted(self, value: IrValue, count: IrValue) -> IrValue:
        """Compute value >> count, value not negative."""
        return IrValue(self, self.builder.lshr(value.raw, count.raw))

    def unordered(self, value: IrValue) -> IrValue:
        """Tell where `value` is NaN."""
        return IrValue(self, self.builder.fcmp_unordered("uno", value.raw, value.raw))

    def larger(self, a: IrValue, b: IrValue) -> IrValue:
        """Return the larger one; b if either is NaN."""
        return self.select(a > b, a, b)

    def smaller(self, a: IrValue, b: IrValue) -> IrValue:
        """Return the smaller one; b if either is NaN."""
        return self.select(a < b, a, b)

    def reduce(self, value: IrValue, combine: Any) -> IrValue:
        """Combine all lanes to a scalar, halves with halves."""
        lanes = value.kind.count
        while lanes > 1:
            lanes //= 2
            low = self.shuffle(value, value, range(lanes))
            value = combine(low, self.shuffle(value, value, range(lanes, 2 * lanes)))
        return value.lane(0)

    def convert(self, value: IrValue, kind: Any) -> IrValue:
        """Convert to another float type or a wider or narrower integer."""
        own, builder = value.kind, self.builder
        if str(own) == str(kind):
            return value
        if _is_float(own) and _is_float(kind):
            grows = _width(kind) > _width(own)
            return IrValue(self, (builder.fpext if grows else builder.fptrunc)(value.raw, kind))
        if _is_float(kind):
            return IrValue(self, builder.sitofp(value.raw, kind))
        grows = _width(kind) > _width(own)
        return IrValue(self, (builder.sext if grows else builder.trunc)(value.raw, kind))

    def unsigned(self, value: IrValue, kind: Any) -> IrValue:
        """Widen an unsigned integer."""
        return IrValue(self, self.builder.zext(value.raw, kind))

    # --- memory ---

    def at(self, base: IrValue, index: "IrValue | int", kind: Any) -> IrValue:
        """Compute the address of element `index` of an array of `kind`."""
        offset = self.like(index, self.i64(0))
        return IrValue(self, self.builder.gep(base.raw, [offset.raw], source_etype=kind))

    def load(self, place: IrValue, kind: Any, align: int | None = None) -> IrValue:
        if align is None:
            align = _width(kind) // 8 if not isinstance(kind, ir.VectorType) else 1
        return IrValue(self, self.builder.load(place.raw, typ=kind, align=align))

    def store(self, value: IrValue, place: IrValue) -> None:
        kind = value.kind
        align = 1 if isinstance(kind, ir.VectorType) else _width(kind) // 8
        self.builder.store(value.raw, place.raw, align=align)

    def fetch(self, place: IrValue) -> None:
        """Fetch the cache line at an address into the second cache; the address need not be valid."""
        hints = (self.constant(I32, number) for number in (0, 2, 1))
        self.effect("llvm.prefetch.p0", place, *hints)

    def pointer(self, base: IrValue, index: "IrValue | int") -> IrValue:
        """Load element `index` of an array of addresses."""
        return IrValue(self, self.builder.inttoptr(self.word(base, index).raw, PTR))

    def swap(self, kind: str, place: IrValue, value: IrValue) -> IrValue:
        """Do an atomic "add" or "xchg" of int64. Returns the value before."""
        return IrValue(self, self.builder.atomic_rmw(kind, place.raw, value.raw, "seq_cst"))

    def load_shared(self, place: IrValue) -> IrValue:
        """Load an int64 that other threads write."""
        return IrValue(self, self.builder.load_atomic(place.raw, "seq_cst", 8, typ=I64))

    def store_shared(self, value: IrValue, place: IrValue) -> None:
        """Store an int64 that other threads read."""
        self.swap("xchg", place, value)  # llvmlite stores atomically to typed pointers only

    def word(self, base: IrValue, index: "IrValue | int") -> IrValue:
        """Load element `index` of an array of int64."""
        return self.load(self.at(base, index, I64), I64)

    def scratch(self, kind: Any, count: int) -> IrValue:
        """Allocate `count` of `kind` on the stack of the running call."""
        with self.builder.goto_entry_block():
            place: Any = self.builder.alloca(kind, size=ir.Constant(I64, count))
            place.align = CACHE_LINE
            # llvmlite would remember the type behind the pointer
            number = self.builder.ptrtoint(place, I64)
            return IrValue(self, self.builder.inttoptr(number, PTR))

    def var(self, initial: IrValue) -> Variable:
        return Variable(self, initial)

    # --- control ---

    @contextmanager
    def loop(
        self, start: "IrValue | int", stop: "IrValue | int", step: "IrValue | int" = 1
    ) -> Iterator[IrValue]:
        """Loop for index in range(start, stop, step), all int64."""
        builder = self.builder
        begin, end, stride = (self.like(n, self.i64(0)) for n in (start, stop, step))
        index = self.var(begin)
        test, body, after = (self.raw.append_basic_block(name) for name in ("test", "body", "after"))
        builder.branch(test)
        builder.position_at_end(test)
        builder.cbranch((index.get() < end).raw, body, after)
        builder.position_at_end(body)
        yield index.get()
        index.set(index.get() + stride)
        builder.branch(test)
        builder.position_at_end(after)

    @contextmanager
    def repeat(self) -> Iterator[Any]:
        """Loop until `leave(condition)` is called with a condition that holds."""
        builder = self.builder
        body, after = self.raw.append_basic_block("body"), self.raw.append_basic_block("after")
        builder.branch(body)
        builder.position_at_end(body)

        def leave(condition: IrValue) -> None:
            on = self.raw.append_basic_block("on")
            builder.cbranch(condition.raw, after, on)
            builder.position_at_end(on)

        yield leave
        builder.branch(body)
        builder.position_at_end(after)

    @contextmanager
    def when(self, condition: IrValue) -> Iterator[None]:
        with self.builder.if_then(condition.raw):
            yield

    def done(self, value: IrValue | None = None) -> None:
        """Return."""
        if value is None:
            self.builder.ret_void()
        else:
            self.builder.ret(value.raw)


def _width(kind: Any) -> int:
    if isinstance(kind, ir.VectorType):
        return int(kind.count) * _width(kind.element)
    if isinstance(kind, ir.IntType):
        return int(kind.width)
    if isinstance(kind, ir.HalfType):
        return 16
    return 32 if isinstance(kind, ir.FloatType) else 64


def _suffix(kind: Any) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return f"f{_width(kind)}" if _is_float(kind) else f"i{_width(kind)}"
