"""`ramify chat`: talk to a model, on a server or on an engine of its own.

On a terminal it is a conversation. `ramify chat "question"`, or text on standard input, is answered
once: the answer goes to stdout, everything else to stderr. `--script` reads a conversation from
standard input, a message or a command a line. This file knows flags and where text goes; the talk is
`chat_session.py`'s.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from ramify.clients.commands import engine
from ramify.clients.commands.chat_session import ChatSession, ReadLine
from ramify.clients.commands.flags import with_settings
from ramify.clients.commands.info import server_at
from ramify.clients.commands.invocation import command
from ramify.clients.commands.options import set_option
from ramify.clients.commands.screen import Screen
from ramify.clients.commands.settings import DEFAULT_MODEL_NOTE, add_model_flags, model_config
from ramify.clients.connect import ConnectSettings
from ramify.clients.errors import ConnectionLost, SessionLost
from ramify.clients.generation import Result
from ramify.clients.options import GenerateOptions
from ramify.clients.session_link import Connection
from ramify.clients.sync import SyncSession, connect_sync
from ramify.protocol.config import EngineConfig, LogConfig, ServerConfig
from ramify.protocol.errors import BadRequest, TooLong
from ramify.protocol.wire import Generate, Usage

PORT = ServerConfig().port
LEAST_CUT = 200  # characters: what is shorter and does not fit is not too long, the model is too small
CUT_MARK = "\n[...]\n"
TICK_MS = 30  # on a terminal: fewer, larger pieces to draw
RETRY_S = 1.0  # between tries to reach a server that is away, for a new session
GIVE_UP_S = 60.0  # without a server, where nobody sits in front of it


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("chat", help="talk to a model, or ask it one thing")
    with_settings(parser, _fill, "[question]")
    parser.set_defaults(run=run)


def _fill(parser: argparse.ArgumentParser, every: bool) -> None:
    parser.add_argument(
        "question", nargs="?", help="answer this (and the text on standard input, if any), and exit"
    )
    parser.add_argument(
        "--url", help=f"a running server (default: the one on port {PORT}, else one of its own)"
    )
    parser.add_argument(
        "--own", action="store_true", help=f"start a server, whatever runs on port {PORT}"
    )
    parser.add_argument("--token", help="bearer token (default: $RAMIFY_TOKEN)")
    parser.add_argument("--system", metavar="TEXT", help="system message of a new session")
    parser.add_argument("--session", metavar="ID", help="go on with a session; needs --key and --url")
    parser.add_argument("--key", help="the session's key")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a generation option"
    )
    parser.add_argument(
        "--cut",
        action="store_true",
        help="leave out the middle of a text that is too long for the model",
    )
    parser.add_argument("--plain", action="store_true", help="show answers as they are, not as Markdown")
    parser.add_argument(
        "--script", action="store_true", help="standard input is a message or a command a line"
    )
    add_model_flags(parser, every)


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends, or answer once. Raises RamifyError."""
    if (args.session is None) != (args.key is None) or (args.session and args.url is None):
        raise BadRequest("--session, --key and --url belong together")
    if args.script and args.question is not None:
        raise BadRequest("--script reads the messages from standard input: leave the question out")
    options = GenerateOptions()
    for pair in args.set:
        name, _, value = pair.partition("=")
        set_option(options, name, value)
    if args.question is not None or not (args.script or sys.stdin.isatty()):
        return _once(args, question(args.question), options)
    return _talk(args, options)


def question(given: str | None) -> str:
    """Read the question: the argument, then a pipe's content. Raises BadRequest if both are missing."""
    parts = [given or ""]
    if not sys.stdin.isatty():
        parts.append(sys.stdin.read())
    text = "\n\n".join(part.strip("\n") for part in parts if part.strip())
    if not text:
        raise BadRequest("there is nothing to answer: the question and standard input are empty")
    return text


def _once(args: argparse.Namespace, text: str, options: GenerateOptions) -> int:
    """Print one answer on stdout."""
    screen = _screen(args, sys.stdout.isatty(), notes_to_stderr=True)
    with (
        _server(args, screen) as url,
        connect_sync(url, **_settings(args, screen, keep=args.session is not None)) as session,
    ):
        if args.system is not None and args.session is None:
            session.main.say(args.system, role="system")
        whole, result = len(text), None
        while result is None:
            try:
                result = _answer(session, screen, text, options)
            except TooLong as error:
                if not args.cut or len(text) < LEAST_CUT:
                    most = (error.details or {}).get("max", "fewer")
                    raise TooLong(
                        f"the message is too long: the model holds {most} tokens. Shorten it, or let "
                        "--cut leave out its middle"
                    ) from None
                text = shorter(text)
        if len(text) < whole:
            screen.note(f"cut: the model was given {len(text):,} of {whole:,} characters")
        if result.reason == "length":
            screen.note(cut_note(result.usage, options.get("max_tokens", Generate(id=0).max_tokens)))
    return 0


def cut_note(usage: Usage, most: int) -> str:
    """Say why an answer was cut: by `most`, its max_tokens, or at the end of the context."""
    if usage.output >= most:
        return f"cut after {usage.output} tokens: --set max_tokens=N allows more"
    return f"cut after {usage.output} tokens: with the {usage.prompt} before them, the context is full"


def _answer(session: SyncSession, screen: Screen, text: str, options: GenerateOptions) -> Result:
    """Ask, and show the answer as it comes."""
    generation = session.main.chat(text, **options)
    with screen.answer() as answer:
        for delta in generation:
            answer.add(delta.text, delta.cut)
    screen.end_line()
    return generation.result()


