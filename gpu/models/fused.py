"""The decoder's forward pass on Triton kernels: the same weights and mathematics as `decoder`.

All its inputs are device tensors of fixed meaning, and it never waits or asks the device, so a
CUDA graph can hold a whole pass. Knows pages through the page table's tensor alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ramify.gpu.attention.paged import Inputs, PagedAttention
from ramify.gpu.kv_pool import KVPool
from ramify.gpu.layers.fused import add_norm, embed_norm, rope_store, silu_mul
from ramify.gpu.layers.linear import Linear
from ramify.gpu.models.decoder import Decoder, DecoderLayer

Product = Callable[[Linear, Tensor], Tensor]


class FusedDecoder:
    """Runs `model` over `pool`; `pages` int32[rows, columns] is the page table on the device.

    `last` int32[rows]: the token that each row sampled last. `product`: how a linear is applied.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        pages: Tensor,
        last: Tensor,
        attention: PagedAttention,
        product: Product = Linear.__call__,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._product = product
        self._pages = pages
        self._last = last
        half = model.config.head_dim // 2
        positions = torch.arange(pages.shape[1] * pool.page_size, device=model.device)
        cos, signed_sin = model.rotary.angles(positions, torch.float32)
        self._cos_sin = cos[:, 0, :half].contiguous(), signed_sin[:, 0, half:].contiguous()

    @torch.inference_mode()
    def forward(self, inputs: Inputs) -> Tensor:
        """Run the step, write its KV. Returns logits [S, vocabulary] in the model's type."""
        model, eps = self._model, self._model.config.rms_eps
        layers, product = model.layers, self._product
        residual, x = embed_norm(
            inputs.codes, self._last, model.embedding, layers[0].input_norm.weight, eps
        )
        for index, layer in enumerate(layers):
            mixed = product(layer.output, self._attend(index, layer, x, inputs))
            x = add_norm(mixed, residual, layer.post_norm.weight, eps)
            x = product(layer.mlp.down, silu_mul(product(layer.mlp.gate_up, x)))
            following = model.norm if layer is layers[-1] else layers[index + 1].input_norm
            x = add_norm(x, residual, following.weight, eps)
        if inputs.sampling is not None:
            x = x.index_select(0, inputs.sampling)
        return product(model.head, x)

    def _attend(self, index: int, layer: DecoderLayer, x: Tensor, inputs: Inputs) -> Tensor:
        """[T, hidden] -> [T, heads * D]."""
        config, pool = self._model.config, self._pool.layers[index]
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm.weight, layer.k_norm.weight
        qkv = self._product(layer.qkv, x)
        q = rope_store(
            qkv, norms, config.rms_eps, self._cos_sin, inputs.rows, inputs.positions, self._pages,
            self._pool.page_size, pool, config.heads,
        )  # fmt: skip
        return self._attention.attend(q, pool, inputs, config.windows[index])
