"""The Llama-like decoder: Llama, Mistral, Qwen2 and Qwen3 are settings of it.

Knows layers and shapes; it does not know pages (the attention back end's business), requests or
files. Plain objects instead of torch modules: at one token a step their call overhead shows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.attention.torch_attention import TorchAttention
from ramify.gpu.models.config import DecoderConfig
from ramify.gpu.ops.linear import Linear, blocks, empty_linear
from ramify.gpu.ops.mlp import GatedMLP
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.rotary import Rotary
from ramify.gpu.step.batch import Batch


@dataclass(slots=True)
class DecoderLayer:
    """One block: attention and feed-forward, each behind a norm and added to the residual."""

    input_norm: RMSNorm
    qkv: Linear  # rows: q heads, k heads, v heads
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: Linear
    post_norm: RMSNorm
    mlp: GatedMLP


class Decoder:
    """Weights and forward pass. Built empty: the loader fills what `weights` names."""

    def __init__(
        self, config: DecoderConfig, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.rotary = Rotary(config.rope, config.head_dim, context, device)
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._empty_layer() for _ in range(config.layers)]
        self.norm = self._empty_norm(config.hidden_size)
        self.head = Linear(
            self.embedding if config.tied else self._empty(config.vocab_size, config.hidden_size)
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: TorchAttention) -> Tensor:
        """Run the batch, write its KV. Returns the last layer's output [T, hidden]; see `logits`."""
        config = self.config
        heads, rotated = config.heads, config.heads + config.kv_heads
        cos, sin = self.rotary.angles(batch.positions, self.dtype)
        residual = F.embedding(batch.tokens, self.embedding)  # [T, hidden]
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.input_norm(residual))
            qkv = qkv.view(-1, rotated + config.kv_heads, config.head_dim)
            qk = qkv[:, :rotated]
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = torch.cat((layer.q_norm(qkv[:, :heads]), layer.k_norm(qkv[:, heads:rotated])), 1)
            qk = self.rotary.rotate(qk, cos, sin)
            mixed = attention.attend(index, qk[:, :heads], qk[:, heads:], qkv[:, rotated:])
            residual = residual.add_(layer.output(mixed))
            residual = residual.add_(layer.mlp(layer.post_norm(residual)))
        return residual

    @torch.inference_mode()
    def logits(self, hidden: Tensor, lines: Tensor | None) -> Tensor:
        """float32[L, vocabulary] of `lines` int64[L] of what `forward` returned; None: of all."""
        wanted = hidden if lines is None else hidden.index_select(0, lines)
        logits: Tensor = self.head(self.norm(wanted)).float()
        return logits

    def pack(self) -> None:
        """Lay the loaded weights out for speed. `weights` cannot be called any more."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
                linear.pack()
        self.head.pack()  # a copy if it is tied: the embedding is looked up row by row

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
        views = {
            f"{prefix}.input_layernorm.weight": layer.input_norm.weight,
            f"{prefix}.post_attention_layernorm.weight": layer.post_norm.weight,
        }
        qkv_sizes = (config.attention_width, config.kv_width, config.kv_width)
        views |= blocks(layer.qkv, [f"{attention}.{part}_proj" for part in "qkv"], qkv_sizes)
        views |= blocks(layer.output, [f"{attention}.o_proj"], [config.hidden_size])
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        views |= blocks(layer.mlp.gate_up, gate_up, [config.intermediate_size] * 2)
        views |= blocks(layer.mlp.down, [f"{mlp}.down_proj"], [config.hidden_size])
        if layer.q_norm is not None and layer.k_norm is not None:
            views[f"{attention}.q_norm.weight"] = layer.q_norm.weight
            views[f"{attention}.k_norm.weight"] = layer.k_norm.weight
        return views

    def _empty_layer(self) -> DecoderLayer:
        config = self.config
        hidden, wide = config.hidden_size, config.intermediate_size
        width, kv = config.attention_width, config.kv_width
        return DecoderLayer(
            input_norm=self._empty_norm(hidden),
            qkv=self._empty_linear(hidden, width + 2 * kv, config.qkv_bias),
            q_norm=self._empty_norm(config.head_dim) if config.qk_norm else None,
            k_norm=self._empty_norm(config.head_dim) if config.qk_norm else None,
            output=self._empty_linear(width, hidden, config.output_bias),
            post_norm=self._empty_norm(hidden),
            mlp=GatedMLP(
                gate_up=self._empty_linear(hidden, 2 * wide, config.mlp_bias),
                down=self._empty_linear(wide, hidden, config.mlp_bias),
            ),
        )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _empty_norm(self, size: int) -> RMSNorm:
        return RMSNorm(self._empty(size), self.config.rms_eps)

    def _empty_linear(self, inputs: int, outputs: int, bias: bool) -> Linear:
        return empty_linear(inputs, outputs, bias, self.dtype, self.device)
