"""What a request is said to compute: what its session has not sent before."""

from ramify.actors.cluster.cache_aware import CacheAware
from ramify.actors.cluster.router import ReplicaRouter
from ramify.protocol.cluster import ReplicaLoad
from ramify.protocol.messages import Submit
from ramify.protocol.plan import pack
from ramify.protocol.sampling import SamplingParams


def submit(prompt: int) -> Submit:
    return Submit(1, 1, prompt, 4, SamplingParams())


def test_a_session_and_its_requests() -> None:
    router = ReplicaRouter()
    placing = CacheAware(router, lambda: 1.0)
    assert placing.place(7, "", pack([1])) is None
    placing.joined(1)
    assert placing.place(7, "", pack([1] * 100)) == 1
    assert router.work(1) == 100
    placing.submitted(7, 1, submit(100))
    assert router.work(1) == 100
    placing.submitted(7, 1, submit(130))
    placing.submitted(7, 1, submit(120))  # of another branch
    assert router.work(1) == 130
    placing.ended(7, 1, 3)
    router.update(1, ReplicaLoad(heard=3), 1.0)
    assert router.work(1) == 0
    placing.submitted(8, 1, submit(5))  # it came there in another way
    assert router.work(1) == 5
    placing.left(7, 1)
    placing.left(7, 1)
    placing.shut(1)
    assert placing.place(9, "", pack([1])) is None
    placing.gone(1)
    placing.submitted(8, 1, submit(9))
    assert len(router) == 0
