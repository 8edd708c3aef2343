"""A checkpoint's own layer of multi-token prediction (MTP; DeepSeek-V3, 2024, section 2.2).

It predicts the token after the next one. At a position it reads the embedding of the next token, and the
model's stream after its last norm: both are normalised, and a product of the two, in this order, goes
through one more layer of the model's kind and a norm. The head reads the result, which is also the
stream of the next position's guess. Embedding and head are the model's. Order and streams as in SGLang
0.4's `deepseek_nextn.py` and vLLM's `qwen3_next_mtp.py`, `deepseek_mtp.py`, `glm4_moe_mtp.py` (the
latter two go on from the stream before the last norm). This file knows neither rows nor drafters.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.definition import Definition, KeptSettings
from ramify.gpu.ops.base import AnyStream, StreamOps
from ramify.gpu.ops.linear.base import Linear, empty_linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.step.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class MtpNames:
    """A checkpoint's names of the tensors of such a layer. All begin with `prefix`."""

    prefix: str
    layer: str  # of the decoder layer within
    norm: str  # behind it
    embedding_norm: str
    hidden_norm: str
    product: str
    others: tuple[str, ...]  # of tensors that are the model's, once more


def mtp_names(shape: Definition) -> MtpNames | None:
    """Find the names of a family's layer; None: no such layer is known of it."""
    if "mtp." in shape.names.skipped:  # Qwen3-Next, Qwen3.5
        return MtpNames(
            "mtp.", "mtp.layers.0.", "mtp.norm.", "mtp.pre_fc_norm_embedding.",
            "mtp.pre_fc_norm_hidden.", "mtp.fc.", (),
        )  # fmt: skip
    prefix = f"model.layers.{len(shape.layers)}."
    if prefix not in shape.names.skipped:
        return None
    return MtpNames(  # DeepSeek V3, GLM 4.5
        prefix, prefix, f"{prefix}shared_head.norm.", f"{prefix}enorm.", f"{prefix}hnorm.",
        f"{prefix}eh_proj.", (f"{prefix}embed_tokens.", f"{prefix}shared_head.head."),
    )  # fmt: skip


def mtp_definition(shape: Definition) -> tuple[Definition, MtpNames] | None:
    """Make the definition of the one layer, without embedding and head; None: none is known."""
    called = mtp_names(shape)
    attends = [layer for layer in shape.layers if isinstance(layer.mixer, KeptSettings)]
    if called is None or not attends:
        return None
    others = [name for name in shape.names.skipped if name != called.prefix]
    own = (called.norm, called.embedding_norm, called.hidden_norm, called.product)
    elsewhere = own[1:] if shape.head_lines is not None and shape.head_lines[0] else ()  # see `MtpLayer`
    layers = [f"model.layers.{index}." for index in range(len(shape.layers))]
    names = replace(
        shape.names,
        renamed=(
            (called.norm, "model.norm."), *((name, name) for name in own[1:]),
            (called.layer, "model.layers.0."),
        ),
        skipped=(
            *others, *called.others, *elsewhere, *layers, "model.embed_tokens.", "model.norm.",
            "language_model.", "model.language_model.", "lm_head.",
        ),
    )  # fmt: skip
    return replace(
        shape,
        layers=(attends[-1],),
        names=names,
        vocab_size=1,
        tied=True,
        stored=None,
        head_lines=None,
    ), called


class MtpLayer:
    """The layer, empty until the loader fills `weights` and calls `complete`.

    Of several ranks the first has the embedding, so it alone has the product and the norms before it.
    """

    def __init__(self, model: Decoder, shape: Definition, called: MtpNames) -> None:
        self.decoder = Decoder(shape, model.context, model.dtype, model.device)
        self._model, self._called = model, called
        self.stored = model.config.stored  # how the checkpoint has weights that are no floats
        hidden = shape.hidden_size
        self._product: Linear | None = None
        self._norms = list[RMSNorm]()  # embedding's, stream's
        if len(model.embedding):
            self._product = empty_linear(2 * hidden, hidden, False, model.dtype, model.device)
            self._norms = [self._norm(hidden, shape.rms_eps) for _ in range(2)]

    def _norm(self, size: int, eps: float) -> RMSNorm:
        model = self._model
        return RMSNorm(torch.empty(size, dtype=model.dtype, device=model.device), eps)

    def weights(self) -> dict[str, Tensor]:
        """Map names to the tensors that the loader fills, as of a decoder."""
        views = self.decoder.weights()
        del views["model.embed_tokens.weight"]
        if self._product is None:
            return views
        called = self._called.embedding_norm, self._called.hidden_norm
        norms = {f"{name}weight": one.weight for name, one in zip(called, self._norms, strict=True)}
        return views | norms | {f"{self._called.product}weight": self._product.tensor}

    def products(self) -> Iterator[tuple[Linear, list[str]]]:
        """List the products, as of a decoder, without the head, which is the model's."""
        for linear, names in self.decoder.products():
            if linear is not self.decoder.head:
                yield linear, names
        if self._product is not None:
            yield self._product, [f"{self._called.product}weight"]

    def complete(self) -> None:
        """Bring loaded weights into the form in which they are used. Call it once."""
        self.decoder.complete()
        for norm in self._norms:
            norm.weight += self.decoder.config.norm_offset

    @torch.inference_mode()
    def forward(
        self, step: StepInputs[Tensor], ops: StreamOps[AnyStream], hidden: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> AnyStream:  # fmt: skip
        """Store the keys and values of the step's positions, and return their streams.

        `hidden` [T, hidden]: streams after the last norm, of the model, or of this layer one position
        before. `tokens` int[T]: the next tokens. None: another rank has the embedding.
        """
        decoder = self.decoder
        if self._product is None or hidden is None or tokens is None:
            shape = len(step.positions), decoder.config.hidden_size
            residual = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        else:
            embedded = F.embedding(tokens, self._model.embedding)
            of_embedding, of_hidden = self._norms
            residual = self._product(torch.cat((of_embedding(embedded), of_hidden(hidden)), -1))
        stream = ops.stream(residual, decoder.layers[0].mixer.norm)
        return decoder.forward(step, ops, given=stream)

    @torch.inference_mode()
    def logits(self, x: AnyStream, ops: StreamOps[AnyStream], output: Tensor | None = None) -> Tensor:
        """Compute logits [R, vocabulary] of the result of `forward`."""
        return self._model.logits(x, None, ops, output)
