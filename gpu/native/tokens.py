"""Which tokens an automaton takes from a state: one walk down the tree of the tokens' bytes.

The tree lies in preorder, and each node knows where its subtree ends. A byte that the automaton does not
take skips the subtree, so the walk looks at nothing below it.

States are offsets of rows of the automaton's table; a negative one is none.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ramify.gpu.native.host import Compiled
from ramify.gpu.native.ir import I8, I16, I32, I64, PTR, Function, Module, Value

MOST_DEPTH = 1024  # of the tree: bytes of a token

POPS, ENTERS = -6, -7  # codes of tables: see `constraints.byte_automaton`

Walk = Callable[[int, int, int, int, int, int, int, int, int, int], None]


def emit_walk(module: Module) -> None:
    """walk(nodes, bytes u8, depths u16, ends i32, tokens i32, classes i32[256], table i32, state,
    mask i32, targets i32).

    Sets the bit of each token that is taken, and, if `targets` is no null pointer, the state behind it.
    """
    f = Function(module, "walk", [I64, *[PTR] * 6, I64, PTR, PTR])
    *tree, classes, table, state, mask, targets = f.args

    def follow(above: Value, column: Value) -> Value:
        return f.convert(f.load(f.at(table, above + column, I32), I32), I64)

    _emit_tree(f, tree, classes, state, mask, targets, follow)


def emit_nested_walk(module: Module) -> None:
    """walk_nested(.. as of walk .., mask i32, targets i64, nesting i64).

    For automata with values that no schema describes. A state is an offset and, above its 32 bits, what
    the value's stack and the number of its return make of an int32: both as in
    `protocol.constraints.Layout`. `table` has the codes of `constraints.byte_automaton`. nesting: where
    the rows of inner states begin, the width of a row, the bits of numbers of returns, the bits of
    stacks; then the offset of each return.
    """
    f = Function(module, "walk_nested", [I64, *[PTR] * 6, I64, PTR, PTR, PTR])
    *tree, classes, table, state, mask, targets, nesting = f.args
    first, width, bits, depth = (f.word(nesting, i) for i in range(4))
    one, half = f.i64(1), f.i64(32)
    numbers = f.shifted(one, bits) - 1
    found = f.var(f.i64(-1))

    def inner(stack: Value, number: Value, place: Value) -> Value:
        """An inner state by its number."""
        return f.shifted(f.shifted(stack, bits) + number, half) + first + place * width

    def follow(above: Value, column: Value) -> Value:
        offset = above & 0xFFFFFFFF
        code = f.convert(f.load(f.at(table, offset + column, I32), I32), I64)
        found.set(f.select(code >= 0, above - offset + code, f.i64(-1)))
        with f.when(code < -1):
            context = f.unshifted(above, half)
            stack, number = f.unshifted(context, bits), context & numbers
            begun = f.i64(-2) - code
            pushed = stack * 2 + (begun & 1)
            deeper = inner(pushed, number, f.unshifted(begun, one))
            found.set(f.select(pushed < f.shifted(one, depth), deeper, f.i64(-1)))
            with f.when(code.equals(POPS)):
                behind = inner(f.unshifted(stack, one), number, (stack & 1) + 2)
                found.set(f.select(stack > 1, behind, f.word(nesting, number + 4)))
            with f.when(code <= ENTERS):
                entered = f.i64(ENTERS) - code
                found.set(inner(one, f.unshifted(entered, one), entered & 1))
        return found.get()

    _emit_tree(f, tree, classes, state, mask, targets, follow, I64)


def _emit_tree(
    f: Function,
    tree: Sequence[Value],
    classes: Value,
    state: Value,
    mask: Value,
    targets: Value,
    follow: Callable[[Value, Value], Value],
    kind: Any = I32,
) -> None:
    """The walk. `follow`: the state behind another one over a column; `kind`: of `targets`."""
    nodes, bytes_, depths, ends, tokens = tree
    states = f.scratch(I64, MOST_DEPTH)
    f.store(state, f.at(states, 0, I64))
    wanted = targets.as_number().differs(0)
    node = f.var(f.i64(1))
    with f.repeat() as leave:
        here = node.get()
        leave(here >= nodes)
        depth = f.unsigned(f.load(f.at(depths, here, I16), I16), I64)
        above = f.load(f.at(states, depth - 1, I64), I64)
        byte = f.unsigned(f.load(f.at(bytes_, here, I8), I8), I64)
        column = f.convert(f.load(f.at(classes, byte, I32), I32), I64)
        target = follow(above, column)
        taken = target >= 0
        f.store(target, f.at(states, depth, I64))
        token = f.convert(f.load(f.at(tokens, here, I32), I32), I64)
        with f.when(taken.both(token >= 0)):
            place = f.at(mask, f.unshifted(token, f.i64(5)), I32)
            bit = f.shifted(f.constant(I32, 1), f.convert(token & 31, I32))
            f.store(f.load(place, I32) + bit, place)
            with f.when(wanted):
                f.store(f.convert(target, kind), f.at(targets, token, kind))
        skip = f.convert(f.load(f.at(ends, here, I32), I32), I64)
        node.set(f.select(taken, here + 1, skip))
    f.done()


class TokenKernels:
    """`walk`: see `emit_walk`; all arguments are addresses but the number of nodes and the state.

    Other threads run meanwhile.
    """

    def __init__(self) -> None:
        self._compiled = Compiled("walk", emit_walk, None)
        self.walk: Walk = _FUNCTION(self._compiled.address("walk"))


class NestedKernels:
    """`walk`: see `emit_nested_walk`."""

    def __init__(self) -> None:
        self._compiled = Compiled("walk_nested", emit_nested_walk, None)
        self.walk: Callable[..., None] = _NESTED(self._compiled.address("walk_nested"))


_ARGUMENTS = (ctypes.c_int64, *[ctypes.c_void_p] * 6, ctypes.c_int64, *[ctypes.c_void_p] * 2)
_FUNCTION = ctypes.CFUNCTYPE(None, *_ARGUMENTS)
_NESTED = ctypes.CFUNCTYPE(None, *_ARGUMENTS, ctypes.c_void_p)


@cache
def token_kernels() -> TokenKernels:
    """Compiled once in a process: some 50 ms."""
    return TokenKernels()


@cache
def nested_kernels() -> NestedKernels:
    """The same, when the first automaton needs them."""
    return NestedKernels()
