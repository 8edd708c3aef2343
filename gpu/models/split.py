"""The division of a decoder, and of a checkpoint's tensors, among ranks.

Heads, channels, rows of feed-forwards and of experts, and the vocabulary of the head are divided in the
order of the ranks; where there are fewer KV heads or groups than ranks, neighbours hold the same one.
So the output of a rank's mixer or feed-forward is a part of a sum. The embedding is rank 0's. This file
knows shapes and names, neither files nor how ranks talk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.definition import (
    AttentionSettings,
    ConvSettings,
    Definition,
    DeltaSettings,
    DenseSettings,
    ExpertSettings,
    FeedForwardSettings,
    FixedSettings,
    LatentSettings,
    LayerSettings,
    MambaSettings,
    MixerSettings,
)
from ramify.gpu.models.experts import ExpertsBeside
from ramify.gpu.models.feed_forward import FeedForward
from ramify.gpu.ops.linear.base import Linear, Weight
from ramify.gpu.ranks.checks import divided
from ramify.protocol.errors import ModelError

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's pieces [first, last) along `dim` of a tensor of `shape`; none: it is another rank's."""

    shape: tuple[int, ...]
    dim: int
    pieces: tuple[tuple[int, int], ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Cut this rank's part out of the whole tensor."""
        parts = [tensor.narrow(self.dim, first, last - first) for first, last in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def of_weight(self, weight: Weight) -> Weight:
        """Cut this rank's part out of a stored form. Raises ValueError: inputs are no whole groups."""
        if self.dim:
            ((first, last),) = self.pieces
            return weight.columns(first, last)
        return weight.in_order(torch.cat([torch.arange(*piece) for piece in self.pieces]))


def part_of(shape: Definition, rank: int, ranks: int, whole_experts: bool = False) -> Definition:
    """Make the definition of the part of `rank` of `ranks`. Raises ModelError if it cannot be divided.

    `whole_experts`: each rank has some experts of every layer, instead of a part of each expert.
    """
    if ranks == 1:
        return shape
    if shape.token_inputs is not None:
        raise _refused(ranks, "inputs of tokens for every layer (Gemma E2B, E4B) are not divided")
    place = rank if whole_experts else None
    layers = tuple(_layer(layer, ranks, place) for layer in shape.layers)
    size, each = shape.vocab_size, -(-shape.vocab_size // ranks)
    lines = min(rank * each, size), min((rank + 1) * each, size)
    return replace(shape, layers=layers, head_lines=lines, vision=None)


def cuts(whole: Definition, own: Decoder, rank: int, ranks: int) -> dict[str, Cut]:
    """List the cuts of the weights of which `own` has a part, by name."""
    shapes = {name: tuple(view.shape) for name, view in _meta(whole).weights().items()}
    held = {name: tuple(view.shape) for name, view in own.weights().items()}
    of_whole, of_own = dict(_blocks(whole)), dict(_blocks(own.config))
    found: dict[str, Cut] = {}
    for name, shape in shapes.items():
        mine = held.get(name, (0,))  # an expert of another rank has none
        if not mine[0]:
            found[name] = Cut(shape, 0, ())
        elif mine != shape:
            dim = next(at for at, size in enumerate(shape) if mine[at] != size)
            sizes = of_whole.get(name, (shape[dim],)), of_own.get(name, (mine[dim],))
            if name in ("lm_head.weight", _EMBEDDING) and own.config.head_lines is not None:
                found[name] = Cut(shape, 0, (own.config.head_lines,))
            else:
                found[name] = Cut(shape, dim, tuple(_pieces(*sizes, rank, ranks)))
    return found


@torch.inference_mode()
def leave_biases_to_first(model: Decoder) -> None:
    """Drop loaded biases after parts of sums, on the other ranks: they are added once."""
    for layer in model.layers:
        parts: list[Linear] = [layer.mixer.output]
        fed = layer.feed_forward
        if isinstance(fed, ExpertsBeside):
            parts.append(fed.dense.down)
            fed = fed.experts
        if isinstance(fed, FeedForward):
            parts.append(fed.down)
        elif fed is not None:
            parts += [] if fed.layer.divided else [fed.layer.down]
            parts += [fed.layer.shared.down] if fed.layer.shared else []
        for linear in parts:
            if linear.bias is not None:
                linear.bias.zero_()


def _meta(shape: Definition) -> Decoder:
    return Decoder(shape, 1, torch.float32, torch.device("meta"))


def _pieces(
    whole: tuple[int, ...], own: tuple[int, ...], rank: int, ranks: int
) -> Iterator[tuple[int, int]]:
    """Yield a rank's piece of each block. Ranks that share a block hold the same one in a row."""
    at = 0
    for size, mine in zip(whole, own, strict=True):
        first = at + rank * size // ranks // mine * mine
        yield first, first + mine
        at += size


def _blocks(shape: Definition) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield tensors of several blocks, each of which is divided, with the blocks' sizes."""
    names = shape.names
    for index, layer in enumerate(shape.layers):
        prefix = f"model.layers.{index}"
        mixer, fixed, fed = layer.mixer, layer.fixed, layer.feed_forward
        if isinstance(mixer, AttentionSettings) and len(names.qkv) == 1:
            blocks = (mixer.width * (1 + mixer.gated), mixer.kv_width, mixer.kv_width)
            for kind in ("weight", "bias"):
                yield f"{prefix}.self_attn.{names.qkv[0]}.{kind}", blocks
        if isinstance(fixed, DeltaSettings) and fixed.rank is None:
            keys = fixed.key_heads * fixed.key_dim
            for name in ("conv1d", "in_proj_qkv"):
                yield f"{prefix}.linear_attn.{name}.weight", (keys, keys, fixed.width)
        if isinstance(fixed, MambaSettings):
            grouped = fixed.groups * fixed.state_dim
            convolved = (fixed.width, grouped, grouped)
            for kind in ("weight", "bias"):
                yield f"{prefix}.mamba.conv1d.{kind}", convolved
                yield f"{prefix}.mamba.in_proj.{kind}", (fixed.width, *convolved, fixed.heads)
        if isinstance(fixed, ConvSettings):
            channels = shape.hidden_size // fixed.ranks
            for kind in ("weight", "bias"):
                yield f"{prefix}.conv.in_proj.{kind}", (channels,) * 3
        if fed is not None and len(names.gate_up) == 1 and fed.activation != "relu2":
            size = fed.shared if isinstance(fed, ExpertSettings) else fed.size
            part = f"{prefix}.{names.feed_forward}"
            if isinstance(fed, ExpertSettings):
                part = f"{prefix}.{names.experts.part or names.feed_forward}.{names.experts.shared}"
            for kind in ("weight", "bias"):
                yield f"{part}.{names.gate_up[0]}.{kind}", (size or 0,) * 2


def _refused(ranks: int, why: str) -> ModelError:
    return ModelError(f"--tensor-parallel {ranks}: {why}; leave it out, or give another number")


def _shared(what: str, count: int, ranks: int) -> int:
    """Divide `count` among ranks; 1 where several ranks hold each. Raises ModelError."""
    if count < ranks and not ranks % count:
        return 1
    return divided(what, count, ranks)


def _layer(layer: LayerSettings, ranks: int, place: int | None) -> LayerSettings:
    """Divide a layer. `place`: of the rank, where it has whole experts."""
    return replace(
        layer,
        mixer=_mixer(layer.mixer, ranks),
        feed_forward=None if layer.feed_forward is None else _fed(layer.feed_forward, ranks, place),
        beside=None if layer.beside is None else _fixed(layer.beside, ranks),
    )


def _mixer(one: MixerSettings, ranks: int) -> MixerSettings:
    if isinstance(one, AttentionSettings):
        if one.qk_norm == "width" and min(one.heads, one.kv_heads) < 2 * ranks:
            raise _refused(ranks, "of norms over all heads each rank has two heads at least")
        heads, kv_heads = (one.heads, "heads"), (one.kv_heads, "KV heads")
        return replace(
            one,
            heads=divided(heads[1], heads[0], ranks),
            kv_heads=_shared(kv_heads[1], kv_heads[0], ranks),
        )
    if isinstance(one, LatentSettings):
        return replace(one, heads=divided("heads", one.heads, ranks))
    return _fixed(one, ranks)


def _fixed(one: FixedSettings, ranks: int) -> FixedSettings:
    if isinstance(one, DeltaSettings):
        return replace(
            one,
            key_heads=divided("key heads", one.key_heads, ranks),
            value_heads=divided("value heads", one.value_heads, ranks),
        )
    if isinstance(one, MambaSettings):
        if one.norm_eps is not None and one.groups % ranks:
            raise _refused(ranks, f"{one.groups} groups of a Mamba layer are normalised each as a whole")
        heads, groups = divided("heads", one.heads, ranks), _shared("groups", one.groups, ranks)
        return replace(one, heads=heads, groups=groups)
    return replace(one, ranks=ranks)


def _fed(one: FeedForwardSettings, ranks: int, place: int | None) -> FeedForwardSettings:
    if isinstance(one, DenseSettings):
        return replace(one, size=divided("rows of a feed-forward", one.size, ranks))
    size, held = one.size, None
    if place is None:
        size = divided("rows of a feed-forward", one.size, ranks)
    else:
        each = divided("experts", one.experts, ranks)
        held = place * each, (place + 1) * each
    shared = None if one.shared is None else divided("rows of a shared expert", one.shared, ranks)
    beside = None
    if one.beside is not None:
        beside = replace(one.beside, size=divided("rows of a feed-forward", one.beside.size, ranks))
    return replace(one, size=size, shared=shared, beside=beside, held=held)
