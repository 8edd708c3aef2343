"""Hundreds of steps of rows that come, pause and go, under more automata than the device has room for.

The host's part is the executor's own: row table, `DeviceConstraints`, and work in threads, which are
late at random. The device's part is played here in Python: it does in order what it is told, and its
results are known a step later, or two. Kernels and the real executor are in `test_cuda_constraints`.
"""

import json
import random
import re
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from ramify.actors.grammar.automaton import Automaton as Machine
from ramify.actors.grammar.compile import compile_constraint
from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.checked import CheckedAutomaton
from ramify.gpu.constraints.matcher import AutomatonConstraint
from ramify.gpu.constraints.outputs import Output
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import StepRows, within
from ramify.protocol.constraints import POP_STEP, WORDS_HEADER, ConstraintSpec, Layout
from ramify.protocol.plan import ExecutorInfo, ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams
from tests.gpu.constraints.machines import machine_of

pytest.importorskip("triton")  # which `automata` imports
STOP, SIZE, ROWS, LINES, PAGES = 2, 160, 8, 48, 20
WORDS = [b'{"name": "', b"pilot", b"co", b"ok", b'", "', b"na", b"ab", b'text"', b"tex"]
TEXTS = [b"", b"", b"", *[bytes([i]) for i in range(32, 127)], *WORDS]
PATTERNS = [
    rf'\{{"name": "[a-z ]{{0,{20 + n}}}", "text_{n}": "[a-z]{{0,{n % 4 + 1}}}(ok|pilot)", '
    rf'"xa[bc]yna[ab]{{{n % 3}}}"\}}'
    for n in range(8)
]
TABLE = 7_300  # bytes; each has between 4,500 and 6,800


def encode(text: str) -> list[int]:
    data, ids = text.encode(), []
    while data:
        ids.append(max((i for i, one in enumerate(TEXTS) if one and data.startswith(one)),
                       key=lambda i: len(TEXTS[i])))  # fmt: skip
        data = data[len(TEXTS[ids[-1]]) :]
    return ids


@dataclass
class Client:
    """What stands in a row: its request, constraint, prompt and output."""

    request: int
    ident: int
    most: int
    prompt: list[int]
    output: list[int] = field(default_factory=list)


LISTS = r'\["(ok|co|pilot|[ab]{1,2})"(, "(ok|co|pilot|[ab]{1,2})"){2,5}\]'


class Launched:
    """A step that the device has done and nobody knows of."""

    def __init__(self, step: StepRows, clients: dict[int, Client]) -> None:
        self.step, self.clients = step, clients
        self.tokens = np.full(len(step.sampling), -1, np.int32)
        self.kept = np.ones(len(step.sampling), np.int32)
        self.openings = np.zeros(0, np.int64)
        self.stuck: dict[int, str] = {}
        self.settled: Any = None


# lists of different texts: followed on the host, as its rows remember what they wrote
DIFFERENT = {
    "type": "array",
    "items": {"type": "string", "pattern": "^(ok|co|pilot|[ab]{1,2})$"},
    "uniqueItems": True,
    "minItems": 3,
    "maxItems": 6,
}


def different(words: Vocabulary) -> Any:
    spec = ConstraintSpec("json_schema", json.dumps(DIFFERENT), True)
    made = constraint_of(compile_constraint(spec).body, words, lambda: pytest.fail("a grammar"))
    assert isinstance(made, CheckedAutomaton)
    return made


