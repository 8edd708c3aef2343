"""Settings, validated once. `ramify.clients.cli` turns flags into these; actors receive them whole.

Constructors raise `ConfigError` naming the field; nothing re-validates later.
"""

import ipaddress
import math
from pathlib import Path
from typing import Literal

import msgspec

from ramify.protocol.constraints import GrammarBackend
from ramify.protocol.credentials import CredentialLimits, check_token
from ramify.protocol.errors import ConfigError
from ramify.protocol.store_url import kind_of
from ramify.protocol.wire import MAX_NAMES, MOST_PRIORITY, Persist

MOST = 2**31 - 1  # of any number that nothing else bounds
DAY_S = 86_400.0
MOST_DRAFTS = 8  # tokens that are guessed for a row in a step


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _seconds(flag: str, value: float, low: float, high: float) -> None:
    """A time that is a number, and one that a clock can be asked for."""
    good = math.isfinite(value) and low <= value <= high
    _require(good, f"{flag} is {value:g}: must be {low:g} to {high:g} seconds")


def _count(flag: str, value: int | None, low: int, high: int = MOST) -> None:
    """A number, or None where that means "decide"."""
    if value is not None:
        _require(value >= low, f"{flag} is {value}: must be at least {low}")
        _require(value <= high, f"{flag} is {value}: must be at most {high}")


