"""One definition for every decoder: a list of layers, each with settings of its own.

A family (`families/`) fills it from config.json, and `decoder` builds it. Devices and kernels read it;
none of them knows a family.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from ramify.gpu.attention.spec import AttentionShape, AttentionSpec, LatentSizes
from ramify.gpu.kv.layout import KVLayout, LatentLayout, PairLayout
from ramify.gpu.kv.states import Shape, StateLayout
from ramify.gpu.ops.base import Activation
from ramify.gpu.ops.experts import ExpertActivation, RouterSettings
from ramify.gpu.ops.linear.checkpoints import WeightFormat
from ramify.gpu.ops.rotary import RopeSettings
from ramify.gpu.vision.tower import Vision

NormPlaces = Literal["before", "after", "both"]
"""Where a mixer and a feed-forward have norms: before, on the input; after, on the output; or both."""


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """A mixer: attention to all positions, or to those of a window (`spec`).

    Sinks of `spec` only say here that a checkpoint has some: the decoder loads its own.
    """

    heads: int
    kv_heads: int
    head_dim: int
    spec: AttentionSpec
    rope: RopeSettings | None  # has at least rope_type and rope_theta; None: no positions
    qk_norm: Literal["head", "width"] | None = None  # over each head of q and k, or over all of them
    qkv_bias: bool = False
    output_bias: bool = False
    value_norm: bool = False  # over each head of v, without a weight
    keys_are_values: bool = False  # v is k before its norm and rotation; there is no product for v
    kv_of: int | None = None  # the layer whose keys and values are read; None: its own
    gated: bool = False  # the output is opened by a sigmoid, whose rows are among those of q

    @property
    def width(self) -> int:
        """Heads times head size: the inputs of the output projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def rows(self) -> int:
        """The outputs of its first product: q, k and v."""
        return self.width + 2 * self.kv_width

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class LatentSettings:
    """A mixer: attention to latents of `rank` numbers that all heads share (DeepSeek-V2, 2024).

    Each head computes its key's `nope` numbers and its value from a token's latent; `turned` further
    numbers of the key are rotated, and are those of all heads. For attention there is one KV head.
    """

    heads: int
    rank: int
    nope: int
    turned: int
    value: int
    spec: AttentionSpec
    rope: RopeSettings | None  # None: no positions
    q_rank: int | None = None  # of the queries' own latents; None: they come from the stream
    interleaved: bool = True  # neighbours turn together in checkpoints, else halves
    bias: bool = False  # of the product that makes the latents, and of the output's
    query_growth: tuple[float, int] | None = None  # queries grow by that much, with the log of steps
    kv_heads: int = 1
    kv_of: None = None

    @property
    def head_dim(self) -> int:
        """The size of keys as they are kept."""
        return self.rank + self.turned

    @property
    def query(self) -> int:
        """The size of a head's query."""
        return self.nope + self.turned

    @property
    def width(self) -> int:
        """The inputs of the output projection."""
        return self.heads * self.value

    @property
    def rows(self) -> int:
        """The outputs of its first product: queries or their latents, then what is kept."""
        return (self.q_rank or self.heads * self.query) + self.head_dim

    @property
    def group(self) -> int:
        """The query heads that share the KV head: all."""
        return self.heads


@dataclass(frozen=True, slots=True)
class DeltaSettings:
    """A mixer: a gated delta net (Yang et al. 2024) after a convolution of `kernel` positions.

    `rank`: each channel of the keys decays by itself (Kimi Delta Attention, 2025); decays and gates are
    products of so many numbers then.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool = False  # checkpoints have two products in front, a key head's rows together
    rank: int | None = None

    @property
    def width(self) -> int:
        """The inputs of the output projection."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """The channels of the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.width

    def states(self, hidden: int) -> tuple[Shape, ...]:
        """List the shapes of its state: the last inputs of its convolution, and its matrices."""
        matrices = self.value_heads, self.key_dim, self.value_dim
        return (self.kernel - 1, self.convolved), matrices


