"""What guesses tokens on a GPU: the interface that the CUDA executor launches.

A drafter there never waits and never says how many tokens it found: the lines of a step are laid out
before it runs. Where it knows nothing it guesses anything. How many guesses a row gets is decided by who
plans the steps, from how many were right.
"""

from typing import Protocol

from torch import Tensor

from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.step.inputs import StepInputs


class DeviceDrafter(Protocol):
    """Guesses what rows will sample."""

    name: str
    reads_tokens: bool
    """Whether it reads `Verifier.tokens`."""

    def propose(self, inputs: StepInputs[Tensor], verifier: Verifier) -> None:
        """Launch what writes the drafts of the step's decodes to `verifier.inputs`.

        The lines of a decode with drafts follow each other: the first one's input is the row's last
        token (-(row + 1)), that of the n-th behind it inputs[n, row]. `inputs.positions` are right.
        """
        ...
