"""Long prompts in a pool that is too small for all: who comes back is found again, who is cold waits.

Agents come back after a pause, each with a history that takes seconds to compute and a few new tokens.
If whoever comes is let in, each evicts what the next one needs. Then everybody computes whole
histories, and all that compute at once hold the pool meanwhile (thrashing; Denning 1968). So of prompts
that take more than one step to compute,

- *warm* ones go before all others: at most one part in `WARM` of them is to be computed. That costs
  little now, and much once others have taken their pages. The cache says whether one is warm, in one
  question for each request that would have to wait (`Acquire.most`).
- *cold* ones for which KV of others has to go wait, while `MOST_COLD` long prompts are being computed.
  They also wait while requests that run hold more than one part in `HELD` of the pool, for the rest is
  what keeps histories through their pauses. But `SPACED` times as long as the last of them took to
  compute, the next one comes, whatever is held.

Knows counts and times; it does not know which requests wait, or in which order.
"""

from ramify.actors.scheduler.planner import Planner
from ramify.actors.scheduler.request import Request, Run
from ramify.actors.scheduler.settlements import Settlements
from ramify.protocol.plan import ExecutorInfo

WARM = 4
MOST_COLD = 2
HELD = 2
SPACED = 4
MARGIN = 64  # slots that a warm request may need beside its prompt and its first output


class ColdPrompts:
    """`now`: clock seconds, to be set before anything is asked."""

    def __init__(self, info: ExecutorInfo, planner: Planner, settlements: Settlements) -> None:
        self._planner = planner
        self._settlements = settlements
        self._step = info.step_tokens
        self._page_size = info.page_size
        self._pages = info.pages
        self._next = 0.0  # when a cold prompt may come whatever is held
        self.now = 0.0

    def renew(self, pages: int) -> None:
        """Set the size of the pool in pages."""
        self._pages = pages

    @staticmethod
    def most(request: Request) -> int:
        """Slots that `request` may need and be warm."""
        return request.prompt // WARM + request.extra(MARGIN) + MARGIN

    def waits(self, request: Request) -> bool:
        """Whether `request` is cold, takes pages of others, and has to wait for that."""
        missing = request.prompt - request.resident
        if missing <= self._step or missing * WARM <= request.prompt or request.ahead:
            return False
        planner, settlements = self._planner, self._settlements
        if not planner.running or missing <= settlements.free * self._page_size:
            return False
        if planner.long_prompts >= MOST_COLD:
            return True
        held = self._pages - settlements.available
        return held * HELD > self._pages and self.now < self._next

    def granted(self, run: Run) -> None:
        """Note that a prompt is going to be computed."""
        missing = run.prompt - run.cached
        rate = self._planner.pace.rate(0)
        if missing > self._step and missing * WARM > run.prompt and rate:
            self._next = self.now + SPACED * missing / rate
