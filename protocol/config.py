"""The configuration of a server, validated once: actors receive it whole.

`settings` says how a setting is declared, `ramify.clients.commands.settings` makes these from flags.
Constructors raise `ConfigError` naming the flag; nothing re-validates later.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ramify.protocol.constraints import GrammarBackend
from ramify.protocol.errors import ConfigError
from ramify.protocol.limits import Limits
from ramify.protocol.replicas_config import MOST_REPLICAS, ReplicasConfig
from ramify.protocol.server_config import SESSIONS_BYTES_LEAST, ServerConfig
from ramify.protocol.settings import DAY_S, Setting, Settings

__all__ = [
    "DAY_S",
    "MOST_REPLICAS",
    "SESSIONS_BYTES_LEAST",
    "EngineConfig",
    "Limits",
    "LogConfig",
    "ModelConfig",
    "ReplicasConfig",
    "ScheduleConfig",
    "ServerConfig",
]

MOST_DRAFTS = 8  # tokens that are guessed for a row in a step: a power of two, for a kernel


class ModelConfig(Settings, frozen=True, kw_only=True):
    """The model to load, and how to run it."""

    GROUP: ClassVar[str] = "model"

    path: Annotated[
        Path,
        Setting(
            "model folder, GGUF file, or a model of the Hugging Face hub (with :TYPE its GGUF file of "
            "that type); that is downloaded if it is not in the local cache",
            flag="--model",
            unit="DIR|FILE.gguf|OWNER/NAME[:TYPE]",
            default="the bundled one",
            first=True,
        ),
    ]
    name: Annotated[
        str | None, Setting("name that clients see", unit="NAME", default="the folder's, or the hub's")
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Setting("auto: CUDA where torch sees it", first=True)
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Setting("auto: float32 on a CPU, else the checkpoint's"),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "fp8"],
        Setting(
            "type of the KV cache; fp8: 8-bit floats with a scale for each token and head, twice as "
            "many tokens in the same memory; auto: as --dtype"
        ),
    ] = "auto"
    context: Annotated[
        int | None, Setting("context length, in tokens", low=2, default="the model's", first=True)
    ] = None
    page_size: Annotated[int, Setting("tokens in a KV page", low=1, high=1 << 16)] = 1
    kv_tokens: Annotated[
        int | None,
        Setting(
            "size of the KV cache in tokens, two pages at least",
            low=2,
            high=1 << 40,
            default="what memory holds",
            first=True,
        ),
    ] = None
    kv_fraction: Annotated[
        float,
        Setting(
            "share of the GPU memory that weights, steps and CUDA graphs leave, for the KV cache",
            over=0,
            under=1,
        ),
    ] = 0.9
    kv_host: Annotated[
        int,
        Setting(
            "host memory for KV that has to leave the KV cache (8G: 8 GiB), which is loaded again where "
            "that is quicker than computing it; auto: half of what is free, divided by the replicas "
            "and ranks that share it; 0: none",
            low=0,
            high=1 << 50,
            unit="bytes",
            words={"auto": -1},
            default="0",
            besides={-1: "auto"},
        ),
    ] = 0
    beside: int = 1  # replicas that share the machine's memory, this one among them
    kv_disk: Annotated[
        Path | None,
        Setting(
            "folder for KV behind --kv-host, which a restart finds again; who reads it can find out "
            "what was said",
            unit="DIR",
            default="none",
        ),
    ] = None
    kv_disk_bytes: Annotated[
        int,
        Setting(
            "most bytes in --kv-disk, of each replica (64G: 64 GiB)", low=1, high=1 << 50, unit="bytes"
        ),
    ] = 16 << 30
    kv_canary: Annotated[
        float,
        Setting(
            "share of the prompts that would be loaded from --kv-host which are computed, and compared "
            "with what would have been loaded; 0: none",
            low=0,
            high=1,
        ),
    ] = 0.0
    state_slots: Annotated[
        int | None,
        Setting(
            "states of sequences to keep, of models with recurrent layers: three of each request that "
            "runs, others are snapshots",
            low=4,
            high=1 << 24,
            default="what half of the KV cache's memory holds, at most 8 for each of --max-rows",
        ),
    ] = None
    window_tokens: Annotated[
        int | None,
        Setting(
            "tokens in the KV cache of layers with a sliding window, which keep the last tokens of each "
            "sequence alone; 0: they keep all, as layers without one",
            low=0,
            high=1 << 31,
            default="half of what all layers would hold, at most 4 windows for each of --max-rows",
        ),
    ] = None
    max_rows: Annotated[
        int | None,
        Setting("most requests in a step", low=1, high=1 << 16, default="512 on CUDA, else 256"),
    ] = None
    step_tokens: Annotated[
        int | None,
        Setting("most tokens in a step", low=16, high=1 << 22, default="8192 on CUDA, else 2048"),
    ] = None
    deterministic: Annotated[
        bool, Setting("same bits alone or batched, cold or cached; slower, CUDA only")
    ] = False
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4", "mxfp4", "fp8"],
        Setting(
            "weights as integers of 8 bits (int8, on a CPU) or 4 (int4), as floats of 8 or 4 bits (fp8 "
            "and mxfp4, for a GPU), or unrounded (none, exact float32 on a CPU); auto: on a GPU as the "
            "checkpoint has them, on a CPU int8, or a checkpoint's integers, if it has the instructions",
            first=True,
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Setting("CPU threads (of each rank)", low=1, high=4096, default="as many as cores"),
    ] = None
    tensor_parallel: Annotated[
        int,
        Setting(
            "processes that hold the model together, each a part of every layer: ranks", low=1, high=64
        ),
    ] = 1
    expert_parallel: Annotated[
        bool,
        Setting("with --tensor-parallel each rank holds some experts whole, instead of a part of each"),
    ] = False
    draft: Annotated[
        str,
        Setting(
            "guess tokens and let the model check them, output stays the same: ngram (what the text "
            "repeats), model (the bundled draft model), the folder of a smaller model with the same "
            "tokenizer, mtp (the checkpoint's own layer, beside floats), or none; auto: none",
            unit="HOW",
        ),
    ] = "auto"
    draft_tokens: Annotated[
        int, Setting("most guesses of a request in a step", low=1, high=MOST_DRAFTS)
    ] = 4
    jump_forward: Annotated[
        bool,
        Setting(
            "sample one by one what a constraint leaves no choice for (the output is the same)",
            flag="--no-jump-forward",
        ),
    ] = True
    grammar_backend: Annotated[
        GrammarBackend,
        Setting(
            "what compiles `regex` and `choices` of clients; outlines: outlines-core alone, what it "
            "cannot compile is refused; auto: our compiler, then outlines-core or llguidance"
        ),
    ] = "auto"
    # torch on a CPU; on CUDA triton, with FlashInfer's FA3 for extends where it is at hand
    attention: Annotated[
        Literal["auto", "flashinfer", "triton", "torch"],
        Setting("kernels; auto: the fastest of those that serve the model here (the log says which)"),
    ] = "auto"
    tool_parser: Annotated[
        Literal[
            "auto",
            "hermes",
            "qwen3-coder",
            "llama3",
            "mistral",
            "granite",
            "deepseek",
            "harmony",
            "lfm2",
            "gemma4",
            "glm45",
            "glm47",
            "kimi_k2",
            "minimax",
            "nemotron",
            "any",
            "none",
        ],
        Setting("how the model writes tool calls; auto: as its chat template says"),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], Setting("dummy: random weights, to measure with")
    ] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < len(self.draft) <= 4096:
            raise ConfigError("--draft is empty or longer than 4096 characters")
        if self.kv_tokens is not None and self.kv_tokens < 2 * self.page_size:
            raise ConfigError(
                f"--kv-tokens is {self.kv_tokens}: must be at least {2 * self.page_size}, two pages of "
                "--page-size"
            )
        if self.kv_disk is not None and not self.kv_host:
            raise ConfigError("--kv-disk lies behind host memory: give --kv-host too (8G, or auto)")
        if self.kv_canary and not self.kv_host:
            raise ConfigError("--kv-canary checks KV in host memory: give --kv-host too (8G, or auto)")
        if self.kv_canary and self.tensor_parallel > 1:
            raise ConfigError(
                "--kv-canary compares KV of one process: leave it or --tensor-parallel out"
            )
        if self.kv_canary and self.kv_dtype == "fp8":
            raise ConfigError(
                "--kv-canary: rounding to 8-bit floats hides what it looks for; leave it or --kv-dtype "
                "out"
            )
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "--expert-parallel divides experts among ranks: give --tensor-parallel too"
            )


class ScheduleConfig(Settings, frozen=True, kw_only=True):
    """How requests share steps and the KV pool."""

    GROUP: ClassVar[str] = "scheduling"

    in_flight: Annotated[
        int, Setting("steps sent before the first one's result is seen", low=1, high=2)
    ] = 2
    itl_target_ms: Annotated[
        float,
        Setting(
            "how long a step that computes prompts beside decodes should last; higher: longer, fewer "
            "pauses between tokens; lower: shorter ones, and later first tokens where many prompts "
            "wait; 0: as long as --mixed-tokens takes",
            low=1,
            high=60_000,
            besides={0: "no target"},
            unit="ms",
        ),
    ] = 20.0
    mixed_tokens: Annotated[
        int,
        Setting(
            "most prompt tokens in a step beside decodes, whatever --itl-target-ms allows",
            low=16,
            high=1 << 22,
        ),
    ] = 2048
    ahead_tokens: Annotated[
        int,
        Setting(
            "most prompt tokens in a step that computes input ahead of its generation",
            low=16,
            high=1 << 22,
        ),
    ] = 512
    quantum_steps: Annotated[
        int,
        Setting(
            "steps that a generation keeps its row before it may be retracted for one of a client that "
            "has fewer",
            low=1,
            high=1 << 20,
        ),
    ] = 32
    lookahead: Annotated[
        int, Setting("tokens for which a generation gets memory ahead", low=1, high=1 << 16)
    ] = 16
    ageing: Annotated[
        float,
        Setting(
            "of one session's requests the one with most cached tokens goes first; so many are added "
            "for each token that the server computes while a request waits",
            low=0,
            high=1e6,
        ),
    ] = 1.0
    retain_share: Annotated[
        int,
        Setting(
            "of the KV pool that one credential may retain (`retain_s`, `cache_control`, ...); what is "
            "beyond is not retained",
            low=0,
            high=100,
            unit="percent",
        ),
    ] = 50
    retain_leases: Annotated[
        int,
        Setting("prefixes and branches that one credential may retain", low=0, high=1 << 20),
    ] = 4096
    # without output half as many, the rest is for generations
    max_waiting: Annotated[
        int,
        Setting(
            "requests that may wait; more are answered `overloaded`, those of clients with many sooner",
            low=1,
            high=1 << 24,
        ),
    ] = 16384


class LogConfig(Settings, frozen=True, kw_only=True):
    """The level and form of the log."""

    GROUP: ClassVar[str] = "log"
    PREFIX: ClassVar[str] = "log-"

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Setting("the least that is shown")
    ] = "info"
    format: Annotated[Literal["human", "json"], Setting("json: an object a line")] = "human"


class EngineConfig(Settings, frozen=True, kw_only=True):
    """Everything a server needs."""

    GROUP: ClassVar[str] = "server"

    model: ModelConfig
    server: ServerConfig = ServerConfig()
    limits: Limits = Limits()
    schedule: ScheduleConfig = ScheduleConfig()
    replicas: ReplicasConfig | None = None  # None: one core, in the engine's process
    executor: Annotated[
        Literal["auto", "thread", "process"],
        Setting(
            "where the model runs; auto: process. A step that hangs in a thread ends the server",
            group="model",
        ),
    ] = "auto"
    gateways: Annotated[
        int | None,
        Setting(
            "processes for sockets and sessions",
            low=0,
            high=64,
            default="0, in the engine's own; on CUDA up to 4",
        ),
    ] = None
    step_timeout_s: Annotated[
        float | None,
        Setting(
            "without a step's result after which the executor has hung and is replaced; /readyz tells "
            "of it after 4",
            low=1,
            high=DAY_S,
            unit="seconds",
            default="60, on a CPU 600",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicas is not None and self.replicas.roles is not None:
            if not self.model.kv_host:
                raise ConfigError(
                    "--roles moves KV by way of host memory: give --kv-host (64G, or auto)"
                )
            if self.model.tensor_parallel > 1:
                raise ConfigError("--roles moves the KV of one process: leave out --tensor-parallel")
        if self.replicas is not None and self.model.tensor_parallel > 1:
            given = self.replicas.gpus
            if given and given != self.model.tensor_parallel:
                raise ConfigError(
                    f"--replica-gpus {given:g}: each of {self.model.tensor_parallel} ranks has a GPU; "
                    f"give {self.model.tensor_parallel}, or leave it out"
                )
