"""Messages of the protocol that tests need in one form or another."""

from typing import Any

from ramify.protocol.wire import Hit, Usage

_USAGE: dict[str, Any] = {
    "prompt": 1,
    "cached": 0,
    "computed": 1,
    "output": 1,
    "forced": 0,
    "hit": Hit(),
    "queue_ms": 0,
    "ttft_ms": None,
    "total_ms": 0,
}


def usage(**fields: Any) -> Usage:
    """Of a generation of one token from a prompt of one, but for `fields`."""
    return Usage(**_USAGE | fields)
