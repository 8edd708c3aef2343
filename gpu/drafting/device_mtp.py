"""Guesses by the checkpoint's own multi-token prediction (MTP) layer (`models.mtp`), on a GPU.

The layer reads a position's stream and the next token. In each step with extends or drafts it runs after
the model, in the same graph, on all lines; for a row's last line the next token is not known yet, so a
wrong key is written there. Before a row's next decode it runs on that position again with the token, and
gives the first guess. Further guesses go on from the layer's own streams. So its keys lie in the pages
of their tokens, and nothing is caught up with. At the end of a prompt's chunk, and where a fork begins,
a key was computed with another next token, which may make a guess worse, and never an output.

Each of several ranks has a part of the layer and runs the same passes, whose number and sizes follow
from the step. Rows and positions of a pass come from rank 0, which alone knows tokens and streams.
"""

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.drafting.device import DeviceDrafter
from ramify.gpu.drafting.triton_model import Chain, Lines
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.models.mtp import MtpLayer
from ramify.gpu.ops.tilings import LayerSizes
from ramify.gpu.ops.triton_linear import Products
from ramify.gpu.ops.triton_ops import TritonOps
from ramify.gpu.ops.triton_ranked import RankedTritonOps
from ramify.gpu.progress import Progress
from ramify.gpu.ranks.group import RankSums
from ramify.gpu.sampling.triton_sampling import sample_into
from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.step.buckets import Bucket, decode_buckets
from ramify.gpu.step.graphs import StepGraphs
from ramify.gpu.step.inputs import StepInputs
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.staging import Upload
from ramify.gpu.step.step_rows import Ints, StepRows, Tokens
from ramify.protocol.plan import StepPlan


class FollowingMtp(DeviceDrafter):
    """Drafter of the ranks beside rank 0: runs rank 0's passes of `layer` over `pool`, guesses nothing.

    `pool`: has as many pages as the model's.
    """

    name = "mtp"
    reads_tokens = False
    follows = True

    def __init__(
        self, layer: MtpLayer, pool: KVPool, sizes: LayerSizes, most: int, ranks: RankSums | None
    ) -> None:
        """`sizes`: the layer's; `most`: drafts of a row in a step; `ranks`: None: there is one."""
        self._layer, self._pool, self._sizes, self._most = layer, pool, sizes, most
        self._ranks, self._captured = ranks, False

    @property
    def bytes_per_token(self) -> int:
        decoder = self._layer.decoder
        return decoder.config.kv_layout(decoder.dtype).bytes_per_token

    def serve(self, table: RowTable, verifier: Verifier) -> None:
        rows, self._vocabulary = len(table.requests), table.vocab_size
        self._buckets = [bucket.decodes for bucket in decode_buckets(rows)]
        self._verifier, self._last = verifier, torch.zeros_like(verifier.last)  # never read
        self._lines = Lines.of(rows, self._layer.decoder.device)
        self._graphs = StepGraphs(self._pass, self._pass, self._layer.decoder.device)

    def join(self, attention: AttentionBackend, products: Products) -> None:
        given = (
            self._pool, self._verifier.pages, self._last, attention, products, self._sizes,
            self._layer.decoder.rotaries,
        )  # fmt: skip
        if self._ranks is None:
            self._ops = TritonOps(*given)
        else:
            self._ops = RankedTritonOps(self._ranks, self._vocabulary, *given, halved=False)

    # --- the host's part ---

    def propose(
        self, entry: int, step: StepRows, inputs: StepInputs[Tensor], verifier: Verifier
    ) -> None:
        if len(step.rows) > step.extends:
            self._replay(self._wanted(step)[1])

    def _wanted(self, step: StepRows) -> tuple[Ints, Ints]:
        """List the rows that decode, most guesses first: first line and number of guesses of each."""
        decodes = step.rows[step.extends :]
        firsts = np.flatnonzero(np.append(True, decodes[1:] != decodes[:-1]))
        most = np.bincount(step.left_to_guess()[0] - step.extends, minlength=len(decodes))
        wanted = np.minimum(np.add.reduceat(most, firsts), self._most)
        order = np.argsort(-wanted, kind="stable")
        return firsts[order], wanted[order]

    def _size(self, rows: int) -> int:
        return next(size for size in self._buckets if size >= rows)

    def _replay(self, wanted: Ints) -> None:
        longest = int(wanted[0])
        self._graphs.replay(_first_pass(self._size(len(wanted)), longest > 0))
        for number in range(1, longest):
            self._graphs.replay(_later_pass(self._size(int((wanted > number).sum()))))

    # --- the device's part ---

    def ran(self, hidden: Tensor, inputs: StepInputs[Tensor]) -> None:
        if inputs.bucket.extended or inputs.bucket.drafted:
            self._layer.forward(inputs, self._ops)

    def _pass(self, bucket: Bucket) -> None:
        """Run the layer on the inputs of `_lines`."""
        lines = self._lines
        self._share(lines)
        inputs = StepInputs.from_parts(_later_pass(bucket.decodes), lines.named(bucket.decodes))
        final = self._layer.forward(inputs, self._ops)
        if bucket.sampling:
            self._layer.logits(final, self._ops)

    def _share(self, lines: Lines) -> None:
        """Replace rows and positions by those of rank 0."""
        if self._ranks is not None:
            self._ranks.from_first(lines.places)

    def _passes(self) -> list[Bucket]:
        sizes = self._buckets
        return [_first_pass(size, some) for size in sizes for some in (False, True)] + [
            _later_pass(size) for size in sizes
        ]

    def warm_sizes(self) -> None:
        for bucket in self._passes():
            self._pass(bucket)

    def capture(self, progress: Progress) -> None:
        if not self._captured:
            self._graphs.capture(self._passes(), progress)
            self._captured = True

    def close(self) -> None:
        self._graphs.close()


