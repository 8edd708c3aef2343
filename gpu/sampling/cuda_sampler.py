"""Sampling on CUDA: the rows' settings, and a step's launches for them.

Greedy rows and rows with a temperature alone are sampled by `triton_sampling`, inside the CUDA graph.
Rows that need more are sampled again from the same logits, after the graph: a step without such rows
launches nothing more. Masks are made meanwhile, beside the model. Nothing here waits for the device.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramify.gpu.sampling.automata import Constrained, DeviceAutomata, Followed, lines_without
from ramify.gpu.sampling.settings import RowSettings
from ramify.gpu.sampling.token_counts import TokenCounts
from ramify.gpu.sampling.triton_logprobs import WORDS, logprobs_into, read_logprobs
from ramify.gpu.sampling.triton_truncation import ASK, EVERY_KEY, Before, resample_into
from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.step.inputs import Draws
from ramify.gpu.step.rows import Ints
from ramify.gpu.step.side_stream import SideStream
from ramify.gpu.step.staging import Array, Upload
from ramify.gpu.step.step_rows import within
from ramify.protocol.plan import OpenRow
from ramify.protocol.sampling import SamplingParams, TokenLogprobs

_RESAMPLED, _TRUNCATED, _LOGPROBS = 1, 2, 4


@dataclass(slots=True)
class Drafts:
    """The S lines of a step with drafts, in the order in which they sample."""

    number: Ints  # [S] how many drafts of its row each line follows, its own input included
    inputs: npt.NDArray[np.int32]  # [S] each line's input, as of `StepInputs.input_ids`
    table: Tensor  # int32, in which inputs below 0 are found

    def before(self, lines: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Find how many drafts each of `lines` [N] follows, and these inputs, line after line."""
        number = self.number[lines]
        return number, self.inputs[np.repeat(lines - number + 1, number) + within(number)]


