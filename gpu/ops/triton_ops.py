"""The operations on Triton kernels: the mathematics of `torch_ops`, in as few launches as pay.

All inputs are device tensors, and nothing waits for the device, so a CUDA graph can hold a whole step.
An RMS norm may be left half done (`LazyStream`): the next product completes it. This file knows pages
through the page table's tensor alone, and no families.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.attention.triton_expanded import TritonLatent
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.ops import triton_delta, triton_mamba
from ramify.gpu.ops.base import (
    Activation,
    LayerAttention,
    LayerLatent,
    Projection,
    ResidualStream,
    TokenInputTables,
)
from ramify.gpu.ops.experts import LayerExperts, opened
from ramify.gpu.ops.fixed_states import CHUNK, LayerConv, LayerDelta, LayerMamba, LayerState
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.rotary import Rotary
from ramify.gpu.ops.tilings import LayerSizes, OpTilings, split, tilings_for
from ramify.gpu.ops.torch_ops import token_inputs
from ramify.gpu.ops.triton_conv import short_conv
from ramify.gpu.ops.triton_experts import MOST_FEW, ExpertRoutes, route_tokens
from ramify.gpu.ops.triton_experts_few import open_few, sum_few
from ramify.gpu.ops.triton_experts_many import run_many
from ramify.gpu.ops.triton_experts_together import open_together, together
from ramify.gpu.ops.triton_four_codes import packing
from ramify.gpu.ops.triton_latent import absorb, open_latents, store_latents
from ramify.gpu.ops.triton_layer import add_norm, divide_rows, embed_norm, open_heads, rope_store
from ramify.gpu.ops.triton_linear import Products, UnscaledRows
from ramify.gpu.step.inputs import StepInputs
from ramify.gpu.vision.placing import MOVED_TURNS

# Of mixers that keep matrices: token by token, in chunks, and the gate of their outputs
_STATES: dict[type, tuple[Callable[..., None], ...]] = {
    LayerDelta: (triton_delta.recurrent, triton_delta.chunked, triton_delta.gated_norm),
    LayerMamba: (triton_mamba.recurrent, triton_mamba.chunked, triton_mamba.gated_norm),
}


@dataclass(slots=True)
class LazyStream(ResidualStream):
    """A stream whose norm may be half done: then `squares` float32[T, parts] is given.

    `normed` is then the residual times the norm's weight, its rows still to be divided by their root
    mean square: `squares` adds up to the sum of squares of each row of the residual.
    """

    squares: Tensor | None
    eps: float
    tilings: OpTilings  # of the step's products

    @property
    def rows(self) -> UnscaledRows:
        """The rows as a product reads them."""
        return UnscaledRows(self.normed, self.squares)


@dataclass(slots=True)
class OpenedExperts(Projection):
    """A term of experts whose sum is still to be made. `rows`: a few tokens' activations of experts."""

    layer: LayerExperts
    routes: ExpertRoutes


