"""The kernels of a step on a GPU: the model, the sampler by temperature, and scores of targets.

A CUDA graph can hold all that is issued here, except the scores. Nothing waits for the device. This
file does not know plans, nor how the inputs came to the device.
"""

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.drafting.device import DeviceDrafter
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.base import ShownPictures
from ramify.gpu.ops.gluon_check import gluon_works
from ramify.gpu.ops.tilings import LayerSizes
from ramify.gpu.ops.triton_linear import Products
from ramify.gpu.ops.triton_ops import LazyStream, TritonOps
from ramify.gpu.programmatic_launch import overlaps
from ramify.gpu.sampling.scoring import arrays, score, slice_lines
from ramify.gpu.sampling.triton_sampling import sample_into
from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.step.inputs import StepInputs
from ramify.gpu.step.rows import Scored
from ramify.gpu.step.staging import Upload
from ramify.protocol.plan import ExecutorInfo


class StepKernels:
    """Issuer of the kernels. `tokens`: int32[lines], gets the token of each line that samples."""

    def __init__(
        self,
        model: Decoder,
        ops: TritonOps,
        drafter: DeviceDrafter | None,
        verifier: Verifier,
        tokens: Tensor,
        info: ExecutorInfo,
    ) -> None:
        self.model, self._ops, self._drafter = model, ops, drafter
        self._verifier, self._tokens = verifier, tokens
        self._unlike_layers = model.unlike_layers()
        # of whatever step runs: were each graph to keep its own, they would fill a gigabyte
        size = info.max_rows, info.vocab_size
        self.logits = torch.empty(size, dtype=model.dtype, device=model.device)
        self._targets = Upload(model.device)
        self.slice = min(info.max_rows, slice_lines(info.vocab_size))  # lines scored at a time

    def issue(
        self, inputs: StepInputs[Tensor], abridged: bool = False, shown: ShownPictures | None = None
    ) -> LazyStream:
        """Issue a step's kernels, its sampler included. Returns the model's output."""
        final = self.compute(inputs, abridged, shown)
        if inputs.bucket.sampling:
            logits = self.logits_of(final, inputs.sampled_lines, inputs.bucket.sampling)
            sample_into(
                logits, inputs.rows_that_sample, inputs.temperatures, inputs.uniforms,
                self._verifier.last, self._tokens,
            )  # fmt: skip
        return final

    def compute(
        self, inputs: StepInputs[Tensor], abridged: bool = False, shown: ShownPictures | None = None
    ) -> LazyStream:
        """Run the model. `abridged`: only layers that together launch all of its kernels."""
        self._verifier.remember(inputs)
        layers = self._unlike_layers if abridged else None
        final = self.model.forward(inputs, self._ops, layers, shown=shown)
        if self._drafter is not None and self._drafter.follows:
            self._drafter.ran(self._ops.whole(final), inputs)
        return final

    def logits_of(self, final: LazyStream, lines: Tensor | None, count: int) -> Tensor:
        """Compute the logits [count, vocabulary] of `lines` (None: all) of the model's output.

        They are a view of `logits`, which the next step overwrites.
        """
        if not count:
            return self.logits[:0]
        return self.model.logits(final, lines, self._ops, self.logits[:count])

    def score(self, entry: int, scored: Scored, final: LazyStream) -> Tensor:
        """Score the targets: the bits of `scoring.score` as int32. Overwrites the step's logits."""

        def logits_of(lines: Tensor) -> Tensor:
            return self.logits_of(final, lines, len(lines))

        views = self._targets.send(entry, **arrays(scored))
        return score(scored, views, logits_of, self.slice).view(torch.int32)

    def score_padding(self, lines: int) -> None:
        """Score padding as a step would that has targets at `lines` positions."""
        places = np.arange(lines)
        scored = Scored(places, places, np.zeros(lines, dtype=np.int32), places, 0 * places)
        self.score(0, scored, self._ops.blank(lines))


def layer_sizes(model: Decoder, products: Products) -> LayerSizes:
    """Collect the sizes and abilities by which `tilings` chooses kernels for the model's products."""
    config, attention = model.config, model.config.attention
    tried = products.follows_tilings and model.dtype == torch.bfloat16  # else Gluon is never chosen
    return LayerSizes(
        hidden=config.hidden_size,
        attention=attention.width,
        qkv=attention.rows,
        intermediate=config.intermediate_size,
        dtype=model.dtype,
        overlaps=overlaps(model.device),
        gluon=tried and gluon_works(model.device),
    )
