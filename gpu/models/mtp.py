"""A checkpoint's own layer that predicts the token after the next one (DeepSeek-V3, 2024, section 2.2).

What it reads of a position is the model's stream behind its last norm, and the embedding of the next
token: both are normalised, and a product of the two goes through one more layer of the model's kind.
Embedding and head are the model's. Knows neither rows nor who guesses with it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.definition import AttentionSettings, Definition
from ramify.gpu.ops.base import Ops, ResidualStream
from ramify.gpu.ops.linear.base import Linear, empty_linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.step.inputs import StepInputs

PREFIX = "mtp."


def mtp_definition(shape: Definition) -> Definition | None:
    """Of its one layer, without embedding and head; None: no such layer is known of this family."""
    attends = [layer for layer in shape.layers if isinstance(layer.mixer, AttentionSettings)]
    if PREFIX not in shape.names.skipped or not attends:
        return None
    others = [name for name in shape.names.skipped if name != PREFIX]
    names = replace(
        shape.names,
        renamed=((f"{PREFIX}layers.", "model.layers."), (f"{PREFIX}norm.", "model.norm.")),
        skipped=(*others, "model.", "language_model.", "lm_head."),
    )
    return replace(shape, layers=(attends[-1],), names=names, vocab_size=1, tied=True, stored=None)


class MtpLayer:
    """Empty, until the loader fills what `weights` names; then `complete`."""

    def __init__(self, model: Decoder, shape: Definition) -> None:
        self.decoder = Decoder(shape, model.context, model.dtype, model.device)
        self._model = model
        hidden = shape.hidden_size
        self._product = empty_linear(2 * hidden, hidden, False, model.dtype, model.device)
        self._norms = {name: self._norm(hidden, shape.rms_eps) for name in ("embedding", "hidden")}

    def _norm(self, size: int, eps: float) -> RMSNorm:
        model = self._model
        return RMSNorm(torch.empty(size, dtype=model.dtype, device=model.device), eps)

    def weights(self) -> dict[str, Tensor]:
        """As those of a decoder."""
        views = self.decoder.weights()
        del views["model.embed_tokens.weight"]
        norms = {f"{PREFIX}pre_fc_norm_{name}.weight": one.weight for name, one in self._norms.items()}
        return views | norms | {f"{PREFIX}fc.weight": self._product.tensor}

    def products(self) -> Iterator[tuple[Linear, list[str]]]:
        """As those of a decoder: all but the head, which is the model's."""
        for linear, names in self.decoder.products():
            if linear is not self.decoder.head:
                yield linear, names
        yield self._product, [f"{PREFIX}fc.weight"]

    def complete(self) -> None:
        """Bring loaded weights into the form in which they are used. Call it once."""
        self.decoder.complete()
        for norm in self._norms.values():
            norm.weight += self.decoder.config.norm_offset

    @torch.inference_mode()
    def forward(
        self, step: StepInputs[Tensor], ops: Ops[ResidualStream], hidden: Tensor, tokens: Tensor
    ) -> Tensor:
        """Store the keys and values of the step's positions, and return their streams [T, hidden].

        `hidden` [T, hidden]: of the model, or of this layer one position before. `tokens` int[T]: those
        behind the positions.
        """
        embedded = F.embedding(tokens, self._model.embedding)
        both = self._norms["embedding"](embedded), self._norms["hidden"](hidden)
        residual = self._product(torch.cat(both, -1))
        norm = self.decoder.layers[0].mixer.norm
        stream = ResidualStream(residual, residual if norm is None else norm(residual))
        return self.decoder.forward(step, ops, given=stream).normed

    @torch.inference_mode()
    def likeliest(self, hidden: Tensor, ops: Ops[ResidualStream]) -> Tensor:
        """int64[R] the token behind each of `hidden` [R, hidden], which `forward` returned."""
        return self._model.logits(ResidualStream(hidden, hidden), None, ops).argmax(-1)
