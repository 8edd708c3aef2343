"""A session as one file: what comes out of it again, and that whatever a file says is checked."""

import base64
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.session.durable.exports import Importing, imported
from ramify.actors.session.durable.items import exported
from ramify.actors.session.restore import Damaged
from ramify.actors.session.sockets.clients import Identity
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest, RamifyError
from ramify.protocol.sampling import TokenLogprobs
from ramify.protocol.saved import Exported, SavedHead, SavedInput, SavedLabel, SavedOutput, SavedSegment
from tests.actors.session.alone import restore
from tests.actors.session.test_random_sessions import random_op
from tests.actors.session.test_restore import shown
from tests.amount import examples

decode, encode = msgspec.msgpack.decode, msgspec.msgpack.encode


def into(key: str = "k_new") -> Importing:
    return Importing(Identity("s_new", key), "you", "yours", 3, False, "sync", 5.0)


def again(data: bytes, *, vocab: int = 384, context: int = 1000, model: str = "") -> dict[str, bytes]:
    text = base64.b64encode(data).decode()
    return imported(text, into(), model=model, vocab=vocab, context=context, limits=Limits())


@pytest.fixture
def chat(sim_class: Any, tokenizer: Tokenizer) -> Any:
    """An engine with a session of some branches."""
    engine = sim_class(tokenizer, stored=True)
    client = engine.session(template="strict")
    for text in ("one two", "three"):
        client.send(
            w.Append(id=client.id(), messages=[w.ChatMessage(role="user", content=text)]),
            w.Generate(id=client.id(), max_tokens=9, temperature=0, logprobs=2),
        )
        engine.pump()
    client.send(
        w.Fork(id=client.id(), branch="main", as_=["a", "b"]),
        w.Fork(id=client.id(), branch="a", as_=["c"]),
        w.Rollback(id=client.id(), branch="b", turns=1),
        w.Drop(id=client.id(), branch="a"),
        w.Set(id=client.id(), branch="c", meta={"x": [1]}, retain_s=5, persist="none"),
        w.Set(id=client.id(), meta={"title": "t"}),
    )
    engine.pump()
    return engine


def test_another_server_has_what_it_was(chat: Any) -> None:
    state = chat.cores[1].state
    items = again(exported(state))
    head = decode(items["head"], type=SavedHead)
    assert (head.session, head.owner, head.namespace, head.priority) == ("s_new", "you", "yours", 3)
    assert (head.clients, head.waits, head.persist, head.created) == ([], [], "sync", 5.0)
    identity = Identity("s_new", "", hashes=(head.key, head.view_key))
    assert identity.opens("k_new")
    assert identity.shows(into().identity.view_key)
    other = chat.make_core(9, saved=True)
    restore(other, items, 1.0, 1.0, stored=False)

    def same(branches: Any) -> dict[str, Any]:
        left = ("retain_s", "persist", "born", "cuts")
        found = {name: shown(branch) for name, branch in branches.items()}
        return {name: {k: v for k, v in f.items() if k not in left} for name, f in found.items()}

    assert same(other.state.branches) == same(state.branches)
    assert other.state.meta == {"title": "t"}
    assert other.state.branches["c"].retain_s is None
    assert other.recorder.collect(1.0, 1.0, ttl_s=None, away=False).put  # a store has nothing of it yet


def altered(data: bytes, key: str, **fields: Any) -> bytes:
    """The file with other fields in one of its records."""
    file = decode(data, type=Exported)
    kind: Any = SavedHead if key == "head" else SavedSegment
    record = msgspec.structs.replace(decode(file.items[key], type=kind), **fields)
    return encode(msgspec.structs.replace(file, items={**file.items, key: encode(record)}))


