"""Drafts and constraints beside the CUDA executor, which has two steps in flight.

`begin` makes a step of a plan, as `host.HostDrafts` does for steps that are over at once. But the host
lays a step out before it knows how many drafts of the one before were accepted. It assumes all of them,
and the verifier corrects that on the device. Results settle the drafts in the table through `watch`.
This file knows neither the model nor when results arrive.
"""

from collections.abc import Callable

from torch import Tensor

from ramify.gpu.drafting.device import DeviceDrafter
from ramify.gpu.sampling.device_constraints import DeviceConstraints
from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.step.inputs import StepInputs
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.staging import Array, StepClock
from ramify.gpu.step.step_rows import Ints, StepRows
from ramify.protocol.plan import StepPlan


class DeviceDrafts:
    """The drafts of the rows in `table`, which `drafter` or `constraints` propose.

    `verifier`: accepts them on the device.
    """

    def __init__(
        self,
        table: RowTable,
        drafter: DeviceDrafter | None,
        constraints: DeviceConstraints | None,
        verifier: Verifier,
    ) -> None:
        self.drafter = drafter
        self._table, self._constraints, self._verifier = table, constraints, verifier
        self._in_flight = 0  # steps with drafts whose end the host does not know
        if drafter is not None:
            drafter.serve(table, verifier)

    @property
    def late(self) -> bool:
        """Whether the device may know of refused drafts that the host does not know."""
        return self._in_flight > 0

    def begin(self, plan: StepPlan) -> StepRows:
        """Apply `plan` to the table. Returns what runs, with the drafts that were found.

        Rows whose constraints are not ready are left out. Raises PlanError if the plan contradicts the
        rows.
        """
        step = self._table.apply(plan)
        if self._constraints is not None:
            plan, step = self._constraints.begin(plan, step)
        if self.drafter is not None:
            step = self.drafter.begin(plan, step)
        if plan.opens:
            self._verifier.opened([opened.row for opened in plan.opens])
        return step

    def lay(
        self, entry: int, inputs: StepInputs[Array], step: StepRows, late: bool, seeds: Ints
    ) -> None:
        """Complete `inputs`, laid out for `step`: where drafts are read, and what is corrected if
        `late`.

        `seeds`: of all rows.
        """
        if late or step.lines is not None:
            self._verifier.track(entry, step.rows, seeds)
        if late:
            self._verifier.assume(inputs, step)
        if step.lines is not None:
            self._verifier.lay(inputs, step)

    def launch(
        self, entry: int, inputs: StepInputs[Tensor], step: StepRows, late: bool, clock: StepClock
    ) -> None:
        """Launch what precedes a step's model: corrections, then guesses.

        `clock`: times the drafter's catching up apart.
        """
        follows = self.drafter is not None and self.drafter.follows
        guesses = self.drafter is not None and step.lines is not None and inputs.bucket.decodes > 0
        guesses |= follows
        if late:
            self._verifier.correct(inputs)
        elif guesses:
            self._verifier.remember(inputs)
        if self.drafter is not None and guesses:
            if self.drafter.is_behind:
                clock.start_part()
                self.drafter.catch_up(entry)
                clock.stop_part()
            self.drafter.propose(entry, step, inputs, self._verifier)

    def watch(self, step: StepRows) -> Callable[[Ints], None]:
        """Return the function that takes how many drafts of each row were refused, once `step` is over.

        `step`: was launched, and has drafts.
        """
        assert step.lines is not None
        rows, drafts = step.sampled_rows, step.lines - 1
        openings = self._table.openings[rows]
        self._in_flight += 1

        def settled(refused: Ints) -> None:
            self._in_flight -= 1
            self._table.settle(rows, drafts, refused, openings)
            same = self._table.openings[rows] == openings
            self._verifier.known(rows[same], refused[same])

        return settled
