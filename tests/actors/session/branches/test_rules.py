"""A constraint counts once, however many outputs stand under it, until none does."""

from ramify.actors.kit.memory import SEGMENT
from ramify.actors.session.branches.state import SessionState
from ramify.protocol.config import Limits
from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.saved import SavedRule


def test_outputs_share_a_rule_which_counts_until_the_last_is_gone() -> None:
    state = SessionState(1, context=64, vocab=9, limits=Limits(), decode=lambda tokens: "")
    before = state.meter.held
    what = SavedRule(ConstraintSpec("regex", "a+"), False)
    first, second = state.rule(what), state.rule(SavedRule(ConstraintSpec("regex", "a+"), False))
    assert first is second
    assert state.meter.held - before == first.size == SEGMENT + len("a+")
    other = state.rule(SavedRule(ConstraintSpec("regex", "a+"), True))  # behind a thought
    assert other is not first
    del first, other
    assert state.meter.held - before == second.size
    del second
    assert state.meter.held == before