def test_whatever_is_wrong_is_named(chat: Any) -> None:
    data = exported(chat.cores[1].state)
    file = decode(data, type=Exported)
    head = decode(file.items["head"], type=SavedHead)
    records = {k: decode(v, type=SavedSegment) for k, v in file.items.items() if k[0] == "s"}
    put = next(k for k, record in records.items() if isinstance(record, SavedInput))
    out = next(k for k, record in records.items() if isinstance(record, SavedOutput))
    first, *rest = head.branches
    bad: list[tuple[str, bytes]] = [
        ("what", encode(msgspec.structs.replace(file, what="else"))),
        ("format", encode(msgspec.structs.replace(file, format=99))),
        ("head", encode(msgspec.structs.replace(file, items={}))),
        ("head", encode(msgspec.structs.replace(file, items={"head": b"\xc1"}))),
        (put, without(file, put)),
        ("head.format", altered(data, "head", format=99)),
        ("head.model", altered(data, "head", model="other")),
        ("head.branches", altered(data, "head", branches=head.branches * 2000)),
        ("head.labels", altered(data, "head", labels=head.labels * 2000)),
        ("head.labels[0].name", altered(data, "head", labels=[SavedLabel("a b", -1, False)] * 9)),
        ("head.labels[0].name", altered(data, "head", labels=[SavedLabel("a" * 65, -1, False)] * 9)),
        ("head.labels[0].above", altered(data, "head", labels=[SavedLabel("a", 0, False)] * 9)),
        ("head.labels[0].above", altered(data, "head", labels=[SavedLabel("a", 99, False)] * 9)),
        ("head.branches[1].handle", altered(data, "head", branches=[first, first_again(first, rest)])),
        ("head.branches[1].label", altered(data, "head", branches=[first, first])),
        ("head.meta", altered(data, "head", meta={"x": "y" * 20_000})),
        ("head.meta", altered(data, "head", meta={"x": b"bytes"})),
        *(
            (f"head.branches[0].{name}", altered(data, "head", branches=[replaced]))
            for name, replaced in (
                ("label", msgspec.structs.replace(first, label=-1)),
                ("label", msgspec.structs.replace(first, label=99)),
                ("label", msgspec.structs.replace(first, of=-2)),
                ("handle", msgspec.structs.replace(first, handle=0)),
                ("handle", msgspec.structs.replace(first, handle=1 << 40)),
                ("at", msgspec.structs.replace(first, at=-1)),
                ("at", msgspec.structs.replace(first, at=1 << 40)),
                ("own", msgspec.structs.replace(first, own=-1)),
                ("own", msgspec.structs.replace(first, own=10_000)),
                ("meta", msgspec.structs.replace(first, meta={"x": "y" * 20_000})),
            )
        ),
        (f"{put}.before", altered(data, put, before=99)),
        (f"{put}.start", altered(data, put, start=7)),
        (f"{put}.tokens", altered(data, put, tokens=b"abc")),
        (f"{put}.tokens", altered(data, put, tokens=b"\xff\xff\xff\xff")),
        (f"{put}.tokens", altered(data, put, tokens=b"\x00\x10\x00\x00")),
        (f"{put}.tail", altered(data, put, tail="what")),
        (f"{put}.history", altered(data, put, history=(99, []))),
        (f"{out}.logprobs[0]", altered(data, out, logprobs=[TokenLogprobs(-1.0, [1, 2], [-1.0])])),
        *(
            (f"{out}.{field}", altered(data, out, **{field.partition("[")[0]: wrong}))
            for number in (math.nan, math.inf, -math.inf)
            for field, wrong in (
                ("logprobs[0]", [TokenLogprobs(number, [], [])]),
                (
                    "logprobs[1]",
                    [TokenLogprobs(-1.0, [], []), TokenLogprobs(-1.0, [1, 2], [-1.0, number])],
                ),
                ("mean", number),
            )
        ),
        (f"{out}.ended", altered(data, out, ended=False)),
        (f"{out}.counts", altered(data, out, counts=[1])),
        (f"{out}.counts", altered(data, out, counts=[-1], sizes=[0], text="", labels=None)),
        (f"{out}.counts", altered(data, out, counts=[99], sizes=[0], text="", labels=None)),
        (f"{out}.sizes", altered(data, out, text="")),
        (f"{out}.lead", altered(data, out, lead=-1)),
        (f"{out}.labels", altered(data, out, labels=[])),
        (f"{out}.logprobs", altered(data, out, logprobs=records[out].logprobs * 99)),  # type: ignore[union-attr, operator]
    ]
    for field, broken in bad:
        with pytest.raises(BadRequest) as refused:
            again(broken)
        assert (refused.value.details or {})["path"] == f"$.import.{field}", (field, refused.value)
        assert field in refused.value.message
    with pytest.raises(BadRequest, match="no base64"):
        imported("!", into(), model="", vocab=9, context=9, limits=Limits())
    with pytest.raises(BadRequest, match="no session"):
        again(b"{}")
    with pytest.raises(BadRequest, match="longer than the context"):
        again(data, context=5)


def without(file: Exported, key: str) -> bytes:
    items = {name: body for name, body in file.items.items() if name != key}
    return encode(msgspec.structs.replace(file, items=items))


def first_again(first: Any, rest: list[Any]) -> Any:
    """Another branch with the handle of the first."""
    return msgspec.structs.replace(rest[0], handle=first.handle)


@settings(max_examples=examples(60, 150), derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_damaged_file_is_refused_or_makes_a_session(
    sim_class: Any, tokenizer: Tokenizer, seed: int
) -> None:
    """Bytes that are changed at random: nothing but BadRequest or a limit, and what is made works."""
    rng = random.Random(seed)
    engine = sim_class(tokenizer, stored=True, eos_every=20, seed=seed)
    client = engine.session()
    client.send(w.Append(id=client.id(), tokens=[5, 6, 7]))
    for _ in range(6):
        client.send(random_op(rng, client))
        engine.pump()
    data = bytearray(exported(engine.cores[1].state))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        items = again(bytes(data))
        core = engine.make_core(1, saved=True)
        restore(core, items, 1.0, 1.0, stored=False)
    except (RamifyError, Damaged):
        return
    exported(core.state)
