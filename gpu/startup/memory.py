"""The division of free memory into KV pages, window pages, state slots and host blocks."""

from pathlib import Path

import msgspec
import torch

from ramify.gpu.kv.host_memory import RECORD
from ramify.gpu.kv.layout import FP8
from ramify.gpu.models.definition import Definition
from ramify.gpu.step.step_rows import spare_states
from ramify.protocol.cluster import BLOCK
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExecutorInfo

_CPU_TOKENS = 65536
CPU_SHARE = 0.25  # of the free memory: the machine may have other work
_SLOTS_PER_ROW = 8  # three while it runs, others are snapshots
_LEAST_SLOTS = 4
_WINDOWS_PER_ROW = 4  # the one that runs, others are tails
_PAGES_PER_WINDOW_PAGE = 8  # of a model that has window pages only
_WRITTEN = 6  # steps that the cache keeps room for, at most (`actors.cache.windows`)
_FALLBACK_BYTES = 2 << 30  # where the system does not say what is free


def free_bytes(device: torch.device, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Read how many bytes can be allocated on `device` now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return _FALLBACK_BYTES
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _FALLBACK_BYTES


def kv_type(asked: str, dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype of the KV cache by `--kv-dtype`; `dtype`: the model's."""
    return FP8 if asked == "fp8" else dtype


def container_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Read how many bytes this container may still take (cgroup v2), cached files not counted.

    2^62 where it has no limit.
    """
    try:
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):  # "max": there is none
        return 1 << 62


def most_cpu_tokens(context: int) -> int:
    """Compute the most tokens of a CPU's pool, unless more are asked for."""
    return max(_CPU_TOKENS, context)


def most_rows(config: ModelConfig, device: torch.device) -> int:
    """Choose how many requests run at once. A GPU gains more from many of them than a CPU."""
    if config.max_rows is not None:
        return config.max_rows
    return 512 if device.type == "cuda" else 256


def most_step_tokens(config: ModelConfig, device: torch.device) -> int:
    """Choose the most tokens in a step. Beyond 2,048 a GPU gains a little, a CPU nothing."""
    if config.step_tokens is not None:
        return config.step_tokens
    return 8192 if device.type == "cuda" else 2048


def plan_pages(
    wanted_tokens: int | None,
    context: int,
    page_size: int,
    bytes_per_token: int,
    free: int,
    device: torch.device,
    fraction: float = 0.9,
) -> int:
    """Compute the pages of the pool: for `wanted_tokens` if given, else from `free` bytes.

    On an accelerator the default is `fraction` of `free`, which is what weights, steps and graphs leave.
    On a CPU the default is at most 65,536 tokens or one whole context, whichever is more. Raises
    ModelError if two pages do not fit, or if `wanted_tokens` do not.
    """
    if wanted_tokens is not None:
        pages = wanted_tokens // page_size
        if pages * page_size * bytes_per_token <= free:
            return pages
        fits = int(free * fraction) // bytes_per_token
        if fits >= 2 * page_size:
            raise ModelError(
                f"--kv-tokens {wanted_tokens} does not fit: a token takes {bytes_per_token} bytes, "
                f"{free >> 20} MiB are free; give at most {fits}"
            )
    on_cpu = device.type == "cpu"
    tokens = int(free * (CPU_SHARE if on_cpu else fraction)) // bytes_per_token
    if on_cpu:
        tokens = min(tokens, most_cpu_tokens(context))
    if tokens < 2 * page_size:
        raise ModelError(
            f"{max(0, free) >> 20} MiB are free on {device} beside what steps need: too little for a KV "
            f"cache of {bytes_per_token} bytes a token; free memory, give a smaller model, or lower "
            "--max-rows and --step-tokens"
        )
    return tokens // page_size


def plan_slots(
    wanted: int | None, info: ExecutorInfo, free: int, device: torch.device, fraction: float
) -> int:
    """Compute the state slots beside the KV pool: `wanted`, else up to half of what both may take.

    The default is at most 8 for each row that may run at once. Slots for drafts come on top. Raises
    ModelError if four do not fit, or if `wanted` do not.
    """
    rows, bytes_each = info.max_rows, info.state_bytes
    room = int(free * (CPU_SHARE if device.type == "cpu" else fraction))
    if info.max_drafts:  # there is one for three others, at most
        bytes_each += -(-bytes_each // 3)
    if wanted is not None:
        if wanted * bytes_each <= free:
            return wanted
        raise ModelError(
            f"--state-slots {wanted} do not fit: one takes {bytes_each} bytes, {free >> 20} MiB are "
            f"free; give at most {room // 2 // bytes_each}"
        )
    slots = min(_SLOTS_PER_ROW * rows, room // 2 // bytes_each)
    if slots < _LEAST_SLOTS:
        raise ModelError(
            f"{max(0, free) >> 20} MiB are free on {device} beside what steps need: too little for "
            f"{_LEAST_SLOTS} states of {bytes_each} bytes each; free memory, or give a smaller model"
        )
    return slots


def has_windows(config: ModelConfig, shape: Definition, context: int) -> bool:
    """Whether layers with a window get pages of their own. Raises ModelError if they cannot."""
    wanted, window = config.window_tokens, shape.window
    obstacle = None
    if window is None:
        obstacle = "the model has no layers with a window, or none that can have a KV cache of their own"
    elif window < 2 or window >= context:
        obstacle = f"its window of {window} tokens is no shorter than the context of {context}"
    elif config.attention == "flashinfer":
        obstacle = "FlashInfer keeps all keys and values of such layers; give --attention triton"
    elif config.page_size != 1:
        obstacle = f"--page-size {config.page_size}: a window may begin at any token; leave it out"
    if obstacle is not None and wanted:
        raise ModelError(f"--window-tokens {wanted}: {obstacle}; or leave --window-tokens out")
    return obstacle is None and wanted != 0


def _with_window_pages(
    info: ExecutorInfo, config: ModelConfig, free: int, device: torch.device
) -> tuple[ExecutorInfo, int]:
    """Add a pool of window pages to `info`. Returns also what it leaves of `free`.

    As many pages as `--window-tokens`; else half of the tokens that would fit if all layers kept all
    (all of them in a model that has only such layers), at most four windows a row. Where that is too
    little for one request the layers keep everything, and `window` becomes 0. Raises ModelError if
    `--window-tokens` is too little, or too much.
    """
    whole = info.kv_bytes_per_token + info.window_bytes
    before, written = info.window - 1, _WRITTEN * (1 + max(info.max_drafts, info.max_forced))
    least = 2 * before + max(info.step_tokens, written)
    share = CPU_SHARE if device.type == "cpu" else config.kv_fraction
    tokens = config.kv_tokens or int(free * share) // whole
    if device.type == "cpu" and config.kv_tokens is None:
        tokens = min(tokens, most_cpu_tokens(info.context))
    pages = config.window_tokens
    if pages is None:
        alone = not info.kv_bytes_per_token and config.kv_tokens is None
        most = max(_WINDOWS_PER_ROW * info.window * info.max_rows, 2 * least)
        pages = min(tokens if alone else tokens // 2, most)
        if pages < least:
            return msgspec.structs.replace(
                info, kv_bytes_per_token=whole, window=0, window_bytes=0
            ), free
    if pages < least:
        raise ModelError(
            f"--window-tokens {pages}: a step of {info.step_tokens} tokens and a window of "
            f"{info.window} need {least}; give at least that, or lower --step-tokens"
        )
    taken = (pages + 1) * info.window_bytes
    if taken > free:
        raise ModelError(
            f"--window-tokens {pages} does not fit: a token takes {info.window_bytes} bytes, "
            f"{free >> 20} MiB are free; give at most {int(free * share) // info.window_bytes}"
        )
    info = msgspec.structs.replace(info, window_pages=pages)
    return info, free - (taken if config.kv_tokens else int(taken / share))


def _kept_from_host(info: ExecutorInfo, wanted: int, each: int, free: int) -> str:
    """Say why KV cannot go to `wanted` bytes of host memory, and what mends that; "": it can.

    `each`: bytes of a block.
    """
    snapshots = info.state_bytes or info.window
    if snapshots and not each:
        return "no layer keeps keys and values of all tokens; leave it out"
    if info.window and each < info.window_bytes:
        return (
            f"a token of layers with a window takes {info.window_bytes} bytes, a block of the others' "
            f"{each}; leave it out"
        )
    if info.drafter and (info.drafter != "ngram" or info.device.startswith("cuda")):
        return "what a drafter keeps beside the KV does not move; give --draft none (or ngram on a CPU)"
    if BLOCK % info.page_size:
        return (
            f"blocks of {BLOCK} tokens move, no parts of pages; give a --page-size that divides {BLOCK}"
        )
    if wanted < each:
        return f"a block of {BLOCK} tokens takes {each} bytes; give at least that"
    if wanted > free:
        return f"{free} bytes are free; give at most that"
    return ""


def host_blocks(info: ExecutorInfo, config: ModelConfig, free: int) -> int:
    """Count the blocks of KV that `--kv-host` bytes hold.

    `free`: bytes of host memory, half of which `auto` takes for all replicas, where blocks can move at
    all. Raises ModelError if there can be no block, or if so many bytes are not free.
    """
    wanted, each = config.kv_host, BLOCK * info.kv_bytes_per_token
    if wanted < 0:  # auto
        wanted = free // 2 // config.beside
    if not wanted:
        return 0
    told = _kept_from_host(info, wanted, each, free)
    if told and config.kv_host < 0:
        return 0
    if told:
        raise ModelError(f"--kv-host {wanted}: {told}")
    return wanted // each


def check_host(info: ExecutorInfo, config: ModelConfig) -> None:
    """Check `--kv-host` and `--kv-disk-bytes` before the weights are loaded. Raises ModelError.

    A CPU's weights and KV cache take host memory, too: `host_blocks` decides when they are there.
    """
    least = BLOCK * info.kv_bytes_per_token * config.tensor_parallel + RECORD
    if config.kv_disk is not None and config.kv_disk_bytes < least:
        raise ModelError(
            f"--kv-disk-bytes {config.kv_disk_bytes}: a block takes {least}; give at least that"
        )
    if config.kv_host > 0:
        host_blocks(info, config, _host_bytes(config))


def _host_bytes(config: ModelConfig) -> int:
    """Compute how many bytes of host memory a rank may still take."""
    return min(free_bytes(torch.device("cpu")), container_bytes()) // config.tensor_parallel


def with_pages(info: ExecutorInfo, config: ModelConfig, free: int, device: torch.device) -> ExecutorInfo:
    """Add pages, state slots, window pages and host blocks to `info`: what was asked for, else what
    `free` bytes allow. Raises ModelError.
    """
    tokens = config.kv_tokens
    if info.state_bytes:
        slots = plan_slots(config.state_slots, info, free, device, config.kv_fraction)
        info = msgspec.structs.replace(info, state_slots=slots)
        free -= (1 + slots + spare_states(info)) * info.state_bytes
    if info.window:
        info, free = _with_window_pages(info, config, free, device)
        if not info.kv_bytes_per_token and tokens is None:  # only the tables of pages take memory
            tokens = max(info.context, _PAGES_PER_WINDOW_PAGE * info.window_pages)
    pages = plan_pages(
        tokens, info.context, info.page_size, info.kv_bytes_per_token, free, device,
        config.kv_fraction,
    )  # fmt: skip
    # a sequence that outgrows the pool could never be finished
    context = min(info.context, pages * info.page_size)
    if device.type == "cpu":
        free -= pages * info.page_size * info.kv_bytes_per_token
        free = min(free, container_bytes() // config.tensor_parallel)
    else:
        free = _host_bytes(config)
    blocks = host_blocks(info, config, free)
    return msgspec.structs.replace(info, pages=pages, context=context, host_blocks=blocks)