class DeviceMtpDrafter(FollowingMtp):
    """Drafter with `layer`, on rank 0 if there are several."""

    reads_tokens = True

    def serve(self, table: RowTable, verifier: Verifier) -> None:
        super().serve(table, verifier)
        self._opened = list[int]()
        decoder, rows, vocabulary = self._layer.decoder, len(table.requests), table.vocab_size
        device, self._spare = decoder.device, rows
        self._chain = Chain(rows, rows, self._most, verifier, (vocabulary, vocabulary))
        self._chain.next = self._chain.first  # all passes are alike
        self._held = 1 << self._most.bit_length()  # streams of a row: of its last lines
        shape = (rows + 1) * self._held, decoder.config.hidden_size
        self._streams = torch.zeros(shape, dtype=decoder.dtype, device=device)
        self._known = torch.zeros(rows + 1, dtype=torch.bool, device=device)  # rows that have some
        self._hidden = torch.zeros((rows, shape[1]), dtype=decoder.dtype, device=device)
        self._logits = torch.empty((rows, vocabulary), dtype=decoder.dtype, device=device)
        self._uploads, self._opens = Upload(device), Upload(device)

    # --- the host's part ---

    def begin(self, plan: StepPlan, step: StepRows) -> StepRows:
        self._opened += [opened.row for opened in plan.opens]
        return step

    def propose(
        self, entry: int, step: StepRows, inputs: StepInputs[Tensor], verifier: Verifier
    ) -> None:
        if self._opened:
            opened = np.array(self._opened, dtype=np.int64)
            self._known.index_fill_(0, self._opens.send(entry, rows=opened)["rows"], False)
            self._opened.clear()
        if len(step.rows) == step.extends:
            return
        firsts, wanted = self._wanted(step)
        places = np.zeros(len(step.rows), dtype=np.int64)
        places[step.sampling] = np.arange(len(step.sampling))
        rows = self._size(len(firsts))
        sent: dict[str, Tokens] = {
            name: np.zeros(rows, dtype=np.int32) for name in ("backs", "runs", "most", "samples")
        }
        sent["targets"] = np.full(rows, -1, dtype=np.int32)
        sent["ends"] = np.arange(rows).astype(np.int32)
        sent["targets"][: len(firsts)] = inputs.extended + firsts
        sent["most"][: len(firsts)] = wanted
        sent["samples"][: len(firsts)] = places[step.extends + firsts]
        self._chain.begin(self._uploads.send(entry, **sent), inputs)
        self._replay(wanted)

    # --- the device's part ---

    def ran(self, hidden: Tensor, inputs: StepInputs[Tensor]) -> None:
        rows, held = inputs.rows.long(), self._held
        places = rows * held + inputs.positions.long() % held
        if len(rows) > held:  # of a row's lines the last ones
            behind = rows[held:] == rows[:-held]
            places[:-held] = torch.where(behind, self._spare * held, places[:-held])
        self._streams.index_copy_(0, places, hidden)
        self._known.index_fill_(0, rows, True)
        self._known[self._spare :].fill_(False)  # padding's, which has none
        if inputs.bucket.extended or inputs.bucket.drafted:
            ids = inputs.input_ids.long()
            given = self._verifier.inputs.view(-1)[(-1 - ids).clamp_(min=0)].long()
            tokens = torch.where(ids < 0, given, ids).roll(-1)
            self._layer.forward(inputs, self._ops, hidden, tokens)

    def _pass(self, bucket: Bucket) -> None:
        """Run the layer on the inputs of `_chain`, sample, and lay out the next pass."""
        chain, rows = self._chain, bucket.decodes
        lines = chain.first
        if bucket.drafted:
            chain.step_back(rows, self._known)
            places = lines.rows[:rows].long() * self._held + lines.positions[:rows].long() % self._held
            torch.index_select(self._streams, 0, places, out=self._hidden[:rows])
        self._share(lines)
        inputs = StepInputs.from_parts(_later_pass(rows), lines.named(rows))
        final = self._layer.forward(inputs, self._ops, self._hidden[:rows], lines.ids[:rows].long())
        if not bucket.sampling:
            return
        logits = self._layer.logits(final, self._ops, self._logits[:rows])
        self._hidden[:rows] = self._ops.whole(final)
        sample_into(
            logits, chain.own[:rows], chain.temperatures[:rows], chain.uniforms[:rows], self._last,
            chain.tokens,
        )  # fmt: skip
        chain.advance(rows)

    def warm(self, inputs: StepInputs[Tensor], verifier: Verifier) -> None:
        nothing = np.zeros(self._buckets[0], dtype=np.int32)
        names = ("backs", "runs", "ends", "most", "samples")
        sent = dict.fromkeys(names, nothing) | {"targets": nothing - 1}
        self._chain.begin(self._uploads.send(0, **sent), inputs)


def _first_pass(rows: int, guesses: bool) -> Bucket:
    """Make the bucket of a first pass, from the model's streams; without guesses it only writes keys."""
    return Bucket(0, 0, rows, rows if guesses else 0, drafted=True)


def _later_pass(rows: int) -> Bucket:
    return Bucket(0, 0, rows, rows)
