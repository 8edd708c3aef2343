"""The replica with the least to do."""

from ramify.actors.cluster.placing import LeastLoaded
from ramify.protocol.messages import Submit
from ramify.protocol.sampling import SamplingParams

SUBMIT = Submit(1, 2, 3, 4, SamplingParams())


def test_requests_count_more_than_sessions() -> None:
    placing = LeastLoaded()
    assert placing.place(1, "", b"") is None
    for replica in (0, 1):
        placing.joined(replica)
    assert [placing.place(session, "", b"") for session in range(4)] == [0, 1, 0, 1]
    placing.submitted(0, 0, SUBMIT)
    assert [placing.place(session, "", b"") for session in (4, 5)] == [1, 1]
    placing.ended(0, 0, 1)
    assert placing.place(6, "", b"") == 0
    placing.submitted(6, 0, SUBMIT)
    placing.left(6, 0)
    assert placing.place(7, "", b"") == 0
    placing.shut(0)
    assert placing.place(8, "", b"") == 1
    placing.gone(1)
    placing.left(8, 1)
    assert placing.place(9, "", b"") is None
