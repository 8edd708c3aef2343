"""The decoder: Llama, Mistral, Qwen2, Qwen3 and Gemma are settings of it, written once over `Ops`.

Knows layers, their weights and their order; it does not know devices and kernels (the operations'
business), pages, requests or files. Plain objects instead of torch modules: at one token a step their
call overhead shows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.gpu.models.config import DecoderConfig
from ramify.gpu.ops.base import AnyStream, LayerAttention, Ops
from ramify.gpu.ops.linear import Linear, blocks, empty_linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.rotary import Rotary
from ramify.gpu.step.inputs import StepInputs


@dataclass(slots=True)
class DecoderLayer:
    """One block: attention and feed-forward, each behind a norm and added to the residual.

    The feed-forward is gated (Shazeer 2020): down(activation(gate(x)) * up(x)).
    """

    input_norm: RMSNorm
    qkv: Linear  # rows: q heads, k heads, v heads
    attention: LayerAttention
    output: Linear
    attention_post_norm: RMSNorm | None  # of what attention adds to the residual
    mlp_norm: RMSNorm
    gate_up: Linear  # [2 * intermediate, hidden], the gate's rows first
    down: Linear
    mlp_post_norm: RMSNorm | None

    def norms(self) -> Iterator[RMSNorm]:
        attention = self.attention
        for norm in (self.input_norm, attention.q_norm, attention.k_norm, self.attention_post_norm,
                     self.mlp_norm, self.mlp_post_norm):  # fmt: skip
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
        self.head = Linear(
            self.embedding if config.tied else self._empty(config.vocab_size, config.hidden_size)
        )

    @property
    def rotaries(self) -> list[Rotary]:
        """All that the layers use."""
        return list({layer.attention.rotary: None for layer in self.layers})

    @torch.inference_mode()
    def forward(
        self, step: StepInputs[Tensor], ops: Ops[AnyStream], layers: Iterable[int] | None = None
    ) -> AnyStream:
        """Run the step, store its keys and values. Returns the stream behind the last norm.

        `layers`: only these, for loading their kernels; garbage comes out.
        """
        ops.begin(step)
        x = ops.embed(step, self.embedding, self._embedding_scale, self.layers[0].input_norm)
        for index in range(len(self.layers)) if layers is None else layers:
            layer = self.layers[index]
            last = index + 1 == len(self.layers)
            following = self.norm if last else self.layers[index + 1].input_norm
            mixed = ops.attend(ops.linear(x, layer.qkv), layer.attention, step)
            x = ops.add(x, mixed, layer.output, layer.mlp_norm, layer.attention_post_norm)
            gated = ops.gated(x, layer.gate_up, self.config.activation)
            x = ops.add(x, gated, layer.down, following, layer.mlp_post_norm)
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
        specs = (layer.attention.spec for layer in self.layers)
        kinds = ((spec.window, spec.softcap, spec.sinks is None) for spec in specs)
        unlike = {(kind, index == 0): index for index, kind in enumerate(kinds)}
        return sorted(unlike.values())

    def complete(self) -> None:
        """Bring loaded weights into the form in which they are used. Call it once."""
        if self.config.norm_offset:
            for norm in (self.norm, *(norm for layer in self.layers for norm in layer.norms())):
                norm.weight += self.config.norm_offset

    def pack(self, pack: Callable[[Linear], Linear]) -> None:
        """Lay the loaded weights out for speed. `weights` cannot be called any more."""
        for layer in self.layers:
            layer.qkv, layer.output = pack(layer.qkv), pack(layer.output)
            layer.gate_up, layer.down = pack(layer.gate_up), pack(layer.down)
        self.head = pack(self.head)  # a copy if it is tied: the embedding is looked up row by row

    def weights(self) -> dict[str, Tensor]:
        """What the loader fills: a view for each tensor, by its name in checkpoints."""
        config = self.config
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not config.tied:
            views["lm_head.weight"] = self.head.weight
        for index, layer in enumerate(self.layers):
            views |= self._layer_weights(f"model.layers.{index}", layer)
        return views

    def parameters(self) -> int:
        """Number of weights, a tied one counted once."""
        return sum(view.numel() for view in self.weights().values())

    def _layer_weights(self, prefix: str, layer: DecoderLayer) -> dict[str, Tensor]:
        config = self.config
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        views = {f"{prefix}.input_layernorm.weight": layer.input_norm.weight}
        mlp_norm = "post_attention_layernorm"
        if layer.attention_post_norm is not None and layer.mlp_post_norm is not None:
            mlp_norm = "pre_feedforward_layernorm"
            views[f"{prefix}.post_attention_layernorm.weight"] = layer.attention_post_norm.weight
            views[f"{prefix}.post_feedforward_layernorm.weight"] = layer.mlp_post_norm.weight
        views[f"{prefix}.{mlp_norm}.weight"] = layer.mlp_norm.weight
        qkv_sizes = (config.attention_width, config.kv_width, config.kv_width)
        views |= blocks(layer.qkv, [f"{attention}.{part}_proj" for part in "qkv"], qkv_sizes)
        views |= blocks(layer.output, [f"{attention}.o_proj"], [config.hidden_size])
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        views |= blocks(layer.gate_up, gate_up, [config.intermediate_size] * 2)
        views |= blocks(layer.down, [f"{mlp}.down_proj"], [config.hidden_size])
        q_norm, k_norm = layer.attention.q_norm, layer.attention.k_norm
        if q_norm is not None and k_norm is not None:
            views[f"{attention}.q_norm.weight"] = q_norm.weight
            views[f"{attention}.k_norm.weight"] = k_norm.weight
        return views

    def _empty_layer(self, index: int) -> DecoderLayer:
        config = self.config
        hidden, wide = config.hidden_size, config.intermediate_size
        width, kv = config.attention_width, config.kv_width
        return DecoderLayer(
            input_norm=self._empty_norm(hidden),
            qkv=self._empty_linear(hidden, width + 2 * kv, config.qkv_bias),
            attention=self._empty_attention(index),
            output=self._empty_linear(width, hidden, config.output_bias),
            attention_post_norm=self._empty_norm(hidden) if config.post_norms else None,
            mlp_norm=self._empty_norm(hidden),
            gate_up=self._empty_linear(hidden, 2 * wide, config.mlp_bias),
            down=self._empty_linear(wide, hidden, config.mlp_bias),
            mlp_post_norm=self._empty_norm(hidden) if config.post_norms else None,
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

    def _empty_linear(self, inputs: int, outputs: int, bias: bool) -> Linear:
        return empty_linear(inputs, outputs, bias, self.dtype, self.device)
