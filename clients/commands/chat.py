"""`ramify chat`: talk to a model in the terminal, on a server or on an engine of its own.

Also reads a script from a pipe: one message a line, answers on stdout, the rest on stderr.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ramify.clients.commands import engine
from ramify.clients.commands.conversation import Conversation, ReadLine, Screen, set_option
from ramify.clients.commands.settings import DEFAULT_MODEL_NOTE, add_model_flags, model_config
from ramify.clients.handles import GenerateOptions
from ramify.clients.sync import connect_sync
from ramify.protocol.config import EngineConfig, ServerConfig
from ramify.protocol.errors import BadRequest

HISTORY = 1000  # lines kept


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("chat", help="talk to a model")
    parser.add_argument("--url", help="a running server (default: start one in this process)")
    parser.add_argument("--token", help="bearer token (default: $RAMIFY_TOKEN)")
    parser.add_argument("--system", metavar="TEXT", help="system message of a new session")
    parser.add_argument("--session", metavar="ID", help="go on with a session; needs --key and --url")
    parser.add_argument("--key", help="the session's key")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a generation option"
    )
    add_model_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends. Raises RamifyError."""
    if (args.session is None) != (args.key is None) or (args.session and args.url is None):
        raise BadRequest("--session, --key and --url belong together")
    options = GenerateOptions()
    for pair in args.set:
        name, _, value = pair.partition("=")
        set_option(options, name, value)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen(sys.stdout, sys.stdout if terminal else sys.stderr, terminal)
    with _server(args, screen) as url:
        settings = {"session": args.session, "key": args.key, "keep": args.url is not None}
        token = args.token or os.environ.get("RAMIFY_TOKEN")
        with connect_sync(url, token=token, **settings) as session, _reader(terminal) as read:
            conversation = Conversation(session, read, screen, options)
            if args.system is not None and args.session is None:
                conversation.system(args.system)
            if terminal:
                screen.note(f"{session.model}: /help lists commands, Ctrl-D leaves")
            conversation.run()
            if args.url is not None:
                where = f"--url {args.url} --session {session.id} --key {session.key}"
                screen.note(f"to go on: ramify chat {where}")
    return 0


@contextlib.contextmanager
def _server(args: argparse.Namespace, screen: Screen) -> Iterator[str]:
    """The URL to talk to: the one given, or that of an engine that lives as long as the block."""
    if args.url is not None:
        yield args.url
        return
    config = EngineConfig(
        model=model_config(args),
        server=ServerConfig(port=0, grace_s=1.0),
        executor=args.executor,
        gateways=0,  # one client
    )
    if args.model is None:
        screen.note(f"{config.model.path.name}: {DEFAULT_MODEL_NOTE}")
    engine.configure_log("warning", "human")
    with engine.embedded(config, engine.show_progress(sys.stderr)) as url:
        yield url


@contextlib.contextmanager
def _reader(terminal: bool) -> Iterator[ReadLine]:
    """A function that reads a line (None at the end): with editing and history on a terminal."""
    if not terminal:
        yield lambda _: line.rstrip("\n") if (line := sys.stdin.readline()) else None
        return
    with _history():
        yield _edited


def _edited(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing with a history file in the user's state folder, where readline is there."""
    try:
        import readline
    except ImportError:  # not on every platform: input() then edits as the terminal does
        yield
        return
    state = os.environ.get("XDG_STATE_HOME")
    file = (Path(state) if state else Path.home() / ".local" / "state") / "ramify" / "chat_history"
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            readline.read_history_file(file)
    readline.set_history_length(HISTORY)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(file)
