"""The code of threads that run a list of kernels together.

A recording is a list of instructions: a kernel, how many items it has, its arguments. Every thread walks
the list. At an instruction it takes items until none is left, and goes on when all items are done. So no
thread waits for one that the system has suspended, unless that one holds an item. Between two runs a
thread spins for a moment and then sleeps.

All memory that the threads share is arrays of int64 that Python allocates; see `Crew` in threads.py.
"""

from ramify.gpu.native.host import Isa
from ramify.gpu.native.ir import CACHE_LINE, I32, I64, PTR, Function, IrValue, Module

# words of an instruction: its kernel; the address of a number of rows; rows to a block; items to a
# block; how many of these gain by being taken together
KERNEL, ROWS, BLOCK, ITEMS, TOGETHER = range(5)
ARGUMENTS, INSTRUCTION_WORDS = 5, 24

_LINE = CACHE_LINE // 8
# words of the shared state, those that several threads write on lines of their own
(RUN, STOP, SLEEPERS, MUTEX, CONDITION, BOARDS, BOARD_WORDS, SPINS, THREADS, AT) = (
    0, _LINE, 2 * _LINE, 3 * _LINE, 6 * _LINE, 9 * _LINE, 9 * _LINE + 1, 9 * _LINE + 2,
    9 * _LINE + 3, 10 * _LINE,
)  # fmt: skip
MOST_THREADS = 256
STATE_WORDS = AT + MOST_THREADS * _LINE  # AT: the run that each thread is at work on, 0: none

# a board holds one run's progress: its recording, and for each instruction what is taken, what is done,
# and how much there is
KEPT_BOARDS = 4  # a thread that was put aside may look at an old one
RECORDING, COUNT, BOARD_HEAD = 0, 1, _LINE
TAKEN, DONE, LIMIT, CHUNK = 0, _LINE, _LINE + 1, _LINE + 2
BOARD_LINE = 2 * _LINE  # words for an instruction
_SHARES = 32  # that a thread takes of an instruction with many items: the last ones end together
_PATIENCE = 1024  # pauses, some 50 us, before the processor is offered to others: it comes back late


def emit_crew(module: Module, isa: Isa) -> None:
    """Write `initialise(state)`, `work(state, number)`, `run(state, recording, count)` and `stop`."""
    wait = _emit_wait(module, isa)
    walk = _emit_walk(module, isa)
    _emit_initialise(module)
    _emit_work(module, isa, walk)
    _emit_run(module, walk, wait)
    _emit_stop(module)


def _pause(f: Function, isa: Isa, spins: IrValue) -> None:
    """Wait a few cycles; now and then yield the processor."""
    if isa.pause:
        f.effect(isa.pause, *([] if "x86" in isa.pause else [f.constant(I32, 1)]))
    with f.when((spins % _PATIENCE).equals(_PATIENCE - 1)):
        f.call("sched_yield", I32)


def _board(f: Function, state: IrValue, run: IrValue) -> IrValue:
    size = f.word(state, BOARD_WORDS)
    return f.at(f.pointer(state, BOARDS), (run % KEPT_BOARDS) * size, I64)


def _emit_walk(module: Module, isa: Isa) -> Function:
    """Take part in a run until its last item is done."""
    f = Function(module, "walk", [PTR, I64], private=True)
    state, run = f.args
    board = _board(f, state, run)
    recording = f.pointer(board, RECORDING)
    with f.loop(0, f.word(board, COUNT)) as index:
        line = f.at(board, index * BOARD_LINE + BOARD_HEAD, I64)
        instruction = f.at(recording, index * INSTRUCTION_WORDS, I64)
        limit, chunk = f.word(line, LIMIT), f.word(line, CHUNK)
        with f.repeat() as leave:
            first = f.swap("add", f.at(line, TAKEN, I64), chunk)
            leave(first >= limit)
            last = f.smaller(first + chunk, limit)
            f.jump(f.word(instruction, KERNEL), [PTR, I64, I64],
                   f.at(instruction, ARGUMENTS, I64), first, last)  # fmt: skip
            f.swap("add", f.at(line, DONE, I64), last - first)
        spins = f.var(f.i64(0))
        with f.repeat() as leave:
            leave(f.load_shared(f.at(line, DONE, I64)) >= limit)
            _pause(f, isa, spins.get())
            spins.set(spins.get() + 1)
    f.done()
    return f


