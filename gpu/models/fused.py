"""The decoder's forward pass on Triton kernels: the same weights and mathematics as `decoder`.

All its inputs are device tensors of fixed meaning, and it never waits or asks the device, so a
CUDA graph can hold a whole pass. Knows pages through the page table's tensor alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ramify.gpu.attention.base import PagedAttention
from ramify.gpu.kv.pool import KVPool
from ramify.gpu.models.decoder import Decoder, DecoderLayer
from ramify.gpu.ops.gluon_check import gluon_works
from ramify.gpu.ops.programmatic_launch import overlaps
from ramify.gpu.ops.tilings import LayerSizes, LayerTilings, tilings_for
from ramify.gpu.ops.triton_layer import divide_rows, embed_norm, rope_store
from ramify.gpu.ops.triton_linear import Products, Rows
from ramify.gpu.step.inputs import StepInputs


class FusedDecoder:
    """Runs `model` over `pool`; `pages` int32[rows, columns] is the page table on the device.

    `last` int32[rows]: the token that each row sampled last. `tilings`: which of the `products` run
    on which kernel, by the number of tokens and the model's sizes.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        pages: Tensor,
        last: Tensor,
        attention: PagedAttention,
        products: Products,
        tilings: Callable[[int, LayerSizes], LayerTilings] = tilings_for,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._pages = pages
        self._last = last
        self._products = products
        self._tilings = tilings
        self._sizes = _sizes(model, products)
        # the first layer's input is a normalised one; else layers differ by their windows
        unlike = {(window, index == 0): index for index, window in enumerate(model.config.windows)}
        self._unlike = sorted(unlike.values())
        half = model.config.head_dim // 2
        positions = torch.arange(pages.shape[1] * pool.page_size, device=model.device)
        cos, signed_sin = model.rotary.angles(positions, torch.float32)
        self._cos_sin = cos[:, 0, :half].contiguous(), signed_sin[:, 0, half:].contiguous()

    @torch.inference_mode()
    def forward(self, inputs: StepInputs[Tensor], logits: Tensor, abridged: bool = False) -> Rows:
        """Run the step, write its KV, and its logits to `logits` [S, vocabulary].

        `abridged`: only layers that launch different kernels, to load those; garbage comes out.
        Returns the last norm's rows [T, hidden], for `logits_of`.
        """
        model, eps = self._model, self._model.config.rms_eps
        layers, products = model.layers, self._products
        tilings = self._tilings(len(inputs.input_ids), self._sizes)
        residual, normed = embed_norm(
            inputs.input_ids, self._last, model.embedding, layers[0].input_norm.weight, eps
        )
        x = Rows(normed)
        for index in self._unlike if abridged else range(len(layers)):
            layer = layers[index]
            qkv = products.plain(x, layer.qkv, eps, tilings.qkv)
            mixed = self._attend(index, layer, qkv, inputs)
            x = products.add(mixed, layer.output, residual, layer.post_norm, tilings.output)
            activated = products.gated(x, layer.mlp.gate_up, eps, tilings.gate_up)
            following = model.norm if layer is layers[-1] else layers[index + 1].input_norm
            x = products.add(activated, layer.mlp.down, residual, following, tilings.down)
        if len(logits):
            self.logits_of(x, inputs.sampled_lines, logits)
        return x

    @torch.inference_mode()
    def logits_of(self, x: Rows, lines: Tensor | None, logits: Tensor) -> None:
        """Write the logits of `lines` int[S] (None: of all) of what `forward` returned."""
        if x.squares is not None:
            final = divide_rows(x.values, x.squares, lines, self._model.config.rms_eps)
        elif lines is not None:
            final = x.values.index_select(0, lines)
        else:
            final = x.values
        self._products.head(final, self._model.head, logits)

    def no_rows(self, lines: int) -> Rows:
        """What `forward` may return for so many lines, without their content."""
        return Rows(self._model.embedding.new_zeros((lines, self._model.config.hidden_size)))

    def _attend(
        self, index: int, layer: DecoderLayer, qkv: Tensor, inputs: StepInputs[Tensor]
    ) -> Tensor:
        """[T, (heads + 2 kv_heads) * D] -> [T, heads * D]."""
        config, pool = self._model.config, self._pool.layers[index]
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm.weight, layer.k_norm.weight
        q = rope_store(
            qkv, norms, config.rms_eps, self._cos_sin, inputs.rows, inputs.positions,
            self._pages, self._pool.page_size, pool, config.heads,
        )  # fmt: skip
        return self._attention.attend(q, pool, inputs, config.windows[index])


def _sizes(model: Decoder, products: Products) -> LayerSizes:
    config = model.config
    tried = products.follows_tilings and model.dtype == torch.bfloat16  # else no ring is chosen
    return LayerSizes(
        hidden=config.hidden_size,
        attention=config.attention_width,
        qkv=config.attention_width + 2 * config.kv_width,
        intermediate=config.intermediate_size,
        dtype=model.dtype,
        overlaps=overlaps(model.device),
        gluon=tried and gluon_works(model.device),
    )
