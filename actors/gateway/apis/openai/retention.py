"""How long a door keeps what a request computed: its words for it, as seconds of `set.retain_s`. Pure.

The lease follows the request's branch to the end of its answer, and outlives the request's session.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from ramify.protocol.errors import InvalidField
from ramify.protocol.wire import (
    MONTH_S,
    BranchName,
    ClientMessage,
    Done,
    Error,
    JsonObject,
    KvAction,
    KvHints,
    Ok,
    ServerMessage,
    Set,
)

RETAIN = 0  # id of the op, the first of a frame: ids increase
OWN = "ramify"  # `message_id` of hints that a door makes
Retention = Literal["in_memory", "in-memory", "24h"]
IN_MEMORY_S, DAY_S = 300.0, 86_400.0
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{0,12})?)(ns|us|µs|ms|s|m|h)", re.ASCII)


def retaining(seconds: float | None) -> list[ClientMessage]:
    """Make the op that keeps the branch for `seconds`, if the request says anything of it."""
    return [Set(id=RETAIN, retain_s=seconds)] if seconds else []


def hinting(
    ident: int, hints: KvHints | None, seconds: float | None, branch: BranchName = "main"
) -> list[ClientMessage]:
    """Make the op behind an answer that passes `kv_hints` on, or asks how much of it is retained."""
    if hints is None and seconds:
        lease = KvAction("", "kv.retain", "1.0", {"duration": seconds})
        hints = KvHints("0.1", OWN, [lease])
    return [Set(id=ident, branch=branch, hints=hints)] if hints is not None else []


class Hinted:
    """Holds back the ends of an answer until the reply about its hints comes. `told`: its fields.

    `due`: the op that says so, if it is not among `ops`; `kept` tells its outcomes.
    """

    def __init__(
        self,
        ops: Iterable[ClientMessage],
        due: int | None = None,
        kept: Callable[[list[JsonObject]], JsonObject] | None = None,
    ) -> None:
        hints = (op.id for op in ops if isinstance(op, Set) and op.hints is not None)
        self._due = next(hints, due)
        self._kept = kept
        self._late: list[Done] = []
        self.told: JsonObject = {}

    def order(self, messages: Iterable[ServerMessage]) -> Iterator[ServerMessage]:
        """Yield what has come, and what was held back."""
        for message in messages:
            if self._due is not None and isinstance(message, Done) and message.reason != "error":
                self._late.append(message)
            elif isinstance(message, Ok | Error) and self._due is not None and message.id == self._due:
                self._due = None
                told = message.result if isinstance(message, Ok) else None
                if self._kept is not None and told is not None:
                    self.told = {"ramify_retention": self._kept(told["kv_hints"]["outcomes"])}
                else:
                    self.told = hinted(message)
                yield from self._late
            else:
                yield message


def hinted(reply: Ok | Error) -> JsonObject:
    """Make the fields that say what became of hints. Retention is told where it falls short."""
    if isinstance(reply, Error):
        return {"kv_hints": {"error": reply.message}} if reply.code != "skipped" else {}
    told = (reply.result or {}).get("kv_hints")
    if told is None or told["message_id"] != OWN:
        return {"kv_hints": told} if told is not None else {}
    (outcome,) = told["outcomes"]
    short = {name: value for name, value in outcome.items() if name != "action_id"}
    return {"ramify_retention": short} if outcome["outcome"] in ("clipped", "rejected") else {}


def seconds_of(retention: Retention | None, key: str | None) -> float | None:
    """Read OpenAI's fields. A key alone means that requests with the same prefix follow soon."""
    if retention == "24h":
        return DAY_S
    return IN_MEMORY_S if retention is not None or key else None


def seconds_alive(keep_alive: float | str | None) -> float | None:
    """Read Ollama's `keep_alive`: seconds, or a duration as Go writes it ("1h30m"); below 0: the longest
    time that there is. Raises InvalidField.
    """
    if keep_alive is None:
        return None
    if isinstance(keep_alive, str):
        text = keep_alive.strip()
        below = text.startswith("-")
        digits = text[1:] if text[:1] in ("-", "+") else text
        parts = _PART.findall(digits)
        if digits.isascii() and digits.isdigit():
            parts = [(digits, "s")]
        elif not parts or "".join(number + unit for number, unit in parts) != digits:
            raise InvalidField(
                f'`keep_alive` {keep_alive[:64]!r} is no duration: send seconds, or text such as "5m"'
            )
        total = sum(float(number) * _UNITS[unit] for number, unit in parts)
        keep_alive = -1.0 if below and total else total
    return float(MONTH_S) if keep_alive < 0 else min(keep_alive, float(MONTH_S))
