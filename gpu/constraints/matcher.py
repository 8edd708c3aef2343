"""The interfaces of a constraint, and of an output's state in it.

All outputs under one constraint share an `OutputConstraint`. A `Matcher` is the state of one of them.
There are two kinds of constraints: byte automata (`token_automaton`), alone or with checks of what an
output has written (`checked`), and grammars (`grammar`).
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.forced import Plan
from ramify.gpu.constraints.token_automaton import TokenAutomaton


class Matcher(Protocol):
    """Interface: the state of an output. May raise ConstraintError where a grammar exceeds its limits.

    `quick`: moving it takes microseconds.
    """

    @property
    def quick(self) -> bool: ...

    @property
    def everything(self) -> NDArray[np.int32]:
        """The mask of all tokens, which `mask` returns where all are legal."""
        ...

    def knows(self) -> bool:
        """Whether `plan`, `only` and `mask` take no more than a fraction of a millisecond here."""
        ...

    def only(self) -> int:
        """Return the only legal token, or -1 if there are several."""
        ...

    def mask(self) -> NDArray[np.int32]:
        """Return the legal tokens, read-only: bit i % 32 of word i // 32. In forced text, one."""
        ...

    def advance(self, token: int) -> bool:
        """Take `token`, or a stop token. Returns False if it is not legal; then nothing has changed."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens. Raises ValueError if there are not so many."""
        ...

    def plan(self) -> Plan:
        """Return the tokens that must follow here: see `forced`."""
        ...

    def likely(self) -> tuple[int, ...]:
        """Return tokens that are likely to follow where none must."""
        ...

    def is_final(self) -> bool:
        """Whether the output may end here, or has ended."""
        ...

    def has_ended(self) -> bool:
        """Whether a stop token was taken."""
        ...

    def __len__(self) -> int:
        """The number of tokens taken."""
        ...


class OutputConstraint(Protocol):
    """Interface: a constraint that outputs obey."""

    def matcher(self) -> Matcher:
        """Make the matcher of a new output."""
        ...

    def close(self) -> None:
        """Drop what the constraint keeps: no new output will use it."""
        ...


class StatesConstraint:
    """A constraint whose outputs go through the states of a byte automaton over tokens."""

    def __init__(self, machine: TokenAutomaton) -> None:
        self.machine = machine

    def look_around(self) -> None:
        """Make what masks need, so that no step waits for it."""
        self.machine.look_around()

    def close(self) -> None:
        self.machine.close()


class AutomatonConstraint(StatesConstraint):
    """The constraint of an automaton alone."""

    def matcher(self) -> "AutomatonMatcher":
        return AutomatonMatcher(self.machine)


class StatesMatcher:
    """Base of matchers that keep the states that an output has gone through. `state`: the last one."""

    __slots__ = ("_machine", "_states")

    quick = True

    def __init__(self, machine: TokenAutomaton) -> None:
        self._machine = machine
        self._states = [machine.start]

    @property
    def state(self) -> int:
        return self._states[-1]

    @property
    def everything(self) -> NDArray[np.int32]:
        return self._machine.vocabulary.everything

    def plan(self) -> Plan:
        return self._machine.plan(self._states[-1])

    def likely(self) -> tuple[int, ...]:
        return self._machine.likely(self._states[-1])

    def is_final(self) -> bool:
        return self._machine.is_final(self._states[-1])

    def has_ended(self) -> bool:
        return self._states[-1] == self._machine.end

    def __len__(self) -> int:
        return len(self._states) - 1

    def _check_way_back(self, count: int) -> None:
        if not 0 <= count < len(self._states):
            raise ValueError(f"cannot take back {count} of {len(self)} tokens")


class AutomatonMatcher(StatesMatcher):
    """The matcher of an automaton alone.

    `elsewhere`: a device makes this output's masks. Outputs of one constraint may differ in that: one
    may find no place on the device.
    """

    __slots__ = ("elsewhere",)

    def __init__(self, machine: TokenAutomaton) -> None:
        super().__init__(machine)
        self.elsewhere = machine.elsewhere

    @property
    def machine(self) -> TokenAutomaton:
        return self._machine

    def knows(self) -> bool:
        return self.elsewhere or self._machine.knows(self._states[-1])

    def only(self) -> int:
        return self._machine.only(self._states[-1])

    def mask(self) -> NDArray[np.int32]:
        return self._machine.mask(self._states[-1])

    def advance(self, token: int) -> bool:
        state = self._machine.advance(self._states[-1], token)
        if state < 0:
            return False
        self._states.append(state)
        return True

    def rollback(self, count: int) -> None:
        self._check_way_back(count)
        del self._states[len(self._states) - count :]
