"""The decoder, written once over `Ops`: every family is settings of it.

This file knows layers, their weights and their order, not devices and kernels (the operations'
business), pages, requests or files. Plain objects instead of torch modules, whose call overhead shows at
one token a step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ramify.gpu.models.definition import (
    AttentionSettings,
    Definition,
    ExpertSettings,
    FeedForwardSettings,
    FixedSettings,
    LatentSettings,
    LayerSettings,
    TensorNames,
)
from ramify.gpu.models.experts import Experts, ExpertsBeside, empty_beside, empty_experts
from ramify.gpu.models.feed_forward import FeedForward, Product, empty_feed_forward, product
from ramify.gpu.models.latent import Latent, empty_latent
from ramify.gpu.models.recurrent import Maker, Recurrent
from ramify.gpu.models.token_inputs import TokenGate, table_product, table_views
from ramify.gpu.ops.base import (
    AnyStream,
    LayerAttention,
    Ops,
    Projection,
    ShownPictures,
    TokenInputTables,
)
from ramify.gpu.ops.linear.base import Linear, Use, blocks, empty_linear, plain
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.rotary import RopeSettings, Rotary, heads_in_order
from ramify.gpu.step.inputs import StepInputs
from ramify.protocol.errors import ModelError

EMBEDDING = "model.embed_tokens.weight"  # as checkpoints call it
_LEAST_DIVISOR = 1e-16  # of the stream: eps over its square stays a float32


@dataclass(slots=True)
class Attention:
    """A mixer: attention to the positions before.

    `beside`: another mixer, which reads the same input; its output follows that of the heads.
    """

    norm: RMSNorm | None  # of its input
    qkv: Linear  # rows: q heads, k heads, v heads
    heads: LayerAttention
    output: Linear
    post_norm: RMSNorm | None  # of the term that is added to the residual
    beside: Recurrent | None = None

    def forward(self, x: AnyStream, ops: Ops[AnyStream], step: StepInputs[Tensor]) -> Projection:
        rows = ops.attend(ops.linear(x, self.qkv), self.heads, step)
        if self.beside is not None:
            rows = torch.cat((rows, self.beside.mixed(x, ops, step)), -1)
        return ops.project(rows, self.output)

    def products(self, prefix: str, names: TensorNames) -> Iterator[Product]:
        """List the products of the layer `prefix`."""
        heads = self.heads
        own, kv = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
        parts = names.qkv if len(names.qkv) == 1 else names.qkv[: 1 + heads.kv_parts]
        sizes = [own * (1 + heads.gated), kv, kv][: 1 + heads.kv_parts]
        yield product(self.qkv, f"{prefix}.self_attn", parts, sizes)
        output = f"{prefix}.self_attn.{names.output}"
        if self.beside is None:
            yield self.output, [output], []
        else:
            first, (_, (last,), _) = self.beside.products(prefix, names)
            yield first
            yield self.output, [output, last], [own, self.beside.layer.width]

    def views(self, prefix: str, names: TensorNames) -> dict[str, Tensor]:
        """Map names to the tensors that the loader fills, other than products and norms."""
        found = {} if self.beside is None else self.beside.views(prefix, names)
        sinks = self.heads.spec.sinks
        return found if sinks is None else found | {f"{prefix}.self_attn.sinks": sinks}

    def norms(self, prefix: str, names: TensorNames) -> Iterator[tuple[str, RMSNorm]]:
        """List the norms of q and k by name; those before and after the mixer are the layer's."""
        for name, norm in zip(names.qk_norms, (self.heads.q_norm, self.heads.k_norm), strict=True):
            if norm is not None:
                yield f"{prefix}.self_attn.{name}", norm


