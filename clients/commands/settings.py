"""Flags of a server, and the `EngineConfig` that they make. Knows the settings, not the engine."""

import argparse
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from ramify.clients.commands.checkpoints import find_model
from ramify.clients.commands.replica_flags import add_replica_flags, replicas_config
from ramify.protocol.config import EngineConfig, Limits, ModelConfig, ScheduleConfig, ServerConfig
from ramify.protocol.credentials import CredentialLimits
from ramify.protocol.errors import ConfigError

TOKEN_VARIABLE = "RAMIFY_AUTH_TOKEN"
STORE_VARIABLE = "RAMIFY_STORE"  # `ps` shows no password that is in it
LIMIT_TEXTS = {
    "frame_bytes": "of a WebSocket message",
    "frame_bytes_before_open": "of the first one, before a token was shown",
    "ops_per_frame": "messages in a frame",
    "ops_in_flight": "ops without a reply, of a session",
    "ops_per_second": "messages a second, of a socket",
    "ops_burst": "messages at once, of a socket",
    "bytes_per_second": "received of a socket; beyond it the socket is read more slowly",
    "bytes_burst": "received at once",
    "branches": "of a session",
    "running": "generations of a session that run at once; the rest wait",
    "n": "generations of one op by `n`",
    "priority": "the highest of a generation; --credential-priority for names",
    "attachments": "sockets of a session, and as many viewers",
    "meta_bytes": "of one `meta`, as JSON",
    "queued_bytes": "that wait for a socket before its deltas are held back",
    "regex_bytes": "of a constraint",
    "schema_bytes": "of a constraint",
    "choices": "of a constraint",
    "compile_ms": "for a constraint",
    "open_timeout_s": "seconds until `open` must have come",
    "replies_kept": "of a client, to be sent again",
    "replies_bytes": "of those",
    "session_bytes": "host memory that a session may hold",
    "queued_op_bytes": "of a session's ops that wait or run",
    "session_meta_bytes": "of all `meta` of a session, as JSON",
    "tree_bytes": "of one answer to `tree`, about; the next one goes on",
    "client_sessions": "sessions of one token's name",
    "client_bytes": "host memory that those may hold",
}
DEFAULT_MODEL_NOTE = "a small demonstration model; give --model DIR to serve a checkpoint of your own"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What to load and how to run it."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="DIR|OWNER/NAME",
        help="model folder, or a model of the Hugging Face hub, which is downloaded if it is not in the "
        "local cache (default: the bundled one)",
    )
    group.add_argument("--name", help="name that clients see (default: the folder's, or the hub's)")
    group.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: CUDA where torch sees it",
    )
    group.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto: float32 on a CPU, else the checkpoint's",
    )
    group.add_argument("--context", type=int, metavar="N", help="context length (default: the model's)")
    group.add_argument("--page-size", type=int, default=1, metavar="N", help="tokens in a KV page")
    group.add_argument("--kv-tokens", type=int, metavar="N", help="size of the KV cache in tokens")
    group.add_argument(
        "--kv-fraction",
        type=float,
        default=0.9,
        metavar="X",
        help="share of the GPU memory that weights, steps and CUDA graphs leave, for the KV cache "
        "(default 0.9)",
    )
    group.add_argument(
        "--max-rows",
        type=int,
        metavar="N",
        help="most requests in a step (default: 512 on CUDA, else 256)",
    )
    group.add_argument(
        "--step-tokens",
        type=int,
        metavar="N",
        help="most tokens in a step (default: 8192 on CUDA, else 2048)",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="same bits alone or batched, cold or cached; slower, CUDA only",
    )
    group.add_argument(
        "--quantization",
        choices=["auto", "none", "int8"],
        default="auto",
        help="int8: weights as 8-bit integers, on a CPU; none: exact float32 there (auto: int8 on a CPU "
        "with instructions for it; the log says which)",
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    group.add_argument(
        "--draft",
        default="auto",
        metavar="HOW",
        help="guess tokens and let the model check them, output stays the same: ngram (what the text "
        "repeats), model (the bundled draft model), the folder of a smaller model with the same "
        "tokenizer, or none (auto: none)",
    )
    group.add_argument(
        "--draft-tokens",
        type=int,
        default=4,
        metavar="N",
        help="most guesses of a request in a step, 1 to 8 (default 4)",
    )
    group.add_argument(
        "--no-jump-forward",
        action="store_true",
        help="sample one by one what a constraint leaves no choice for (the output is the same)",
    )
    group.add_argument(
        "--grammar-backend",
        choices=["auto", "outlines"],
        default="auto",
        help="what compiles `regex` and `choices` of clients; outlines: outlines-core alone, what "
        "it cannot compile is refused (auto: our compiler, then outlines-core or llguidance)",
    )
    group.add_argument(
        "--attention",
        choices=["auto", "flashinfer", "triton", "torch"],
        default="auto",
        help="kernels (auto: the fastest of those that serve the model here; the log says which)",
    )
    group.add_argument(
        "--tool-parser",
        choices=[
            "auto",
            "hermes",
            "qwen3-coder",
            "llama3",
            "mistral",
            "deepseek",
            "harmony",
            "any",
            "none",
        ],
        default="auto",
        help="how the model writes tool calls (auto: as its chat template says)",
    )
    group.add_argument(
        "--load-format",
        choices=["auto", "dummy"],
        default="auto",
        help="dummy: random weights, to measure with",
    )
    group.add_argument(
        "--executor",
        choices=["auto", "thread", "process"],
        default="auto",
        help="where the model runs (auto: on CUDA in a process of its own)",
    )


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The socket, the life of sessions, scheduling, and every limit."""
    group = parser.add_argument_group("server")
    known_server = ServerConfig()
    group.add_argument("--host", default="127.0.0.1", help="address to bind (default 127.0.0.1)")
    group.add_argument(
        "--port", type=int, default=8765, metavar="N", help="0: any free port (default 8765)"
    )
    group.add_argument(
        "--auth-token",
        action="append",
        default=[],
        metavar="TOKEN",
        help="a token that clients need; shows in `ps`; may be repeated",
    )
    group.add_argument(
        "--auth-token-file",
        type=Path,
        metavar="FILE",
        help=f"a file that holds one token; or set the variable {TOKEN_VARIABLE}",
    )
    group.add_argument(
        "--auth-tokens",
        type=Path,
        metavar="FILE",
        help='a token a line, as JSON: {"name", "sha256" or "token", "namespace"?, "limits"?}; '
        "files are read again at SIGHUP",
    )
    group.add_argument(
        "--shared-cache",
        action="store_true",
        help="all tokens share what is cached (else each name has a cache of its own: a shared one "
        "tells a client which prefixes others have used)",
    )
    group.add_argument("--metrics-auth", action="store_true", help="/metrics needs a token")
    for name, value in msgspec.structs.asdict(CredentialLimits()).items():
        group.add_argument(
            f"--credential-{name.replace('_', '-')}",
            type=int,
            default=value,
            metavar="N",
            help="the highest `priority` of its generations (default 0): a higher one goes before all "
            "other names'"
            if name == "priority"
            else f"most {name.replace('_', ' ')} of one token's name, all its sockets together "
            f"(default {value})",
        )
    group.add_argument(
        "--max-sockets",
        type=int,
        default=known_server.max_sockets,
        metavar="N",
        help=f"most WebSockets of all clients together (default {known_server.max_sockets})",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        metavar="S",
        help="seconds without a step's result after which the executor has hung and is replaced "
        "(default: 60, on a CPU 600); /readyz tells of it after 4",
    )
    group.add_argument("--insecure", action="store_true", help="serve other machines without a token")
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="HOST",
        help="another name that requests may use for this server; may be repeated; *: any",
    )
    group.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="another site whose pages may connect; may be repeated; *: any",
    )
    group.add_argument(
        "--proxy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="the IP address of a reverse proxy: what clients without a token may cost is limited by "
        "address, and this one stands for many; may be repeated",
    )
    group.add_argument(
        "--gateways",
        type=int,
        metavar="N",
        help="processes for sockets and sessions (default: 0, in the engine's own; on CUDA up to 4)",
    )
    group.add_argument(
        "--store",
        default="auto",
        metavar="PLACE",
        help="where sessions are saved, so that they outlive the server: a file, or postgresql://... or "
        "redis://..., which several servers may share; none: nowhere; auto: what the variable "
        f"{STORE_VARIABLE} says, else ramify/sessions-PORT.db in $XDG_STATE_HOME or ~/.local/state, "
        "none if the port is 0",
    )
    group.add_argument(
        "--store-key-file",
        type=Path,
        metavar="FILE",
        help="encrypt what is saved: a key of 32 bytes in base64 on each line (`openssl rand -base64 "
        "32`); the first one encrypts, all decrypt",
    )
    group.add_argument(
        "--persist",
        choices=["none", "lazy", "sync"],
        default=known_server.persist,
        help="how, where a client does not say; none: not at all; lazy: soon; sync: before a reply says "
        f"that it is done (default {known_server.persist})",
    )
    group.add_argument(
        "--store-days",
        type=float,
        default=known_server.store_days,
        metavar="DAYS",
        help=f"how long after its last use a session is kept (default {known_server.store_days:g})",
    )
    group.add_argument(
        "--store-bytes",
        type=int,
        default=known_server.store_bytes,
        metavar="N",
        help="most bytes of sessions there; beyond them the longest unused go "
        f"(default {known_server.store_bytes})",
    )
    group.add_argument(
        "--warm-start",
        type=warm_start,
        default="auto",
        metavar="N",
        help="tokens of saved sessions to compute after the start, the last used first, while there is "
        "nothing else to do, so that who comes back does not wait; none; auto: what free pages hold",
    )
    group.add_argument("--deflate", action="store_true", help="compress frames (costs CPU)")
    for flag, default, text in (
        ("--ping-interval", 20.0, "between WebSocket pings"),
        ("--ping-timeout", 60.0, "for a pong"),
        ("--session-ttl", 600.0, "that a session without clients is kept"),
        ("--session-ttl-max", 86400.0, "that a client may ask for instead"),
        ("--grace", 10.0, "for running generations at stop"),
        ("--token-ttl", 60.0, "that a minted single-use token is valid"),
    ):
        group.add_argument(
            flag, type=float, default=default, metavar="S", help=f"seconds {text} (default {default:g})"
        )
    for flag, most, text in (
        ("--max-sessions", known_server.max_sessions, "most sessions at a time"),
        ("--sessions-bytes", known_server.sessions_bytes, "host memory that all sessions may hold"),
    ):
        group.add_argument(flag, type=int, default=most, metavar="N", help=f"{text} (default {most})")
    add_replica_flags(parser)
    schedule = parser.add_argument_group("scheduling")
    known = ScheduleConfig()
    schedule.add_argument(
        "--in-flight",
        type=int,
        default=known.in_flight,
        metavar="N",
        help=f"steps sent before the first one's result is seen, 1 or 2 (default {known.in_flight})",
    )
    schedule.add_argument(
        "--itl-target-ms",
        type=float,
        default=known.itl_target_ms,
        metavar="MS",
        help="how long a step that computes prompts beside decodes should last; higher: longer, fewer "
        "pauses between tokens; lower: shorter ones, and later first tokens where many prompts wait; "
        f"0: as long as --mixed-tokens takes (default {known.itl_target_ms:g})",
    )
    schedule.add_argument(
        "--mixed-tokens",
        type=int,
        default=known.mixed_tokens,
        metavar="N",
        help="most prompt tokens in a step beside decodes, whatever --itl-target-ms allows "
        f"(default {known.mixed_tokens})",
    )
    schedule.add_argument(
        "--ahead-tokens",
        type=int,
        default=known.ahead_tokens,
        metavar="N",
        help="most prompt tokens in a step that computes input ahead of its generation "
        f"(default {known.ahead_tokens})",
    )
    schedule.add_argument(
        "--quantum-steps",
        type=int,
        default=known.quantum_steps,
        metavar="N",
        help="steps that a generation keeps its row before it may be retracted for one of a client that "
        f"has fewer (default {known.quantum_steps})",
    )
    schedule.add_argument(
        "--lookahead",
        type=int,
        default=known.lookahead,
        metavar="N",
        help=f"tokens for which a generation gets memory ahead (default {known.lookahead})",
    )
    schedule.add_argument(
        "--ageing",
        type=float,
        default=known.ageing,
        metavar="X",
        help="cached tokens that one token of waiting is worth, among requests of one session "
        f"(default {known.ageing:g})",
    )
    schedule.add_argument(
        "--max-waiting",
        type=int,
        default=known.max_waiting,
        metavar="N",
        help="requests that may wait; more are answered `overloaded`, those of clients with many "
        f"sooner (default {known.max_waiting})",
    )
    limits = parser.add_argument_group("limits")
    for name, value in Limits().wire().items():
        flag = f"--limit-{name.replace('_', '-')}"
        text = f"{LIMIT_TEXTS[name]} (default {value})"
        limits.add_argument(flag, type=int, default=value, metavar="N", help=text)


def model_config(args: argparse.Namespace) -> ModelConfig:
    """Raises ConfigError that names the flag."""
    path, name = find_model(args.model) if args.model is not None else (bundled_model(), None)
    return ModelConfig(
        path=path,
        name=args.name or name,
        device=args.device,
        dtype=args.dtype,
        context=args.context,
        page_size=args.page_size,
        kv_tokens=args.kv_tokens,
        kv_fraction=args.kv_fraction,
        max_rows=args.max_rows,
        step_tokens=args.step_tokens,
        tool_parser=args.tool_parser,
        attention=args.attention,
        quantization=args.quantization,
        deterministic=args.deterministic,
        threads=args.threads,
        load_format=args.load_format,
        draft=args.draft,
        draft_tokens=args.draft_tokens,
        jump_forward=not args.no_jump_forward,
        grammar_backend=args.grammar_backend,
    )


def warm_start(text: str) -> int | None:
    """For argparse: of `--warm-start`."""
    if text in ("auto", "none"):
        return None if text == "auto" else 0
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be auto, none or tokens") from None


def store_place(store: str, port: int) -> str | None:
    """The file or the URL that `--store` names; None: no store."""
    if store == "auto":
        store = os.environ.get(STORE_VARIABLE) or "auto"
    if store == "none" or (store == "auto" and port == 0):
        return None
    if store != "auto":
        return store
    state = os.environ.get("XDG_STATE_HOME")
    folder = Path(state) if state else Path.home() / ".local" / "state"
    return str(folder / "ramify" / f"sessions-{port}.db")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that `ramify serve`'s flags make. Raises ConfigError that names the flag."""
    given: dict[str, Any] = vars(args)
    return EngineConfig(
        model=model_config(args),
        server=ServerConfig(
            host=args.host,
            port=args.port,
            tokens=tuple(args.auth_token),
            environment_token=os.environ.get(TOKEN_VARIABLE),
            token_file=args.auth_token_file,
            credentials_file=args.auth_tokens,
            shared_cache=args.shared_cache,
            credential_limits=CredentialLimits(
                **{name: given[f"credential_{name}"] for name in CredentialLimits.__struct_fields__}
            ),
            metrics_auth=args.metrics_auth,
            max_sockets=args.max_sockets,
            insecure=args.insecure,
            allowed_hosts=tuple(args.allowed_host),
            allowed_origins=tuple(args.allowed_origin),
            proxies=tuple(args.proxy),
            deflate=args.deflate,
            ping_interval_s=args.ping_interval,
            ping_timeout_s=args.ping_timeout,
            session_ttl_s=args.session_ttl,
            session_ttl_max_s=args.session_ttl_max,
            max_sessions=args.max_sessions,
            sessions_bytes=args.sessions_bytes,
            grace_s=args.grace,
            token_ttl_s=args.token_ttl,
            store=store_place(args.store, args.port),
            store_key_file=args.store_key_file,
            store_days=args.store_days,
            store_bytes=args.store_bytes,
            warm_start=args.warm_start,
            persist=args.persist,
        ),
        limits=Limits(**{name: given[f"limit_{name}"] for name in Limits.__struct_fields__}),
        schedule=ScheduleConfig(
            in_flight=args.in_flight,
            itl_target_ms=args.itl_target_ms,
            mixed_tokens=args.mixed_tokens,
            ahead_tokens=args.ahead_tokens,
            quantum_steps=args.quantum_steps,
            lookahead=args.lookahead,
            ageing=args.ageing,
            max_waiting=args.max_waiting,
        ),
        executor=args.executor,
        gateways=args.gateways,
        replicas=replicas_config(args),
        step_timeout_s=args.step_timeout,
    )


def bundled_model() -> Path:
    """The model folder that comes with the package. Raises ConfigError if it is not there."""
    folder = Path(str(files("ramify.gpu") / "default_model"))
    if not (folder / "config.json").is_file():
        raise ConfigError("this installation holds no default model: give --model DIR")
    return folder
