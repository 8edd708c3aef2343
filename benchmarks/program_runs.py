"""Runs programs of `program_suite`: as branches of a session, or as prompts that are sent whole.

`on_branches` sends a program as one frame, if the server takes as many ops: it puts what branches said
into other branches (`join`), and waits where a call comes `after` others. `on_prompts` is the stateless
client: it keeps every history, and sends it whole with each call; whom it asks is an `Asker`.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from program_suite import Work, waves
from tokenizers import Tokenizer

from ramify.clients.bench.history import HistorySession
from ramify.clients.bench.program import Job
from ramify.clients.generation import Generation, Result
from ramify.clients.handles import Session
from ramify.protocol.wire import Append, Drop, Fork, Generate, Join, Op, Select

FRAME = 500  # ops: a server takes 512 in a frame unless it is told otherwise
LINE = "{text}\n"  # how an output is joined


class Words:
    """Text to tokens and back, with the tokenizer of a model folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def choices(self, text: str, choices: Sequence[str]) -> tuple[int, list[list[int]]]:
        """Tokens of `text` that stay whatever is chosen, and those of each choice behind them."""
        plain = self.tokens(text)
        joint = [self.tokens(text + choice) for choice in choices]
        kept = min(_common(plain, each) for each in joint)
        return kept, [each[kept:] for each in joint]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@dataclass
class Asked:
    """What one call asked of the model, in tokens.

    `targets`: of each choice, behind the prompt. `whole`: the prompt with the last tokens that a choice
    may change (`choices`, as text); the same as `prompt` where there are none.
    """

    prompt: list[int]
    output: int = 0
    targets: Sequence[Sequence[int]] = ()
    whole: Sequence[int] = ()
    choices: Sequence[str] = ()


# --- branches -----------------------------------------------------------------------------------------


class _Frames:
    """The ops of one program, call by call."""

    def __init__(self, session: Session, work: Work) -> None:
        self.work = work
        self.branches: dict[int, str] = {}
        self._children = Counter(call.parent for call in work.calls)
        self._fresh = iter(session.fresh_names("p", len(work.calls)))

    def barriers(self, wave: Sequence[int]) -> list[Op]:
        """Hold the wave's branches until the calls `after` which it comes are over: empty `join`s."""
        calls = [self.work.calls[place] for place in wave]
        waits = dict.fromkeys((call.parent, call.after) for call in calls if call.after)
        return [
            Join(
                id=0, from_=[self.branches[other] for other in after if other != parent],
                branch=self.branches[parent], each="", role=None, keep=True,
            )
            for parent, after in waits
            if parent is not None
        ]  # fmt: skip

    def inputs(self, place: int) -> list[Op]:
        """Make the call's branch, and append its input."""
        call = self.work.calls[place]
        ops: list[Op] = []
        if call.parent is None or self._children[call.parent] > 1:
            branch = next(self._fresh)
            source = None if call.parent is None else self.branches[call.parent]
            ops.append(Fork(id=0, branch=source, as_=[branch]))
        else:
            branch = self.branches[call.parent]
        self.branches[place] = branch
        if call.joins:
            sources = [self.branches[other] for other in call.joins]
            ops.append(
                Join(
                    id=0, from_=sources, branch=branch, prefix=call.text, each=LINE,
                    suffix=call.tail, role=None, keep=True,
                )
            )  # fmt: skip
        elif call.text + call.tail:
            ops.append(Append(id=0, branch=branch, text=call.text + call.tail))
        return ops

    def ask(self, place: int) -> Op | None:
        call, branch = self.work.calls[place], self.branches[place]
        if call.choices:
            return Select(id=0, branch=branch, choices=list(call.choices))
        if call.output:
            return Generate(
                id=0, branch=branch, max_tokens=call.output, temperature=0.0, ignore_eos=True, quiet=True
            )
        return None


@dataclass
class Ran:
    """A program that has run. `results`: of each call that asked for something."""

    work: Work
    branches: dict[int, str]
    results: dict[int, Result]


async def on_branches(session: Session, work: Work) -> Ran:
    """Run it. Its branches stay: `drop` ends them."""
    frames = _Frames(session, work)
    results: dict[int, Result] = {}
    ops: list[tuple[int | None, Op]] = []
    for wave in waves(work):
        ops += [(None, op) for op in frames.barriers(wave)]
        ops += [(None, op) for place in wave for op in frames.inputs(place)]
        ops += [(place, op) for place in wave if (op := frames.ask(place)) is not None]
    running: list[tuple[int | None, Any]] = []
    for start in range(0, len(ops), FRAME):
        places, some = zip(*ops[start : start + FRAME], strict=True)
        running += zip(places, await session.send(some), strict=True)
    for place, handle in running:
        ended = await handle
        if place is not None:
            results[place] = ended
    return Ran(work, frames.branches, results)


async def drop(session: Session, ran: Ran) -> None:
    """Release its branches."""
    names = sorted(set(ran.branches.values()))
    for reply in await session.send([Drop(id=0, branch=names)]):
        await reply  # type: ignore[misc]