def _emit_wait(module: Module, isa: Isa) -> Function:
    """Wait until no thread looks at the board that run `run` is going to use."""
    f = Function(module, "wait_for_board", [PTR, I64], private=True)
    state, run = f.args
    with f.loop(1, f.word(state, THREADS)) as number:
        place = f.at(state, number * _LINE + AT, I64)
        spins = f.var(f.i64(0))
        with f.repeat() as leave:
            at = f.load_shared(place)
            leave(at.equals(0).either(at > run - KEPT_BOARDS))
            _pause(f, isa, spins.get())
            spins.set(spins.get() + 1)
    f.done()
    return f


def _emit_run(module: Module, walk: Function, wait: Function) -> None:
    f = Function(module, "run", [PTR, PTR, I64])
    state, recording, count = f.args
    run = f.load_shared(f.at(state, RUN, I64)) + 1
    f.invoke(wait, state, run)
    board = _board(f, state, run)
    f.store(recording.as_number(), f.at(board, RECORDING, I64))
    f.store(count, f.at(board, COUNT, I64))
    threads = f.word(state, THREADS)
    with f.loop(0, count) as index:
        instruction = f.at(recording, index * INSTRUCTION_WORDS, I64)
        block = f.word(instruction, BLOCK)
        blocks = (f.word(f.pointer(instruction, ROWS), 0) + block - 1) // block
        limit = blocks * f.word(instruction, ITEMS)
        line = f.at(board, index * BOARD_LINE + BOARD_HEAD, I64)
        together = f.smaller(f.word(instruction, TOGETHER), limit // threads)
        chunk = f.larger(limit // (threads * _SHARES) + 1, together)
        for place, value in ((TAKEN, f.i64(0)), (DONE, f.i64(0)), (LIMIT, limit), (CHUNK, chunk)):
            f.store(value, f.at(line, place, I64))
    f.store_shared(run, f.at(state, RUN, I64))
    _wake(f, state)
    f.invoke(walk, state, run)
    f.done()


def _wake(f: Function, state: IrValue) -> None:
    with f.when(f.load_shared(f.at(state, SLEEPERS, I64)) > 0):
        f.call("pthread_mutex_lock", I32, f.at(state, MUTEX, I64))
        f.call("pthread_cond_broadcast", I32, f.at(state, CONDITION, I64))
        f.call("pthread_mutex_unlock", I32, f.at(state, MUTEX, I64))


def _emit_work(module: Module, isa: Isa, walk: Function) -> None:
    f = Function(module, "work", [PTR, I64])
    state, number = f.args
    place = f.at(state, number * _LINE + AT, I64)
    seen = f.var(f.i64(0))
    with f.repeat() as leave:
        _await_run(f, isa, state, seen.get())
        leave(f.load_shared(f.at(state, STOP, I64)).differs(0))
        run = f.load_shared(f.at(state, RUN, I64))
        f.store_shared(run, place)
        # a run whose board may be in use again is over
        with f.when(f.load_shared(f.at(state, RUN, I64)) - run < KEPT_BOARDS - 1):
            f.invoke(walk, state, run)
        f.store_shared(f.i64(0), place)
        seen.set(run)
    f.done()


def _await_run(f: Function, isa: Isa, state: IrValue, seen: IrValue) -> None:
    place = f.at(state, RUN, I64)
    spins = f.var(f.i64(0))
    with f.repeat() as leave:
        leave(f.load_shared(place).differs(seen).either(spins.get() >= f.word(state, SPINS)))
        _pause(f, isa, spins.get())
        spins.set(spins.get() + 1)
    mutex, sleepers = f.at(state, MUTEX, I64), f.at(state, SLEEPERS, I64)
    with f.when(f.load_shared(place).equals(seen)):
        f.call("pthread_mutex_lock", I32, mutex)
        f.swap("add", sleepers, f.i64(1))
        with f.repeat() as leave:
            leave(f.load_shared(place).differs(seen))
            f.call("pthread_cond_wait", I32, f.at(state, CONDITION, I64), mutex)
        f.swap("add", sleepers, f.i64(-1))
        f.call("pthread_mutex_unlock", I32, mutex)


def _emit_initialise(module: Module) -> None:
    f = Function(module, "initialise", [PTR])
    (state,) = f.args
    none = f.like(0, f.i64(0)).as_pointer()
    f.call("pthread_mutex_init", I32, f.at(state, MUTEX, I64), none)
    f.call("pthread_cond_init", I32, f.at(state, CONDITION, I64), none)
    f.done()


def _emit_stop(module: Module) -> None:
    """End all helpers: a run that has nothing to do."""
    f = Function(module, "stop", [PTR])
    (state,) = f.args
    f.store_shared(f.i64(1), f.at(state, STOP, I64))
    f.swap("add", f.at(state, RUN, I64), f.i64(1))
    _wake(f, state)
    f.done()
