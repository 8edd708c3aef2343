"""What the start of a process may fail with comes out where it was started."""

import pytest

from ramify.actors.processes.messages import NotStarted, StartFailed, decoder, encoder
from ramify.protocol.errors import ConfigError, ModelError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModelError("no", details={"n": 1}), ModelError("no", details={"n": 1})),
        (ConfigError("no"), ConfigError("no")),
        (NotStarted("no"), NotStarted("no")),
        (KeyError("no"), NotStarted("the process did not start: KeyError: 'no'")),
    ],
)
def test_why_a_process_did_not_start(error: Exception, expected: ModelError) -> None:
    told = decoder(StartFailed).decode(encoder().encode(StartFailed.of(error)))
    raised = told.exception("the process")
    assert (type(raised), raised.message, raised.details) == (
        type(expected),
        expected.message,
        expected.details,
    )
