"""Settings: each is declared once, as an annotated field. Flag, check, help and docs follow from it.

    class ScheduleConfig(Settings, frozen=True, kw_only=True):
        GROUP = "scheduling"
        lookahead: Annotated[int, Setting("tokens of memory ahead", low=1, high=1 << 16)] = 16

is the flag `--lookahead N`, an error that names it for values out of bounds, a line of `--help-all` and
a row of docs/settings.md. `ramify.clients.commands.flags` makes the flags. Conditions between two
settings are checked by the class, in `__post_init__`.
"""

import functools
import ipaddress
import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from ramify.protocol.errors import ConfigError

MOST = 2**31 - 1  # of any whole number that declares no bound
DAY_S = 86_400.0
NOTHING = msgspec.NODEFAULT


class Setting(msgspec.Struct, frozen=True):
    """The description of a field, beside its type and default. Stands in its annotation."""

    help: str  # without the default; `--help` shows it up to the first ";"
    flag: str | None = ""  # "": "--" and the field's name; None: the setting has no flag
    low: float | None = None
    high: float | None = None  # None: MOST
    over: float | None = None  # a lower bound that is excluded
    under: float | None = None  # an upper bound that is excluded
    besides: Mapping[float, str] = {}  # values out of these bounds, and what they mean
    words: Mapping[str, object] = {}  # texts that stand for values
    default: str = ""  # the word for the field's default, or what happens where that is None
    unit: str = ""  # of the value
    first: bool = False  # a newcomer needs it: `--help` shows it
    environment: str = ""  # a variable that is read where the flag is not given
    group: str = ""  # where help and docs list it; "": in the group of its class


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A group of settings. Constructors raise ConfigError that names the flag; nothing checks later."""

    GROUP: ClassVar[str] = ""
    PREFIX: ClassVar[str] = ""  # of its flags

    def __post_init__(self) -> None:
        for each in declared(type(self)):
            each.check(getattr(self, each.field))


class DeclaredSetting(msgspec.Struct, frozen=True):
    """A setting together with its field."""

    field: str
    flag: str | None
    group: str
    kind: Any  # the field's type without None; of a list, the type of its members
    many: bool  # it is a list
    default: Any  # NOTHING: the field is required
    setting: Setting

    @property
    def choices(self) -> tuple[Any, ...]:
        """The words that it may be, if it is a choice."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def bounds(self) -> str:
        """The bounds in words, for errors and the documentation; "" without any."""
        known = self.setting
        if self.kind not in (int, float):
            return ""
        if known.over is not None and known.under is not None:
            text = f"between {_shown(known.over)} and {_shown(known.under)}"
        elif known.over is not None:
            text = f"over {_shown(known.over)}, up to {_shown(known.high)}"
        elif known.high is None:
            text = f"at least {_shown(known.low)}"
        else:
            text = f"{_shown(known.low)} to {_shown(known.high)}"
        unit = f" {known.unit}" if known.unit else ""
        return text + unit + "".join(
            f", or {_shown(value)} for {what}" for value, what in known.besides.items()
        )  # fmt: skip

    def check(self, value: Any, where: str | None = None) -> None:
        """Raise ConfigError for a number out of bounds. `where`: what the error names, not the flag."""
        known = self.setting
        if self.kind not in (int, float) or value is None or value in known.besides:
            return
        high = MOST if known.high is None else known.high
        good = (
            math.isfinite(value)
            and (known.low is None or value >= known.low)
            and (known.over is None or value > known.over)
            and (known.under is None or value < known.under)
            and value <= high
        )
        if not good:
            bounds = self.bounds
            if known.high is None and known.under is None and value > high:
                bounds = f"at most {MOST}"
            raise ConfigError(f"{where or self.flag} is {_shown(value)}: must be {bounds}")


@functools.cache
def declared(kind: type[Settings]) -> tuple[DeclaredSetting, ...]:
    """The settings of a class, in the order of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        base, *notes = get_args(hint)
        setting = next((note for note in notes if isinstance(note, Setting)), None)
        if setting is None:
            continue
        inner, many = _kind(base)
        default = field.default
        if default is NOTHING and field.default_factory is not NOTHING:
            default = field.default_factory()
        flag = setting.flag if setting.flag != "" else _flag(kind.PREFIX, field.name)
        group = setting.group or kind.GROUP
        found.append(DeclaredSetting(field.name, flag, group, inner, many, default, setting))
    return tuple(found)


def _flag(prefix: str, name: str) -> str:
    return f"--{prefix}{name.removesuffix('_s').replace('_', '-')}"


def _kind(base: Any) -> tuple[Any, bool]:
    """(the type without None, whether it is a list of them)."""
    if get_origin(base) in (Union, UnionType):
        (base,) = (each for each in get_args(base) if each is not NoneType)
    if get_origin(base) is tuple:
        return get_args(base)[0], True
    return base, False


def _shown(value: float | None) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return f"{value:.0f}" if whole else f"{value:g}" if isinstance(value, float) else str(value)


def is_loopback(host: str) -> bool:
    """True for addresses that no other machine can reach. A name that only looks like one is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