def _is_loopback(host: str) -> bool:
    """True for addresses that no other machine can reach. A name that only looks like one is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may ask for. Sent in `state.limits`; each is a server flag."""

    frame_bytes: int = 1 << 20
    frame_bytes_before_open: int = 8 << 10
    ops_per_frame: int = 512  # a tree of thought, five wide and three deep, takes about 300
    ops_in_flight: int = 1024
    ops_per_second: int = 200
    ops_burst: int = 1024  # less than `ops_per_frame`: frames of more are always refused
    bytes_per_second: int = 1 << 20  # received; beyond it the socket is read more slowly
    bytes_burst: int = 8 << 20
    branches: int = 1024
    running: int = 64  # generations of one session that are submitted at once; the rest queue
    n: int = 64
    priority: int = MOST_PRIORITY  # the highest; that of a token's name may be lower
    attachments: int = 8
    meta_bytes: int = 16 << 10  # of one `meta`, as JSON: it is kept and shown again
    queued_bytes: int = 256 << 10  # on a socket before its deltas are held back
    regex_bytes: int = 8 << 10
    schema_bytes: int = 64 << 10
    choices: int = 1024
    compile_ms: int = 10_000
    open_timeout_s: int = 5
    replies_kept: int = 1024  # of a client, to be sent again: a client has as many ops under way
    replies_bytes: int = 1 << 20  # of those
    # Memory of the host, by estimate. With gateway processes each has its share of a client's.
    session_bytes: int = 1 << 28
    queued_op_bytes: int = 1 << 24  # of a session's ops that wait or run
    session_meta_bytes: int = 1 << 18  # of a session's `meta` objects together, as JSON
    tree_bytes: int = 1 << 18  # of one answer to `tree`; the next one goes on
    client_sessions: int = 1024  # of one credential
    client_bytes: int = 1 << 30  # of one credential's sessions

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            low, high = (-MOST_PRIORITY, MOST_PRIORITY) if name == "priority" else (1, MOST)
            _count(f"--limit-{name.replace('_', '-')}", getattr(self, name), low, high)
        _require(
            self.n <= MAX_NAMES, f"--limit-n is {self.n}: one op names at most {MAX_NAMES} branches"
        )

    def wire(self) -> dict[str, int]:
        """As `state.limits` shows them."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to load and how to run it."""

    path: Path
    name: str | None = None  # served name; default: the folder's name
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on a CPU
    # weights as 8-bit integers; auto: on a CPU that has instructions for them, where the model allows it
    quantization: Literal["auto", "none", "int8"] = "auto"
    context: int | None = None  # default: the model's own
    page_size: int = 1
    kv_tokens: int | None = None  # default: sized from memory
    kv_fraction: float = 0.9  # of the GPU memory that weights, steps and graphs leave, for the KV cache
    max_rows: int | None = None  # requests that run at once; default: 512 on CUDA, 256 on a CPU
    step_tokens: int | None = None  # most tokens in one step; default: 8192 on CUDA, 2048 on a CPU
    # auto: torch on a CPU; on CUDA triton, with FlashInfer's FA3 for extends where it is at hand
    attention: Literal["auto", "flashinfer", "triton", "torch"] = "auto"
    deterministic: bool = False  # a request's logits never depend on batch, chunking or cache
    threads: int | None = None  # torch CPU threads
    load_format: Literal["auto", "dummy"] = "auto"
    # what guesses tokens that the model then checks: "none", "ngram", "model" (the bundled draft
    # model), or a checkpoint's folder; auto: none
    draft: str = "auto"
    draft_tokens: int = 4  # most of them for a row in a step
    jump_forward: bool = True  # run what a constraint says must follow in one step
    # what compiles regexes and choices; auto: our compiler, and a library where it cannot
    grammar_backend: GrammarBackend = "auto"
    # how the model writes tool calls; auto: as its chat template says
    tool_parser: Literal[
        "auto", "hermes", "qwen3-coder", "llama3", "mistral", "deepseek", "harmony", "any", "none"
    ] = "auto"

    def __post_init__(self) -> None:
        _count("--page-size", self.page_size, 1, 1 << 16)
        _count("--max-rows", self.max_rows, 1, 1 << 16)
        _count("--step-tokens", self.step_tokens, 16, 1 << 22)
        _count("--context", self.context, 2)
        _count("--threads", self.threads, 1, 4096)
        _require(0 < len(self.draft) <= 4096, "--draft is empty or longer than 4096 characters")
        _count("--draft-tokens", self.draft_tokens, 1, MOST_DRAFTS)
        _require(
            0 < self.kv_fraction < 1, f"--kv-fraction is {self.kv_fraction}: must be between 0 and 1"
        )
        if self.kv_tokens is not None:
            floor = 2 * self.page_size
            _count("--kv-tokens", self.kv_tokens, floor, 1 << 40)


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests share the machine."""

    in_flight: int = 2  # steps sent before the first one's result is seen
    itl_target_ms: float = 20.0  # how long a step with prompts beside decodes should last; 0: any
    mixed_tokens: int = 2048  # most prompt tokens in a step beside decodes
    ahead_tokens: int = 512  # most in a step that holds some nobody waits for yet
    lookahead: int = 16  # token slots granted ahead of a decoding request
    quantum_steps: int = 32  # that a request keeps its row before it may be retracted for fairness
    ageing: float = 1.0  # cached tokens that one token of waiting is worth
    max_waiting: int = 16384  # requests; without output half as many, the rest is for generations

    def __post_init__(self) -> None:
        _require(self.in_flight in (1, 2), f"--in-flight is {self.in_flight}: must be 1 or 2")
        for flag, tokens in (("mixed", self.mixed_tokens), ("ahead", self.ahead_tokens)):
            _count(f"--{flag}-tokens", tokens, 16, 1 << 22)
        _require(
            self.itl_target_ms == 0 or 1 <= self.itl_target_ms <= 60_000,  # refuses NaN too
            f"--itl-target-ms is {self.itl_target_ms}: must be 1 to 60000, or 0 for no target",
        )
        _count("--quantum-steps", self.quantum_steps, 1, 1 << 20)
        _count("--lookahead", self.lookahead, 1, 1 << 16)
        _require(0 <= self.ageing <= 1e6, f"--ageing is {self.ageing}: must be 0 to 1e6")
        _count("--max-waiting", self.max_waiting, 1, 1 << 24)


SESSIONS_BYTES_LEAST = 1 << 20
STORE_BYTES_LEAST = 1 << 20


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The socket side and the life of sessions."""

    host: str = "127.0.0.1"
    port: int = 8765
    tokens: tuple[str, ...] = ()  # bearer tokens "token-1", "token-2"; no token of any kind: no auth
    environment_token: str | None = None  # "environment": what RAMIFY_AUTH_TOKEN held
    token_file: Path | None = None  # one token, "file"; read again at SIGHUP, as is the next one
    credentials_file: Path | None = None  # JSON lines: see `protocol.credentials`
    shared_cache: bool = False  # one radix tree for all names, instead of one for each
    credential_limits: CredentialLimits = CredentialLimits()  # of a name that has none of its own
    metrics_auth: bool = False  # `/metrics` needs a token
    max_sockets: int = 10_000  # connections of all clients
    insecure: bool = False  # allow a non-loopback bind without tokens
    allowed_hosts: tuple[str, ...] = ()  # beside the bound address and localhost
    allowed_origins: tuple[str, ...] = ()  # beside pages served by this server
    proxies: tuple[str, ...] = ()  # addresses that stand for many clients, and limit them on their own
    deflate: bool = False
    ping_interval_s: float = 20.0
    ping_timeout_s: float = 60.0
    session_ttl_s: float = 600.0
    session_ttl_max_s: float = 86400.0  # what a client may ask for
    max_sessions: int = 16384
    sessions_bytes: int = 1 << 32  # of the host's memory, for all sessions
    grace_s: float = 10.0  # drain time at stop
    token_ttl_s: float = 60.0  # of minted single-use tokens
    store: str | None = None  # what keeps sessions, a file or a URL; None: they end with the process
    store_key_file: Path | None = None  # what it is encrypted with; None: it is not
    store_days: float = 30.0  # that it keeps a session after its last use
    store_bytes: int = 1 << 33  # of all sessions in it; beyond them the oldest go
    persist: Persist = "lazy"  # how sessions are saved that do not say
    warm_start: int | None = None  # tokens of saved sessions to compute after the start; None: what fits

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, f"--port is {self.port}: must be 0 to 65535")
        _count("--max-sockets", self.max_sockets, 1, 1 << 20)
        for token in self.tokens:
            check_token(token, "--auth-token")
        if self.environment_token is not None:
            check_token(self.environment_token, "RAMIFY_AUTH_TOKEN")
        for flag, names in (("host", self.allowed_hosts), ("origin", self.allowed_origins)):
            _require(all(names), f"--allowed-{flag} is empty: is a variable not set?")
        for address in self.proxies:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise ConfigError(f"--proxy is {address!r}: must be an IP address") from None
        _seconds("--ping-interval", self.ping_interval_s, 0.1, DAY_S)
        _seconds("--ping-timeout", self.ping_timeout_s, 0.1, DAY_S)
        _seconds("--session-ttl", self.session_ttl_s, 0, 30 * DAY_S)
        _seconds("--grace", self.grace_s, 0, DAY_S)
        _seconds("--token-ttl", self.token_ttl_s, 1, DAY_S)
        _require(
            self.guarded or not self.metrics_auth,
            "--metrics-auth needs tokens: give --auth-tokens, --auth-token-file or --auth-token",
        )
        _require(
            _is_loopback(self.host) or self.guarded or self.insecure,
            f"--host {self.host} is reachable from other machines: give --auth-token, --auth-token-file "
            "or --auth-tokens, or --insecure to serve anybody",
        )
        _seconds("--session-ttl-max", self.session_ttl_max_s, self.session_ttl_s, 365 * DAY_S)
        if self.store is not None:
            kind_of(self.store)
        _require(
            self.store is not None or self.store_key_file is None,
            "--store-key-file needs a store: give --store",
        )
        days = self.store_days
        _require(0 < days <= 36_500, f"--store-days is {days:g}: must be over 0, up to 36500")
        _count("--warm-start", self.warm_start, 0, 1 << 40)
        _count("--store-bytes", self.store_bytes, STORE_BYTES_LEAST, 1 << 50)
        _count("--max-sessions", self.max_sessions, 1, 1 << 26)
        _count("--sessions-bytes", self.sessions_bytes, SESSIONS_BYTES_LEAST, 1 << 50)

    @property
    def guarded(self) -> bool:
        """True if clients need a token."""
        files = self.token_file is not None or self.credentials_file is not None
        return bool(self.tokens) or self.environment_token is not None or files


