"""The decoder: Llama, Mistral, Qwen2, Qwen3 and Gemma are settings of it, written once over `Ops`.

Knows layers, their weights and their order; it does not know devices and kernels (the operations'
business), pages, requests or files. Plain objects instead of torch modules: at one token a step their
call overhead shows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.gpu.models.config import DecoderConfig
from ramify.gpu.ops.base import Activation, AnyStream, LayerAttention, Ops, Projection
from ramify.gpu.ops.linear.base import Linear, Use, blocks, empty_linear, plain
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.rotary import Rotary
from ramify.gpu.step.inputs import StepInputs

Product = tuple[Linear, list[str], list[int]]
"""With its blocks of rows: their names in checkpoints and how many rows they have."""


@dataclass(slots=True)
class Attention:
    """A layer's mixer: what lets a position read the ones before it."""

    norm: RMSNorm
    qkv: Linear  # rows: q heads, k heads, v heads
    heads: LayerAttention
    output: Linear
    post_norm: RMSNorm | None  # of what is added to the residual

    def forward(self, x: AnyStream, ops: Ops[AnyStream], step: StepInputs[Tensor]) -> Projection:
        return ops.project(ops.attend(ops.linear(x, self.qkv), self.heads, step), self.output)

    def products(self, prefix: str) -> Iterator[Product]:
        """All of them, in the layer that is called `prefix`."""
        heads = self.heads
        own, kv = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
        yield self.qkv, [f"{prefix}.self_attn.{part}_proj" for part in "qkv"], [own, kv, kv]
        yield self.output, [f"{prefix}.self_attn.o_proj"], [len(self.norm.weight)]

    def norms(self, prefix: str) -> Iterator[tuple[str, RMSNorm]]:
        """Those inside, by their names: what is before and behind it is the layer's."""
        for part, norm in (("q", self.heads.q_norm), ("k", self.heads.k_norm)):
            if norm is not None:
                yield f"{prefix}.self_attn.{part}_norm", norm


@dataclass(slots=True)
class GatedFeedForward:
    """A layer's feed-forward (Shazeer 2020): down(activation(gate(x)) * up(x))."""

    norm: RMSNorm
    gate_up: Linear  # [2 * size, hidden], the gate's rows first
    down: Linear
    size: int
    activation: Activation
    post_norm: RMSNorm | None

    def forward(self, x: AnyStream, ops: Ops[AnyStream]) -> Projection:
        return ops.project(ops.gated(x, self.gate_up, self.activation), self.down)

    def products(self, prefix: str) -> Iterator[Product]:
        names = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        yield self.gate_up, names, [self.size, self.size]
        yield self.down, [f"{prefix}.mlp.down_proj"], [len(self.norm.weight)]


@dataclass(slots=True)
class DecoderLayer:
    """One block: a mixer and a feed-forward, each behind a norm and added to the residual."""

    mixer: Attention
    feed_forward: GatedFeedForward

    def products(self, prefix: str) -> Iterator[Product]:
        """All of them, in the layer that is called `prefix`."""
        yield from self.mixer.products(prefix)
        yield from self.feed_forward.products(prefix)

    def norms(self, prefix: str) -> Iterator[tuple[str, RMSNorm]]:
        """All of them, by their names."""
        mixer, feed_forward = self.mixer, self.feed_forward
        behind = mixer.post_norm is not None and feed_forward.post_norm is not None
        before = "pre_feedforward_layernorm" if behind else "post_attention_layernorm"
        for name, norm in (
            ("input_layernorm", mixer.norm),
            ("post_attention_layernorm", mixer.post_norm),
            ("post_feedforward_layernorm", feed_forward.post_norm),
            (before, feed_forward.norm),
        ):
            if norm is not None:
                yield f"{prefix}.{name}", norm
        yield from mixer.norms(prefix)


