"""How sessions are made: new ones, those that were saved, and those that a file holds.

What is made here is in no use yet: `directory.py` lets it begin.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from ramify.actors.calls.dialects import dialect_of
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address
from ramify.actors.kit.memory import Meter
from ramify.actors.kit.turns import Steps, Turns, Work
from ramify.actors.kit.working import Working, cell_of
from ramify.actors.session.branches.state import MakeTokens, SessionState
from ramify.actors.session.core import SessionCore
from ramify.actors.session.durable.exports import Importing, imported
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.session.output.generation import Seeds
from ramify.actors.session.restore import read_head, restoring
from ramify.actors.session.saver import Saver
from ramify.actors.session.sockets.clients import Identity
from ramify.actors.tokenizer import Tokenizer
from ramify.actors.tokenizer.detokenizer import Detokenizer
from ramify.actors.tokenizer.encoder import Encoder, Job, Queue
from ramify.actors.tokenizer.fetching import FETCHES, PictureFetcher
from ramify.actors.tokenizer.histories import Histories
from ramify.actors.tokenizer.pictures import PROCESSES, PictureDecoder, settings_of
from ramify.protocol.config import Limits
from ramify.protocol.errors import RamifyError
from ramify.protocol.messages import (
    Fetched,
    OpenSession,
    StoreMessage,
)
from ramify.protocol.pictures import PictureSettings
from ramify.protocol.wire import Persist, ServerInfo

log = get_log(__name__)


class Terms(NamedTuple):
    """What holds for a session from its `open` to its end."""

    owner: str
    namespace: str
    priority: int
    saves: bool
    displaceable: bool
    binds: bool = False

    @classmethod
    def of(cls, message: OpenSession) -> "Terms":
        """Make the terms of a new session."""
        return cls(
            message.owner,
            message.namespace,
            message.priority,
            message.saves,
            message.displaceable,
            message.binds,
        )


class Made(NamedTuple):
    """A session that does not run yet."""

    number: int
    core: SessionCore
    saver: Saver | None
    displaceable: bool


class SessionMaker:
    """What all sessions of a process have in common. Times in seconds.

    `store`: keeps them for `kept_s` after their last use. `wall`: seconds since 1970. `numbers`: what
    sessions are called inside. `working`: where to write which session is worked on. `ahead`: see
    `SpareWork.put`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        server: ServerInfo,
        context: int,
        vocab: int,
        limits: Limits,
        ttl_s: float,
        ttl_max_s: float = math.inf,
        clock: Clock,
        wall: Callable[[], float] = time.time,
        numbers: Iterator[int] | None = None,
        tool_parser: str = "auto",
        store: Address[StoreMessage] | None = None,
        kept_s: float = math.inf,
        persist: Persist = "lazy",
        working: Working | None = None,
        ahead: Callable[[str, MakeTokens], None] | None = None,
        pictures: PictureSettings | None = None,
        fetch_images: Sequence[str] = (),
    ) -> None:
        dialect = dialect_of(tokenizer.template_source, tool_parser)
        log.info("tool calls", form=dialect.name, thoughts=dialect.thought is not None)
        shown = tokenizer.showing(dialect.marks)
        self._tokenizer = shown
        self.template = ChatTemplate(shown, dialect, control=shown is not tokenizer)
        self._detokenizer = Detokenizer(shown.token_bytes)
        self.server = server
        self.model = f"{server.model} ({vocab} tokens)"  # as `SavedHead.model`
        self._context = context
        self._vocab = vocab
        _compare(tokenizer, vocab)
        self.limits = limits
        self._ttl_s = ttl_s
        self._ttl_max_s = ttl_max_s
        self.clock = clock
        self._wall = wall
        self._numbers = numbers if numbers is not None else itertools.count(1)
        self.store = store
        self._kept_s = kept_s if store is not None else None
        self._persist: Persist = persist
        self.working = working
        self._ahead = ahead
        self._seeds = Seeds()
        self.pictures: PictureDecoder | None = None
        others: dict[Queue, Encoder] = {}
        if pictures is not None:
            fetcher = PictureFetcher(fetch_images) if fetch_images else None
            self.pictures = PictureDecoder(pictures, fetcher=fetcher)
            others["pictures"] = Encoder(PROCESSES, shared=True)
            others["remote"] = Encoder(FETCHES, shared=True)
        self.encoder = Encoder(others=others)
        self.turns = Turns()
        self.histories = Histories(limits)

    def _limits_of(self, priority: int) -> Limits:
        if priority >= self.limits.priority:
            return self.limits
        return msgspec.structs.replace(self.limits, priority=priority)

    def make(
        self,
        identity: Identity,
        meter: Meter,
        terms: Terms,
        found: Fetched | None = None,
    ) -> Made:
        """Make a session that is not in use yet: new, or to be filled with what was `found`."""
        number, saves, priority = next(self._numbers), terms.saves, terms.priority
        core = SessionCore(
            identity,
            SessionState(
                number,
                context=self._context,
                vocab=self._vocab,
                limits=self._limits_of(priority),
                decode=self._tokenizer.decode,
                owner=terms.owner,
                model=self.model,
                namespace=terms.namespace,
                meter=meter,
            ),
            self._tokenizer,
            self.template,
            self._detokenizer,
            server=self.server,
            ttl_s=self._ttl_s,
            ttl_max_s=self._ttl_max_s,
            random_seed=self._seeds,
            saved=found is not None,
            kept_s=self._kept_s if saves else None,
        )
        core.state.histories, core.state.binds = self.histories, terms.binds
        core.state.ahead, core.state.pictures = self._ahead, self.pictures
        saver = None
        if self.store is not None and saves:
            created = self._wall() if found is None else read_head(found.items).created
            core.state.persist = self._persist
            core.record(
                model=self.model,
                priority=priority,
                created=created,
                displaceable=terms.displaceable,
            )
            fence = 0 if found is None else found.fence
            saver = Saver(core, self.store, self.clock, fence=fence, wall=self._wall)
        return Made(number, core, saver, terms.displaceable)

    async def imported(self, identity: Identity, message: OpenSession) -> dict[str, bytes]:
        """Read the items of a new session from a file. Raises BadRequest, Overloaded."""
        file = message.open.import_
        assert file is not None
        into = Importing(
            identity,
            owner=message.owner,
            namespace=message.namespace,
            priority=message.priority,
            displaceable=message.displaceable,
            persist=self._persist,
            created=self._wall(),
        )
        run = partial(
            imported,
            file,
            into,
            model=self.model,
            vocab=self._vocab,
            context=self._context,
            limits=self.limits,
            pictures=settings_of(self.pictures),
        )
        read: asyncio.Future[dict[str, bytes]] = asyncio.get_running_loop().create_future()
        self.encoder.submit(message.owner, -message.socket, Job(len(file), run, partial(_settle, read)))
        try:
            return await read
        finally:
            del read  # it has the exception, whose traceback has this frame

    def _work_on(self, cell: bytes | None) -> None:
        if self.working is None:
            return
        if cell is None:
            self.working.off()
        else:
            self.working.on(cell)

    async def fill(self, made: Made, found: Fetched) -> None:
        """Restore a session, some of it in each turn of the loop. Raises Damaged, LimitExceeded."""
        work = Work()
        now, wall = self.clock.now(), self._wall()
        sound = True

        def steps() -> Steps[None]:
            nonlocal sound
            sound = yield from restoring(made.core, found.items, now, wall, stored=found.fence > 0)

        name = cell_of(found.session)
        self._work_on(name)
        for cost in steps():
            if not work.take(cost):
                self._work_on(None)
                await self.turns.next()
                self._work_on(name)
                work.renew()
                work.take(cost)
        self._work_on(None)
        if not sound and made.saver is not None:
            made.saver.unsaved(1)  # what the store has is not what the session is

    def save_from_now(self, core: SessionCore, *, displaceable: bool) -> Saver | None:
        """Begin to save a session that was not to be saved. Returns its saver, if there is a store."""
        if self.store is None:
            return None
        core.save_from_now(self._persist, self._kept_s)
        core.record(
            model=self.model,
            priority=core.state.limits.priority,
            created=self._wall(),
            displaceable=displaceable,
        )
        return Saver(core, self.store, self.clock, late=True, wall=self._wall)


def _settle(
    read: asyncio.Future[dict[str, bytes]], items: dict[str, bytes] | None, error: BaseException | None
) -> None:
    if read.done():  # the directory has gone
        return
    if items is not None:
        read.set_result(items)
    else:
        read.set_exception(error or RamifyError("the file could not be read"))


def _compare(tokenizer: Tokenizer, vocab: int) -> None:
    """Warn of tokens that the tokenizer has and the model lacks: appends that need one are refused."""
    unknown = tokenizer.beyond(vocab)
    if unknown:
        log.warning(
            "the tokenizer has tokens that the model does not have; text with one of them is refused. "
            "Serve a model whose embedding was resized for this tokenizer, or the model's own tokenizer",
            vocabulary=vocab,
            tokens=len(unknown),
            examples=dict(sorted(unknown.items())[:4]),
        )
    missing = sorted(tokenizer.eos_ids & unknown.keys())
    if missing:
        log.warning("the model can never sample these ends of a sequence", tokens=missing)
