"""Mailbox messages: one tagged union per actor.

Commands are imperative, events are past tense. No message asks: a reply is a message with an id.
Ids are integers, unique in the engine: a session's number is `session`; `branch` (a branch
handle in the radix tree) and `request` are `session << 32 | counter` and chosen by the session,
so nothing has to be awaited. Token arrays are int32 `bytes` (see `plan.pack`).

Order. Mailboxes are FIFO for each sender. Two rules make the whole causal: a session tells the
cache about a branch before it tells the scheduler about a request on it; the scheduler tells
the cache `Settle` before it tells sessions what was settled.

The tree holds the tokens of every live branch; KV is a property of its nodes ("tokens are
durable, KV is a cache"). A node is *resident* (has pages) or *cold* (not computed, or evicted).
A request makes the path to its branch's head resident, then appends what it samples.
"""

from ramify.protocol.messages.base import *  # noqa: F403
from ramify.protocol.messages.cache import *  # noqa: F403
from ramify.protocol.messages.directory import *  # noqa: F403
from ramify.protocol.messages.gateway import *  # noqa: F403
from ramify.protocol.messages.grammar import *  # noqa: F403
from ramify.protocol.messages.scheduler import *  # noqa: F403
from ramify.protocol.messages.session import *  # noqa: F403
from ramify.protocol.messages.store import *  # noqa: F403
from ramify.protocol.plan import ExecutorMessage as ExecutorMessage
