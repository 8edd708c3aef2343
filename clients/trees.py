"""The answers to one `tree`, put together: whole histories again, whatever came once or in parts. Pure.

A server sends as much as fits (`state.next` says where to go on), and the turns that a fork shares with
its parent only there (`turns_from`).
"""

from collections.abc import Sequence

from msgspec.structs import replace

from ramify.protocol.wire import BranchState, SegmentState, StateReply


def whole(pages: Sequence[StateReply]) -> StateReply:
    """Make one `state` with each branch once, and all its turns."""
    branches: dict[str, BranchState] = {}
    for page in pages:
        for branch in page.branches:
            known = branches.get(branch.branch)
            if known is not None and known.turns is not None:
                end = known.turns[-1].start if known.turns else -1
                more = [turn for turn in branch.turns or () if turn.start > end]
                branch = replace(branch, turns=[*known.turns, *more])
            branches[branch.branch] = branch
    complete: dict[str, list[SegmentState] | None] = {}
    for name in branches:
        _complete(name, branches, complete)
    shown = [replace(each, turns=complete[each.branch], turns_from=None) for each in branches.values()]
    return replace(pages[-1], branches=shown, next=None)


def _complete(
    name: str, branches: dict[str, BranchState], complete: dict[str, list[SegmentState] | None]
) -> None:
    """Note the turns of a branch and of those that it comes from. No recursion: chains may be long."""
    chain: dict[str, BranchState] = {}
    while name not in complete and name not in chain:  # a circle would be the server's fault
        branch = chain[name] = branches[name]
        if branch.turns_from is None or branch.parent not in branches:
            break
        name = branch.parent
    for branch in reversed(chain.values()):
        turns, start = branch.turns, branch.turns_from
        if turns is not None and start is not None and branch.parent is not None:
            before = complete.get(branch.parent) or ()
            turns = [*(turn for turn in before if turn.end <= start), *turns]
        complete[branch.branch] = turns