class TritonOps:
    """Operations on Triton over `pool`; `pages` int32[rows, columns] is the page table on the device,
    `windows` that of window pages.

    `last` int32[rows]: the token that each row sampled last. `rotaries`: all of the model's.
    `tilings`: on which kernel each of the `products` runs, by the number of tokens and the sizes.
    """

    def __init__(
        self,
        pool: KVPool,
        pages: Tensor,
        last: Tensor,
        attention: AttentionBackend,
        products: Products,
        sizes: LayerSizes,
        rotaries: Iterable[Rotary],
        tilings: Callable[[int, LayerSizes], OpTilings] = tilings_for,
        windows: Tensor | None = None,
    ) -> None:
        self._pool = pool
        self._pages, self._windows = pages, pages if windows is None else windows
        self._last = last
        self._attention = attention
        self._products = products
        self._sizes = sizes
        self._tilings = tilings
        self._grown: dict[tuple[float, int], Tensor] = {}  # of the step's queries
        positions = torch.arange(pages.shape[1] * pool.page_size, device=pages.device)
        self._cos_sin = {rotary: rotary.table(positions) for rotary in rotaries}

    def begin(self, step: StepInputs[Tensor]) -> None:
        self._grown.clear()

    @torch.inference_mode()
    def blank(self, lines: int) -> LazyStream:
        """Make a stream of so many lines, not initialised, to warm `head` with."""
        shape, device = (lines, self._sizes.hidden), self._pages.device
        nothing = torch.zeros(shape, dtype=self._sizes.dtype, device=device)
        return LazyStream(nothing, nothing, None, 0.0, OpTilings())

    def embed(
        self, step: StepInputs[Tensor], table: Tensor, scale: float, norm: RMSNorm | None
    ) -> LazyStream:
        ids = step.input_ids
        tilings = self._tilings(len(ids), self._sizes)
        residual, normed = embed_norm(ids, self._last, table, scale, norm)
        return LazyStream(residual, normed, None, 0.0 if norm is None else norm.eps, tilings)

    def stream(self, residual: Tensor, norm: RMSNorm | None) -> LazyStream:
        normed = residual if norm is None else add_norm(None, residual, norm)
        tilings = self._tilings(len(residual), self._sizes)
        return LazyStream(residual, normed, None, 0.0 if norm is None else norm.eps, tilings)

    def whole(self, x: LazyStream) -> Tensor:
        return x.normed if x.squares is None else divide_rows(x.normed, x.squares, None, x.eps)

    def linear(self, x: LazyStream, linear: Linear) -> Tensor:
        return self._products.plain(x.rows, linear, x.eps, x.tilings.linear)

    def attend(self, qkv: Tensor, layer: LayerAttention, step: StepInputs[Tensor]) -> Tensor:
        kv = self._pool.layers[layer.index]
        pages = self._windows if kv.windowed else self._pages
        q = rope_store(
            qkv, layer, self._cos_sin[layer.rotary], step.rows, step.positions, pages, kv,
            step.plan.get(MOVED_TURNS),
        )  # fmt: skip
        output = self._attention.attend(q, kv, step, layer.spec)
        return open_heads(output, qkv) if layer.gated else output

    def attend_latent(self, rows: Tensor, layer: LayerLatent, step: StepInputs[Tensor]) -> Tensor:
        heads, kv = layer.heads, self._pool.layers[layer.index]
        invariant = not self._products.follows_tilings
        kept = rows[:, rows.shape[1] - heads.rank - kv.tail :]
        queries = rows[:, : rows.shape[1] - heads.rank - kv.tail]
        if layer.q_norm is not None and layer.q_up is not None:
            queries = add_norm(None, queries.contiguous(), layer.q_norm)
            queries = self._products.library(queries, layer.q_up)
        growth = self._grown.get(layer.query_growth or (0.0, 1))
        if growth is None and layer.query_growth is not None:
            growth = self._grown[layer.query_growth] = layer.growth(step.positions)
        output = rows.new_empty((len(rows), len(heads.up) * heads.value))
        lines = [slice(0, len(rows))]
        expands = isinstance(self._attention, TritonLatent) and step.extended > 0
        q = store_latents(
            queries, kept, heads, layer.norm, self._cos_sin[layer.rotary], step.rows, step.positions,
            self._pages, kv, growth, None if expands else invariant,
        )  # fmt: skip
        if isinstance(self._attention, TritonLatent) and expands:
            lines = self._attention.absorbed(step, len(rows))
            self._attention.attend_expanded(queries, q, kv, heads, growth, step, output)
        for part in lines if expands else []:
            absorb(queries[part], heads, q[part], None if growth is None else growth[part], invariant)
        if lines:
            mixed = self._attention.attend(q, kv, step, heads.spec)
            for part in lines:
                open_latents(mixed[part], heads, invariant, output[part])
        return output

    def recur(self, rows: Tensor, layer: LayerState, step: StepInputs[Tensor]) -> Tensor:
        assert self._pool.states is not None
        states, plan = self._pool.states.layers[layer.index], step.plan
        invariant = not self._products.follows_tilings
        if isinstance(layer, LayerDelta) and layer.ups is not None:
            rows = layer.widened(rows, self._products.library)
        output = rows.new_empty((len(rows), layer.width))
        decodes, lines = plan["state_decodes"], plan["state_lines"]
        chunks = plan.get("state_chunks")
        few = CHUNK if invariant else 1
        if isinstance(layer, LayerConv):
            short_conv(rows, layer, states[0], lines, few, output)
            if chunks is not None:
                short_conv(rows, layer, states[0], chunks, CHUNK, output)
            return output
        recurrent, chunked, gated_norm = _STATES[type(layer)]
        recurrent(rows, layer, states, decodes, output)
        gated_norm(rows, layer, lines, few, output)
        if chunks is not None:
            extends = plan["state_extends"]
            if invariant:
                recurrent(rows, layer, states, extends, output)
            else:
                chunked(rows, layer, states, extends, chunks, step.extended, output)
            gated_norm(rows, layer, chunks, CHUNK, output)
        return output

    def experts(self, x: LazyStream, layer: LayerExperts) -> Projection:
        products, rows, shared = self._products, x.rows, layer.shared
        packed = packing(layer.gate_up.weight, x.normed.dtype) > 0  # which are faster in tiles
        invariant, few = not products.follows_tilings, len(x.normed) <= (1 if packed else MOST_FEW)
        if x.squares is not None and not few:
            rows = UnscaledRows(divide_rows(x.normed, x.squares, None, x.eps))
        routed, norm = rows, layer.router_norm
        if norm is not None:
            routed = UnscaledRows(add_norm(None, x.residual, norm))
        tiling = split(x.tilings.linear, len(x.normed), layer.router.weight.shape)
        routes = route_tokens(products.plain(routed, layer.router, x.eps, tiling), layer)
        if few and not invariant:
            opened = open_together if together(layer, len(x.normed)) else open_few
            return OpenedExperts(opened(rows, x.eps, layer, routes), None, layer, routes)
        beside = None
        if shared is not None:
            if shared.activation == "relu2":
                own = products.plain(rows, shared.gate_up, x.eps, x.tilings.linear)
                own = own.relu_().square_()
            else:
                own = products.gated(rows, shared.gate_up, x.eps, x.tilings.gated, shared.activation)
            beside = products.library(own, shared.down)
        return Projection(run_many(rows.values, layer, routes, beside, invariant), None)

    def _result(self, projection: Projection) -> Tensor:
        """Compute a term: [T, hidden]."""
        if isinstance(projection, OpenedExperts):
            return sum_few(projection.rows, projection.layer, projection.routes)
        y, linear = projection.rows, projection.linear
        return y if linear is None else self._products.library(y, linear)

    def behind(self, x: LazyStream, norm: RMSNorm) -> LazyStream:
        return LazyStream(x.residual, add_norm(None, x.residual, norm), None, norm.eps, x.tilings)

    def joined(
        self, first: Projection, first_norm: RMSNorm, second: Projection, second_norm: RMSNorm
    ) -> Projection:
        one = add_norm(None, self._result(first), first_norm)
        other = add_norm(None, self._result(second), second_norm)
        return Projection(add_norm(one, other, None), None)

    def project(self, x: Tensor, linear: Linear) -> Projection:
        return Projection(x, linear)

    def reduce(self, projection: Projection) -> Projection:
        return projection

    def add_norm(
        self, x: LazyStream, projection: Projection, norm: RMSNorm | None, post: RMSNorm | None = None
    ) -> LazyStream:
        y, linear = projection.rows, projection.linear
        if linear is not None and post is None and norm is not None:
            rows = self._products.add(y, linear, x.residual, norm, x.tilings.add)
        else:
            added = self._result(projection)
            if post is not None:
                added = add_norm(None, added, post)
            rows = UnscaledRows(add_norm(added, x.residual, norm))
        eps = 0.0 if norm is None else norm.eps
        return LazyStream(x.residual, rows.values, rows.squares, eps, x.tilings)

    def gated(self, x: LazyStream, linear: Linear, activation: Activation) -> Tensor:
        return self._products.gated(x.rows, linear, x.eps, x.tilings.gated, activation)

    def squared(self, x: LazyStream, linear: Linear) -> Tensor:
        return self.linear(x, linear).relu_().square_()

    def token_inputs(self, x: LazyStream, step: StepInputs[Tensor], inputs: TokenInputTables) -> Tensor:
        rows = self._products.library(x.residual, inputs.product) * inputs.product_scale
        table, _ = embed_norm(step.input_ids, self._last, inputs.table, inputs.scale, None)
        return token_inputs(rows, table, inputs)

    def open_gate(
        self, x: LazyStream, linear: Linear, scale: float, given: Tensor, activation: Activation
    ) -> Tensor:
        return opened(self._products.library(x.residual, linear) * scale, activation).mul_(given)

    def head(
        self,
        x: LazyStream,
        lines: Tensor | None,
        linear: Linear,
        softcap: float | None,
        output: Tensor | None = None,
    ) -> Tensor:
        if x.squares is not None:
            final = divide_rows(x.normed, x.squares, lines, x.eps)
        elif lines is not None:
            final = x.normed.index_select(0, lines)
        else:
            final = x.normed
        if output is None:
            output = final.new_empty((len(final), linear.weight.shape[0]))
        self._products.head(final, linear, output)
        if softcap is not None:
            output.div_(softcap).tanh_().mul_(softcap)
        return output
