"""What a save costs: sessions, their savers and a SQLite store in one thread, without a server.

    python benchmarks/saves.py [--sessions 64] [--tokens 200] [--step-ms 7] [--rounds 8] [--json FILE]
                               [--encrypted]

Each round every session gets an `append` and a `generate` of --tokens tokens, one a step. The clock is
moved by hand, so how many saves there are does not depend on the machine. CPU time of the thread. A
kind of turn is timed for all sessions together; shown is the 20th percentile over the turns, which is
what it costs where others do not take the caches away.

    looks      microseconds a token: the saver's look, for a token that saves nothing
    started    microseconds a save: on the event loop / in the store's thread; when the `append` is done
    between    the same once a second, while the output grows
    done       the same when the `generate` is done
    saves      how many for an answer
    a token    all of it over the tokens: loop, thread, sum
"""

import argparse
import base64
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from fake_server import write_model_folder
from report import headline, machine, percentile, table, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `tests.actors`
from ramify.actors.kit.clock import ManualClock
from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.session.saver import Saver
from ramify.actors.store.base import Store
from ramify.actors.store.places import open_store
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.wire import Append, Generate
from tests.actors.session.alone import Alone

SKIPPED = 2  # rounds that warm up


class Sessions:
    """They generate together; `spent`: (what, when) -> microseconds for each, by turn."""

    def __init__(self, tokenizer: Tokenizer, store: Store, options: argparse.Namespace) -> None:
        self.spent: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.on = False
        self._store = store
        self._clock = ManualClock()
        self._mailbox: Mailbox[Any] = Mailbox("store", 1 << 20)
        self._all: dict[int, tuple[Alone, Saver]] = {}
        for number in range(1, options.sessions + 1):
            alone = Alone(tokenizer, context=1 << 20)
            alone.core.identity.session = f"s_{number}_benchmark"
            alone.state.number = number
            alone.core.record(model="m", priority=0, created=0.0)
            self._all[number] = alone, Saver(alone.core, self._mailbox, self._clock)
        self._turn("first")
        self._turn("first")

    def round(self, ident: int, options: argparse.Namespace) -> None:
        """An answer of each. `ident`: that no op has had, nor the next."""
        requests = []
        ops = Append(id=ident, text="once upon a time"), Generate(id=ident + 1, ignore_eos=True)
        for alone, _ in self._all.values():
            requests.append(alone.send(*ops)[-1].request)
        self._turn("started")
        for step in range(options.tokens):
            self._clock.advance(options.step_ms / 1e3)
            for (alone, _), request in zip(self._all.values(), requests, strict=True):
                alone.said(request, 1000 + step % 500)
            self._turn("between")
        for (alone, _), request in zip(self._all.values(), requests, strict=True):
            alone.over(request, options.tokens)
        self._turn("done")

    def _turn(self, when: str) -> None:
        """Savers look, the store writes what they told, and sockets take what is for them."""
        begin = time.thread_time()
        for _, saver in self._all.values():
            saver.turn()
        looked = time.thread_time()
        saves = self._mailbox.drain_nowait()
        if saves:
            self._store.write([save.changes for save in saves])
        written = time.thread_time()
        for save in saves:
            self._all[save.session][1].saved(save.ticket)
        heard = time.thread_time()
        for alone, saver in self._all.values():
            alone.state.out.cache.clear()
            for subscriber in alone.core.subscribers.values():
                if saver.holds:
                    saver.sent(subscriber.socket, len(subscriber.out))
                subscriber.out = []
        if not self.on:
            return
        loop = looked - begin + heard - written
        if saves:
            self.spent["loop", when].append(1e6 * loop / len(saves))
            self.spent["thread", when].append(1e6 * (written - looked) / len(saves))
        else:
            self.spent["looks", when].append(1e6 * loop / len(self._all))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_model_folder(folder)
    key = None
    if options.encrypted:
        key = folder / "key"
        key.write_bytes(base64.b64encode(os.urandom(32)))
        key.chmod(0o600)
    store = open_store(folder / "s.db", key)
    sessions = Sessions(Tokenizer.load(folder), store, options)
    for number in range(SKIPPED + options.rounds):
        sessions.on = number >= SKIPPED
        sessions.round(1 + 2 * number, options)
    store.close()
    spent = sessions.spent
    usual = {kind: percentile(times, 20) for kind, times in spent.items()}
    times = {kind: len(each) / options.rounds for kind, each in spent.items()}
    a_token = {
        what: sum(usual[kind] * times[kind] for kind in usual if kind[0] == what) / options.tokens
        for what in ("looks", "loop", "thread")
    }
    row: dict[str, Any] = {"looks": round(a_token["looks"], 2)}
    for when in ("started", "between", "done"):
        loop, thread = usual.get(("loop", when), 0.0), usual.get(("thread", when), 0.0)
        row[when] = f"{loop:.1f} / {thread:.1f}"
    row["saves"] = round(sum(times[kind] for kind in times if kind[0] == "loop"), 1)
    loop = a_token["looks"] + a_token["loop"]
    row["a token"] = f"{loop:.2f} + {a_token['thread']:.2f} = {loop + a_token['thread']:.2f}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=7.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--encrypted", action="store_true")
    parser.add_argument("--json", help="write the result to this file")
    options = parser.parse_args()
    about = machine()
    print(headline(about))
    with tempfile.TemporaryDirectory() as folder:
        row = measure(options, Path(folder))
    print(table(list(row), [[str(value) for value in row.values()]]))
    write_json(options.json, about, row)


if __name__ == "__main__":
    main()