@dataclass(frozen=True, slots=True)
class ConvSettings:
    """A mixer: a convolution of `kernel` positions between two gates (LFM2)."""

    kernel: int
    bias: bool = False  # of its products as well
    ranks: int = 1  # that hold its channels

    def states(self, hidden: int) -> tuple[Shape, ...]:
        return ((self.kernel - 1, hidden // self.ranks),)


@dataclass(frozen=True, slots=True)
class MambaSettings:
    """A mixer: Mamba-2 (Dao & Gu 2024) after a convolution of `kernel` positions."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    conv_bias: bool
    bias: bool  # of its products
    norm_eps: float | None  # of the norm of each group of its output; None: there is none
    norm_first: bool = False  # the norm precedes the gate; else the gate precedes the norm

    @property
    def width(self) -> int:
        """The inputs of the output projection."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """The channels of the convolution: x, B and C."""
        return self.width + 2 * self.groups * self.state_dim

    def states(self, hidden: int) -> tuple[Shape, ...]:
        """List the shapes of its state: the last inputs of its convolution, and its matrices."""
        matrices = self.heads, self.state_dim, self.head_dim
        return (self.kernel - 1, self.convolved), matrices


KeptSettings = AttentionSettings | LatentSettings
"""Settings of mixers that keep something of each token in the KV cache."""
FixedSettings = DeltaSettings | MambaSettings | ConvSettings
"""Settings of mixers that keep a fixed state."""
MixerSettings = KeptSettings | FixedSettings


@dataclass(frozen=True, slots=True)
class DenseSettings:
    """A feed-forward with a gate (Shazeer 2020); "relu2": max(x, 0) squared, without a gate."""

    size: int
    activation: Activation | Literal["relu2"]
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """A feed-forward: a few of `experts`, each like `DenseSettings`, chosen for each token."""

    experts: int
    size: int
    activation: ExpertActivation
    router: RouterSettings
    shared: int | None = None  # the size of one more, which every token goes through
    shared_gated: bool = False  # and which a sigmoid opens
    bias: bool = False  # of the router, too; never of a shared one
    beside: DenseSettings | None = None  # runs on the same stream; each behind norms of its own
    held: tuple[int, int] | None = None  # the experts that this rank has, [first, last); None: all


FeedForwardSettings = DenseSettings | ExpertSettings


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """One block of a decoder."""

    mixer: MixerSettings
    feed_forward: FeedForwardSettings | None
    norms: NormPlaces = "before"
    beside: FixedSettings | None = None  # runs on attention's input; both outputs are added

    @property
    def fixed(self) -> FixedSettings | None:
        """The settings of its mixer with a fixed state; None: it has none."""
        return self.mixer if isinstance(self.mixer, FixedSettings) else self.beside


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A checkpoint's names of the tensors of a layer of experts, in its feed-forward.

    `each`: of every expert's gate, up and down, in `experts.NUMBER`; `stacked`: gate and up of all, and
    down of all, where they are one tensor each. `interleaved`: these are [experts, inputs, outputs],
    gate and up alternate, and biases end in `_bias`; or they are MXFP4's `_blocks` and `_scales`.
    `part`: the part that they are in; None: the feed-forward, "": the layer.
    """

    router: str = "gate"
    each: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, ...] = ("experts.gate_up_proj", "experts.down_proj")
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    correction: str = "gate.e_score_correction_bias"
    part: str | None = None
    interleaved: bool = False
    inputs: int | None = None  # of gate and up: where another dimension has so many, the two are swapped


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A checkpoint's names of its tensors. Two names: the mixer's, the feed-forward's.

    One name for several blocks of rows: the checkpoint has them as one tensor.
    """

    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    feed_forward: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    experts: ExpertNames = ExpertNames()
    last_norm: str = "norm"
    renamed: tuple[tuple[str, str], ...] = ()  # how names begin in checkpoints, and here
    # Endings of names here, and the factors of so many rows each, applied when they are loaded
    scaled: tuple[tuple[str, tuple[tuple[int, float], ...]], ...] = ()
    skipped: tuple[str, ...] = ()  # how names of tensors begin that text does not need


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The layers' inputs of tokens besides the stream (per-layer embeddings, Gemma 3n).

    Each layer gets `size` values, of a table by tokens and of a product of the embedding. It multiplies
    them by a gate of the stream, adds a product of that, and then scales the stream by a number.
    """

    size: int
    vocab_size: int
    activation: Activation


@dataclass(frozen=True, slots=True)
class Definition:
    """A decoder. Its layers may differ in everything that `LayerSettings` says."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSettings, ...]
    names: TensorNames
    rms_eps: float
    tied: bool  # lm_head shares the embedding
    max_position: int  # max_position_embeddings
    context: int  # longest sequence to serve unless another is asked for
    longest: int | None  # the most that may be asked for; None: any
    eos_token_ids: tuple[int, ...]
    dtype: str  # as the file states it
    embedding_scale: float = 1.0
    embedding_scale_rounded: bool = False  # to the model's type, before the product
    norm_offset: float = 0.0  # added to the weights of the norms
    logit_scale: float = 1.0  # on the logits; the weight of the last norm takes it
    logit_softcap: float | None = None
    token_inputs: TokenInputs | None = None
    layer_scalars: bool = False  # each layer has a number that the stream is multiplied by behind it
    vision: Vision | None = None
    stored: WeightFormat | None = None  # how the checkpoint has the weights of products; None: floats
    head_lines: tuple[int, int] | None = None  # of the vocabulary, [first, last); None: all

    @property
    def attention(self) -> KeptSettings:
        """The attention of the first layer that has any: see `equal`."""
        return next(self.attentions)

    @property
    def attentions(self) -> Iterator[KeptSettings]:
        """The attention of all layers that have any."""
        return (layer.mixer for layer in self.layers if isinstance(layer.mixer, KeptSettings))

    def logits_cost(self, parameters: int) -> float:
        """Compute the ratio of multiplications for a position's logits to those of its layers."""
        head = self.vocab_size * self.hidden_size
        return head / max(1, parameters - (head if self.tied else 2 * head))

    @property
    def intermediate_size(self) -> int:
        """The size of the first feed-forward; 0: there is none."""
        return next((each.feed_forward.size for each in self.layers if each.feed_forward), 0)

    @property
    def equal(self) -> bool:
        """Whether all layers are attention of one size, with keys and values of their own."""
        sizes = {_sizes(one) for one in self.attentions}
        feed_forwards = {layer.feed_forward for layer in self.layers}
        own = all(one.kv_of is None for one in self.attentions)
        return not self.keeps_states and len(sizes) == 1 and len(feed_forwards) == 1 and own

    @property
    def experts(self) -> list[ExpertSettings]:
        """The settings of all layers that choose among experts."""
        feed_forwards = (layer.feed_forward for layer in self.layers)
        return [one for one in feed_forwards if isinstance(one, ExpertSettings)]

    @property
    def has_experts(self) -> bool:
        """Whether a layer chooses among experts."""
        return bool(self.experts)

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep fixed states of a sequence, with or without keys and values."""
        return any(layer.fixed for layer in self.layers)

    @property
    def window(self) -> int | None:
        """The most tokens that a layer with a window sees; None: no layer can have window pages.

        A layer that reads the keys and values of another one has a window if that has one.
        """
        mixers = [layer.mixer for layer in self.layers]
        windows = [one.spec.window if isinstance(one, KeptSettings) else None for one in mixers]
        pairs = [(one.spec.window, one.kv_of) for one in self.attentions]
        if self.keeps_states or isinstance(self.attention, LatentSettings):
            return None
        if any(of is not None and (own is None) != (windows[of] is None) for own, of in pairs):
            return None
        return max((window for window in windows if window is not None), default=None)

    def attention_shapes(
        self, dtype: torch.dtype, windows: bool = False, codes: bool = False
    ) -> list[AttentionShape]:
        """Collect the shapes of attention for back ends: each shape once, with its layers' specs.

        `windows`: layers with a window have pages of their own, and so a back end. `codes`: keys and
        values are 8-bit floats.
        """
        specs: dict[tuple[int, int, int, bool], list[AttentionSpec]] = {}
        for one in self.attentions:
            windowed = windows and one.spec.window is not None
            specs.setdefault((one.heads, one.kv_heads, one.head_dim, windowed), []).append(one.spec)
        first = self.attention
        value, latent = None, None
        if isinstance(first, LatentSettings):
            value = first.rank
            latent = LatentSizes(first.rank, first.nope, first.turned, first.value)
        return [
            AttentionShape(heads, kv_heads, dim, dtype, tuple(found), value, windowed, latent, codes)
            for (heads, kv_heads, dim, windowed), found in specs.items()
        ]

    def kv_places(self) -> list[int]:
        """List for each layer which layer of the pool has its keys and values, or its mixer's state."""
        places: list[int] = []
        keys = 0
        for layer, state in zip(self.layers, self.state_places(), strict=True):
            if isinstance(layer.mixer, FixedSettings):
                places.append(state)
            elif layer.mixer.kv_of is None:
                places.append(keys)
                keys += 1
            else:
                places.append(places[layer.mixer.kv_of])
        return places

    def state_places(self) -> list[int]:
        """List for each layer how many before it keep states: the index of its own."""
        return list(accumulate((layer.fixed is not None for layer in self.layers), initial=0))[:-1]

    def kv_layout(self, dtype: torch.dtype, windows: bool = False) -> KVLayout:
        """Make the layout of keys and values. Layers with latents are all alike, and without others.

        `windows`: layers with a window use window pages.
        """
        own, first = [one for one in self.attentions if one.kv_of is None], self.attention
        if isinstance(first, LatentSettings):
            return LatentLayout(len(own), first.rank, first.turned, dtype)
        windowed = tuple(windows and one.spec.window is not None for one in own)
        return PairLayout(tuple((one.kv_heads, one.head_dim) for one in own), dtype, windowed)

    def state_layout(self) -> StateLayout:
        """Make the layout of fixed states."""
        mixers = (layer.fixed for layer in self.layers)
        return StateLayout(tuple(one.states(self.hidden_size) for one in mixers if one is not None))


def _sizes(mixer: KeptSettings) -> tuple[int, ...]:
    alike = isinstance(mixer, LatentSettings) or mixer.keys_are_values
    return mixer.heads, mixer.kv_heads, mixer.head_dim, alike
