"""Checks of models with fixed states: settings that rule them out."""

from pathlib import Path

from ramify.gpu.attention.registry import KernelChoice
from ramify.gpu.models.definition import (
    Definition,
    DeltaSettings,
    MambaSettings,
)
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError

# Of a delta net's heads: a program of the kernels holds a head's state. Of 256, with one decay a head,
# Triton 3.6 compiles wrong numbers for Hopper (docs/log/gpu.md).
_MOST_DIM, _MOST_DIM_BY_CHANNEL = 128, 256
_MOST_STATE = 256  # of Mamba-2's heads, likewise


def check_states(config: ModelConfig, shape: Definition, attention: KernelChoice) -> None:
    """Check the settings against a model's fixed states. Raises ModelError."""
    if not shape.keeps_states:
        if config.state_slots is not None:
            raise ModelError("--state-slots: the model's layers keep no fixed states; leave it out")
        return
    if config.page_size != 1:
        raise ModelError(
            f"--page-size {config.page_size}: the model's layers keep fixed states, so a prefix may end "
            "at any token, inside of a larger page too; leave --page-size out"
        )
    for layer in shape.layers if attention.extend != "torch" else ():
        mixer, told = layer.fixed, ""
        if isinstance(mixer, DeltaSettings):
            most = _MOST_DIM if mixer.rank is None else _MOST_DIM_BY_CHANNEL
            dim = max(mixer.key_dim, mixer.value_dim)
            told = f"delta nets with heads of up to {most}, not {dim}" if dim > most else ""
        if isinstance(mixer, MambaSettings) and mixer.state_dim > _MOST_STATE:
            told = f"Mamba layers with a state_dim of up to {_MOST_STATE}, not {mixer.state_dim}"
        if told:
            raise ModelError(
                f"the kernels for a GPU know {told}: give --device cpu, or --attention torch, which is "
                "slow"
            )


def check_draft_model(folder: Path, shape: Definition) -> None:
    """Check that a draft model keeps no fixed states. Raises ModelError."""
    if shape.keeps_states:
        raise ModelError(
            f"--draft {folder}: its layers keep fixed states, which cannot be taken back; give another "
            "draft model, --draft ngram or --draft none"
        )
