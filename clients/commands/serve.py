"""`ramify serve`: load a model and serve it until a signal."""

import argparse
import sys
from typing import Any

from ramify.clients.commands import engine
from ramify.clients.commands.flags import with_settings
from ramify.clients.commands.info import server_at
from ramify.clients.commands.invocation import command
from ramify.clients.commands.settings import (
    DEFAULT_MODEL_NOTE,
    add_server_flags,
    engine_config,
)
from ramify.protocol.config import LogConfig
from ramify.protocol.errors import ConfigError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("serve", help="serve a model over WebSockets")
    with_settings(parser, add_server_flags)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve. Raises ConfigError, ModelError, EngineStopped."""
    # first: errors are logged as the rest is
    engine.configure_log(LogConfig(level=args.log_level, format=args.log_format))
    config = engine_config(args)
    token = next(iter(config.server.tokens), None)
    other = server_at(config.server.port, token) if config.server.port else None
    if other is not None:
        where, facts = other
        raise ConfigError(
            f"a server runs on port {config.server.port} already ({facts['model'].get('model')}): "
            f"{page_of(where)} shows it; --port N (make serve PORT=N) starts another one"
        )
    note = f" ({DEFAULT_MODEL_NOTE})" if args.model is None else ""
    print(f"model: {config.model.name or config.model.path.name}{note}", flush=True)
    json = args.log_format == "json"
    show = engine.log_progress() if json else engine.show_progress(sys.stderr)

    def progress(what: str, done: float) -> None:
        if what.startswith("ready at "):
            announce(what.removeprefix("ready at "))
        else:
            show(what, done)

    engine.serve(config, progress)
    return 0


def announce(url: str, out: Any = None) -> None:
    """Tell where the server is."""
    talk = command("chat", "--url", url)
    print(f"ready: {url}\n       page {page_of(url)}   talk: {talk}", file=out, flush=True)


def page_of(url: str) -> str:
    """Make the URL of the chat page of the server at `url`."""
    return url.replace("ws", "http", 1).removesuffix("/v1/ws") + "/"
