"""A draft model on the device: it guesses while the host is ahead, and nothing waits.

Its keys and values have the page numbers of the model's, under a layout of their own. So forks,
rollbacks and shared prefixes hold for it as well. It computes only what it needs: a row without drafts
costs nothing, and one that is drafted again first catches up (`draft_keys`), all missing tokens in one
go.

A guess of k tokens is k passes, each a CUDA graph for some number of rows; a pass writes its samples
where the next one reads them (`triton_model`). It draws with the random number and temperature of the
model's own choice: so where both agree on what is likely, they choose the same.

A row that cannot be guessed for, because it is still behind or longer than the drafter's context, loses
its drafts before the step is laid out.
"""

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.attention.triton_paged import TritonPaged
from ramify.gpu.drafting.device import DeviceDrafter
from ramify.gpu.drafting.draft_keys import CATCH_UP, DraftKeys, Guessing, first_lines
from ramify.gpu.drafting.triton_model import Chain
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.tilings import LayerSizes
from ramify.gpu.ops.triton_linear import Products
from ramify.gpu.ops.triton_ops import LazyStream, TritonOps
from ramify.gpu.progress import Progress
from ramify.gpu.sampling.triton_sampling import sample_into
from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.step.buckets import NOTHING, Bucket, decode_buckets, mixed_buckets, tailored
from ramify.gpu.step.graphs import StepGraphs
from ramify.gpu.step.inputs import NO_DRAWS, StepFrame, StepInputs, lay, layout
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.staging import Upload, frame_bytes
from ramify.gpu.step.step_rows import Ints, StepRows, Tokens, within
from ramify.protocol.plan import StepPlan


