"""Models with fixed states: what cannot be served with them, and how many state slots to make."""

from pathlib import Path

import torch

from ramify.gpu.attention.registry import KernelChoice
from ramify.gpu.models.definition import (
    Definition,
    DeltaSettings,
    ExpertSettings,
    MambaSettings,
)
from ramify.gpu.startup.drafts import DraftChoice
from ramify.gpu.startup.memory import CPU_SHARE
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError

_SLOTS_PER_ROW = 8  # three while it runs, others are snapshots
_LEAST_SLOTS = 4
_MOST_DIM = 128  # of a delta net's heads: a program of the kernels holds a head's state
_MOST_STATE = 256  # of Mamba-2's heads, likewise


def check_states(
    config: ModelConfig, shape: Definition, draft: DraftChoice, attention: KernelChoice
) -> None:
    """Raises ModelError if a model with fixed states cannot be served as asked."""
    if not shape.keeps_states:
        if config.state_slots is not None:
            raise ModelError("--state-slots: the model's layers keep no fixed states; leave it out")
        return
    if draft.kind != "none":
        raise ModelError(
            f"--draft {config.draft}: the model's layers keep fixed states, which cannot be taken back "
            "behind a draft that is refused; give --draft none"
        )
    if config.page_size != 1:
        raise ModelError(
            f"--page-size {config.page_size}: the model's layers keep fixed states, so a prefix may end "
            "at any token, inside of a larger page too; leave --page-size out"
        )
    for layer in shape.layers if attention.extend != "torch" else ():
        mixer, told = layer.fixed, ""
        if isinstance(mixer, DeltaSettings) and max(mixer.key_dim, mixer.value_dim) > _MOST_DIM:
            dim = max(mixer.key_dim, mixer.value_dim)
            told = f"delta nets with heads of up to {_MOST_DIM}, not {dim}"
        if isinstance(mixer, MambaSettings) and mixer.state_dim > _MOST_STATE:
            told = f"Mamba layers with a state_dim of up to {_MOST_STATE}, not {mixer.state_dim}"
        if layer.feed_forward is not None and isinstance(layer.feed_forward, ExpertSettings):
            told = "experts with a gate alone" if layer.feed_forward.activation == "relu2" else told
        if told:
            raise ModelError(
                f"the kernels for a GPU know {told}: give --device cpu, or --attention torch, which is "
                "slow"
            )


def check_draft_model(folder: Path, shape: Definition) -> None:
    """Raises ModelError if a draft model keeps fixed states."""
    if shape.keeps_states:
        raise ModelError(
            f"--draft {folder}: its layers keep fixed states, which cannot be taken back; give another "
            "draft model, --draft ngram or --draft none"
        )


def plan_slots(
    wanted: int | None, bytes_each: int, rows: int, free: int, device: torch.device, fraction: float
) -> int:
    """State slots beside the KV pool: `wanted` if given, else of at most half of what both may take.

    More than 8 for each of the `rows` that may run at once are not made by themselves. Raises ModelError
    if four do not fit, or if `wanted` do not.
    """
    room = int(free * (CPU_SHARE if device.type == "cpu" else fraction))
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
