"""Constraints that the device follows without the host: their tables there, and each row's state.

All tables lie in one piece of memory of a fixed size. A table without users stays until its place is
needed. Automata that find no place, and grammars, are followed on the host: see `device_constraints`,
which also knows plans.
"""

from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramify.gpu.constraints.arena import Arena
from ramify.gpu.constraints.byte_tables import (
    KNOWN,
    TokenBytes,
    byte_tables,
    can_be_tables,
    token_bytes,
)
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.gpu.sampling.triton_automata import DeviceTokenBytes, TokenMasks, advance, masks_into
from ramify.gpu.step.staging import Upload

ARENA_BYTES = 256 << 20  # of the device, for the tables of all constraints
_ALIGN = 32  # words
_RETURNS = 3  # in a table's header: how many values have no schema

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Constrained:
    """The S lines of a step that sample, of which some have a constraint.

    kinds int32 [S]: see `triton_automata`; states int32 [S]: the state of a line after drafts, -1: that
    of its row; words int32 [K, W]: the masks that the host made, a bit for each token.
    """

    kinds: Int32s
    states: Int32s
    words: Int32s


@dataclass(slots=True)
class Followed:
    """The N asks of a step on the device, as `DeviceAutomata.masks` left them for `advance`."""

    asks: Tensor
    states: Tensor
    counts: Tensor


class DeviceAutomata:
    """The automata that rows follow. `put`: from any thread; all else: from the executor's.

    `always_nested`: launch the kernels that know values without a schema, even if no row has such.
    On the device, int32: `arena`, all tables; `tables` [rows], where each row's begins; `states` [rows].
    `made`: the tables of constraints on the host.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device, size: int) -> None:
        """`size`: bytes for all tables."""
        self._device = device
        self._places = Arena(size // (4 * _ALIGN))
        self.arena = torch.zeros(size // 4, dtype=torch.int32, device=device)
        self.tables = torch.zeros(rows, dtype=torch.int32, device=device)
        self.states = torch.zeros(rows, dtype=torch.int32, device=device)
        self._words = torch.zeros((rows, -(-vocab_size // 32)), dtype=torch.int32, device=device)
        self._vocabulary: Vocabulary | None = None
        # until a vocabulary is known, for the masks of the host: no token has bytes
        ids = np.arange(vocab_size, dtype=np.int32)
        none, base = ids[-1:] + 1, ids[:1]
        self._tokens = self._on_device(TokenBytes(ids, ids, none, base, np.zeros(1, np.uint8), 0))
        self._lock = Lock()
        self.made: dict[int, Tensor | None] = {}  # pinned; None: too large
        self._of: dict[int, int] = {}  # rows' constraints
        self._nested: set[int] = set()  # rows whose automata have values that no schema describes
        self.always_nested = False
        self._fresh: dict[int, tuple[int, int]] = {}  # rows that the device does not know: place, state
        self._upload = Upload(device)

    @property
    def used_bytes(self) -> int:
        """Bytes of the tables on the device."""
        return self._places.used * 4 * _ALIGN

    def put(self, ident: int, machine: TokenAutomaton) -> bool:
        """Make the tables of a constraint, unless they are there. False: they are too large."""
        if ident in self.made:
            return self.made[ident] is not None
        with self._lock:
            if self._vocabulary is not machine.vocabulary:
                self._tokens = self._on_device(token_bytes(machine.vocabulary))
                self._vocabulary = machine.vocabulary
        made: Tensor | None = None
        size = -(-len(machine.automaton.words) // _ALIGN) * _ALIGN
        if size <= self._places.size * _ALIGN and can_be_tables(machine):
            made = torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
            byte_tables(machine, made.numpy())
        self.made[ident] = made
        return made is not None

    def forget(self, ident: int) -> None:
        """Drop a constraint that no row has."""
        self.made.pop(ident, None)
        self._places.forget(ident)

    def open(self, row: int, ident: int, state: int, forced: int | None = None) -> bool:
        """Let a closed `row` follow constraint `ident` from `state` on. Returns False if it cannot.

        `forced`: the token that must come there; a table does not know it of states no output reaches.
        """
        table = self.made.get(ident)
        if table is None or (forced is not None and int(table[KNOWN + state]) >> 1 != forced + 1):
            return False
        start = self._places.find(ident)
        if start is None:
            start = self._places.take(ident, len(table) // _ALIGN)
            if start is None:
                return False
            self.arena[start * _ALIGN : start * _ALIGN + len(table)].copy_(table, non_blocking=True)
        self._places.use(ident)
        self._of[row] = ident
        if table[_RETURNS] > 0:
            self._nested.add(row)
        self._fresh[row] = start * _ALIGN, state
        return True

    def close(self, row: int) -> None:
        """Stop following a row."""
        ident = self._of.pop(row, None)
        if ident is not None:
            self._places.leave(ident)
            self._nested.discard(row)
            self._fresh.pop(row, None)

    def upload(self, entry: int) -> None:
        """Tell the device of the rows that were opened, through ring entry `entry`."""
        if not self._fresh:
            return
        tables, states = np.array(list(self._fresh.values()), dtype=np.int32).T
        rows = np.array(list(self._fresh), dtype=np.int64)
        sent = self._upload.send(entry, rows=rows, tables=tables, states=states)
        self.tables.index_copy_(0, sent["rows"], sent["tables"])
        self.states.index_copy_(0, sent["rows"], sent["states"])
        self._fresh.clear()

    def masks(self, followed: Followed, words: Tensor) -> TokenMasks:
        """Make the masks of the asks, and count their tokens. `words` int32 [K, W]: the host's masks."""
        masks = TokenMasks(self._words[: len(followed.asks)], self._tokens.places)
        masks_into(
            followed.asks, self._tokens, self.arena, self.tables, self.states, followed.states, words,
            masks.words, followed.counts, self._follows_nested,
        )  # fmt: skip
        return masks

    def advance(self, followed: Followed, tokens: Tensor, kept: Tensor | None, forced: Tensor) -> None:
        """Move the rows on by what was sampled: see `triton_automata.advance`."""
        advance(
            followed.asks, self._tokens, self.arena, self.tables, self.states, followed.states,
            followed.counts, tokens, kept, forced, self._follows_nested,
        )  # fmt: skip

    @property
    def _follows_nested(self) -> bool:
        return self.always_nested or bool(self._nested)

    def _on_device(self, tables: TokenBytes) -> DeviceTokenBytes:
        def moved(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(array.copy()).to(self._device)

        return DeviceTokenBytes(
            moved(tables.ids), moved(tables.places), moved(tables.first), moved(tables.base),
            moved(tables.bytes), tables.stops,
        )  # fmt: skip


def lines_without(count: int, words: int) -> Constrained:
    """Make `count` lines, none with a constraint."""
    none = np.full(count, -1, dtype=np.int32)
    return Constrained(none, none.copy(), np.zeros((1, words), dtype=np.int32))
