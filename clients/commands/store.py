"""`ramify store`: look at where a server saves sessions, move sessions. No torch."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from ramify.clients.commands import engine
from ramify.clients.commands.screen import shown
from ramify.clients.commands.settings import store_of
from ramify.protocol.errors import ConfigError
from ramify.protocol.saved import (
    EXPORT,
    FORMAT,
    HEAD,
    HISTORY,
    Changes,
    Exported,
    SavedHead,
    SavedOutput,
    SavedSegment,
    next_fence,
)
from ramify.protocol.store_url import kind_of
from ramify.protocol.wire import ChatMessage

MOST_BYTES = 1 << 31  # of a file that is imported
DAY_S = 86_400.0
TITLE = 60  # characters of a session's title
SEALED = b"\xc1"  # how an encrypted item begins: see `actors.store.sealed`


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("store", help="look at saved sessions, export and import them")
    _add_place(parser, "auto", 8765, None)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("ls", help="the sessions with their titles, the last used first")
    actions.add_parser("check", help="read everything; says what is damaged")
    show = actions.add_parser("show", help="one session: its branches and their text")
    show.add_argument("session")
    prune = actions.add_parser("prune", help="forget sessions; no server may have a file meanwhile")
    prune.add_argument("session", nargs="*", help="these")
    prune.add_argument("--days", type=float, metavar="DAYS", help="those not used for so long")
    export = actions.add_parser(
        "export", help="write a session into a file; its key opens it elsewhere too"
    )
    export.add_argument("session")
    export.add_argument("file", type=Path)
    export.add_argument("--plain", action="store_true", help="not encrypted, though the store is")
    imported = actions.add_parser(
        "import", help="add the session of a file; no server may have the store's file meanwhile"
    )
    imported.add_argument("file", type=Path)
    actions.add_parser(
        "trust-clock",
        help="this machine's clock is right, though the last sweep was long ago, or later: forget by it",
    )
    actions.add_parser(
        "rekey", help="encrypt everything with the key file's first key, also what was not encrypted"
    )
    for action in actions.choices.values():  # behind the action they are understood as well
        _add_place(action, *[argparse.SUPPRESS] * 3)
    parser.set_defaults(run=run)


def _add_place(parser: argparse.ArgumentParser, store: str, port: Any, key_file: Any) -> None:
    """Add the flags that say which store, with these defaults."""
    parser.add_argument("--store", default=store, metavar="PLACE", help="as of `ramify serve`")
    parser.add_argument(
        "--port", type=int, default=port, metavar="N", help="of the server, for --store auto (8765)"
    )
    parser.add_argument(
        "--store-key-file", type=Path, default=key_file, metavar="FILE", help="as of `ramify serve`"
    )


def run(args: argparse.Namespace) -> int:
    """Do what the action says. Raises ConfigError."""
    place = store_of(args)
    if place is None:
        raise ConfigError("there is no store: give its file or its URL with --store")
    writes = args.action in ("prune", "import", "rekey", "trust-clock")
    if args.action != "import" and kind_of(place) == "file" and not Path(place).exists():
        raise ConfigError(f"there is no store {place}: give the server's --store, or its --port")
    converts = args.action == "rekey"
    if converts and args.store_key_file is None:
        raise ConfigError("rekey needs --store-key-file: its first key encrypts everything anew")
    with engine.store(place, args.store_key_file, writes=writes, converts=converts) as store:
        return int(ACTIONS[args.action](store, args))


def _ls(store: Any, args: argparse.Namespace) -> int:
    for kept in list(store.kept()):
        if kept.session.startswith(HISTORY):
            continue
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.used))
        rest = [f"owner {kept.owner}"] if kept.owner else []
        rest += ["ops wait"] if kept.busy else []
        rest += [_title(store, kept.session)]
        print(shown("  ".join([kept.session, used, f"{kept.size:>9} bytes", *rest]).rstrip()))
    return 0


def _check(store: Any, args: argparse.Namespace) -> int:
    faults = list(store.check())
    if not faults:
        for kept in list(store.kept()):
            if kept.session.startswith(HISTORY):
                continue
            try:
                engine.check_saved(store.read(kept.session))
            except ConfigError as error:
                faults.append(f"session {kept.session}: {error}")
    for fault in faults:
        print(shown(fault))
    print("damaged" if faults else "sound")
    return 1 if faults else 0


def _show(store: Any, args: argparse.Namespace) -> int:
    items = _items(store, args.session)
    head = _head(items)
    print(shown(f"session {head.session}  model {head.model}  persist {head.persist}"))
    for name, position, turns in _texts(items):
        print(shown(f"\n[{name}] {position} tokens"))
        for who, text in turns:
            print(shown(f"{who}: {text}"))
    if head.waits:
        print(f"\n{len(head.waits)} ops wait or run")
    return 0


def _prune(store: Any, args: argparse.Namespace) -> int:
    if not args.session and args.days is None:
        raise ConfigError("say which: sessions, or --days")
    named = set(args.session)
    before = time.time() - args.days * DAY_S if args.days is not None else 0.0
    kept_now = list(store.kept())
    unknown = named - {kept.session for kept in kept_now}
    if unknown:
        raise ConfigError(
            f"the store has no session {min(unknown)}: `ramify store ls` shows which it has"
        )
    gone = [kept.session for kept in kept_now if kept.session in named or kept.used < before]
    store.delete(gone)
    print(f"forgot {len(gone)} sessions")
    return 0


def _export(store: Any, args: argparse.Namespace) -> int:
    items = dict(_items(store, args.session))
    owner = _head(items).owner
    if args.store_key_file is not None and not args.plain:
        seal = engine.keys(args.store_key_file).seal
        items = {key: seal(args.session, key, body) for key, body in items.items()}
    body = msgspec.msgpack.encode(Exported(EXPORT, FORMAT, args.session, owner, items))
    try:
        with open(os.open(args.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(body)
    except OSError as error:
        raise ConfigError(f"{args.file}: {error.strerror}: choose another file") from error
    return 0


def _import(store: Any, args: argparse.Namespace) -> int:
    try:
        if args.file.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{args.file} is larger than {MOST_BYTES} bytes")
        found = msgspec.msgpack.decode(args.file.read_bytes(), type=Exported)
    except OSError as error:
        raise ConfigError(f"{args.file}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{args.file} is no session that `ramify store export` wrote") from error
    if found.what != EXPORT or found.format > FORMAT:
        raise ConfigError(f"{args.file} is no session that this version of Ramify can read")
    if not found.session:
        raise ConfigError(
            f"{args.file} is a session without a key, as clients export it: `/load` it in `ramify chat`"
        )
    found = _unsealed(found, args)
    try:
        engine.check_saved(found.items)
    except ConfigError as error:
        raise ConfigError(f"{args.file} cannot be imported: {error.message}") from error
    if store.read(found.session):
        raise ConfigError(f"the store has a session {found.session} already: prune it first")
    busy = bool(_head(found.items).waits)
    store.write(
        [
            Changes(
                found.session,
                found.owner,
                found.items,
                [],
                sum(map(len, found.items.values())),
                time.time(),
                None,
                busy,
                live=False,
                sync=True,
                fence=next_fence(),
                whole=True,
            )
        ]
    )
    print(shown(f"session {found.session}"))
    return 0


def _unsealed(found: Exported, args: argparse.Namespace) -> Exported:
    """Unseal all items of an export."""
    if found.items.get(HEAD, b"")[:1] != SEALED:
        return found
    if args.store_key_file is None:
        raise ConfigError(f"{args.file} is encrypted: give the --store-key-file of the store it is from")
    keys = engine.keys(args.store_key_file)
    try:
        items = {key: keys.unseal(found.session, key, body) for key, body in found.items.items()}
    except ValueError as error:
        raise ConfigError(f"{args.file}: an item cannot be decrypted: {error}") from error
    return msgspec.structs.replace(found, items=items)


def _rekey(store: Any, args: argparse.Namespace) -> int:
    done, left = store.rekey()
    print(f"encrypted {done} sessions")
    if left:
        print(f"{left} are left: a server has them, or they are damaged; the old keys are still needed")
    return 1 if left else 0


def _trust_clock(store: Any, args: argparse.Namespace) -> int:
    store.set_clock(time.time())
    print(time.strftime("sessions are forgotten by the clock again: it is %Y-%m-%d %H:%M"))
    return 0


ACTIONS = {
    "ls": _ls,
    "check": _check,
    "show": _show,
    "prune": _prune,
    "export": _export,
    "import": _import,
    "rekey": _rekey,
    "trust-clock": _trust_clock,
}


def _items(store: Any, session: str) -> Any:
    items = store.read(session)
    if not items:
        raise ConfigError(f"the store has no session {session}: `ramify store ls` shows which it has")
    return items


def _head(items: Any) -> SavedHead:
    try:
        return msgspec.msgpack.decode(items[HEAD], type=SavedHead)
    except (KeyError, msgspec.MsgspecError) as error:
        raise ConfigError("what was saved of the session is damaged") from error


def _texts(items: Any) -> list[tuple[str, int, list[tuple[str, str]]]]:
    """Read of each branch its name, its tokens, and its messages with their roles. Raises ConfigError
    if the session is damaged.
    """
    head = _head(items)
    found = []
    for branch in head.branches:
        turns: list[tuple[str, str]] = []
        number, position = branch.top, 0
        while number:
            if f"s{number}" not in items:
                raise ConfigError(f"segment {number} of the session is missing")
            segment = _segment(items[f"s{number}"], number)
            position = max(position, segment.start + len(segment.tokens) // 4)
            turns += _said(segment)[::-1]
            if not 0 <= segment.before < number:
                raise ConfigError(f"segment {number} of the session does not follow one before it")
            number = segment.before
        if not 0 <= branch.label < len(head.labels):
            raise ConfigError("a branch of the session has no name")
        found.append((head.labels[branch.label].name, position, turns[::-1]))
    return found


def _said(segment: Any) -> list[tuple[str, str]]:
    """Read the messages of a segment with their roles, without what the chat template adds."""
    if isinstance(segment, SavedOutput):
        return [(segment.role or "text", segment.text if segment.ended else "(being generated)")]
    if segment.messages or segment.chat:
        return [(message.role, _content(message)) for message in segment.messages]
    return [(segment.role or "text", segment.text)]


def _content(message: ChatMessage) -> str:
    """Write the text of a message, and the calls in it."""
    calls = [call["function"] for call in message.tool_calls or ()]
    told = [message.content, *(f"{call['name']}({call['arguments']})" for call in calls)]
    return "\n".join(filter(None, told))


def _title(store: Any, session: str) -> str:
    """Find a title: the client's, or how the session begins; "" where that cannot be read."""
    try:
        items = store.read(session)
        head = _head(items)
        title = (head.meta or {}).get("title")
        if not isinstance(title, str):
            said = [said for _, _, turns in _texts(items)[:1] for said in turns]
            asked = [text for who, text in said if who == "user"] or [text for _, text in said]
            title = asked[0] if asked else ""
    except ConfigError:
        return ""
    line = " ".join(title[: 4 * TITLE].split())
    return line if len(line) <= TITLE else f"{line[: TITLE - 1]}…"


def _segment(item: bytes, number: int) -> Any:
    try:
        return msgspec.msgpack.decode(item, type=SavedSegment)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"segment {number} of the session is damaged: {error}") from error
