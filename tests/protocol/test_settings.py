"""A setting is declared once: its flag, bounds and default are read off the field."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest

from ramify.protocol.config import EngineConfig, ModelConfig
from ramify.protocol.credentials import CredentialLimits
from ramify.protocol.errors import ConfigError
from ramify.protocol.limits import Limits
from ramify.protocol.settings import DeclaredSetting, Setting, Settings, declared, is_loopback


class Kitchen(Settings, frozen=True, kw_only=True):
    """Every kind of setting."""

    GROUP: ClassVar[str] = "kitchen"
    PREFIX: ClassVar[str] = "pan-"

    eggs: Annotated[int, Setting("how many", low=1, high=12)] = 2
    salt: Annotated[int | None, Setting("grains", low=0)] = None
    heat: Annotated[float, Setting("share", over=0, under=1)] = 0.5
    days: Annotated[float, Setting("kept", over=0, high=36_500, unit="days")] = 1.0
    boil_s: Annotated[float, Setting("time", low=1, high=600, besides={0: "none"}, unit="seconds")] = 9.0
    kind: Annotated[Literal["soft", "hard"], Setting("of egg", group="eggs")] = "soft"
    names: Annotated[tuple[str, ...], Setting("of eggs", flag="--name")] = ()
    recipe: Annotated[Path | None, Setting("to read", flag=None)] = None
    notes: str = ""


KNOWN: dict[str, DeclaredSetting] = {each.field: each for each in declared(Kitchen)}


def test_what_a_field_says() -> None:
    assert "notes" not in KNOWN
    assert [each.flag for each in KNOWN.values()] == [
        *("--pan-eggs", "--pan-salt", "--pan-heat", "--pan-days", "--pan-boil", "--pan-kind"),
        *("--name", None),
    ]
    assert [each.kind for each in KNOWN.values()][:4] == [int, int, float, float]
    assert (KNOWN["kind"].choices, KNOWN["kind"].group) == (("soft", "hard"), "eggs")
    assert (KNOWN["names"].kind, KNOWN["names"].many, KNOWN["names"].default) == (str, True, ())
    assert (KNOWN["recipe"].kind, KNOWN["recipe"].many) == (Path, False)
    assert KNOWN["eggs"].group == "kitchen"


@pytest.mark.parametrize(
    ("field", "bounds"),
    [
        ("eggs", "1 to 12"),
        ("salt", "at least 0"),
        ("heat", "between 0 and 1"),
        ("days", "over 0, up to 36500 days"),
        ("boil_s", "1 to 600 seconds, or 0 for none"),
        ("kind", ""),
        ("names", ""),
    ],
)
def test_bounds_as_they_are_said(field: str, bounds: str) -> None:
    assert KNOWN[field].bounds == bounds


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("eggs", [1, 12]),
        ("salt", [0, None, 2**31 - 1]),
        ("heat", [0.001, 0.999]),
        ("days", [0.001, 36_500.0]),
        ("boil_s", [0.0, 1.0, 600.0]),
    ],
)
def test_what_is_within_its_bounds(field: str, values: list[object]) -> None:
    for value in values:
        assert getattr(Kitchen(**{field: value}), field) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("eggs", 0, "--pan-eggs is 0: must be 1 to 12"),
        ("eggs", 13, "--pan-eggs is 13: must be 1 to 12"),
        ("salt", -1, "--pan-salt is -1: must be at least 0"),
        ("salt", 2**31, "--pan-salt is 2147483648: must be at most 2147483647"),
        ("heat", 0.0, "--pan-heat is 0: must be between 0 and 1"),
        ("heat", 1.0, "--pan-heat is 1: must be between 0 and 1"),
        ("heat", float("nan"), "--pan-heat is nan"),
        ("days", 0.0, "--pan-days is 0: must be over 0, up to 36500 days"),
        ("days", float("inf"), "--pan-days is inf"),
        ("boil_s", 0.5, "--pan-boil is 0.5: must be 1 to 600 seconds, or 0 for none"),
    ],
)
def test_what_is_out_of_bounds_names_the_flag_and_them(field: str, value: float, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Kitchen(**{field: value})  # type: ignore[arg-type]
    assert caught.value.message.startswith(said)
    with pytest.raises(ConfigError, match="line 3"):
        KNOWN[field].check(value, "line 3")


@pytest.mark.parametrize("kind", [EngineConfig, ModelConfig, Limits, CredentialLimits])
def test_every_number_of_a_server_has_bounds(kind: type[Settings]) -> None:
    for each in declared(kind):
        known = each.setting
        assert each.group
        assert known.help
        if each.kind in (int, float):
            assert known.low is not None or known.over is not None
        if each.kind is float:
            assert known.high is not None or known.under is not None


def test_loopback() -> None:
    assert is_loopback("localhost")
    assert is_loopback("127.1.2.3")
    assert not is_loopback("127.evil.example")