class Decoder:
    """Weights and forward pass. Built empty: the loader fills what `weights` names, then `complete`."""

    def __init__(
        self, config: DecoderConfig, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.context = context  # positions that it knows the angles of
        self.dtype = dtype
        self.device = device
        rope, local_rope = config.rope, config.local_rope
        self.rotary = Rotary(rope, config.head_dim, context, device)
        self._local_rotary = self.rotary
        if local_rope is not None:
            self._local_rotary = Rotary(local_rope, config.head_dim, context, device)
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        # rounded as the product with an embedding of this type is
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        self.layers = [self._empty_layer(index) for index in range(config.layers)]
        self.norm = self._empty_norm(config.hidden_size)
        head = self.embedding if config.tied else self._empty(config.vocab_size, config.hidden_size)
        self.head = plain(head, use="logits")

    @property
    def rotaries(self) -> list[Rotary]:
        """All that the layers use."""
        return list({layer.mixer.heads.rotary: None for layer in self.layers})

    @torch.inference_mode()
    def forward(
        self, step: StepInputs[Tensor], ops: Ops[AnyStream], layers: Iterable[int] | None = None
    ) -> AnyStream:
        """Run the step, store its keys and values. Returns the stream behind the last norm.

        `layers`: only these, for loading their kernels; garbage comes out.
        """
        ops.begin(step)
        x = ops.embed(step, self.embedding, self._embedding_scale, self.layers[0].mixer.norm)
        for index in range(len(self.layers)) if layers is None else layers:
            mixer, feed_forward = self.layers[index].mixer, self.layers[index].feed_forward
            last = index + 1 == len(self.layers)
            following = self.norm if last else self.layers[index + 1].mixer.norm
            mixed = ops.reduce(mixer.forward(x, ops, step))
            x = ops.add_norm(x, mixed, feed_forward.norm, mixer.post_norm)
            fed = ops.reduce(feed_forward.forward(x, ops))
            x = ops.add_norm(x, fed, following, feed_forward.post_norm)
        return x

    @torch.inference_mode()
    def logits(
        self, x: AnyStream, lines: Tensor | None, ops: Ops[AnyStream], output: Tensor | None = None
    ) -> Tensor:
        """[S, vocabulary] of `lines` int[S] of what `forward` returned, None: of all.

        Written to `output` if it is given.
        """
        return ops.head(x, lines, self.head, self.config.logit_softcap, output)

    def unlike_layers(self) -> list[int]:
        """Layers that together launch every kernel that any layer does.

        The first layer's input is a normalised one; else layers differ by their attention.
        """
        specs = (layer.mixer.heads.spec for layer in self.layers)
        kinds = ((spec.window, spec.softcap, spec.sinks is None) for spec in specs)
        unlike = {(kind, index == 0): index for index, kind in enumerate(kinds)}
        return sorted(unlike.values())

    def complete(self) -> None:
        """Bring loaded weights into the form in which they are used. Call it once."""
        if self.config.norm_offset:
            inside = [norm for layer in self.layers for _, norm in layer.norms("")]
            for norm in (self.norm, *inside):
                norm.weight += self.config.norm_offset

    def weights(self) -> dict[str, Tensor]:
        """What the loader fills: a view for each tensor, by its name in checkpoints.

        Raises TypeError once products have another form than the plain one.
        """
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tied:
            views["lm_head.weight"] = self.head.tensor
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            views |= {f"{name}.weight": norm.weight for name, norm in layer.norms(prefix)}
            for linear, names, sizes in layer.products(prefix):
                views |= blocks(linear, names, sizes)
        return views

    def products(self) -> Iterator[tuple[Linear, list[str]]]:
        """All of them, each with the names of its tensors among `weights`."""
        for index, layer in enumerate(self.layers):
            for linear, names, _ in layer.products(f"model.layers.{index}"):
                kinds = ["weight"] if linear.bias is None else ["weight", "bias"]
                yield linear, [f"{name}.{kind}" for kind in kinds for name in names]
        yield self.head, ["model.embed_tokens.weight" if self.config.tied else "lm_head.weight"]

    def parameters(self) -> int:
        """Number of weights, a tied one counted once."""
        return sum(view.numel() for view in self.weights().values())

    def _empty_layer(self, index: int) -> DecoderLayer:
        config = self.config
        hidden, wide = config.hidden_size, config.intermediate_size
        width, kv = config.attention_width, config.kv_width
        return DecoderLayer(
            Attention(
                norm=self._empty_norm(hidden),
                qkv=self._empty_linear(hidden, width + 2 * kv, config.qkv_bias),
                heads=self._empty_attention(index),
                output=self._empty_linear(width, hidden, config.output_bias),
                post_norm=self._empty_norm(hidden) if config.post_norms else None,
            ),
            GatedFeedForward(
                norm=self._empty_norm(hidden),
                gate_up=self._empty_linear(hidden, 2 * wide, config.mlp_bias, "gated"),
                down=self._empty_linear(wide, hidden, config.mlp_bias),
                size=wide,
                activation=config.activation,
                post_norm=self._empty_norm(hidden) if config.post_norms else None,
            ),
        )

    def _empty_attention(self, index: int) -> LayerAttention:
        config, spec = self.config, self.config.specs[index]
        return LayerAttention(
            index=index,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            spec=spec,
            rotary=self.rotary if spec.window is None else self._local_rotary,
            q_norm=self._empty_norm(config.head_dim) if config.qk_norm else None,
            k_norm=self._empty_norm(config.head_dim) if config.qk_norm else None,
        )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _empty_norm(self, size: int) -> RMSNorm:
        # what is added to a weight would be rounded away in half precision
        dtype = torch.float32 if self.config.norm_offset else self.dtype
        weight = torch.empty(size, dtype=dtype, device=self.device)
        return RMSNorm(weight, self.config.rms_eps)

    def _empty_linear(self, inputs: int, outputs: int, bias: bool, use: Use = "rows") -> Linear:
        return empty_linear(inputs, outputs, bias, self.dtype, self.device, use)
