"""Which runs give a row or pages back for a waiting request. Looks at running requests, changes nothing.

1. Priority: for a request of a higher level the lowest level gives way, its youngest run first. There is
   no quantum, and nothing swings: a retracted request cannot ask back.
2. Fairness, at the same level: a tenant with at least two rows more than the waiting one gives one,
   since that makes the two more equal. It gives the youngest run of its session with the most rows. The
   same holds between two sessions of one tenant. For pages, pool slots are compared: the giver must have
   no less afterwards than the taker.
3. Turns, where there are more tenants than rows: a tenant without a row gets the row of a run that has
   had it for `TURN` quanta, and the pages of one whose tenant holds at least as many as it asks for.
   So a tenant's only run does not hold the whole pool until it ends. But KV has to be computed anew: a
   turn of pages takes as many steps as the run's prompt has tokens, `LONGEST` quanta at most.

A run keeps its row for a quantum of steps before (2), so that a retraction costs little beside what the
run achieved; for a tenant without a row it is `SOON` steps, since a quantum is seconds on a CPU. A run
whose last token is planned is never asked: its row comes back by itself. Retracted runs lose nothing
that was committed: their KV stays in the tree until others need the pages.
"""

from collections.abc import Collection, Iterable

from ramify.actors.scheduler.request import Request, RequestRun, Tenant

TURN = 8  # quanta
LONGEST = 64  # quanta
SOON = 4  # steps


def for_row(
    request: Request, runs: Iterable[RequestRun], step: int, quantum: int
) -> tuple[RequestRun, bool] | None:
    """The run whose row `request` is entitled to, and whether by priority; None: no run's.

    `step`: the last planned step.
    """
    lower: RequestRun | None = None
    fair: tuple[tuple[int, int, int], RequestRun] | None = None
    account, level = request.account, request.level
    tenant = account.tenant
    for run in runs:
        if run.complete or run.level > level:
            continue
        if run.level < level:
            if lower is None or _youngest(run) < _youngest(lower):
                lower = run
            continue
        other = run.account
        if other is account:
            continue
        if other.tenant is tenant:
            more, mine = other.rows - account.rows, account.rows
        else:
            more, mine = other.tenant.rows - tenant.rows, tenant.rows
        wait = TURN * quantum if more < 2 else quantum if mine else min(quantum, SOON)
        if (more >= 2 or (more == 1 and not mine)) and step - run.since >= wait:
            key = (other.tenant.rows, other.rows, run.request.seq)
            if fair is None or key > fair[0]:
                fair = key, run
    if lower is not None:
        return lower, True
    return None if fair is None else (fair[1], False)


def for_slots(
    request: Request, slots: int, runs: Collection[RequestRun], step: int, quantum: int
) -> tuple[list[RequestRun], bool]:
    """Runs that hold at least `slots` slots which `request` should have; none if there are too few.

    And whether priority is enough of a reason.
    """
    level, tenant = request.level, request.account.tenant
    chosen: list[RequestRun] = []
    lower = [run for run in runs if run.level < level and not run.complete and run.held]
    for run in sorted(lower, key=_youngest):
        chosen.append(run)
        slots -= run.held
        if slots <= 0:
            return chosen, True
    left: dict[Tenant, int] = {}
    equal = [
        run
        for run in runs
        if run.level == level and run.account.tenant is not tenant and not run.complete and run.held
    ]
    equal.sort(key=lambda run: (run.account.tenant.slots, run.request.seq), reverse=True)
    mine = tenant.slots + slots
    for run in equal:
        other = run.account.tenant
        had = left.get(other, other.slots)
        rest = had - run.held
        if rest >= mine:
            wait = quantum if tenant.slots else min(quantum, SOON)
        elif had >= mine and not tenant.slots:
            wait = min(max(TURN * quantum, run.prompt), LONGEST * quantum)
        else:
            continue
        if step - run.since >= wait:
            left[other] = rest
            chosen.append(run)
            slots -= run.held
            if slots <= 0:
                return chosen, False
    return [], False


def for_growth(run: RequestRun) -> tuple[bool, int, int, int, int]:
    """Sort key of runs to retract when running ones need pages: the least goes first.

    Among equals the tenant with the most slots gives one, of its session that began last: that has least
    to compute anew. Only runs of tenants go last of these, in the same order. So the session that began
    first always comes to the end of its stay, and in it the oldest request.
    """
    tenant = run.account.tenant
    crowded = -tenant.slots if tenant.rows > 1 else 0
    return (*run.level, crowded, -run.account.began, -run.request.seq)


def _youngest(run: RequestRun) -> tuple[bool, int, int]:
    return (*run.level, -run.request.seq)