class DeviceModelDrafter(DeviceDrafter):
    """Drafter with `model` over `pool`, which has as many pages as the pool of the served model."""

    name = "model"
    reads_tokens = True

    def __init__(self, model: Decoder, pool: KVPool, sizes: LayerSizes, most: int) -> None:
        """`sizes`: those of `model`; `most`: drafts of a row in a step."""
        self._model, self._pool, self._sizes, self._most = model, pool, sizes, most
        self._guessing = Guessing()
        self._captured = False

    @property
    def bytes_per_token(self) -> int:
        return self._model.config.kv_layout(self._model.dtype).bytes_per_token

    def serve(self, table: RowTable, verifier: Verifier) -> None:
        model, device = self._model, self._model.device
        rows = max(1, len(table.requests) // 2)  # a row with drafts has two lines at least
        self._spare = len(table.requests)
        self._buckets = [bucket.decodes for bucket in decode_buckets(rows)]
        self._keys = DraftKeys(table, model.context, 2 * rows)
        self._chain = Chain(
            rows, 2 * rows, self._most, verifier, (table.vocab_size, model.config.vocab_size)
        )
        self._last = torch.zeros_like(verifier.last)  # written by the sampler, never read
        self._logits = torch.empty((rows, model.config.vocab_size), dtype=model.dtype, device=device)
        (shape,) = model.config.attention_shapes(model.dtype)
        # rows that share keys are not grouped: it would pay for a large model of a draft model's kind
        self._attention = TritonPaged(verifier.pages, table, shape, shares_keys=False)
        self._ops = TritonOps(
            self._pool, verifier.pages, self._last, self._attention, Products(device), self._sizes,
            model.rotaries,
        )  # fmt: skip
        self._unlike_layers = model.unlike_layers()
        self._table = table
        most = 4 * frame_bytes(layout(_first_pass(rows), {}))
        self._uploads = Upload(device, fixed=most)
        self._longest = Bucket(CATCH_UP, min(CATCH_UP, self._spare), 0, 0)
        self._frames = Upload(device)
        # made large here, because later it might become a tensor of inference mode
        self._frames.frame(0, layout(self._longest, self._attention.room(self._longest)))
        self._graphs = StepGraphs(self._warm_pass, self._pass, device)

    # --- the host's part ---

    def begin(self, plan: StepPlan, step: StepRows) -> StepRows:
        table, keys = self._table, self._keys
        self._guessing = Guessing()
        if plan.opens or table.updates:
            keys.opened(plan.opens)
        if step.extends:
            keys.ran(step.rows[: step.extends], step.counts[: step.extends])
            brought = step.rows[step.extends : step.extends + len(step.given)][step.given >= 0]
            for row in brought.tolist():  # drafts that an extend brings
                keys.missing[row] += 1
        decodes = np.frombuffer(plan.decodes, dtype=np.int32).astype(np.int64)
        if step.lines is None or not plan.drafts:
            keys.ran(decodes, 1)
            return step
        lines = step.lines[len(step.lines) - len(decodes) :]
        firsts = len(step.rows) - int(lines.sum()) + np.cumsum(lines) - lines
        unsettled = table.unsettled[decodes] - (lines - 1)
        lasts = step.starts[firsts]
        self._guessing = found = keys.guess(decodes, lines - 1, lasts, unsettled)
        self._decodes, self._lasts = len(decodes), lasts[found.which]
        counts = np.zeros(len(decodes), dtype=np.int64)
        counts[found.which] = found.most
        dropped = lines - 1 - counts
        if not dropped.any():
            return step
        some = np.flatnonzero(dropped)
        table.settle(decodes[some], dropped[some], dropped[some])
        return step.fewer(counts)

    def propose(
        self, entry: int, step: StepRows, inputs: StepInputs[Tensor], verifier: Verifier
    ) -> None:
        found = self._guessing
        if len(found.which) and step.lines is not None:
            lines = step.lines[len(step.lines) - self._decodes :]
            self._guess(entry, found, step, lines, inputs)

    def _guess(
        self, entry: int, found: Guessing, step: StepRows, lines: Ints, inputs: StepInputs[Tensor]
    ) -> None:
        """Launch the passes. `lines` [D]: of each of the plan's decodes, the step's last ones."""
        firsts = np.cumsum(lines) - lines
        index = found.which
        targets = inputs.extended + len(step.rows) - step.extends - int(lines.sum()) + firsts[index]
        samples = len(step.sampling) - int(lines.sum()) + firsts[index]
        count = len(index)
        first = first_lines(found, self._lasts)
        rows = next(size for size in self._buckets if size >= count and 2 * size >= len(first.rows))
        bucket = _first_pass(rows)
        plan = self._attention.plan(first, bucket, captured=True)
        sent: dict[str, Tokens] = {
            "targets": np.full(2 * rows, -1, dtype=np.int32),
            "backs": np.zeros(2 * rows, dtype=np.int32),
            "runs": plan["runs"].astype(np.int32),
            "ends": np.zeros(rows, dtype=np.int32),
            "most": np.zeros(rows, dtype=np.int32),
            "samples": np.zeros(rows, dtype=np.int32),
        }
        each = 1 + found.missing
        sent["targets"][: len(first.rows)] = np.repeat(targets, each)
        sent["backs"][: len(first.rows)] = np.repeat(found.missing, each) - within(each)
        sent["ends"][:count] = np.cumsum(each) - 1
        sent["most"][:count], sent["samples"][:count] = found.most, samples
        self._chain.begin(self._uploads.send(entry, **sent), inputs)
        self._graphs.replay(bucket)
        for number in range(1, int(found.most[0])):
            going = int((found.most > number).sum())
            self._graphs.replay(_later_pass(next(size for size in self._buckets if size >= going)))

    @property
    def is_behind(self) -> bool:
        return len(self._guessing.behind) > 0

    def catch_up(self, entry: int) -> None:
        found = self._guessing  # whose positions the host knows
        nothing = np.empty(0, dtype=np.int64)
        step = StepRows(
            rows=found.behind,
            starts=found.starts,
            counts=found.counts,
            extends=len(found.behind),
            tokens=np.zeros(int(found.counts.sum()), dtype=np.int32),  # filled in on the device
            sampling=nothing,
            draws=nothing,
        )
        self._extend(entry, step, tailored(step, self._padded))

    @property
    def _padded(self) -> bool:
        return self._attention.static_extends and self._model.device.type == "cuda"

    def _extend(self, entry: int, step: StepRows, bucket: Bucket, abridged: bool = False) -> None:
        plan = self._attention.plan(step, bucket, captured=False) if step.extends else {}
        room = plan if plan else self._attention.room(bucket)
        frame = StepFrame(bucket, self._frames.frame(entry, layout(bucket, room)))
        lay(frame.host, step, NO_DRAWS, plan, self._spare)
        frame.send()
        self._chain.fill(frame.device)
        self._forward(frame.device, abridged)

    # --- the device's part ---

    def _forward(self, inputs: StepInputs[Tensor], abridged: bool = False) -> LazyStream:
        return self._model.forward(inputs, self._ops, self._unlike_layers if abridged else None)

    def _pass(self, bucket: Bucket, abridged: bool = False) -> None:
        """Run the model on the inputs of `_chain`, sample, and lay out the next pass."""
        chain, rows = self._chain, bucket.sampling
        if bucket.drafted:
            parts = chain.first.named(bucket.decodes) | {
                "sampled_lines": chain.ends[:rows], "runs": chain.runs[: bucket.decodes]
            }  # fmt: skip
        else:
            parts = chain.next.named(rows)
        inputs = StepInputs.from_parts(bucket, parts)
        final = self._forward(inputs, abridged)
        logits = self._model.logits(final, inputs.sampled_lines, self._ops, self._logits[:rows])
        sample_into(
            logits, chain.own[:rows], chain.temperatures[:rows], chain.uniforms[:rows], self._last,
            chain.tokens,
        )  # fmt: skip
        chain.advance(rows)

    def _passes(self) -> list[Bucket]:
        return [form(size) for size in self._buckets for form in (_first_pass, _later_pass)]

    def _warm_pass(self, bucket: Bucket) -> None:
        self._pass(bucket, abridged=True)

    def warm(self, inputs: StepInputs[Tensor], verifier: Verifier) -> None:
        rows = self._buckets[0]
        lines, each = np.zeros(2 * rows, dtype=np.int32), np.zeros(rows, dtype=np.int32)
        sent = self._uploads.send(
            0, targets=lines - 1, backs=lines, runs=lines, ends=each, most=each, samples=each
        )
        self._chain.begin(sent, inputs)

    def warm_sizes(self) -> None:
        for bucket in self._passes():
            self._warm_pass(bucket)
        sizes = {bucket.extended for bucket in mixed_buckets(self._spare, CATCH_UP)}
        for size in sorted(sizes):
            if self._model.device.type == "cuda":
                torch.cuda.synchronize()  # the ring entry is used again
            self._extend(0, NOTHING, Bucket(size, min(size, self._spare), 0, 0), abridged=True)

    def capture(self, progress: Progress) -> None:
        if not self._captured:
            if self._model.device.type == "cuda":
                self._extend(0, NOTHING, self._longest)
                torch.cuda.synchronize()
            self._graphs.capture(self._passes(), progress)
            self._captured = True

    def close(self) -> None:
        self._graphs.close()


def _first_pass(rows: int) -> Bucket:
    """Make the bucket of a first pass, which runs missing tokens too: twice as many lines as rows."""
    return Bucket(0, 0, 2 * rows, rows, drafted=True)


def _later_pass(rows: int) -> Bucket:
    return Bucket(0, 0, rows, rows)