def shorter(text: str) -> str:
    """Shorten a text to three quarters, by its middle, with a mark where something is left out."""
    begin, _, end = text.partition(CUT_MARK)
    if not end:
        begin, end = text[: len(text) // 2], text[len(text) // 2 :]
    keep = 3 * (len(begin) + len(end)) // 8
    return begin[:keep] + CUT_MARK + end[-keep:]


def _talk(args: argparse.Namespace, options: GenerateOptions) -> int:
    """Hold a conversation, on a terminal or from a script."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and not args.script
    screen = _screen(args, terminal, notes_to_stderr=not terminal)
    with _server(args, screen) as url:
        settings = _settings(args, screen, keep=args.url is not None)

        def renew() -> SyncSession:
            fresh = settings.copy()
            fresh["session"] = fresh["key"] = None
            return _attach(url, fresh, screen)

        def imports(file: bytes) -> SyncSession:
            fresh = settings.copy()
            fresh["session"] = fresh["key"] = None
            fresh["imports"] = file
            return _attach(url, fresh, screen)

        session = connect_sync(url, **settings)
        with _reader(lambda: talk, terminal) as read:
            older = args.session is not None
            talk = ChatSession(session, read, screen, options, renew, imports, older=older)
            try:
                if older:
                    talk.learn()
                elif args.system is not None:
                    talk.system(args.system)
                if terminal:
                    screen.note(f"{session.model}: /help lists commands, Ctrl-D leaves")
                talk.run()
            finally:
                used = talk.leave()
        if args.url is not None and used:
            where = ["--url", args.url, "--session", talk.session.id, "--key", talk.session.key or ""]
            token = " (and --token)" if args.token else ""
            screen.note(f"to go on: {command('chat', *where)}{token}")
    return 1 if talk.failed and args.script else 0


def _settings(args: argparse.Namespace, screen: Screen, *, keep: bool) -> ConnectSettings:
    """Make the connection's settings. A lost one is tried again, on a terminal for as long as
    the user waits.
    """
    waits = sys.stdin.isatty() and args.question is None
    return ConnectSettings(
        token=args.token or os.environ.get("RAMIFY_TOKEN"),
        session=args.session,
        key=args.key,
        keep=keep,
        tick_ms=TICK_MS if screen.colour else 0,
        give_up_s=float("inf") if waits else GIVE_UP_S,
        watch=lambda change: tell(screen, change),
    )


def tell(screen: Screen, change: Connection) -> None:
    """Say what became of the connection. Called from the client's thread."""
    if change.up:
        screen.note("connected again")
    elif isinstance(change.error, SessionLost):
        screen.note("the server no longer knows this session")
    elif not change.over and change.error is not None:
        screen.note(f"the server is gone ({change.error.message}); trying again")


def _attach(url: str, settings: ConnectSettings, screen: Screen) -> SyncSession:
    """Make a new session; waits for a server that is away. Raises ConnectionLost when it gives up."""
    told, until = False, time.monotonic() + settings.get("give_up_s", GIVE_UP_S)
    while True:
        try:
            return connect_sync(url, **settings)
        except ConnectionLost as error:
            if time.monotonic() >= until:
                raise
            if not told:
                screen.note(f"{error.message}; trying again. Ctrl-C returns to the prompt")
            told = True
            time.sleep(RETRY_S)


@contextlib.contextmanager
def _server(args: argparse.Namespace, screen: Screen) -> Iterator[str]:
    """Give the URL to talk to: the one given, or that of an engine that lives as long as the block."""
    if args.url is not None:
        yield args.url
        return
    if not args.own and args.model is None:  # a model was asked for: that one, and no other
        found = server_at(PORT, args.token or os.environ.get("RAMIFY_TOKEN"))
        if found is not None:
            url, facts = found
            screen.note(
                f"talking to the server at {url} ({facts['model'].get('model')}); --own starts one"
            )
            yield url
            return
        try:
            engine.load("ramify.actors.engine")
        except engine.EngineMissing as error:
            raise BadRequest(
                f"no server answers on port {PORT} (--url names another one), and {error.message}"
            ) from None
    engine.load("ramify.actors.engine")  # before anything is said of its model
    config = EngineConfig(
        model=model_config(args),
        server=ServerConfig(port=0, grace_s=1.0),
        executor=args.executor,
        gateways=0,  # one client
    )
    if args.model is None:
        screen.note(f"{config.model.path.name}: {DEFAULT_MODEL_NOTE}")
    engine.configure_log(LogConfig(level="warning"))
    with engine.embedded(config, engine.show_progress(sys.stderr)) as url:
        yield url


def _screen(args: argparse.Namespace, terminal: bool, *, notes_to_stderr: bool) -> Screen:
    """Make a screen: Markdown on a terminal, else plain text."""
    if terminal and not args.plain:
        from rich.console import Console  # here: it takes time that `ramify serve` need not spend

        from ramify.clients.commands.markdown import MarkdownScreen

        console = Console()
        if console.is_terminal and not console.is_dumb_terminal:
            notes = Console(stderr=True) if notes_to_stderr else console
            return MarkdownScreen(console, notes)
    colour = terminal and (sys.stderr.isatty() or not notes_to_stderr)
    return Screen(None, sys.stderr if notes_to_stderr else None, colour=colour)


@contextlib.contextmanager
def _reader(talk: Callable[[], ChatSession], terminal: bool) -> Iterator[ReadLine]:
    """Give a function that reads a line (None at the end), with editing and history on a terminal."""
    if not terminal:
        yield lambda _: line.rstrip("\n") if (line := sys.stdin.readline()) else None
        return
    from ramify.clients.commands.terminal import Terminal

    def words(name: str) -> list[str]:
        match name:
            case "":
                return talk().commands
            case "/switch":
                return talk().branches
            case "/set":
                return list(GenerateOptions.__annotations__)
        return []

    with Terminal(words) as opened:
        yield opened.read
