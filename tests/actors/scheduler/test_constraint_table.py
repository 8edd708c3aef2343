"""Which constraints requests may name, and when the executor gets and forgets them."""

from ramify.actors.scheduler.constraint_table import ConstraintTable
from ramify.protocol.messages import Constrain, Unconstrain
from ramify.protocol.plan import LoadConstraint, unpack


def known(*idents: int) -> ConstraintTable:
    constraints = ConstraintTable()
    for ident in (0, *idents):
        constraints.add(Constrain(ident, b"%d" % ident))
    return constraints


def test_what_is_not_there_cannot_be_taken() -> None:
    constraints = known(1)
    assert not constraints.take(2)
    assert constraints.take(1)
    assert len(constraints) == 1
    without = ConstraintTable()
    without.add(Constrain(1, b"1"))
    assert not without.take(1)  # there is no vocabulary


def test_a_body_is_loaded_once_behind_the_vocabulary() -> None:
    constraints = known(1, 2, 3)
    assert constraints.wanted == []
    assert constraints.take(1)
    assert constraints.take(1)
    assert constraints.loads() == [LoadConstraint(0, b"0"), LoadConstraint(1, b"1")]
    assert constraints.take(1)
    assert constraints.wanted == []
    assert constraints.take(3)
    assert constraints.take(2)
    assert constraints.loads() == [LoadConstraint(3, b"3"), LoadConstraint(2, b"2")]


def test_who_leaves_before_the_next_plan_has_nothing_loaded() -> None:
    constraints = known(1, 2)
    assert constraints.take(1)
    constraints.give_back(1)
    assert constraints.take(2)
    constraints.give_back(2)
    constraints.retire(Unconstrain(2))
    assert constraints.loads() == [LoadConstraint(0, b"0")]
    assert constraints.forgets() == b""
    assert constraints.take(1)
    assert constraints.take(1)
    constraints.give_back(1)
    assert constraints.loads() == [LoadConstraint(1, b"1")]


def test_a_retired_one_stays_for_those_that_have_it() -> None:
    constraints = known(1)
    assert constraints.take(1)
    constraints.loads()
    constraints.retire(Unconstrain(1))
    assert not constraints.take(1)
    assert constraints.forgets() == b""
    constraints.give_back(1)
    assert unpack(constraints.forgets()).tolist() == [1]
    assert constraints.forgets() == b""


def test_what_was_never_loaded_is_not_forgotten() -> None:
    constraints = known(1)
    constraints.retire(Unconstrain(1))
    constraints.retire(Unconstrain(1))
    assert constraints.forgets() == b""


def test_the_vocabulary_is_due_as_soon_as_it_is_known() -> None:
    constraints = known(1)
    assert constraints.due
    assert constraints.loads() == [LoadConstraint(0, b"0")]
    assert not constraints.due
    assert constraints.take(1)
    assert constraints.due
    assert constraints.loads() == [LoadConstraint(1, b"1")]
    assert constraints.loads() == []
    constraints.add(Constrain(2, b"2"))
    assert not constraints.due  # nobody has named it


def test_the_vocabulary_gets_a_plan_of_its_own(world) -> None:
    w = world()
    w.turn(Constrain(0, b"words"))
    (plan,) = w.sent
    assert plan.constraints == [LoadConstraint(0, b"words")]
    assert (plan.opens, plan.extends, plan.decodes) == ([], [], b"")
    w.run(w.submit(max_tokens=2))
    assert all(not plan.constraints for plan in w.sent[1:])
    w.check_idle()


def test_another_executor_gets_what_requests_have() -> None:
    constraints = known(1, 2, 3)
    for ident in (1, 2):
        assert constraints.take(ident)
    constraints.loads()
    constraints.give_back(2)
    constraints.retire(Unconstrain(2))
    assert constraints.take(3)
    constraints.reload()
    assert constraints.due
    constraints.need(1)
    constraints.need(1)
    assert constraints.loads() == [LoadConstraint(0, b"0"), LoadConstraint(1, b"1")]
    assert constraints.forgets() == b""
    assert constraints.take(1)
    constraints.need(3)
    constraints.need(1)
    assert constraints.loads() == [LoadConstraint(3, b"3")]