class CudaSampler:
    """Sampler of the CUDA executor: settings as arrays on the host, token counts on the device."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._settings = RowSettings(max_rows, vocab_size)
        # the settings once more, as the kernels read them
        self._rows = np.zeros(max_rows, dtype=ASK)
        self._rows["counted"] = self._rows["kind"] = -1
        self._kinds: npt.NDArray[np.uint8] = np.zeros(max_rows, dtype=np.uint8)
        self._counts = TokenCounts(vocab_size, device)
        self._upload = Upload(device)
        self._side = SideStream(device)
        self._followed: Followed | None = None  # asks of the last step, some with a constraint
        self._undecided: Tensor | None = None  # asks of the last step, whose tokens are not counted yet
        self._words = torch.zeros((max_rows, WORDS), dtype=torch.int32, device=device)

    def apply(self, entry: int, closes: list[int], opens: list[OpenRow]) -> None:
        """Close and open rows; histories go through ring entry `entry`."""
        for row in closes:
            line = int(self._rows["counted"][row])
            if line >= 0:
                self._counts.give_back(line)
                self._rows["counted"][row] = -1
        for opened in opens:
            self._open(opened.row, opened.sampling)
        penalised = [opened for opened in opens if opened.sampling.penalized]
        if penalised:
            histories = [(opened.history, opened.sampled) for opened in penalised]
            lines = self._counts.take(entry, histories)
            self._rows["counted"][[opened.row for opened in penalised]] = lines

    @property
    def seeds(self) -> Ints:
        """The seeds of all rows: int64[rows]."""
        return self._settings.seeds

    def draws_for(self, rows: Ints, draws: Ints) -> Draws:
        """Compute temperature and random number of output token `draws` [S] of `rows` [S]."""
        return self._settings.draws(rows, draws)

    def model_begins(self) -> None:
        """Let the inputs of `resample`, other than logits, be made beside the model. Call before it."""
        self._side.fork()

    def resample(
        self,
        entry: int,
        logits: Tensor,
        rows: Ints,
        draws: Ints,
        last: Tensor,
        tokens: Tensor,
        verifier: Verifier | None = None,
        drafts: Drafts | None = None,
        constrained: Constrained | None = None,
        automata: DeviceAutomata | None = None,
    ) -> Tensor | None:
        """Replace the tokens int32[S] (and last[rows]) of the rows that need more than a temperature.

        logits [S or more, V] of `rows` int64[S]. Returns int32[N * WORDS], the log-probabilities of
        the N rows that ask for them, in order; None if none does. `verifier`: knows how many draws were
        refused before this step. `drafts`: if the step has any; call `record` after accepting.
        `constrained`: if some lines have a constraint, which `automata` follow; call `follow` last.
        """
        self._undecided = self._followed = None
        kinds = self._kinds[rows]
        if constrained is not None:
            kinds = np.where(constrained.kinds >= 0, kinds | _RESAMPLED, kinds)
        if not kinds.any():
            return None
        lines = np.flatnonzero(kinds & _RESAMPLED)
        asked = np.flatnonzero(kinds & _LOGPROBS)
        asks = self._rows[rows[lines]]
        asks["line"], asks["row"] = lines, rows[lines]
        if verifier is None:
            asks["uniform"] = self._settings.draws(rows[lines], draws[lines]).uniforms
        else:
            asks["uniform"] = verifier.assumed(rows[lines], draws[lines]).view(np.float64)
        followed = np.empty(0, dtype=np.int32)
        counted = np.flatnonzero(asks["counted"] >= 0)
        if drafts is not None and len(counted):
            number, followed = drafts.before(lines[counted])
            asks["drafts"][counted], asks["first"][counted] = number, np.cumsum(number) - number
        arrays: dict[str, Array] = {"asked": asked.astype(np.int32), "followed": followed}
        if constrained is not None:
            asks["kind"] = constrained.kinds[lines]
            arrays["states"], arrays["legal"] = constrained.states[lines], constrained.words
            arrays["counts"] = np.zeros(len(lines), dtype=np.int32)
        arrays["words"] = asks.view(np.int32).reshape(-1, ASK.itemsize // 4)
        masks = None
        with self._side.issued():
            sent = self._upload.send(entry, **arrays)
            if len(lines) and constrained is not None and automata is not None:
                self._followed = Followed(sent["words"], sent["states"], sent["counts"])
                masks = automata.masks(self._followed, sent["legal"])
        if len(lines):
            truncated = bool((kinds & _TRUNCATED).any())
            if verifier is not None:
                verifier.correct_draws(sent["words"])
            before = None
            if drafts is not None:
                before = Before(sent["followed"], drafts.table)
                self._undecided = sent["words"] if len(counted) else None
            table = self._counts.table
            resample_into(logits, sent["words"], truncated, table, last, tokens, before, masks)
        if not len(asked):
            return None
        output = self._words[: len(asked)]
        logprobs_into(logits, sent["asked"], tokens, output)
        return output.view(-1)

    def record(self, verifier: Verifier, tokens: Tensor, kept: Tensor) -> None:
        """Count the output of penalised rows in a step with drafts: tokens of lines that are `kept`."""
        if self._undecided is not None:
            verifier.record(self._undecided, tokens, kept, self._counts.table)

    def follow(
        self, automata: DeviceAutomata, tokens: Tensor, kept: Tensor | None, forced: Tensor
    ) -> None:
        """Advance constraints by what their lines sampled, after accepting: see `triton_automata`."""
        if self._followed is not None:
            automata.advance(self._followed, tokens, kept, forced)

    def logprobs_asked(self, rows: Ints) -> Ints:
        """Look up how many of the best tokens each row wants, int64[S]; 0: no log-probabilities."""
        return self._settings.logprobs[rows]

    def warm(
        self,
        dtype: torch.dtype,
        row: int,
        last: Tensor,
        tokens: Tensor,
        kept: Tensor,
        forced: Tensor,
        verifier: Verifier,
        automata: DeviceAutomata | None,
    ) -> None:
        """Compile every kernel, by sampling into `row`, which is closed, and tokens[0]."""
        logits = torch.zeros((1, self._vocab_size), dtype=dtype, device=tokens.device)
        rows, draws = np.array([row]), np.array([0])
        held: list[Constrained | None] = [None]
        if automata is not None:
            line = lines_without(1, -(-self._vocab_size // 32))
            line.kinds[0] = 0
            held.append(line)
        for settings, nested in (
            (SamplingParams(top_k=2, top_p=0.9, logprobs=1), False),
            (SamplingParams(repetition_penalty=1.1), True),
        ):
            if automata is not None:
                automata.always_nested = nested
            self.apply(0, [], [OpenRow(row, 0, b"", 0, settings)])
            both = None, Drafts(draws, np.zeros(1, dtype=np.int32), verifier.inputs)
            for drafts, constrained in product(both, held):
                own = verifier if drafts else None
                verifier.track(0, rows, self.seeds)
                self.resample(0, logits, rows, draws, last, tokens, own, drafts, constrained, automata)
                self.record(verifier, tokens, kept)
                if automata is not None:
                    self.follow(automata, tokens, kept if drafts else None, forced)
                if logits.is_cuda:
                    torch.cuda.synchronize()  # the ring entry is used again
            verifier.opened([row])
            self.apply(0, [row], [])
        if automata is not None:
            automata.always_nested = False

    def _open(self, row: int, sampling: SamplingParams) -> None:
        settings = self._settings
        settings.open(row, sampling)
        drawn = sampling.temperature > 0
        truncated = drawn and (sampling.top_k > 0 or sampling.top_p < 1)
        key = EVERY_KEY
        if sampling.min_p > 0:
            key = int(np.float32(-np.log(sampling.min_p) + 0.0).view(np.int32))
        own = self._rows[row]
        own["counted"], own["key"] = -1, key
        own["top_k"], own["top_p"] = settings.top_k[row], settings.top_p[row]
        own["temperature"], own["repetition"] = sampling.temperature, sampling.repetition_penalty
        own["frequency"], own["presence"] = sampling.frequency_penalty, sampling.presence_penalty
        resampled = sampling.penalized or (drawn and (truncated or sampling.min_p > 0))
        self._kinds[row] = (
            _RESAMPLED * resampled | _TRUNCATED * truncated | _LOGPROBS * (sampling.logprobs > 0)
        )


def token_logprobs(words: npt.NDArray[np.int32], asked: Ints) -> "list[TokenLogprobs | None]":
    """Unpack words int32[N, WORDS] of `resample`: an entry for each of asked int64[S]."""
    lines = iter(words)
    return [read_logprobs(next(lines), int(best)) if best else None for best in asked]
