"""How much memory there is, and how many tokens of KV cache to make of it."""

from pathlib import Path

import torch

from ramify.protocol.errors import ModelError

_CPU_TOKENS = 65536
CPU_SHARE = 0.25  # of the free memory: the machine is somebody's desk, not ours alone
_FALLBACK_BYTES = 2 << 30  # where the system does not say what is free


def free_bytes(device: torch.device, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be taken on `device` now."""
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


def plan_pages(
    wanted_tokens: int | None,
    context: int,
    page_size: int,
    bytes_per_token: int,
    free: int,
    device: torch.device,
    fraction: float = 0.9,
) -> int:
    """Pages of the pool: for `wanted_tokens` if given, else sized from `free` bytes.

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
        tokens = min(tokens, max(_CPU_TOKENS, context))
    if tokens < 2 * page_size:
        raise ModelError(
            f"{max(0, free) >> 20} MiB are free on {device} beside what steps need: too little for a KV "
            f"cache of {bytes_per_token} bytes a token; free memory, give a smaller model, or lower "
            "--max-rows and --step-tokens"
        )
    return tokens // page_size
