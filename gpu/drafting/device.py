"""The interface of drafters on a GPU, which `device_drafts` launches (why there are two: see `base`).

A drafter never waits for the device. Before a step is laid out it says, on the host, which rows it can
guess for; its guesses are on the device alone. How many guesses a row gets is the scheduler's decision,
by how many were right.
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
    """Base of drafters on a GPU. Called in the order of the plans:

        serve, capture -> [begin -> catch_up, propose -> the model runs the step, drafts included] ...

    A drafter that can guess for every row at any time implements `propose` alone.
    """

    name: str  # in `ExecutorInfo.drafter`
    reads_tokens: bool
    """Whether it reads `Verifier.tokens`."""
    follows = False
    """Whether `propose` and `ran` are called for every step, not only for those with drafts."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes a KV slot, besides the model's keys and values and `Verifier.tokens`."""
        return 0

    def serve(self, table: RowTable, verifier: Verifier) -> None:
        """Prepare to guess for the rows of `table`. Called once."""

    def join(self, attention: AttentionBackend, products: "Products") -> None:
        """Take over the model's back end and products. Called once, after `serve`."""

    def ran(self, hidden: Tensor, inputs: StepInputs[Tensor]) -> None:
        """Launch what follows the model in a step, perhaps within its CUDA graph, if it `follows`.

        `hidden`: the model's stream after its last norm.
        """

    def begin(self, plan: StepPlan, step: StepRows) -> StepRows:
        """Return `step`, which the table made of the plan, with only those drafts that can be guessed.

        Drafts that cannot are settled in the table.
        """
        return step

    @property
    def is_behind(self) -> bool:
        """Whether `catch_up` is due before `propose`."""
        return False

    def catch_up(self, entry: int) -> None:
        """Launch the computation of what was missed of rows: a cost once for each row, not each step."""

    @abstractmethod
    def propose(
        self, entry: int, step: StepRows, inputs: StepInputs[Tensor], verifier: Verifier
    ) -> None:
        """Launch the kernels that write the drafts of the plan's decodes to `verifier.inputs`.

        The lines of a decode with drafts follow each other: the first one's input is the row's last
        token (-(row + 1)), that of the n-th behind it inputs[n, row]. `inputs.positions` are right.
        `entry`: of the ring of uploads. `step`: as it was laid out, with drafts.
        """

    def warm(self, inputs: StepInputs[Tensor], verifier: Verifier) -> None:
        """Launch every kernel once, on a GPU. `inputs`: padding; nothing reads what is written."""

    def warm_sizes(self) -> None:
        """Launch kernels that have many sizes, once in each."""

    def capture(self, progress: Progress) -> None:
        """Run what takes the most memory and capture CUDA graphs, if that was not done yet."""

    def close(self) -> None:
        """Release the CUDA graphs. Nothing may be called afterwards."""
