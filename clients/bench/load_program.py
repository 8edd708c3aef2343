"""The requests of a load and its measurements: `LoadProgram` in, `Trace` out. Plain data that crosses
processes.

A program is the work of one session. It holds *lines* (branches; for a stateless server, histories),
starts with one empty line, and works through levels. Chat is one job a level on the same line; a flat
load is one level of many jobs; a tree of thought forks one line of the level before.
"""

import msgspec


class GenerateJob(msgspec.Struct, frozen=True, array_like=True):
    """Append `tokens` to a line, then generate exactly `output` tokens (end tokens ignored)."""

    tokens: list[int]
    output: int
    seed: int = 0


class Level(msgspec.Struct, frozen=True, array_like=True):
    """Jobs that run at once; the next level starts when all of them have ended.

    `parent` None: job i goes on with line i. Else `prefix` is appended to the line `parent`, which
    is forked into one line for each job; these replace the lines.
    `ahead_s`: tokens are appended so long before their generation is asked for (with `parent` None).
    `together`: wait until every program of the load has come this far.
    """

    jobs: list[GenerateJob]
    parent: int | None = None
    prefix: list[int] = []
    ahead_s: float = 0.0
    together: bool = False


class LoadProgram(msgspec.Struct, frozen=True, array_like=True):
    """The levels of one session."""

    levels: list[Level]

    @property
    def width(self) -> int:
        """The most generations at once."""
        return max(len(level.jobs) for level in self.levels)

    @property
    def output(self) -> int:
        """All tokens that will be generated."""
        return sum(job.output for level in self.levels for job in level.jobs)


class Trace(msgspec.Struct, array_like=True):
    """One generation as the client saw it. Times are `time.perf_counter()` seconds.

    `arrivals[i]`: when `counts[i]` more tokens were known to have come. `cached` and `computed`: prompt
    tokens by the server's own account; None where it gives none. `server_ttft_ms`: the server's own.
    `extra`: a request of the client's own making (warming a prefix), not of the load.
    """

    level: int = 0
    program: int = 0
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = msgspec.field(default_factory=list)
    counts: list[int] = msgspec.field(default_factory=list)
    prompt: int = 0
    cached: int | None = None
    computed: int | None = None
    output: int = 0
    server_ttft_ms: float | None = None
    extra: bool = False

    def arrived(self, now: float, count: int) -> None:
        """Note that `count` more tokens came."""
        self.arrivals.append(now)
        self.counts.append(count)
        self.output += count

    @property
    def ttft(self) -> float:
        """Seconds from asking to the first token."""
        return self.arrivals[0] - self.sent


class Target(msgspec.Struct, frozen=True, array_like=True):
    """The server under test and how to talk to it. `url`: ws(s):// for Ramify, else http(s)://."""

    kind: str  # "ramify", "sglang" or "openai"
    url: str
    model: str | None = None
    token: str | None = None
    temperature: float = 0.6
    warm_prefix: bool = False


class Outcome(msgspec.Struct, array_like=True):
    """A finished load. `begin`: when the first op was allowed to leave. `cpu`: share of a core that
    the busiest process of the load took.
    """

    begin: float
    traces: list[Trace]
    cpu: float = 0.0
    device_s: float | None = None  # time on the device, by the server's metrics
    steps: int | None = None

    @property
    def load(self) -> list[Trace]:
        """The generations of the load itself."""
        return [trace for trace in self.traces if not trace.extra]

    @property
    def seconds(self) -> float:
        return max(trace.ended for trace in self.traces) - self.begin
