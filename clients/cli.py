"""The console script `ramify`: `serve`, `replica`, `chat`, `info`, `store`, `bench`.

Exit codes: 0 done, 1 the work failed, 2 a wrong flag, setting or model folder, 130 interrupted. An
error is one line on stderr. Each subcommand lives in `commands/`; this file knows only their names.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from ramify.clients.commands.screen import shown
from ramify.protocol.errors import BadRequest, RamifyError, Unauthorized

COMMANDS = ("serve", "replica", "chat", "info", "store", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    args = build_parser(words[:1]).parse_args(words)
    try:
        code: int = args.run(args)
    except RamifyError as error:
        message = error.message
        if error.code == Unauthorized.code:  # the server names what its protocol has, not our flags
            message += " (here: --token TOKEN)"
        # ConfigError and ModelError are bad requests too: what the user can mend.
        return _fail(message, 2 if error.code == BadRequest.code else 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output is gone: nothing is left to tell
        return 1
    except OSError as error:
        return _fail(str(error), 1)
    return code


class _Parser(argparse.ArgumentParser):
    """Refuses a flag, command or choice that it does not know by naming the closest one that it does."""

    # The base's overloads have several signatures; all callers pass what this one takes.
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        known, left = super().parse_known_args(args, namespace)
        if left:
            flags = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(left[0].partition("=")[0], flags, n=1)
            self.error(
                f"unrecognized arguments: {' '.join(left)}"
                + (f" (did you mean {near[0]}?)" if near else "")
            )
        return known, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = [str(choice) for choice in action.choices or ()]
            if near := difflib.get_close_matches(str(value), choices, n=1):
                error.message += f" (did you mean {near[0]}?)"
            raise


def build_parser(first: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Make the parser of the whole command line; of one command, if that is the `first` word."""
    parser = cast(
        argparse.ArgumentParser,
        _Parser(
            prog="ramify", description="Serve language models to stateful clients, and talk to them."
        ),
    )
    parser.add_argument("--version", action="version", version=f"ramify {installed_version()}")
    commands: argparse._SubParsersAction[argparse.ArgumentParser]
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in first if first and first[0] in COMMANDS else COMMANDS:  # a server imports no chat
        import_module(f"ramify.clients.commands.{name}").add_parser(commands)
    return parser


def installed_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("ramify")
    except PackageNotFoundError:
        return "(not installed)"


def _fail(message: str, code: int) -> int:
    line = shown(" ".join(message.split()))
    print(f"ramify: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
