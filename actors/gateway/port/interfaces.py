"""What the gateway needs to know of the rest of the engine, as interfaces that the engine fills."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ramify.actors.kit.report import StoreHealth


class Served(NamedTuple):
    """What doors know of the model, once it is loaded.

    `context`: most tokens of a branch. `thinks`: its output may begin with a thought.
    `unthought`: text at the head of an answer that keeps it from thinking; None: nothing does.
    `tells_effort`: its chat template tells it how much to think.
    `users_follow_results`: its chat template takes a user's turn behind results of tools.
    `control`: how control tokens are spelled, by id; they have no text in answers.
    `sampling`: what holds for the fields of `generate` that a client leaves out, by their names.
    `pictures`: it sees some; `fetches`: they may be given by their address.
    """

    context: int = 0
    thinks: bool = False
    unthought: str | None = ""
    users_follow_results: bool = True
    tells_effort: bool = False
    control: Mapping[int, bytes] = MappingProxyType({})
    sampling: Mapping[str, float] = MappingProxyType({})
    pictures: bool = False
    fetches: bool = False


class Status(Protocol):
    """The state of the engine, asked for at each request."""

    @property
    def ready(self) -> bool:
        """True once sessions can be opened; before that upgrades get 503."""
        ...

    @property
    def phase(self) -> str:
        """What the engine is doing, for people: "loading 40%", "ready", "draining"."""
        ...

    @property
    def fault(self) -> str | None:
        """Why a server that is ready makes no progress: what `/readyz` tells, with 503."""

    @property
    def store(self) -> StoreHealth:
        """The state of the store: while nothing can be written, `/readyz` says so, with 503."""
        ...

    @property
    def model(self) -> str:
        """The name under which a ready server serves its model."""
        ...

    def info(self) -> dict[str, Any]:
        """Make the body of `GET /v1/info`: builtins only."""
        ...

    def load(self) -> dict[str, float]:
        """Make `pong.load`: {"queue": requests that wait, "kv": part of the pool in use, 0..1}."""
        ...


class GatewayMetrics(Protocol):
    """The Prometheus registry, as far as the gateway touches it."""

    def sockets(self, delta: int, /) -> None:
        """Count a WebSocket that opened (+1) or ended (-1)."""

    def scrape(self, done: Callable[[bytes], object], /) -> None:
        """Call `done` with the body of `GET /metrics`, in the text exposition format.

        At once, or on a later turn of the loop where another process has the numbers.
        """
