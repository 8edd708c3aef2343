"""Flags of settings: made from their declarations (`ramify.protocol.settings`), and read back.

`--help` shows the few settings that a newcomer needs, up to the first `;` of what is said of them;
`--help-all` shows everything. Knows no setting by name.
"""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ramify.protocol.settings import NOTHING, DeclaredSetting, Settings, declared

GROUPS = {
    "model": None,
    "server": None,
    "access": "who may use it",
    "sessions": "how long they live, and where they are saved",
    "replicas": "the model several times, behind one port; sessions move when a replica goes",
    "scheduling": None,
    "limits": "what one client may ask for",
    "log": None,
}
KINDS = {int: int, float: float}  # what is read as such; the rest is text
METAVARS = {int: "N", float: "X", Path: "FILE"}
UNITS = {"seconds": "S", "ms": "MS", "days": "DAYS", "bytes": "BYTES"}

Fill = Callable[[argparse.ArgumentParser, bool], None]


def with_settings(parser: argparse.ArgumentParser, fill: Fill, operands: str = "") -> None:
    """Give `parser` all flags of `fill(parser, every)`, of which its help shows those for newcomers."""
    parser.usage = f"%(prog)s [FLAG ...] {operands}".rstrip()
    fill(parser, False)
    parser.add_argument(
        "--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, fill=fill,
        help="show all flags; docs/settings.md has them too",
    )  # fmt: skip


def add_flags(
    parser: argparse.ArgumentParser,
    kinds: Sequence[type[Settings]],
    *,
    every: bool,
    groups: Sequence[str] = tuple(GROUPS),
) -> None:
    """Add the flags of these settings, by group. Not `every`: help shows those for newcomers alone."""
    for name in groups:
        text, members = GROUPS[name], members_of(name, kinds)
        if not members:
            continue
        shown = every or any(each.setting.first for each in members)
        group = parser.add_argument_group(name, text if every else None) if shown else parser
        for each in members:
            _add(group, each, brief=not every, hidden=not (every or each.setting.first))


def members_of(group: str, kinds: Sequence[type[Settings]]) -> list[DeclaredSetting]:
    """Find the settings of a group that have a flag."""
    every = [each for kind in kinds for each in declared(kind)]
    return [each for each in every if each.flag is not None and each.group == group]


def given(kind: type[Settings], args: argparse.Namespace) -> dict[str, Any]:
    """Read the values of flags and environment variables, by field."""
    found: dict[str, Any] = {}
    for each in declared(kind):
        if each.flag is not None:
            value = getattr(args, each.flag.removeprefix("--").replace("-", "_"))
            if each.many:
                value = tuple(value)
            elif each.kind is Path and value is not None:
                value = Path(value)
            found[each.field] = value
        if each.setting.environment:
            found[each.field] = or_variable(each, found.get(each.field))
    return found


def or_variable(each: DeclaredSetting, value: Any) -> Any:
    """Return `value`, or the setting's environment variable if its flag is not given."""
    known = each.setting
    text = os.environ.get(known.environment)
    silent = each.flag is None or value == known.default
    if text is None or not silent or (text == "" and each.flag is not None):
        return value
    return known.words.get(text, text)


def help_of(each: DeclaredSetting, *, brief: bool = False) -> str:
    """Write one setting's help: its meaning and its default."""
    known = each.setting
    text = known.help.partition(";")[0] if brief else known.help
    text = f"{known.unit} {text}" if known.unit == "seconds" else text
    if each.many:
        text += "; may be repeated"
    default = default_of(each)
    return f"{text} (default: {default})" if default else text


def default_of(each: DeclaredSetting) -> str:
    """Write the default as a user would type it, or what happens without the flag; "" for nothing."""
    default = each.default
    if each.setting.default:
        return each.setting.default
    if default is NOTHING or default is None or isinstance(default, (bool, tuple)):
        return ""
    return f"{default:.10g}" if isinstance(default, float) else str(default)


def _add(group: Any, each: DeclaredSetting, *, brief: bool, hidden: bool) -> None:
    known, flag = each.setting, each.flag
    text = argparse.SUPPRESS if hidden else help_of(each, brief=brief).replace("%", "%%")
    if each.kind is bool:
        action = "store_false" if each.default else "store_true"
        group.add_argument(flag, action=action, help=text)
        return
    default = None if each.default is NOTHING else each.default
    if known.words or (known.default and default is not None):
        default = known.default  # as a user would write it
    options: dict[str, Any] = {"help": text, "default": default}
    if each.choices:
        options["choices"] = list(each.choices)
    else:
        kind = _bytes if known.unit == "bytes" else KINDS.get(each.kind)
        options["type"] = _words(known.words, kind or each.kind) if known.words else kind
        options["metavar"] = UNITS.get(known.unit) or known.unit or METAVARS.get(each.kind, "TEXT")
    if each.many:
        options |= {"action": "append", "default": []}
    group.add_argument(flag, **options)


def _words(words: Mapping[str, object], kind: Any) -> Callable[[str], object]:
    """Make a converter for argparse: of a word that stands for a value, or the text of one."""

    def read(text: str) -> object:
        if text in words:
            return words[text]
        try:
            return kind(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or {', '.join(words)}") from None
        except ValueError:
            known = ", ".join(words)
            raise argparse.ArgumentTypeError(f"{text!r}: must be {known} or a number") from None

    return read


def _bytes(text: str) -> int:
    """Read a number of bytes as a user writes it: 64M is 64 MiB."""
    found = re.fullmatch(r"(-?[0-9]{1,18})([KMGT]?)", text)
    if found is None:
        known = "a number of bytes, or one with K, M, G or T"
        raise argparse.ArgumentTypeError(f"{text!r}: must be {known}")
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ")


class _HelpAll(argparse.Action):
    """Shows the help of a parser that has every flag in its help."""

    def __init__(self, *args: Any, fill: Fill, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fill = fill

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        whole = argparse.ArgumentParser(prog=parser.prog, usage=parser.usage)
        self._fill(whole, True)
        whole.print_help()
        parser.exit()
