"""Settings, validated once. `ramify.clients.cli` turns flags into these; actors receive them whole.

Constructors raise `ConfigError` naming the field; nothing re-validates later.
"""

import ipaddress
from pathlib import Path
from typing import Literal

import msgspec

from ramify.protocol.errors import ConfigError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


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
    ops_per_frame: int = 256
    ops_in_flight: int = 1024
    ops_per_second: int = 200
    ops_burst: int = 500
    branches: int = 1024
    running: int = 64  # generations of one session that are submitted at once; the rest queue
    n: int = 64
    attachments: int = 8
    queued_bytes: int = 256 << 10  # on a socket before its deltas are held back
    regex_bytes: int = 8 << 10
    schema_bytes: int = 64 << 10
    choices: int = 1024
    compile_ms: int = 10_000
    open_timeout_s: int = 5
    replies_kept: int = 256

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _require(getattr(self, name) > 0, f"--limit-{name.replace('_', '-')} must be positive")

    def wire(self) -> dict[str, int]:
        """As `state.limits` shows them."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to load and how to run it."""

    path: Path
    name: str | None = None  # served name; default: the folder's name
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on a CPU
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

    def __post_init__(self) -> None:
        _require(self.page_size >= 1, f"--page-size is {self.page_size}: must be at least 1")
        rows = self.max_rows
        _require(rows is None or rows >= 1, f"--max-rows is {rows}: must be at least 1")
        most = self.step_tokens
        _require(most is None or most >= 16, f"--step-tokens is {most}: must be at least 16")
        _require(self.context is None or self.context >= 2, f"--context is {self.context}: at least 2")
        _require(
            0 < self.kv_fraction < 1, f"--kv-fraction is {self.kv_fraction}: must be between 0 and 1"
        )
        if self.kv_tokens is not None:
            floor = 2 * self.page_size
            _require(self.kv_tokens >= floor, f"--kv-tokens is {self.kv_tokens}: at least {floor}")


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
            _require(tokens >= 16, f"--{flag}-tokens is {tokens}: must be at least 16")
        _require(
            self.itl_target_ms == 0 or 1 <= self.itl_target_ms <= 60_000,  # refuses NaN too
            f"--itl-target-ms is {self.itl_target_ms}: must be 1 to 60000, or 0 for no target",
        )
        quantum = self.quantum_steps
        _require(1 <= quantum <= 1 << 20, f"--quantum-steps is {quantum}: must be 1 to {1 << 20}")
        _require(self.lookahead >= 1, f"--lookahead is {self.lookahead}: must be at least 1")
        _require(self.ageing >= 0, f"--ageing is {self.ageing}: must not be negative")
        _require(self.max_waiting >= 1, f"--max-waiting is {self.max_waiting}: must be at least 1")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The socket side and the life of sessions."""

    host: str = "127.0.0.1"
    port: int = 8765
    tokens: tuple[str, ...] = ()  # bearer tokens; none: no auth
    insecure: bool = False  # allow a non-loopback bind without tokens
    allowed_hosts: tuple[str, ...] = ()  # beside the bound address and localhost
    allowed_origins: tuple[str, ...] = ()  # beside pages served by this server
    deflate: bool = False
    ping_interval_s: float = 20.0
    ping_timeout_s: float = 60.0
    session_ttl_s: float = 600.0
    grace_s: float = 10.0  # drain time at stop
    token_ttl_s: float = 60.0  # of minted single-use tokens

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, f"--port is {self.port}: must be 0 to 65535")
        _require(
            _is_loopback(self.host) or bool(self.tokens) or self.insecure,
            f"--host {self.host} is reachable from other machines: give --auth-token, or --insecure "
            "to serve anybody",
        )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a server needs."""

    model: ModelConfig
    server: ServerConfig = ServerConfig()
    limits: Limits = Limits()
    schedule: ScheduleConfig = ScheduleConfig()
    executor: Literal["auto", "thread", "process"] = "auto"  # auto: thread on a CPU, else process
    gateways: int | None = None  # processes for sockets and sessions; 0: none; None: placement decides

    def __post_init__(self) -> None:
        if self.gateways is not None:
            _require(0 <= self.gateways <= 64, f"--gateways is {self.gateways}: must be 0 to 64")
