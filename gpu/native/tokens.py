"""The walk down the tree of tokens' bytes, to find the tokens that an automaton takes from a state.

The tree lies in preorder, and each node knows where its subtree ends. A byte that the automaton does not
take skips the subtree, so the walk looks at nothing below it.

States are offsets of rows of the automaton's table; a negative one is none.
"""

import ctypes
from collections.abc import Callable
from functools import cache

from ramify.gpu.native.host import MachineCode
from ramify.gpu.native.ir import I8, I16, I32, I64, PTR, Function, IrValue, Module

MOST_DEPTH = 1024  # of the tree: bytes of a token

POP_CODE, ENTER_CODE = -6, -7  # codes of tables: see `constraints.byte_automaton`

Walk = Callable[[int, int, int, int, int, int, int, int, int, int, int], None]


def emit_walk(module: Module) -> None:
    """Write walk(nodes, bytes u8, depths u16, ends i32, tokens i32, classes i32[256], table i32, state,
    mask i32, targets i64, nesting i64).

    Sets the bit of each token that is taken, and, if `targets` is no null pointer, the state behind it.
    A state is an offset and, above its 32 bits, what the stack and the number of the return make of an
    int32 in a value that no schema describes: both as in `protocol.constraints.Layout`. `table` has the
    codes of `constraints.byte_automaton`. nesting: where the rows of inner states begin, the width of a
    row, the bits of numbers of returns, the bits of stacks; then the offset of each return.
    """
    f = Function(module, "walk", [I64, *[PTR] * 6, I64, PTR, PTR, PTR])
    nodes, bytes_, depths, ends, tokens, classes, table, state, mask, targets, nesting = f.args
    first, width, bits, most = (f.word(nesting, i) for i in range(4))
    one, half = f.i64(1), f.i64(32)
    numbers = f.shifted(one, bits) - 1
    states = f.scratch(I64, MOST_DEPTH)
    f.store(state, f.at(states, 0, I64))
    wanted = targets.as_number().differs(0)
    node, behind = f.var(f.i64(1)), f.var(f.i64(-1))

    def inner(stack: IrValue, number: IrValue, place: IrValue) -> IrValue:
        """Compute an inner state from its number."""
        return f.shifted(f.shifted(stack, bits) + number, half) + first + place * width

    def follow_code(context: IrValue, code: IrValue) -> None:
        stack, number = f.unshifted(context, bits), context & numbers
        begun = f.i64(-2) - code
        pushed = stack * 2 + (begun & 1)
        deeper = inner(pushed, number, f.unshifted(begun, one))
        behind.set(f.select(pushed < f.shifted(one, most), deeper, f.i64(-1)))
        with f.when(code.equals(POP_CODE)):
            outer = inner(f.unshifted(stack, one), number, (stack & 1) + 2)
            behind.set(f.select(stack > 1, outer, f.word(nesting, number + 4)))
        with f.when(code <= ENTER_CODE):
            entered = f.i64(ENTER_CODE) - code
            behind.set(inner(one, f.unshifted(entered, one), entered & 1))

    with f.repeat() as leave:
        here = node.get()
        leave(here >= nodes)
        depth = f.unsigned(f.load(f.at(depths, here, I16), I16), I64)
        above = f.load(f.at(states, depth - 1, I64), I64)
        byte = f.unsigned(f.load(f.at(bytes_, here, I8), I8), I64)
        column = f.convert(f.load(f.at(classes, byte, I32), I32), I64)
        offset = above & 0xFFFFFFFF
        code = f.convert(f.load(f.at(table, offset + column, I32), I32), I64)
        behind.set(f.select(code >= 0, above - offset + code, f.i64(-1)))
        with f.when(code < -1):
            follow_code(f.unshifted(above, half), code)
        target = behind.get()
        taken = target >= 0
        f.store(target, f.at(states, depth, I64))
        token = f.convert(f.load(f.at(tokens, here, I32), I32), I64)
        with f.when(taken.both(token >= 0)):
            place = f.at(mask, f.unshifted(token, f.i64(5)), I32)
            bit = f.shifted(f.constant(I32, 1), f.convert(token & 31, I32))
            f.store(f.load(place, I32) + bit, place)
            with f.when(wanted):
                f.store(target, f.at(targets, token, I64))
        skip = f.convert(f.load(f.at(ends, here, I32), I32), I64)
        node.set(f.select(taken, here + 1, skip))
    f.done()


class TokenKernels:
    """The compiled `walk`, see `emit_walk`; arguments are addresses, except nodes and state.

    Other threads run meanwhile.
    """

    def __init__(self) -> None:
        self._compiled = MachineCode("walk", emit_walk, None)
        kind = ctypes.CFUNCTYPE(
            None, ctypes.c_int64, *[ctypes.c_void_p] * 6, ctypes.c_int64, *[ctypes.c_void_p] * 3
        )
        self.walk: Walk = kind(self._compiled.address("walk"))


@cache
def token_kernels() -> TokenKernels:
    """Compile the walk, once in a process: some 50 ms."""
    return TokenKernels()