async def asked(session: Session, ran: Ran, words: Words) -> list[tuple[Asked, list[int]]]:
    """What each call asked, and its output, in the server's own tokens.

    Raises AssertionError where a chosen text is not the tokens that we expect.
    """
    held: dict[str, list[int]] = {}
    for name in set(ran.branches.values()):
        turns = (await session.branch(name).tree(tokens=True)).turns or []
        held[name] = [token for turn in turns for token in turn.tokens or ()]
    ends: dict[int, list[int]] = {}
    found = []
    for place, call in enumerate(ran.work.calls):
        tokens = held[ran.branches[place]]
        result = ran.results.get(place)
        if result is None:  # input alone
            before = [] if call.parent is None else ends[call.parent]
            ends[place] = before + words.tokens(call.text + call.tail)
            continue
        ends[place] = tokens[: result.position]
        if not call.choices:
            assert result.usage.output == call.output, (ran.work.program, place, result)
            cut = result.position - call.output
            found.append((Asked(tokens[:cut], call.output), tokens[cut : result.position]))
            continue
        before = [] if call.parent is None else ends[call.parent]
        kept, targets = words.choices(call.text, call.choices)
        prompt = before + words.tokens(call.text)[:kept]
        assert result.choice is not None
        assert ends[place] == prompt + targets[result.choice], (ran.work.program, place)
        found.append((Asked(prompt, 0, targets), targets[result.choice]))
    return found


# --- prompts that are sent whole ----------------------------------------------------------------------


class Asker(Protocol):
    """Whom a stateless client asks: calls that can run at once."""

    async def ask(self, calls: Sequence[Asked]) -> list[list[int]]:
        """The output of each; of a choice, the target that is taken."""
        ...


async def on_prompts(asker: Asker, work: Work, words: Words) -> list[Asked]:
    """Run it; what was asked. The client keeps the histories, and joins texts itself."""
    ends: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}
    found = []
    for wave in waves(work):
        calls: list[Asked] = []
        for place in wave:
            call = work.calls[place]
            before = [] if call.parent is None else ends[call.parent]
            joined = [LINE.format(text=words.text(outputs[other])) for other in call.joins]
            text = call.text + "".join(joined) + call.tail
            ends[place] = whole = before + words.tokens(text)
            if call.choices:
                kept, targets = words.choices(text, call.choices)
                kept += len(before)
                calls.append(Asked(whole[:kept], 0, targets, whole, call.choices))
            elif call.output:
                calls.append(Asked(whole, call.output, (), whole))
        found += calls
        said = iter(zip(calls, await asker.ask(calls), strict=True))
        for place in wave:
            if work.calls[place].asks:
                each, output = next(said)
                outputs[place], ends[place] = output, each.prompt + output
    return found


class Roots:
    """Our own server, as if it knew no branches: each call has a new one, and sends its whole history.

    `salted`: two tokens of its own before each, so that nothing is ever found: the cache is off.
    """

    def __init__(self, session: Session, salt: Iterator[list[int]] | None = None) -> None:
        self._session = session
        self._salt = salt

    async def ask(self, calls: Sequence[Asked]) -> list[list[int]]:
        return list(await asyncio.gather(*map(self._ask, calls)))

    async def _ask(self, call: Asked) -> list[int]:
        (name,) = self._session.fresh_names("call", 1)
        prompt = call.whole if self._salt is None else [*next(self._salt), *call.whole]
        ask: Op = Select(id=0, branch=name, choices=list(call.choices))
        if not call.choices:
            ask = Generate(id=0, branch=name, max_tokens=call.output, temperature=0.0, ignore_eos=True)
        ops = [Fork(id=0, branch=None, as_=[name]), Append(id=0, branch=name, tokens=list(prompt)), ask]
        _, _, handle, _ = await self._session.send([*ops, Drop(id=0, branch=name)])
        assert isinstance(handle, Generation)
        result = await handle
        if call.choices:
            assert result.choice is not None
            return list(call.targets[result.choice])
        assert result.tokens is not None, "the session was opened without `tokens=True`"
        assert len(result.tokens) == call.output
        return result.tokens


class Http:
    """Another engine's HTTP endpoint, or any that `ramify bench` can drive.

    It is asked for one token behind each choice, which costs it less than scores would.
    """

    def __init__(self, session: HistorySession) -> None:
        self._session = session

    async def ask(self, calls: Sequence[Asked]) -> list[list[int]]:
        return list(await asyncio.gather(*map(self._ask, calls)))

    async def _ask(self, call: Asked) -> list[int]:
        if not call.choices:
            _, output = await self._session.generate(call.prompt, Job([], call.output), ids=True)
            return output
        ends = [call.prompt + list(target) for target in call.targets]
        await asyncio.gather(*(self._session.generate(end, Job([], 1), ids=False) for end in ends))
        return list(call.targets[0])


def width(work: Work) -> int:
    """Requests that `Http` has at once."""
    calls = work.calls
    return max(sum(len(calls[p].choices) or bool(calls[p].output) for p in wave) for wave in waves(work))
