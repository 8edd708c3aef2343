"""What guesses tokens on a GPU: the interface that `device_drafts` launches (why: see `base`).

A drafter there never waits. Which rows it can guess for it says before a step is laid out, on the host;
what it guesses only the device knows. How many guesses a row gets is decided by who plans the steps,
from how many were right.
"""

# ruff: noqa: B027  # a drafter implements what it needs

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.progress import Progress
from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.step.inputs import StepInputs
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import StepRows
from ramify.protocol.plan import StepPlan

if TYPE_CHECKING:  # which need Triton
    from ramify.gpu.ops.triton_linear import Products


class DeviceDrafter(ABC):
    """Guesses what rows will sample. Called in the order of the plans:

        serve, capture -> [begin -> catch_up, propose -> the model runs the step, drafts included] ...

    One that knows something of every row at any time does nothing but `propose`.
    """

    name: str  # in `ExecutorInfo.drafter`
    reads_tokens: bool
    """Whether it reads `Verifier.tokens`."""
    follows = False
    """Whether `propose` is called, and `ran`, for every step, and not only for those with drafts."""

    @property
    def bytes_per_token(self) -> int:
        """Of each KV slot, beside the model's keys and values and `Verifier.tokens`."""
        return 0

    def serve(self, table: RowTable, verifier: Verifier) -> None:
        """Guess for these rows from now on. Called once."""

    def join(self, attention: AttentionBackend, products: "Products") -> None:
        """What the model runs on. Called once, behind `serve`."""

    def ran(self, hidden: Tensor, inputs: StepInputs[Tensor]) -> None:
        """The model ran a step; a CUDA graph may hold this, too. Called if it `follows`.

        `hidden`: the model's stream behind its last norm.
        """

    def begin(self, plan: StepPlan, step: StepRows) -> StepRows:
        """`step` is what the table made of the plan. Returns it with the drafts that can be guessed.

        Those that cannot are settled in the table.
        """
        return step

    @property
    def is_behind(self) -> bool:
        """Whether it has to compute what it missed of rows, before it guesses for the step."""
        return False

    def catch_up(self, entry: int) -> None:
        """Launch that. It takes its time once for each row, and not step by step."""

    @abstractmethod
    def propose(
        self, entry: int, step: StepRows, inputs: StepInputs[Tensor], verifier: Verifier
    ) -> None:
        """Launch what writes the drafts of the plan's decodes to `verifier.inputs`.

        The lines of a decode with drafts follow each other: the first one's input is the row's last
        token (-(row + 1)), that of the n-th behind it inputs[n, row]. `inputs.positions` are right.
        `entry`: of the ring of uploads. `step`: as it was laid out, with drafts.
        """

    def warm(self, inputs: StepInputs[Tensor], verifier: Verifier) -> None:
        """Launch every kernel once, on a GPU. `inputs`: padding; nothing reads what is written."""

    def warm_sizes(self) -> None:
        """The same for what has many sizes."""

    def capture(self, progress: Progress) -> None:
        """Run what takes the most memory and capture CUDA graphs, if that was not done yet."""

    def close(self) -> None:
        """Release the CUDA graphs. Nothing may be called afterwards."""
