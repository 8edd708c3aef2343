"""Tells a cache of all branches of a session, for one that has none of them. Pure.

A session that was saved is taken up like this, and one whose engine has gone moves to another.
"""

from array import array

from ramify.actors.kit.turns import Steps
from ramify.actors.session.branches.branch import Link
from ramify.actors.session.branches.state import SessionState
from ramify.protocol.messages import ExtendBranch, ForkBranch, OpenBranch
from ramify.protocol.plan import pack

BRANCH = 5  # what it costs to tell of one (see `Work`)
LINKS = 2  # that are looked at in a microsecond


def retell(state: SessionState, now: float) -> Steps[None]:
    """Each branch is a fork of the first that has its segments: shared tokens are told once.

    `now`: from when on branches are retained.
    """
    placed: dict[int, int] = {}  # id(link) -> a handle that has it
    for branch in list(state.branches.values()):
        own: list[Link] = []
        link = branch.segments.top
        while link is not None and id(link) not in placed:
            own.append(link)
            link = link.before
        if link is None:
            state.out.cache.append(OpenBranch(branch.handle, state.namespace))
        else:
            state.out.cache.append(ForkBranch(placed[id(link)], [branch.handle], link.segment.end))
        yield BRANCH + len(own) // LINKS
        tokens: array[int] = array("i")
        for each in reversed(own):
            placed[id(each)] = branch.handle
            tokens.extend(each.segment.tokens)
        if tokens:
            state.out.cache.append(ExtendBranch(branch.handle, pack(tokens)))
        if branch.retain_s is not None:
            state.out.retained[branch.handle] = now + branch.retain_s
