"""`ramify store` on a store that an engine has written."""

import base64
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import connect

import ramify
from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.actors.store.sqlite import SqliteStore, claim
from ramify.clients.cli import main
from ramify.protocol.config import EngineConfig, ModelConfig, ServerConfig
from ramify.protocol.saved import Changes, Exported, SavedHead, SavedHistory, SavedSegment

FAKE = FakeSpec(model={"vocab_size": 384, "eos": 2, "first": 3})


@pytest.fixture
async def kept(tokenizer_folder: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A store, and the `state` of the session in it: a branch with an answer and a fork of it."""
    path = tmp_path / "s.db"
    return path, await filled(tokenizer_folder, str(path))


async def filled(tokenizer_folder: Path, place: str) -> dict[str, Any]:
    """Have a server fill the store at `place`; returns the session's `state`."""
    config = EngineConfig(
        model=ModelConfig(path=tokenizer_folder), server=ServerConfig(port=0, store=place, grace_s=0)
    )
    async with running_engine(config, spec=FAKE) as engine, connect(engine.url) as ws:
        await ws.send(
            json.dumps(
                [
                    {"type": "open", "client": "c"},
                    {"type": "append", "id": 1, "text": "one two"},
                    {"type": "generate", "id": 2, "max_tokens": 5, "temperature": 0},
                    {"type": "fork", "id": 3, "branch": "main", "as": ["other"]},
                ]
            )
        )
        messages: list[dict[str, Any]] = []
        while not any(message.get("id") == 3 for message in messages):
            frame = json.loads(await ws.recv())
            messages += frame if isinstance(frame, list) else [frame]
    return messages[0]


@pytest.mark.parametrize("kind", ["postgres", "redis"])
async def test_a_store_with_a_url(
    tokenizer_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    url: str = request.getfixturevalue(f"{kind}_url")
    at, other = ["store", "--store", url], ["store", "--store", str(tmp_path / "s.db")]
    assert main([*at, "ls"]) == 2
    session = (await filled(tokenizer_folder, url))["session"]
    file = str(tmp_path / "session")
    capsys.readouterr()
    for args in ([*at, "ls"], [*at, "show", session], [*at, "check"], [*at, "export", session, file]):
        assert main(args) == 0
    shown = capsys.readouterr().out
    assert shown.count(session) == 2
    assert shown.count("one two") == 3  # the title, and on both branches
    assert shown.endswith("sound\n")
    assert main([*other, "import", file]) == 0
    assert main([*at, "import", file]) == 2
    assert main([*at, "prune", session]) == 0
    assert main([*at, "show", session]) == 2
    assert main([*at, "import", file]) == 0
    assert main([*at, "prune", "--days", "1"]) == 0
    assert main([*at, "show", session]) == 0
    assert "secret" not in capsys.readouterr().err


def test_what_is_there(kept: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    with closing(SqliteStore(kept[0])) as store:  # what is no session is not shown as one
        store.write([SavedHistory(b"1", "m", None, 0, [("a", b"1234")]).changes("")])
    path, state = kept
    at = ["store", "--store", str(path)]
    assert main([*at, "ls"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert state["session"] in line
    assert main([*at, "show", state["session"]]) == 0
    shown = capsys.readouterr().out
    assert "[main]" in shown
    assert "[other]" in shown
    assert shown.count("one two") == 2
    assert state["key"] not in shown
    assert main([*at, "check"]) == 0
    assert capsys.readouterr().out == "sound\n"
    assert main([*at, "show", "s_none"]) == 2


async def test_sessions_have_titles_and_are_shown_as_they_were_told(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "s.db")
    config = EngineConfig(
        model=ModelConfig(path=tokenizer_folder), server=ServerConfig(port=0, store=place, grace_s=0)
    )
    call = {"type": "function", "id": "a", "function": {"name": "look", "arguments": {"at": 1}}}
    async with running_engine(config, spec=FAKE) as engine:
        session = await ramify.connect(engine.url)
        long = "Tell me\n a story. " + "And more. " * 9
        await session.main.chat(long, max_tokens=4)
        await session.main.append(messages=[{"role": "assistant", "tool_calls": [call]}])
        named = await ramify.connect(engine.url)
        await named.set(meta={"title": "My foxes"})
        await named.main.append(messages=[{"role": "user", "content": "Hello."}])
    at = ["store", "--store", place]
    assert main([*at, "ls"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert sorted(row.split("bytes  ")[1] for row in rows) == [
        "My foxes",
        "Tell me a story. And more. And more. And more. And more. An…",
    ]
    assert main([*at, "show", next(row for row in rows if "story" in row).split()[0]]) == 0
    shown = capsys.readouterr().out
    assert "user: Tell me\n a story." in shown
    assert "look({'at': 1})" in shown
    assert "<|im_" not in shown  # what the template adds


async def test_a_session_moves_to_another_server(
    kept: tuple[Path, dict[str, Any]], tokenizer_folder: Path, tmp_path: Path
) -> None:
    path, state = kept
    file, other = tmp_path / "session", tmp_path / "other.db"
    assert main(["store", "--store", str(path), "export", state["session"], str(file)]) == 0
    assert file.stat().st_mode & 0o077 == 0
    assert main(["store", "--store", str(path), "export", state["session"], str(file)]) == 2
    assert main(["store", "--store", str(other), "import", str(file)]) == 0
    assert main(["store", "--store", str(other), "import", str(file)]) == 2
    config = EngineConfig(
        model=ModelConfig(path=tokenizer_folder),
        server=ServerConfig(port=0, store=str(other), grace_s=0),
    )
    async with running_engine(config, spec=FAKE) as engine, connect(engine.url) as ws:
        opened = {"type": "open", "client": "c", "session": state["session"], "key": state["key"]}
        await ws.send(json.dumps(opened))
        back = json.loads(await ws.recv())
        assert [branch["branch"] for branch in back["branches"]] == ["main", "other"]


def _circle(items: dict[str, bytes]) -> None:
    top = msgspec.msgpack.decode(items["head"], type=SavedHead).branches[0].top
    items[f"s{top}"] = changed(items[f"s{top}"], before=top)


def _above(items: dict[str, bytes]) -> None:
    head = msgspec.msgpack.decode(items["head"], type=SavedHead)
    labels = [msgspec.structs.replace(head.labels[0], above=0), *head.labels[1:]]
    items["head"] = msgspec.msgpack.encode(msgspec.structs.replace(head, labels=labels))


def changed(item: bytes, **fields: Any) -> bytes:
    record = msgspec.msgpack.decode(item, type=SavedSegment)
    return msgspec.msgpack.encode(msgspec.structs.replace(record, **fields))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_circle, "before"),
        (_above, "head.labels[0].above"),
        (lambda items: items.pop("s1"), "s1"),
        (lambda items: items.update(s1=changed(items["s1"], tokens=b"abc")), "s1.tokens"),
        (lambda items: items.update(s1=changed(items["s1"], tokens=b"\xff\xff\xff\x7f")), "s1.tokens"),
        (lambda items: items.update(x=b""), "`x`"),
    ],
)
def test_a_file_passes_the_checks_of_an_import_by_clients(
    kept: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Any,
    field: str,
) -> None:
    """And so does what `check` reads. Names in a circle would hold a server that drops the branch, and
    segments in a circle this command, for ever.
    """
    path, state = kept
    file, other = tmp_path / "session", tmp_path / "other.db"
    assert main(["store", "--store", str(path), "export", state["session"], str(file)]) == 0
    found = msgspec.msgpack.decode(file.read_bytes(), type=Exported)
    change(found.items)
    file.write_bytes(msgspec.msgpack.encode(found))
    assert main(["store", "--store", str(other), "import", str(file)]) == 2
    assert field in capsys.readouterr().err
    store = SqliteStore(path)
    taken = store.take(state["session"], "ask")
    assert taken is not None
    row = next(iter(store.kept()))
    written = Changes(
        row.session, "", found.items, [], 1, row.used, None, False, fence=taken.fence, whole=True
    )
    assert store.write([written]) == {}
    store.close()
    assert main(["store", "--store", str(path), "check"]) == 1
    out = capsys.readouterr().out
    assert field in out
    assert "damaged" in out


def test_an_encrypted_store(
    kept: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is made of one that was not; what is exported of it is encrypted too, unless not wanted."""
    path, state = kept
    keys = tmp_path / "keys"
    keys.write_bytes(base64.b64encode(bytes(32)))
    keys.chmod(0o600)
    session, files = state["session"], [tmp_path / "sealed", tmp_path / "plain"]
    plain, at = (
        ["store", "--store", str(path)],
        ["store", "--store", str(path), "--store-key-file", str(keys)],
    )
    assert main([*plain, "rekey"]) == 2
    assert main([*at, "ls"]) == 2
    assert main([*at, "rekey"]) == 0
    assert main([*plain, "ls"]) == 2
    capsys.readouterr()
    assert main([*at, "show", session]) == 0
    assert capsys.readouterr().out.count("one two") == 2
    assert main([*at, "check"]) == 0
    assert main([*at, "export", session, str(files[0])]) == 0
    assert main([*at, "export", "--plain", session, str(files[1])]) == 0
    assert [b"one two" in file.read_bytes() for file in files] == [False, True]
    other = ["store", "--store", str(tmp_path / "other.db")]
    assert main([*other, "import", str(files[0])]) == 2
    assert "is encrypted" in capsys.readouterr().err
    assert main([*other, "import", str(files[1])]) == 0
    assert main([*at, "prune", session]) == 0
    assert main([*at, "import", str(files[0])]) == 0
    assert main([*at, "check"]) == 0
    keys.write_bytes(base64.b64encode(b"x" * 32))
    for args in (["ls"], ["import", str(files[0])], ["rekey"]):
        assert main([*at, *args]) == 2


def test_prune(kept: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    path, state = kept
    at = ["store", "--store", str(path)]
    assert main([*at, "prune"]) == 2
    assert main([*at, "prune", "--days", "1"]) == 0
    assert capsys.readouterr().out == "forgot 0 sessions\n"
    with claim(path):
        assert main([*at, "prune", state["session"]]) == 2
        assert main([*at, "ls"]) == 0
    assert "in use by another server" in capsys.readouterr().err
    capsys.readouterr()
    assert main([*at, "prune", state["session"], "s_none"]) == 2
    assert "the store has no session s_none" in capsys.readouterr().err
    assert main(["store", "prune", state["session"], "--store", str(path)]) == 0
    assert main([*at, "show", state["session"]]) == 2


@pytest.mark.parametrize("content", [b"", b"no session", b"\x95\xa1x\x01\xa1a\xa0\x80"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert main(["store", "--store", str(tmp_path / "s.db"), "import", str(file)]) == 2


def test_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--store", "none", "ls"]) == 2
    assert main(["store", "--store", str(tmp_path / "none.db"), "ls"]) == 2
    assert "there is no store" in capsys.readouterr().err
    assert main(["store", "--store", str(tmp_path / "none.db"), "prune", "--days", "0"]) == 2
    assert "there is no store" in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("key", ["s1", "head"])
def test_damage_inside_an_item(
    kept: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str
) -> None:
    """It is told in words, whatever is asked."""
    path, state = kept
    body: Any = b"\xc1"
    with sqlite3.connect(path) as db:
        if key == "head":
            (whole,) = db.execute("SELECT body FROM items WHERE key = 'head'").fetchone()
            body = msgspec.msgpack.encode(
                msgspec.structs.replace(msgspec.msgpack.decode(whole, type=SavedHead), labels=[])
            )
        db.execute("UPDATE items SET body = ? WHERE key = ?", (body, key))
    at = ["store", "--store", str(path)]
    assert main([*at, "check"]) == 1
    assert f"session {state['session']}" in capsys.readouterr().out
    assert main([*at, "show", state["session"]]) == 2
    assert main([*at, "export", state["session"], str(tmp_path / "file")]) == 0
    assert main(["store", "--store", str(tmp_path / "2.db"), "import", str(tmp_path / "file")]) == 2
    assert "cannot be imported" in capsys.readouterr().err


def test_damage(kept: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = kept
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM items WHERE key = 's1'")
    assert main(["store", "--store", str(path), "check"]) == 1
    assert "`s1` is missing" in capsys.readouterr().out