@dataclass(slots=True)
class DecoderLayer:
    """One block: a mixer and a feed-forward, each between norms and added to the residual."""

    mixer: Attention | Latent | Recurrent
    feed_forward: FeedForward | Experts | ExpertsBeside | None
    gate: TokenGate | None = None
    scalar: Tensor | None = None  # [1]: the factor of the stream after the layer

    def products(self, prefix: str, names: TensorNames) -> Iterator[Product]:
        """List the products of the layer `prefix`."""
        yield from self.mixer.products(prefix, names)
        if self.feed_forward is not None:
            yield from self.feed_forward.products(prefix, names)
        if self.gate is not None:
            yield from self.gate.products(prefix)

    def norms(self, prefix: str, names: TensorNames) -> Iterator[tuple[str, RMSNorm]]:
        """List the norms by name."""
        mixer, feed_forward = self.mixer, self.feed_forward
        parts = (mixer,) if feed_forward is None else (mixer, feed_forward)
        for part, before, after in zip(parts, names.before, names.after, strict=False):
            for name, norm in ((before, part.norm), (after, part.post_norm)):
                if norm is not None:
                    yield f"{prefix}.{name}", norm
        if not isinstance(mixer, Recurrent):
            yield from mixer.norms(prefix, names)
        if self.gate is not None:
            yield self.gate.named_norm(prefix)

    def divide_stream(self, by: float) -> None:
        """Adapt to a stream that is kept divided by `by`: norms see that in eps alone."""
        parts = [self.mixer] if self.feed_forward is None else [self.mixer, self.feed_forward]
        before = [part.norm for part in parts]
        if isinstance(self.feed_forward, ExpertsBeside):
            before += self.feed_forward.readers
        for norm in before:
            if norm is not None:
                norm.eps /= by * by
        after = [part.post_norm for part in parts]
        if self.gate is not None:
            after.append(self.gate.norm)
            self.gate.scale = by
        for norm in after:
            if norm is not None:
                norm.weight /= by


def _rows_in_order(mixer: AttentionSettings, heads: LayerAttention) -> Tensor | None:
    """Compute which row of a checkpoint's q, k and v each of ours is; None: they stay as they are.

    Heads whose halves rotate together; values; then the gate's, which follow those of q head by head.
    """
    order, dim = heads.rotary.order, mixer.head_dim
    if order is None and not mixer.gated:
        return None
    if order is None:
        order = torch.arange(dim)
    elif mixer.keys_are_values:
        raise ModelError("keys that are values cannot be brought into another order")
    queries = torch.arange(mixer.heads)[:, None] * dim * (1 + mixer.gated)
    first = mixer.width * (1 + mixer.gated)
    keys = first + heads_in_order(order, mixer.kv_heads if heads.kv_parts else 0)
    values = first + len(keys) + torch.arange(mixer.kv_width if heads.kv_parts == 2 else 0)
    gates = (queries + dim + torch.arange(dim)).flatten() if mixer.gated else queries[:0].flatten()
    return torch.cat(((queries + order).flatten(), keys, values, gates))