MOST_REPLICAS = 1024  # of a front


class ReplicasConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Several cores behind one front: where they run, and how those on other machines join."""

    count: int  # that are kept running; with "join" none is started: they come by themselves
    most: int | None = None  # more are started when first tokens are late; None: never
    ttft_s: float = 1.0  # then this is late
    on: Literal["processes", "ray", "join"] = "processes"
    listen: str = "127.0.0.1"  # where replicas of other processes and machines join
    listen_port: int = 0  # 0: any
    advertise: str | None = None  # the host that they are told; default: `listen`
    secret_file: Path | None = None  # what a replica must know to join; with Ray one is made up
    tls_cert: Path | None = None  # of the front, PEM; with the next one links are encrypted
    tls_key: Path | None = None
    ray_address: str | None = None  # of a cluster; None: one on this machine
    gpus: float | None = None  # of each replica, for Ray; None: 1 where the model runs on CUDA
    cpus: float = 1.0  # of each replica, for Ray
    silence_s: float = 3.0  # a replica that says nothing for so long has hung: its sessions move
    drain_s: float = 30.0  # that a replica which leaves lets generations run

    def __post_init__(self) -> None:
        least = 0 if self.on == "join" else 1
        _count("--replicas", self.count, least, MOST_REPLICAS)
        _count("--replicas-max", self.most, max(1, self.count), MOST_REPLICAS)
        _require(
            self.most is None or self.on != "join",
            "--replicas-max does not go with --replicas-on join: nobody here can start one",
        )
        _seconds("--replica-ttft", self.ttft_s, 0.001, DAY_S)
        _require(
            0 <= self.listen_port <= 65535,
            f"--replica-listen has port {self.listen_port}: must be at most 65535",
        )
        _require(
            (self.tls_cert is None) == (self.tls_key is None),
            "--replica-tls-cert and --replica-tls-key go together",
        )
        _require(
            self.on != "join" or self.secret_file is not None,
            "--replicas-on join needs --replica-secret-file: what replicas must know to join",
        )
        _require(self.gpus is None or 0 <= self.gpus <= 64, f"--replica-gpus is {self.gpus}: at most 64")
        _require(
            self.ray_address in (None, "local", "auto") or not _is_loopback(self.listen),
            f"--replica-listen {self.listen} cannot be reached from other machines of a Ray cluster: "
            "give an address of this one",
        )
        _require(0 <= self.cpus <= 4096, f"--replica-cpus is {self.cpus:g}: at most 4096")
        _seconds("--replica-silence", self.silence_s, 0.5, DAY_S)
        _seconds("--replica-drain", self.drain_s, 0, DAY_S)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a server needs."""

    model: ModelConfig
    server: ServerConfig = ServerConfig()
    limits: Limits = Limits()
    schedule: ScheduleConfig = ScheduleConfig()
    executor: Literal["auto", "thread", "process"] = "auto"  # auto: thread on a CPU, else process
    replicas: ReplicasConfig | None = None  # None: one core, in the engine's process
    gateways: int | None = None  # processes for sockets and sessions; 0: none; None: placement decides
    step_timeout_s: float | None = None  # a step that takes longer has hung; None: see `actors.watchdog`

    def __post_init__(self) -> None:
        if self.step_timeout_s is not None:
            _seconds("--step-timeout", self.step_timeout_s, 1, DAY_S)
        if self.gateways is not None:
            _require(0 <= self.gateways <= 64, f"--gateways is {self.gateways}: must be 0 to 64")
