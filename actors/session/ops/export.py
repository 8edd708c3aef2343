"""`export`: the session as one file, which a server makes a new session of (`open.import`)."""

import base64

from ramify.actors.session.durable.items import exported
from ramify.actors.session.ops.handler import AtOnce, Hands, one_entry, short
from ramify.actors.session.sockets.publisher import error_message
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.protocol.errors import Conflict, LimitExceeded, Overloaded, RamifyError
from ramify.protocol.wire import Export, Ok, ServerMessage

RETRY_MS = 1000
AROUND = 4096  # bytes of a frame that are not the file: it has to fit into one, here and where it goes


def _run(hands: Hands, subscriber: Subscriber, op: Export) -> None:
    try:
        if subscriber.throttled or any(_holds_file(message) for message in subscriber.out):
            raise Overloaded("read what was sent, then export again", retry_ms=RETRY_MS)
        reply = Ok(id=op.id, revision=hands.state.revision, result={"file": _file(hands)})
    except RamifyError as error:
        refusal = error_message(error, ident=op.id)
        hands.publisher.reply(
            subscriber.client, op.id, refusal, None, keep=False, write=subscriber.write
        )
        return
    hands.publisher.reply(subscriber.client, op.id, reply, None, keep=False, write=subscriber.write)


def _holds_file(message: ServerMessage) -> bool:
    return isinstance(message, Ok) and message.result is not None and "file" in message.result


def _file(hands: Hands) -> str:
    """Make the file, in base64. Raises Conflict, LimitExceeded."""
    if len(hands.runner):
        raise Conflict(f"{len(hands.runner)} ops wait or run: export when they are done, or cancel them")
    most = (hands.state.limits.frame_bytes - AROUND) // 4 * 3
    held = hands.state.meter.held
    data = exported(hands.state) if held <= most * 8 else None  # so large needs no try
    if data is None or len(data) > most:
        size = f"about {held} bytes in memory" if data is None else f"{len(data)} bytes"
        raise LimitExceeded(
            f"the session has {size}, a file at most {most}: drop branches, or raise "
            "`--limit-frame-bytes` here and where it goes",
            details={"max": most},
        )
    return base64.b64encode(data).decode()


HANDLER = AtOnce(Export, _run, one_entry, short, looks_again=True)
