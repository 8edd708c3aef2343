"""Checks of settings, config.json and machine for ranks, before their processes are started.

Needs no torch. Checks that need the whole model are each rank's (`gpu.startup.ranks`).
"""

from pathlib import Path

from ramify.protocol.checkpoint.files import json_files
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as families call them


def check_ranks(config: ModelConfig, gpus: int = 0) -> None:
    """Check the settings. `gpus`: the most that torch may see, 0: unknown. Raises ModelError."""
    count = config.tensor_parallel
    if count == 1:
        return
    refuse_file(config.path, count)
    if config.deterministic and count > 2:
        raise refused(count, "sums of more than two depend on the batch; leave --deterministic out")
    raw = json_files(config.path)("config.json") or {}
    inner = raw.get("text_config")
    fields = inner if isinstance(inner, dict) else raw
    for name in ("num_attention_heads", *(_EXPERTS if config.expert_parallel else ())):
        each = fields.get(name)
        if isinstance(each, int) and each > 0:
            divided("experts" if name in _EXPERTS else "heads", each, count)
    if config.device != "cpu" and 0 < gpus < count:
        raise too_few_gpus(count, gpus)


def divided(what: str, count: int, ranks: int) -> int:
    """Divide `count` of `what` among ranks. Raises ModelError if there is a remainder."""
    if count % ranks:
        raise refused(ranks, f"{count} {what} are not divisible by {ranks}; give another number")
    return count // ranks


def refuse_no_experts(there: bool, ranks: int) -> None:
    """Refuse a model without experts, where ranks are to have some whole. Raises ModelError."""
    if not there:
        raise refused(ranks, "the model has no experts; leave --expert-parallel out")


def refuse_file(path: Path, ranks: int) -> None:
    """Refuse a GGUF file for several ranks. Raises ModelError."""
    if ranks > 1 and path.is_file():
        raise refused(ranks, "a GGUF file is not divided; give a folder of safetensors")


def too_few_gpus(ranks: int, found: int) -> ModelError:
    return ModelError(
        f"--tensor-parallel {ranks}: each rank has a GPU, and there are {found}; give at most that, "
        "or --device cpu"
    )


def refused(ranks: int, told: str) -> ModelError:
    return ModelError(f"--tensor-parallel {ranks}: {told}, or leave --tensor-parallel out")
