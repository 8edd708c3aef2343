"""The children of a fork, and their end: a join, a prune, or nothing.

After a prune the winners' content is unknown here until the server has named them. So their states have
a `Past`, which is asked for texts when the program reads them.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ramify.clients.options import JoinOptions, PruneBy
from ramify.clients.program.steps import Step, all_of, wait
from ramify.clients.program.telling import TurnPart
from ramify.clients.program.value import Value
from ramify.protocol.errors import BadRequest
from ramify.protocol.joining import join_texts
from ramify.protocol.wire import Join, Op, Prune

if TYPE_CHECKING:
    from ramify.clients.program.state import AsyncState


class Forks(list["AsyncState"]):
    """The children of a fork. `parent`: the state that was forked."""

    def __init__(self, children: Iterable["AsyncState"], parent: "AsyncState") -> None:
        super().__init__(children)
        self.parent = parent

    async def values(self, name: str) -> list[str]:
        """Read the text of the gap `name` in each child, in order."""
        return list(await asyncio.gather(*(child[name] for child in self)))

    async def finish(self) -> None:
        """Wait until every child is done."""
        for child in self:
            await child.finish()

    def join(self, **options: Unpack[JoinOptions]) -> None:
        """Append what each child generated last to the state that was forked, and end the children.

        `options`: see `JoinOptions`.
        """
        parent = self.parent
        parent.usable()
        parent.settle()
        _settled(self)
        op = Join(id=0, from_=[child.branch for child in self], branch=parent.branch, **options)
        item = JoinedText(op, self)
        parent.writer.insert(op.role, item)
        parent.filled.append(item)
        step = Step(lambda: [op], all_of, writes=[parent], reads=self)
        for child in self:
            child.gone, child.kept = step, op.keep
        parent.add(step)

    def prune(
        self, k: int = 1, *, by: PruneBy = "logprob", judges: "Sequence[AsyncState] | None" = None
    ) -> "Forks":
        """Keep the best `k` children, the best first: a beam. They go on as the returned states.

        `by`: the `first` that are through, the mean `logprob` of what each generated last, the last
        `number` in it, or the answer that most give (`vote`). `judges`: states whose answers are
        compared instead, one for each child.
        """
        from ramify.clients.program.state import AsyncState

        if not 1 <= k <= len(self):
            raise ValueError(f"prune({k}): of {len(self)} forks")
        family = self.parent.family
        past = self._pruned(by, judges)
        names = family.sender.session.fresh_names(self.parent.branch, k)
        winners = []
        for rank, name in enumerate(names):
            winners.append(AsyncState(family, self.parent.writer.fork(name)))
            winners[-1].follow(past.of(rank))
        self._decide(past, names, winners, by, judges)
        return Forks(winners, self.parent)

    def adopt(self, *, by: PruneBy = "logprob", judges: "Sequence[AsyncState] | None" = None) -> None:
        """Have the state that was forked go on as the best child. See `prune`."""
        self.parent.usable()
        self.parent.settle()
        past = self._pruned(by, judges)
        self.parent.follow(past)
        self._decide(past, [self.parent.branch], [self.parent], by, judges)

    def _pruned(self, by: PruneBy, judges: "Sequence[AsyncState] | None") -> "Past":
        """Check a prune as far as it can be checked here. Returns what the winners will be like."""
        if judges is not None and len(judges) != len(self):
            raise ValueError(f"{len(judges)} judges for {len(self)} forks: one for each")
        _settled(self)
        if judges is not None:
            _settled(judges)
        places = {child.writer.place for child in self}
        if len(places) > 1:
            raise TypeError("the forks stand in different turns: prune where all have ended, or none")
        for each in judges if judges is not None else self:
            last = each.gap_before()
            sent = last is not None and (last.noted or (last.step is not None and last.step.flushed))
            if by == "logprob" and last is not None and sent and not last.scored:
                raise BadRequest(
                    f"prune by 'logprob' of the gap {last.name!r}, which was sent before: "
                    "give it logprobs=1"
                )
        return Past(list(self), self[0])

    def _decide(
        self,
        past: "Past",
        names: list[str],
        winners: "Sequence[AsyncState]",
        by: PruneBy,
        judges: "Sequence[AsyncState] | None",
    ) -> None:
        scorers = list(judges) if judges is not None else list(self)

        def ops() -> Sequence[Op]:
            """Make the op, without branches that failed in an earlier frame."""
            pairs = list(zip(self, scorers, strict=True))
            left = [pair for pair in pairs if pair[0].error is None and pair[1].error is None]
            if len(left) < len(names):
                raise next(error for pair in pairs for s in pair if (error := s.error) is not None)
            return [
                Prune(
                    id=0,
                    from_=[child.branch for child, _ in left],
                    into=names,
                    by=by,
                    score_from=None if judges is None else [judge.branch for _, judge in left],
                )
            ]

        async def settle(handles: Sequence[Any]) -> None:
            ((ok,),) = [await handle for handle in handles]
            past.told_winners([kept["from"] for kept in ok.result["kept"]])

        reads = dict.fromkeys([*self, *scorers])
        step = Step(ops, settle, writes=winners, reads=reads, spared=True)
        past.step = step
        for state in reads:
            state.gone = step
        for state in winners:
            if state.birth is None:
                state.birth = step
        winners[0].add(step)


class JoinedText:
    """The text that a join appended, for readers."""

    def __init__(self, op: Join, sources: "Sequence[AsyncState]") -> None:
        self._op = op
        self._answers = [source.answer() for source in sources]

    async def text(self) -> str:
        """Make the text, without that of hidden gaps, which is not known here."""
        return join_texts(self._op, [await answer() for answer in self._answers])


class Past:
    """The content of a state that a prune made: the text of the `rank`-th winner among `sources`."""

    def __init__(
        self,
        sources: "Sequence[AsyncState]",
        like: "AsyncState",
        rank: int = 0,
        shared: "Past | None" = None,
    ) -> None:
        self.like = like
        self.step: Step | None = None
        self._sources = sources
        self._rank = rank
        self._shared = shared or self
        self._winners: list[str] = []
        self._turn = like.writer.turn

    def of(self, rank: int) -> "Past":
        """Make the past of another winner."""
        return Past(self._sources, self.like, rank, self._shared)

    def told_winners(self, names: list[str]) -> None:
        """Note the winners of the prune, which is done."""
        self._winners = names

    def names(self) -> list[str]:
        """Find the gaps that every source has."""
        first, *others = [source.names() for source in self._sources]
        return [name for name in first if all(name in other for other in others)]

    async def _winner(self) -> "AsyncState":
        step = self._shared.step
        assert step is not None
        if not step.over.done():
            self.like.family.reads()
            await wait(step)
        if step.error is not None:
            raise step.error
        name = self._shared._winners[self._rank]
        return next(source for source in self._sources if source.branch == name)

    async def answer(self) -> str:
        """Read the text that the winner generated last."""
        return await (await self._winner()).answer()()

    async def value(self, name: str) -> Value:
        """Return the winner's gap."""
        return (await self._winner())[name]

    async def told(self) -> AsyncIterator[TurnPart]:
        """Yield the winner's text. Its last turn has the number that goes on."""
        winner = await self._winner()
        shift = self._turn - winner.writer.turn
        async for part in winner.told():
            yield part._replace(turn=part.turn + shift)


def _settled(states: "Iterable[AsyncState]") -> None:
    for state in states:
        state.usable()
        state.settle()