class Decoder:
    """Weights and forward pass. Built empty: the loader fills `weights`, then calls `complete`."""

    def __init__(
        self, config: Definition, context: int, dtype: torch.dtype, device: torch.device,
        late: bool = False,
    ) -> None:  # fmt: skip
        """`late`: layers' products have no memory before `Linear.allocate` is called."""
        self.config, self._late = config, late
        self.context = context  # positions that it knows the angles of
        self.dtype, self.device = dtype, device
        self._rotaries: list[tuple[RopeSettings | None, int, Rotary]] = []
        first, last = config.head_lines or (0, config.vocab_size)
        self.embedding = self._empty(0 if first else config.vocab_size, config.hidden_size)
        scale, rounds = config.embedding_scale, config.embedding_scale_rounded
        self._embedding_scale = float(torch.tensor(scale, dtype=dtype)) if rounds else scale
        self._kv_places, self._state_places = config.kv_places(), config.state_places()
        self._maker = Maker(config.hidden_size, config.rms_eps, dtype, device)
        self.layers = [self._empty_layer(*numbered) for numbered in enumerate(config.layers)]
        self.norm = self._empty_norm(config.hidden_size, config.logit_scale != 1.0)
        self.token_inputs = None if config.token_inputs is None else self._empty_tables()
        apart = not config.tied or first
        head = self._empty(last - first, config.hidden_size) if apart else self.embedding[:last]
        self.head, self.table = plain(head, use="logits"), plain(self.embedding)  # the CPU's kernels'
        self._head_name = EMBEDDING if config.tied else "lm_head.weight"

    @property
    def rotaries(self) -> list[Rotary]:
        """The rotary embeddings that layers use."""
        return [rotary for _, _, rotary in self._rotaries]

    @torch.inference_mode()
    def forward(
        self, step: StepInputs[Tensor], ops: Ops[AnyStream], layers: Iterable[int] | None = None,
        given: AnyStream | None = None, shown: ShownPictures | None = None,
    ) -> AnyStream:  # fmt: skip
        """Run the step, store its keys and values. Returns the stream after the last norm.

        `layers`: only these, to load their kernels; the result is garbage. `given`: in place of the
        embedding. `shown`: in its place for some tokens.
        """
        ops.begin(step)
        norm, scale = self.layers[0].mixer.norm, self._embedding_scale
        x = ops.embed(step, self.embedding, scale, norm) if given is None else given
        if shown is not None:
            x = shown.embedded(x, norm, ops)
        tables = self.token_inputs
        inputs = None if tables is None else ops.token_inputs(x, step, tables)
        for index in range(len(self.layers)) if layers is None else layers:
            layer = self.layers[index]
            mixer, feed_forward, gate = layer.mixer, layer.feed_forward, layer.gate
            last = index + 1 == len(self.layers)
            following = self.norm if last else self.layers[index + 1].mixer.norm
            mixed = ops.reduce(mixer.forward(x, ops, step))
            if feed_forward is None:
                x = ops.add_norm(x, mixed, following, mixer.post_norm)
                continue
            x = ops.add_norm(x, mixed, feed_forward.norm, mixer.post_norm)
            fed = ops.reduce(feed_forward.forward(x, ops))
            if shown is not None:
                shown.deepen(x, index)
            if gate is not None and inputs is not None:
                x = ops.add_norm(x, fed, None, feed_forward.post_norm)
                through = ops.reduce(gate.forward(x, inputs[:, index], ops))
                x = ops.add_norm(x, through, following, gate.norm)
            else:
                x = ops.add_norm(x, fed, following, feed_forward.post_norm)
        return x

    @torch.inference_mode()
    def logits(
        self, x: AnyStream, lines: Tensor | None, ops: Ops[AnyStream], output: Tensor | None = None
    ) -> Tensor:
        """Compute logits [S, vocabulary] of `lines` int[S] of `forward`'s result, None: of all.

        They are written to `output` if it is given.
        """
        return ops.head(x, lines, self.head, self.config.logit_softcap, output)

    def unlike_layers(self) -> list[int]:
        """List layers that together launch every kernel that any layer does.

        The first layer's input is normalised already; else layers differ by their attention.
        """
        unlike: dict[object, int] = {}
        for index, layer in enumerate(self.config.layers):
            mixer, following = layer.mixer, self.config.layers[index + 1 : index + 2]
            if layer.fixed is not None or not isinstance(mixer, AttentionSettings):
                unlike[str((mixer, layer.beside, layer.feed_forward, layer.norms, index == 0))] = index
                continue
            spec, own = mixer.spec, mixer.kv_of is None
            attention = (spec.window, spec.softcap, spec.sinks is None, mixer.qk_norm, own)
            sizes = (mixer.heads, mixer.kv_heads, mixer.head_dim)
            norms = (layer.norms, [each.norms for each in following])
            unlike[str((attention, sizes, norms, layer.feed_forward, index == 0))] = index
        return sorted(unlike.values())

    def complete(self) -> None:
        """Bring loaded weights into the form in which they are used. Call it once."""
        names = self.config.names
        for layer in self.layers:
            if not isinstance(layer.mixer, Attention):
                continue
            heads = layer.mixer.heads
            for norm in (heads.q_norm, heads.k_norm):
                if norm is not None and heads.rotary.order is not None:
                    order = heads_in_order(heads.rotary.order, len(norm.weight) // heads.head_dim)
                    norm.weight.copy_(norm.weight[order.to(self.device)])
        if self.config.norm_offset:
            inside = [norm for layer in self.layers for _, norm in layer.norms("", names)]
            for norm in (self.norm, *inside):
                norm.weight += self.config.norm_offset
        if self.config.logit_scale != 1.0:
            self.norm.weight *= self.config.logit_scale
        if self.config.layer_scalars:
            self._divide_streams()

    def _divide_streams(self) -> None:
        """Keep the stream divided by all scalars so far, instead of multiplying it after each layer."""
        divided = 1.0
        for index, layer in enumerate(self.layers):
            layer.divide_stream(divided)
            assert layer.scalar is not None
            divided *= float(layer.scalar)
            if not _LEAST_DIVISOR < abs(divided) < 1 / _LEAST_DIVISOR:
                raise ModelError(
                    f"model.layers.{index}.layer_scalar is {float(layer.scalar)}, and those so far make "
                    f"{divided:.3g}: the checkpoint is damaged"
                )
        self.norm.eps /= divided * divided

    def weights(self) -> dict[str, Tensor]:
        """Map names in checkpoints to the tensors that the loader fills.

        Raises TypeError once products have another form than the plain one.
        """
        called = self.config.names
        views = {EMBEDDING: self.embedding, f"model.{called.last_norm}.weight": self.norm.weight}
        if not self.config.tied or not len(self.embedding):
            views[self._head_name] = self.head.tensor
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            views |= {f"{name}.weight": norm.weight for name, norm in layer.norms(prefix, called)}
            views |= layer.mixer.views(prefix, called)
            if isinstance(layer.feed_forward, Experts | ExpertsBeside):
                views |= layer.feed_forward.views(prefix, called)
            if layer.scalar is not None:
                views[f"{prefix}.layer_scalar"] = layer.scalar
            for linear, names, sizes in layer.products(prefix, called):
                views |= blocks(linear, names, sizes or [len(linear.tensor)])
        if self.token_inputs is not None:
            linear, names = table_product(self.token_inputs)
            views |= table_views(self.token_inputs) | blocks(linear, names, [len(linear.tensor)])
        return views

    def products(self) -> Iterator[tuple[Linear, list[str]]]:
        """List the products, each with the names of its tensors among `weights`."""
        for index, layer in enumerate(self.layers):
            for linear, names, _ in layer.products(f"model.layers.{index}", self.config.names):
                kinds = ["weight"] if linear.bias is None else ["weight", "bias"]
                yield linear, [f"{name}.{kind}" for kind in kinds for name in names]
        if self.token_inputs is not None:
            linear, (name,) = table_product(self.token_inputs)
            yield linear, [f"{name}.weight"]
        yield self.head, [self._head_name]

    def parameters(self) -> int:
        """Count the weights, a tied one once."""
        return sum(view.numel() for view in self.weights().values())

    def _empty_layer(self, index: int, settings: LayerSettings) -> DecoderLayer:
        before, after = settings.norms != "after", settings.norms != "before"
        layer = DecoderLayer(
            self._empty_mixer(index, settings, before, after),
            self._empty_feed_forward(settings.feed_forward, before, after),
            self._empty_gate(),
            torch.ones(1, device=self.device) if self.config.layer_scalars else None,
        )
        for linear, _, _ in layer.products("", self.config.names) if self._late else ():
            linear.release()
        return layer

    def _empty_feed_forward(
        self, own: FeedForwardSettings | None, before: bool, after: bool
    ) -> FeedForward | Experts | ExpertsBeside | None:
        """Make the layer's part. `before`, `after`: the norms around it."""
        if own is None:
            return None
        hidden = self.config.hidden_size
        if isinstance(own, ExpertSettings) and own.beside is not None:
            norms = partial(self._empty_norm, hidden)
            return empty_beside(own, own.beside, hidden, norms, self.dtype, self.device)
        norm = self._empty_norm(hidden) if before else None
        post = self._empty_norm(hidden) if after else None
        if isinstance(own, ExpertSettings):
            return empty_experts(own, hidden, norm, post, self.dtype, self.device)
        return empty_feed_forward(own, hidden, norm, post, self.dtype, self.device)

    def _empty_mixer(
        self, index: int, settings: LayerSettings, before: bool, after: bool
    ) -> Attention | Latent | Recurrent:
        """Make the layer's part. `before`, `after`: the norms around it."""
        hidden, mixer = self.config.hidden_size, settings.mixer
        norm = self._empty_norm(hidden) if before else None
        post = self._empty_norm(hidden) if after else None
        maker, place = self._maker, self._kv_places[index]
        if isinstance(mixer, FixedSettings):
            return maker.made(place, mixer, norm, post)
        if isinstance(mixer, LatentSettings):
            rotary = self._rotary(mixer.rope, mixer.turned)
            return empty_latent(place, mixer, rotary, hidden, norm, post, self.dtype, self.device)
        heads = self._empty_attention(index, mixer)
        width = mixer.width * (1 + mixer.gated) + heads.kv_parts * mixer.kv_width
        qkv = self._empty_linear(hidden, width, mixer.qkv_bias)
        qkv.order = _rows_in_order(mixer, heads)
        width, beside = mixer.width, None
        if settings.beside is not None:
            beside = maker.made(self._state_places[index], settings.beside, None, None)
            width += beside.layer.width
        output = self._empty_linear(width, hidden, mixer.output_bias)
        output.beside = beside is not None
        return Attention(norm, qkv, heads, output, post, beside)

    def _empty_gate(self) -> TokenGate | None:
        given, hidden = self.config.token_inputs, self.config.hidden_size
        if given is None:
            return None
        return TokenGate(
            self._empty_linear(hidden, given.size, False),
            self._empty_linear(given.size, hidden, False),
            self._empty_norm(hidden),
            given.activation,
        )

    def _empty_tables(self) -> TokenInputTables:
        given, hidden = self.config.token_inputs, self.config.hidden_size
        assert given is not None
        width = len(self.config.layers) * given.size
        scale = given.size**0.5
        if self.config.embedding_scale_rounded:
            scale = float(torch.tensor(scale, dtype=self.dtype))
        return TokenInputTables(
            self._empty(given.vocab_size, width), scale, self._empty_linear(hidden, width, False),
            hidden**-0.5, self._empty_norm(given.size),
        )  # fmt: skip

    def _empty_attention(self, index: int, mixer: AttentionSettings) -> LayerAttention:
        sizes = {None: (0, 0), "head": (mixer.head_dim,) * 2, "width": (mixer.width, mixer.kv_width)}
        q_norm, k_norm = (self._empty_norm(n) if n else None for n in sizes[mixer.qk_norm])
        stores, spec = mixer.kv_of is None, mixer.spec
        if spec.sinks is not None:
            spec = replace(spec, sinks=torch.empty(mixer.heads, device=self.device))
        return LayerAttention(
            index=self._kv_places[index],
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            spec=spec,
            rotary=self._rotary(mixer.rope, mixer.head_dim),
            q_norm=q_norm,
            k_norm=k_norm if stores else None,
            value_eps=self.config.rms_eps if mixer.value_norm else None,
            gated=mixer.gated,
            kv_parts=0 if not stores else 1 if mixer.keys_are_values else 2,
        )

    def _rotary(self, rope: RopeSettings | None, dim: int) -> Rotary:
        """Find or make the rotary embedding, one for all layers with the same settings."""
        for known, size, rotary in self._rotaries:
            if (known, size) == (rope, dim):
                return rotary
        rotary = Rotary(rope, dim, self.context, self.device)
        self._rotaries.append((rope, dim, rotary))
        return rotary

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _empty_norm(self, size: int, changed: bool = False) -> RMSNorm:
        # changes of a weight would be rounded away in half precision
        changed = changed or bool(self.config.norm_offset) or self.config.layer_scalars
        dtype = torch.float32 if changed else self.dtype
        weight = torch.empty(size, dtype=dtype, device=self.device)
        return RMSNorm(weight, self.config.rms_eps)

    def _empty_linear(self, inputs: int, outputs: int, bias: bool, use: Use = "rows") -> Linear:
        return empty_linear(inputs, outputs, bias, self.dtype, self.device, use)
