"""The output of one row under its constraint, and the tokens that may follow.

The executor's thread moves it by the sampled tokens. Long work is done in another thread: waiting for
the constraint to be loaded, taking tokens that were sampled before a pause, masks of grammars and of
large vocabularies. Meanwhile the output is *busy* and no other thread touches its matcher; a step that
cannot wait leaves the row out.

This file does not know rows, lines or logits.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from threading import Event
from time import monotonic
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.forced import MOST_FORCED
from ramify.gpu.constraints.forced import NOTHING as NO_PLAN
from ramify.gpu.constraints.loads import Loaded
from ramify.gpu.constraints.matcher import Matcher
from ramify.protocol.errors import ConstraintError

T = TypeVar("T")

log = logging.getLogger(__name__)

FEW = 64  # tokens that were sampled before: so many are gone through at once


class Legal(NamedTuple):
    """The legal tokens: `only` one, or those of `mask`; -1 and None: none. `free`: all are."""

    only: int
    mask: NDArray[np.int32] | None
    free: bool = False

    def has(self, token: int) -> bool:
        if self.only >= 0 or self.mask is None:
            return token == self.only >= 0
        return bool(self.mask[token >> 5] >> (token & 31) & 1)


NOTHING = Legal(-1, None)
LOST = "its matcher failed, which the server's log says more of"


class Ahead(NamedTuple):
    """Tokens that must follow, or are likely to; `legal`: the legal tokens here, and after each of them;
    `guessed`: which of them a drafter guessed.
    """

    tokens: tuple[int, ...]
    legal: tuple[Legal, ...]
    guessed: tuple[bool, ...] = ()


Guess = Callable[[Sequence[int], int], Sequence[int]]
"""Takes drafts and a number. Returns up to so many tokens that may follow the output and these."""


class Output:
    """An output. `matcher`: None: not made yet, or the constraint cannot be followed, see `why`."""

    __slots__ = ("_ahead", "_busy", "_closed", "_late", "_threads", "matcher", "why")

    def __init__(
        self,
        loaded: "Future[Loaded]",
        outputs: Sequence[int],
        threads: Callable[[], Executor],
    ) -> None:
        """`outputs`: tokens that were sampled before."""
        self.matcher: Matcher | None = None
        self.why = ""
        self._threads = threads
        self._ahead: Ahead | None = None
        self._busy: Event | None = None
        self._late = self._closed = False
        if loaded.done() and len(outputs) <= FEW:
            self._enter(loaded)
            self.advance(outputs)
            return
        self._late = True
        self._busy = done = Event()

        def begin(_: "Future[Loaded]") -> None:
            threads().submit(self._begin, loaded, outputs, done)

        loaded.add_done_callback(begin)

    def _enter(self, loaded: "Future[Loaded]") -> None:
        constraint = ConstraintError("the server is stopping") if loaded.cancelled() else loaded.result()
        if isinstance(constraint, ConstraintError):
            self.why = constraint.message
        else:
            self.matcher = constraint.matcher()

    def close(self) -> None:
        """Let work under way stop: the row is closed."""
        self._closed = True

    @property
    def ready(self) -> bool:
        """Whether the output can be moved, and asked, without waiting."""
        if self._busy is not None and self._busy.is_set():
            self._busy, self._late = None, False
        return self._busy is None

    @property
    def late(self) -> bool:
        """Whether a step has waited for the output in vain, and it is not ready yet."""
        return not self.ready and self._late

    def wait(self, until: float) -> bool:
        """Wait until it is ready, or until that time (of `time.monotonic`). Returns whether it is."""
        if self.ready:
            return True
        assert self._busy is not None
        self._busy.wait(max(0.0, until - monotonic()))
        return self.ready

    def missed(self) -> None:
        """Note that a step stopped waiting: no step waits again until the output is ready."""
        self._late = True

    def advance(self, tokens: Sequence[int]) -> None:
        """Take `tokens`, which are legal. The output must be ready."""
        self._ahead = None
        if self.matcher is None:
            return
        if not self.matcher.quick:
            self._start(tokens)
            return
        self._take(tokens)
        if self.matcher is not None and not self.matcher.knows():
            self._start(())

    def look(self) -> Ahead:
        """Find what may follow. The output must be ready."""
        if self._ahead is None:
            self._look()
        return Ahead((), (NOTHING,)) if self._ahead is None else self._ahead

    def leaves_a_choice(self) -> bool:
        """Whether the next token can be guessed: it is not forced, and the legal ones are known."""
        matcher = self.matcher
        return matcher is not None and matcher.quick and matcher.knows() and matcher.only() < 0

    def guess(self, most: int, guesses: int, guess: Guess, jumps: bool) -> Ahead:
        """Collect up to `most` tokens that may follow: forced ones, legal ones of a drafter's `guesses`,
        and forced ones after these. The output must be ready.

        `jumps`: forced tokens are taken. There are no guesses where finding the legal tokens takes long.
        """
        if self.matcher is None or not self.matcher.quick or not self.matcher.knows():
            return self.look() if jumps else Ahead((), ())
        found = self._tried(lambda matcher: _guessed(matcher, most, guesses, guess, jumps))
        self._ahead = found
        return Ahead((), (NOTHING,)) if found is None else found

    def along(self, drafts: Sequence[int]) -> list[Legal]:
        """Find what may follow here, and after each of `drafts` as long as they are legal."""
        tokens, legal, _ = self.look()
        known = 0
        while known < len(drafts) and known < len(tokens) and drafts[known] == tokens[known]:
            known += 1
        found = list(legal[: known + 1])
        if known == len(drafts) or not found[-1].has(drafts[known]) or self.matcher is None:
            return found
        return self._tried(lambda matcher: self._walk(matcher, drafts)) or [NOTHING]

    def _start(self, tokens: Sequence[int]) -> None:
        self._busy = done = Event()
        self._late = False
        self._threads().submit(self._work, tokens, done)

    def _begin(self, loaded: "Future[Loaded]", outputs: Sequence[int], done: Event) -> None:
        try:
            self._enter(loaded)
        except Exception:
            log.exception("a constraint cannot be followed")
            self.why = LOST
        self._work(outputs, done)

    def _work(self, tokens: Sequence[int], done: Event) -> None:
        try:
            self._take(tokens)
            # What is made quickly is made when it is asked for; where a device follows, nothing is.
            if not (self._closed or self.matcher is None or self.matcher.knows()):
                self._look()
        except Exception:
            log.exception("a constraint cannot be followed")
            self.matcher, self.why = None, LOST
        finally:
            done.set()

    def _take(self, tokens: Sequence[int]) -> None:
        def take(matcher: Matcher) -> None:
            for token in tokens:
                if self._closed:
                    return
                if not matcher.advance(token):
                    raise ConstraintError(f"token {token} is not legal")

        self._tried(take)

    def _look(self) -> None:
        self._ahead = self._tried(_ahead)

    def _walk(self, matcher: Matcher, drafts: Sequence[int]) -> list[Legal]:
        found = [_legal(matcher)]
        taken = 0
        for token in drafts:
            if not found[-1].has(token) or not matcher.advance(token):
                break
            taken += 1
            found.append(_legal(matcher))
        matcher.rollback(taken)
        return found

    def _tried(self, call: Callable[[Matcher], T]) -> T | None:
        """Return the result of `call`; None: the constraint cannot be followed, and never again."""
        if self.matcher is None:
            return None
        try:
            return call(self.matcher)
        except ConstraintError as error:
            log.error("a constraint cannot be followed: %s", error)
            self.matcher, self.why = None, error.message
            return None


def _legal(matcher: Matcher) -> Legal:
    only = matcher.only()
    if only >= 0:
        return Legal(only, None)
    mask = matcher.mask()
    return Legal(-1, mask, mask is matcher.everything)


def _ahead(matcher: Matcher) -> Ahead:
    plan = matcher.plan()
    taken, legal = list[int](), [_legal(matcher)]

    def take(tokens: Sequence[int]) -> bool:
        for token in tokens:
            if not legal[-1].has(token) or not matcher.advance(token):
                return False
            taken.append(token)
            legal.append(_legal(matcher))
        return True

    if take(plan.forced) and len(plan.forced) < MOST_FORCED:
        take(matcher.likely())
    matcher.rollback(len(taken))
    return Ahead(tuple(taken), tuple(legal))


def _guessed(matcher: Matcher, most: int, guesses: int, guess: Guess, jumps: bool) -> Ahead:
    tokens, legal, guessed = list[int](), [_legal(matcher)], list[bool]()

    def take(found: Sequence[int], is_guess: bool) -> int:
        """Take those of `found` that are legal, up to one that would take long. Returns how many."""
        for number, token in enumerate(found):
            if len(tokens) == most or not legal[-1].has(token) or not matcher.advance(token):
                return number
            if is_guess and not matcher.knows():
                matcher.rollback(1)
                return number
            tokens.append(token)
            legal.append(_legal(matcher))
            guessed.append(is_guess)
        return len(found)

    while len(tokens) < most and not matcher.has_ended():
        plan = matcher.plan() if jumps else NO_PLAN
        if plan.forced:
            if take(plan.forced, False) < len(plan.forced):
                break
            continue
        taken = take(guess(tokens, min(guesses, most - len(tokens))), True) if guesses > 0 else 0
        guesses -= taken
        if taken:
            continue
        likely = matcher.likely() if jumps else ()
        if take(likely, False) < max(1, len(likely)) or guesses <= 0:
            break
    matcher.rollback(len(tokens))
    return Ahead(tuple(tokens), tuple(legal), tuple(guessed))
