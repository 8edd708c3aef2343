"""The load of a scheduler, as routers are told it. Looks at requests, changes nothing."""

from ramify.actors.scheduler.lifecycle import RequestLifecycle
from ramify.actors.scheduler.planner import Planner
from ramify.actors.scheduler.settlements import Settlements
from ramify.protocol.cluster import LOT, ReplicaLoad
from ramify.protocol.plan import ExecutorInfo


def replica_load(
    lifecycle: RequestLifecycle,
    planner: Planner,
    settlements: Settlements,
    info: ExecutorInfo,
    heard: int,
) -> ReplicaLoad:
    """The scheduler's load, for routers. O(requests): call it some times a second, not each step."""
    queued = decoding = wanted = context = excess = long = 0
    for request in lifecycle.requests.values():
        run = request.run
        if run is None:
            left = max(0, request.prompt - request.resident)
            wanted += request.prompt
        else:
            left = run.prompt - run.computed
            context += run.prompt + len(run.out)
            decoding += left <= 0
        if left > 0:
            queued += left
            if left > LOT:
                excess += left - LOT
                long += 1
    size = info.page_size
    return ReplicaLoad(
        heard=heard,
        queued=queued,
        waiting=lifecycle.waiting,
        wanted=wanted,
        decoding=decoding,
        context=context,
        free=settlements.free * size,
        evictable=(settlements.available - settlements.free) * size,
        slots=info.pages * size,
        prefill_rate=planner.pace.rate(decoding),
        step_s=planner.pace.step_s if lifecycle.runs else 0.0,
        hold_s=lifecycle.hold_s,
        excess=excess,
        long=long,
    )
