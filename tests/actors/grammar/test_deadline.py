"""Constructions end at the deadline of the one that asked."""

from math import inf

import pytest

from ramify.actors.grammar.limits import check_deadline, deadline
from ramify.protocol.errors import ConstraintError


def test_without_a_deadline_nothing_ends() -> None:
    check_deadline()


def test_behind_it_a_step_raises_and_the_outer_one_counts_again() -> None:
    with deadline(inf):
        with deadline(-1.0), pytest.raises(ConstraintError, match="too long"):
            check_deadline()
        check_deadline()


def test_an_error_inside_leaves_no_deadline_behind() -> None:
    with pytest.raises(KeyError), deadline(-1.0):
        raise KeyError
    check_deadline()
