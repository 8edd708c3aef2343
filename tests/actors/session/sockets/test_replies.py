"""Errors as messages."""

import gc
import weakref
from typing import get_args

import msgspec
import pytest

from ramify.actors.session.sockets.publisher import bare, error_message, error_of, refusals
from ramify.protocol.errors import (
    BadRequest,
    Cancelled,
    Code,
    DeadlineExceeded,
    Overloaded,
    RamifyError,
    Skipped,
)
from ramify.protocol.saved import SavedError
from ramify.protocol.wire import Append, Credit, Drop, Error


def test_an_error_is_told_with_all_that_it_knows() -> None:
    message = error_message(Overloaded("later", retry_ms=70, details={"max": 1}), ident=3, branch="a")
    assert (message.code, message.message, message.id, message.branch) == ("overloaded", "later", 3, "a")
    assert (message.retry_ms, message.details) == (70, {"max": 1})
    assert [kind("").code for kind in (Skipped, Cancelled, DeadlineExceeded)] == [
        "skipped",
        "cancelled",
        "deadline",
    ]


def test_the_faulty_op_gets_the_error_and_the_others_are_skipped() -> None:
    ops = [Append(id=1, text="a"), Credit(branch="a", upto=1), Drop(id=2, branch="b")]
    told = refusals(BadRequest("no", details={"id": 2}), list(ops))
    assert [(each.id, each.code) for each in told] == [(1, "skipped"), (2, "bad_request")]
    assert "op 2" in told[0].message
    told = refusals(BadRequest("no"), list(ops))
    assert [(each.id, each.code) for each in told] == [(1, "bad_request"), (2, "bad_request")]
    (alone,) = refusals(BadRequest("no"), [Credit(branch="a", upto=1)])
    assert (alone.id, alone.code) == (None, "bad_request")


def test_an_error_that_is_kept_holds_nothing_of_where_it_came_from() -> None:
    class Large:
        pass

    def fail() -> weakref.ref[Large]:
        large = Large()
        try:
            try:
                raise ValueError("first")
            except ValueError as first:
                raise RamifyError("second") from first
        except RamifyError as error:
            kept.append(bare(error))
        return weakref.ref(large)

    kept: list[RamifyError] = []
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()
    assert (kept[0].__traceback__, kept[0].__cause__, kept[0].__context__) == (None, None, None)


@pytest.mark.parametrize("code", get_args(Code))
def test_a_saved_error_is_what_it_was(code: str) -> None:
    found = error_of(SavedError(code, "why", 5, {"max": 3}))
    assert error_message(found) == Error(code=code, message="why", retry_ms=5, details={"max": 3})  # type: ignore[arg-type]


def test_a_code_that_this_version_does_not_know() -> None:
    assert error_of(SavedError("unheard", "why")).code == "internal"


def test_an_error_saved_by_the_version_before() -> None:
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(("limit", "why")), type=SavedError)
    assert saved == SavedError("limit", "why")
