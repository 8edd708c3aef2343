"""The frames of `ramify.v1`: what clients send and what servers send.

Client frames refuse unknown fields; server frames may gain fields within v1, so clients ignore
unknown ones. Fields equal to their default are left out on the wire. See docs/protocol.md.
This file knows shapes and ranges; what an op does to a branch is the session's business.
"""

from ramify.protocol.wire.client import *  # noqa: F403
from ramify.protocol.wire.fields import *  # noqa: F403
from ramify.protocol.wire.server import *  # noqa: F403