class Crowd:
    def __init__(self, seed: int, drafts: bool, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from ramify.gpu.sampling import device_constraints

        monkeypatch.setattr(device_constraints, "ARENA_BYTES", room)
        self.dice, self.drafts = random.Random(seed), drafts
        info = ExecutorInfo(
            "m", "a", 1, SIZE, 4096, 16, 4096, LINES, 2048, "cpu", "float32", "triton", [STOP], 1, 0.0,
            constrains=True, max_forced=32 if drafts else 0,
        )  # fmt: skip
        self.table = RowTable(info)
        self.constraints = device_constraints.DeviceConstraints(info, self.table, torch.device("cpu"))
        self.automata = self.constraints.automata
        words = Vocabulary(TEXTS, [STOP], encode, SIZE)
        for ident, pattern in enumerate(PATTERNS, 1):
            made = Machine.from_regex(pattern)
            machine = machine_of(words, made)
            self.constraints.prepare(ident, AutomatonConstraint(machine))
            self.constraints.rows.put(ident, AutomatonConstraint(machine))
        checked = different(words)
        self.constraints.prepare(len(PATTERNS) + 1, checked)
        self.constraints.rows.put(len(PATTERNS) + 1, checked)
        self.patterns = [*PATTERNS, LISTS]
        self.live: dict[int, Client] = {}
        self.paused: list[Client] = []
        self.closes: list[int] = []
        self.requests = self.steps = self.drafted = 0
        self.texts: list[tuple[str, str]] = []
        self.followed = {True: 0, False: 0}  # steps of rows on the device, and on the host

    # --- the scheduler ---

    def plan(self) -> StepPlan:
        decodes, dice = [*self.live], self.dice
        closes, self.closes = self.closes, []
        free = [row for row in range(ROWS) if row not in self.live]
        opens, extends = [], []
        for row in dice.sample(free, min(len(free), dice.choice([0, 0, 1, 3]))):
            if self.paused and dice.random() < 0.5:
                client = replace(self.paused.pop())
            else:
                self.requests += 1
                prompt = [5] * dice.choice([1, 1, 4, 20])
                client = Client(self.requests, dice.randrange(len(self.patterns)) + 1,
                                dice.choice([10, 60, 128]), prompt)  # fmt: skip
            self.live[row] = client
            history = pack([*client.prompt, *client.output])
            # all computed but for the last token, or nothing
            cached = dice.choice([0, len(history) // 4 - 1])
            pages = pack(range(row * PAGES, (row + 1) * PAGES))
            opens.append(
                OpenRow(row, client.request, pages, cached, SamplingParams(temperature=1.0),
                        len(client.output), history, client.ident, len(client.output))
            )  # fmt: skip
            extends.append(ExtendRow(row, cached, history[4 * cached :], True))
        room, asked = LINES - len(decodes) - len(extends), []
        for _ in decodes:
            asked.append(min(room, dice.choice([0, 8, 32])))
            room -= asked[-1]
        self.steps += 1
        return StepPlan(
            self.steps, pack(closes), opens, extends=extends, decodes=pack(decodes),
            drafts=pack(asked) if self.drafts and decodes else b"",
        )  # fmt: skip

    def end(self, row: int, client: Client, *, whole: bool = False) -> None:
        if whole:
            text = b"".join(TEXTS[token] for token in client.output).decode()
            self.texts.append((self.patterns[client.ident - 1], text))
        del self.live[row]
        self.closes.append(row)

    def take(self, launched: Launched) -> None:
        step, kept = launched.step, launched.kept
        if launched.settled is None:
            return
        if step.lines is not None:
            accepted = np.add.reduceat(kept, np.cumsum(step.lines) - step.lines)
            refused = step.lines - accepted
            self.table.settle(step.sampled_rows, step.lines - 1, refused, launched.openings)
            self.drafted += int((accepted - 1).sum())
        launched.settled(launched.tokens, None if step.lines is None else kept)
        for line, row in enumerate(step.rows[step.sampling].tolist()):
            client = self.live.get(row)
            if not kept[line] or client is None or launched.clients.get(row) is not client:
                continue
            token = int(launched.tokens[line])
            assert token >= 0, launched.stuck.get(line)
            if token == STOP:
                self.end(row, client, whole=True)
                continue
            client.output.append(token)
            if len(client.output) == client.most or self.dice.random() < 0.003:
                self.end(row, client)
            elif self.dice.random() < 0.01:
                self.end(row, client)
                self.paused.append(client)

    def run(self, steps: int, enough: Callable[[], bool] = lambda: True) -> None:
        """So many steps, and more until there is `enough`: how late threads are is the machine's."""
        pending: deque[Launched] = deque()
        for step in count():
            if step >= steps and (enough() or step >= 20 * steps):
                break
            pending.append(self.launch(self.plan()))
            for row in self.live:
                if (on_device := self.constraints.on_device(row)) is not None:
                    self.followed[on_device] += 1
            while len(pending) > self.dice.choice([0, 1, 1]):
                self.take(pending.popleft())
        self.constraints.close()

    # --- the executor, as `CudaExecutor.launch` ---

    def launch(self, plan: StepPlan) -> Launched:
        plan, step = self.constraints.begin(plan, self.table.apply(plan))
        self.automata.upload(0)
        step = step.with_short_extends_as_decodes()
        launched = Launched(step, dict(self.live))
        if len(step.sampling):
            self.sample(launched, self.constraints.lines(step))
            launched.stuck = dict(self.constraints.stuck)
            launched.openings = self.table.openings[step.sampled_rows]
            launched.settled = self.constraints.watch(step)
        return launched

    # --- the device ---

    def sample(self, launched: Launched, found: Any) -> None:
        step, tokens, kept = launched.step, launched.tokens, launched.kept
        rows = step.rows[step.sampling].tolist()
        number = np.zeros(len(rows), np.int64) if step.lines is None else within(step.lines)
        states = list[int]()
        for line, row in enumerate(rows):
            if number[line]:
                draft = step.given[step.sampling[line] - step.extends]
                kept[line] = kept[line - 1] and tokens[line - 1] == draft
            kind = -1 if found is None else int(found.kinds[line])
            state = -1 if found is None else int(found.states[line])
            states.append(state if state >= 0 else int(self.automata.states[row]))
            legal: list[int] = list(range(3, len(TEXTS)))
            if kind == 0:
                legal = self.legal(row, states[-1])
            elif kind > 0:
                bits = np.unpackbits(found.words[kind - 1].view(np.uint8), bitorder="little")
                legal = np.flatnonzero(bits).tolist()
            if legal:
                tokens[line] = self.dice.choice(legal)
        for line, row in enumerate(rows):
            last = kept[line] and not (line + 1 < len(rows) and number[line + 1] and kept[line + 1])
            if last and found is not None and found.kinds[line] == 0:
                self.automata.states[row] = self.after(row, states[line], int(tokens[line]))

    def layout(self, row: int) -> tuple[np.ndarray[Any, Any], int, Layout]:
        """The arena, where the row's automaton begins in it, and how its states are numbered."""
        arena, table = self.automata.arena.numpy(), int(self.automata.tables[row])
        states, _, returns, inner, bits, shift, depth = arena[table + 1 : table + WORDS_HEADER].tolist()
        return arena, table, Layout(states, returns, inner, bits, shift, depth)

    def after(self, row: int, state: int, token: int) -> int:
        """As `triton_automata` reads the arena."""
        arena, table, at = self.layout(row)
        if token == STOP:
            return at.states
        begins = table + WORDS_HEADER + 256 + at.states + 1 + at.inner
        steps = begins + at.states + 1 + at.inner
        columns, kinds = arena[table], arena[table + 2]
        for byte in TEXTS[token]:
            step = int(
                arena[steps + arena[begins + place(at, state)] + arena[table + WORDS_HEADER + byte]]
            )
            inside = state - at.states - 1
            stack, number = inside >> at.shift, (inside & ((1 << at.shift) - 1)) >> at.bits
            base = at.states + 1 + (number << at.bits)
            if step == POP_STEP:
                outer = base + (stack >> 1 << at.shift) + 2 + (stack & 1)
                state = int(arena[steps + columns * kinds + number]) if stack == 1 else outer
            elif step < 0 and step & 1:
                begun = (-1 - step) >> 1
                deeper = base + (2 * stack + (begun & 1) << at.shift) + (begun >> 1)
                state = -1 if stack >> at.depth - 1 else deeper
            else:
                state = (0 if step & 1 else state) + (step >> 1)
            if state < 0:
                return -1
        return state

    def legal(self, row: int, state: int) -> list[int]:
        arena, table, at = self.layout(row)
        own = int(arena[table + WORDS_HEADER + 256 + place(at, state)])
        if own >> 1:
            return [(own >> 1) - 1]
        found = [token for token in range(3, len(TEXTS)) if self.after(row, state, token) >= 0]
        return [STOP, *found] if own & 1 else found


def place(layout: Layout, state: int) -> int:
    """Where among the rows there is that of a state."""
    inside = state - layout.states - 1
    return state if inside < 0 else layout.states + 1 + (inside & ((1 << layout.bits) - 1))


@pytest.mark.parametrize(
    ("seed", "drafts", "places"), [(1, True, 3), (2, True, 0), (3, False, 3), (4, True, 12)]
)
def test_all_obey(monkeypatch: pytest.MonkeyPatch, seed: int, drafts: bool, places: int) -> None:
    """Wherever a row is followed, and whenever threads are done: no token is refused, texts match."""
    monkeypatch.setattr("ramify.gpu.constraints.token_automaton.QUICK_NODES", 0)
    monkeypatch.setattr("ramify.gpu.constraints.outputs.FEW", 8)
    dice, work = random.Random(seed), Output._work

    def late(self: Output, *given: Any) -> None:
        time.sleep(0.002 * dice.random() ** 3)
        work(self, *given)

    monkeypatch.setattr(Output, "_work", late)
    crowd = Crowd(seed, drafts, places * TABLE, monkeypatch)
    crowd.run(400, lambda: [pattern for pattern, _ in crowd.texts].count(LISTS) > 2)
    assert len(crowd.texts) > 20
    lists = 0
    for pattern, text in crowd.texts:
        assert re.fullmatch(pattern, text), (pattern, text)
        if pattern is LISTS:
            assert len(set(json.loads(text))) == len(json.loads(text)), text
            lists += 1
    assert lists > 2
    assert (crowd.drafted > 100) == drafts
    assert (crowd.followed[True] > 100) == (places > 0)
    assert crowd.followed[False] > 100


def test_what_is_forgotten_while_it_is_loaded_keeps_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(0, True, 3 * TABLE, monkeypatch)
    constraints, automata = crowd.constraints, crowd.automata
    machine = constraints.rows.loading(1).result()
    assert isinstance(machine, AutomatonConstraint)
    loaded = Future[Any]()
    constraints.rows._known[9] = loaded
    constraints.begin(StepPlan(1, forgets=pack([1, 9])), crowd.table.apply(StepPlan(1)))
    assert list(automata.made) == list(range(2, 9))
    constraints.prepare(9, machine)
    assert 9 in automata.made
    loaded.set_result(machine)
    assert list(automata.made) == list(range(2, 9))
    constraints.close()
