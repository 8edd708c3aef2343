"""The exception tree and the wire agree."""

from typing import get_args

import pytest

from ramify.protocol import errors
from ramify.protocol.errors import BadRequest, Close, Code, Overloaded, RamifyError, brief


def subclasses(cls: type[RamifyError]) -> list[type[RamifyError]]:
    found = [cls, *(sub for child in cls.__subclasses__() for sub in subclasses(child))]
    return [each for each in found if each.__module__ == errors.__name__]  # not those of the engine


@pytest.mark.parametrize("cls", subclasses(RamifyError))
def test_every_exception_carries_a_known_code(cls: type[RamifyError]) -> None:
    assert cls.code in get_args(Code)
    assert cls.__name__ in (errors.__doc__ or "")


def test_fields_travel() -> None:
    error = Overloaded("busy", details={"queue": 3}, retry_ms=50)
    assert (str(error), error.message, error.details, error.retry_ms) == (
        "busy",
        "busy",
        {"queue": 3},
        50,
    )
    assert BadRequest("x").details is None


def test_a_librarys_message_is_told_in_short() -> None:
    assert brief(" no\n  such thing ") == "no such thing"
    assert brief("x" * 500) == "x" * 500
    told = brief("begin " + 9_000 * "x" + " end")
    assert len(told) == 500
    assert told.startswith("begin x")
    assert told.endswith("x end")


def test_close_codes_are_valid_on_the_wire() -> None:
    codes = [value for name, value in vars(Close).items() if name.isupper()]
    assert len(set(codes)) == len(codes)
    for code in codes:
        assert code in (1000, 1001, 1002, 1003, 1007, 1009, 1011, 1012) or 4000 <= code <= 4999
