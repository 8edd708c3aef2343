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


@dataclass(slots=True)
class GatedFeedForward:
    """A layer's feed-forward (Shazeer 2020): down(activation(gate(x)) * up(x))."""

    norm: RMSNorm
    gate_up: Linear  # [2 * intermediate, hidden], the gate's rows first
    down: Linear
    activation: Activation
    post_norm: RMSNorm | None

    def forward(self, x: AnyStream, ops: Ops[AnyStream]) -> Projection:
        return ops.project(ops.gated(x, self.gate_up, self.activation), self.down)


@dataclass(slots=True)
class DecoderLayer:
    """One block: a mixer and a feed-forward, each behind a norm and added to the residual."""

    mixer: Attention
    feed_forward: GatedFeedForward

    def norms(self) -> Iterator[RMSNorm]:
        mixer, feed_forward = self.mixer, self.feed_forward
        for norm in (mixer.norm, mixer.heads.q_norm, mixer.heads.k_norm, mixer.post_norm,
                     feed_forward.norm, feed_forward.post_norm):  # fmt: skip
            if norm is not None:
                yield norm


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
            for norm in (self.norm, *(norm for layer in self.layers for norm in layer.norms())):
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
            views |= self._norm_weights(prefix, layer)
            for linear, names, sizes in self._layer_products(prefix, layer):
                views |= blocks(linear, names, sizes)
        return views

    def products(self) -> Iterator[tuple[Linear, list[str]]]:
        """All of them, each with the names of its tensors among `weights`."""
        for index, layer in enumerate(self.layers):
            for linear, names, _ in self._layer_products(f"model.layers.{index}", layer):
                kinds = ["weight"] if linear.bias is None else ["weight", "bias"]
                yield linear, [f"{name}.{kind}" for kind in kinds for name in names]
        yield self.head, ["model.embed_tokens.weight" if self.config.tied else "lm_head.weight"]

    def parameters(self) -> int:
        """Number of weights, a tied one counted once."""
        return sum(view.numel() for view in self.weights().values())

    def _layer_products(
        self, prefix: str, layer: DecoderLayer
    ) -> Iterator[tuple[Linear, list[str], list[int]]]:
        """Each with its blocks of rows: their names and how many rows they have."""
        config, mixer, feed_forward = self.config, layer.mixer, layer.feed_forward
        qkv = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        yield mixer.qkv, qkv, [config.attention_width, config.kv_width, config.kv_width]
        yield mixer.output, [f"{prefix}.self_attn.o_proj"], [config.hidden_size]
        gate_up = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        yield feed_forward.gate_up, gate_up, [config.intermediate_size] * 2
        yield feed_forward.down, [f"{prefix}.mlp.down_proj"], [config.hidden_size]

    def _norm_weights(self, prefix: str, layer: DecoderLayer) -> dict[str, Tensor]:
        mixer, feed_forward = layer.mixer, layer.feed_forward
        views = {f"{prefix}.input_layernorm.weight": mixer.norm.weight}
        name = "post_attention_layernorm"
        if mixer.post_norm is not None and feed_forward.post_norm is not None:
            name = "pre_feedforward_layernorm"
            views[f"{prefix}.post_attention_layernorm.weight"] = mixer.post_norm.weight
            views[f"{prefix}.post_feedforward_layernorm.weight"] = feed_forward.post_norm.weight
        views[f"{prefix}.{name}.weight"] = feed_forward.norm.weight
        q_norm, k_norm = mixer.heads.q_norm, mixer.heads.k_norm
        if q_norm is not None and k_norm is not None:
            views[f"{prefix}.self_attn.q_norm.weight"] = q_norm.weight
            views[f"{prefix}.self_attn.k_norm.weight"] = k_norm.weight
        return views

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
