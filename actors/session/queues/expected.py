"""About how many tokens an op is going to add to a branch: for whoever plans the KV pool. Pure.

Text is not tokenized for this, and nobody knows how long an output will be.
"""

from ramify.protocol.wire import Append, Generate, Join, Op

OUTPUT = 64  # tokens of an output that count: most end before they have to
JOINED = 32  # tokens of each branch that is joined
CHARACTERS = 4  # to a token


def expected_tokens(op: Op, *, generates: bool) -> int:
    """Of a task that runs `op` on one branch. `generates`: it is not one that makes branches for it."""
    match op:
        case Generate() if generates:
            return min(op.max_tokens, OUTPUT)
        case Append():
            said = len(op.text or "") + sum(len(message.content) for message in op.messages or ())
            return len(op.tokens or ()) + said // CHARACTERS
        case Join():
            return (len(op.prefix) + len(op.suffix)) // CHARACTERS + JOINED * len(op.from_)
        case _:
            return 0
