"""A constrained output that was cut, forked or rolled back in its middle goes on in its automaton."""

import base64
import json
import random
import re
from typing import Any

import msgspec
import pytest

from ramify.actors.session.branches.segments import OutputSegment
from ramify.actors.session.durable.exports import imported
from ramify.actors.session.durable.items import exported
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.errors import BadRequest
from ramify.protocol.saved import Exported, SavedOutput, SavedRule
from tests.actors.session.alone import restore
from tests.actors.session.durable.test_exports import again, into
from tests.actors.session.output.test_constrained_sessions import obeys

RECORD = w.Constraint(regex=r'\{"name": "[a-z]{1,12}", "tags": \[("[a-z]", ){0,3}"[a-z]"\]\}')
SCHEMA = w.Constraint(
    json_schema={
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 2},
        },
        "required": ["kind", "tags"],
        "additionalProperties": False,
    }
)
GRAMMAR = w.Constraint(grammar='start: "(" start ")" | /[a-z]{1,3}/ "-" /[a-z]{9}/')
GO_ON = w.Constraint(continue_=True)
ANEW = w.Constraint(continue_=False)


def client_of(sim_class: Any, tokenizer: Tokenizer, *ops: w.Op, **options: Any) -> Any:
    """A client that has sent `ops` behind an input; the ids 1 to 9 are theirs."""
    engine = sim_class(tokenizer, **({"eos_every": 0, "seed": 3} | options))
    client = engine.session()
    client.send(w.Append(id=1, text="hello"), *ops)
    engine.pump()
    return client


def generate(ident: int, branch: str = "main", **options: Any) -> w.Generate:
    given: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "quiet": True}
    return w.Generate(id=ident, branch=branch, **(given | options))


def done(client: Any, ident: int) -> w.Done:
    (found,) = client.replies[ident]
    assert isinstance(found, w.Done), found
    return found


def said(client: Any, *idents: int) -> str:
    return "".join(done(client, ident).text or "" for ident in idents)


def whole(sim_class: Any, tokenizer: Tokenizer, constraint: w.Constraint) -> tuple[str, int]:
    """The text without a cut, and its tokens."""
    client = client_of(sim_class, tokenizer, generate(2, constraint=constraint))
    assert done(client, 2).reason == "stop"
    return said(client, 2), done(client, 2).usage.output


@pytest.mark.parametrize("constraint", [RECORD, SCHEMA, GRAMMAR], ids=["regex", "schema", "grammar"])
@pytest.mark.parametrize("wanted", [None, GO_ON], ids=["default", "continue"])
def test_after_length_it_goes_on(
    sim_class: Any, tokenizer: Tokenizer, constraint: w.Constraint, wanted: Any
) -> None:
    """At whatever token it is cut: the parts are the whole."""
    text, count = whole(sim_class, tokenizer, constraint)
    for at in range(1, count - 1, 3 if wanted is None else 11):
        client = client_of(sim_class, tokenizer, generate(2, constraint=constraint, max_tokens=at))
        assert done(client, 2).reason == "length"
        client.send(generate(3, constraint=wanted))
        client.engine.pump()
        assert done(client, 3).reason == "stop"
        assert said(client, 2, 3) == text


def test_many_parts(sim_class: Any, tokenizer: Tokenizer) -> None:
    """One token each, with and without drafts, and few pages, so that runs are retracted."""
    text, count = whole(sim_class, tokenizer, RECORD)
    for options in ({}, {"drafts": 3}, {"pages": count + 12, "constraints": 1}):
        client = client_of(sim_class, tokenizer, generate(2, constraint=RECORD, max_tokens=1), **options)
        parts = [generate(ident, max_tokens=1) for ident in range(3, count + 3)]
        client.send(*parts)
        client.engine.pump()
        idents = range(2, 2 + sum(1 for i in range(2, count + 3) if done(client, i).text))
        assert said(client, *idents) == text
        assert any(done(client, i).reason == "stop" for i in range(2, count + 3))


def test_forks_and_rollbacks_in_the_middle(sim_class: Any, tokenizer: Tokenizer) -> None:
    """From each position, of an output that was complete too: behind its text only the end is left."""
    text, count = whole(sim_class, tokenizer, RECORD)
    client = client_of(sim_class, tokenizer, generate(2, constraint=RECORD))
    end = client.replies[2][0].position
    start = end - count + 1
    for at in range(start + 1, end + 1, 4):
        ident = 10 * at
        client.send(
            w.Fork(id=ident, branch="main", as_=[f"f{at}"], at=at),
            generate(ident + 1, f"f{at}", temperature=1.0, seed=at),
        )
        client.engine.pump()
        segments = client.engine.cores[1].state.branches[f"f{at}"].segments
        made = "".join(each.text for each in segments if isinstance(each, OutputSegment))
        assert re.fullmatch(RECORD.regex or "", made), made
    client.send(w.Rollback(id=9000, branch="main", to=start + 5), generate(9001))
    client.engine.pump()
    made = client.engine.cores[1].state.branches["main"].text()
    assert made == "hello" + text  # greedy: what was there


def test_what_begins_anew(sim_class: Any, tokenizer: Tokenizer) -> None:
    """What is named, `continue` false, a complete output, text in between, what goes with none."""
    client = client_of(sim_class, tokenizer, generate(2, constraint=RECORD, max_tokens=4))
    client.send(
        w.Fork(id=3, branch="main", as_=list("abcdef")),
        generate(4, "a", constraint=w.Constraint(regex="[0-9]{3}")),
        generate(5, "b", constraint=ANEW, max_tokens=5),
        generate(6, "c", constraint=RECORD),
        w.Append(id=7, branch="d", text=" x "),
        generate(8, "d", max_tokens=5),
        generate(9, "e", max_tokens=5, ignore_eos=True),
        generate(10, "f"),
        generate(11, "f", max_tokens=5),
    )
    client.engine.pump()
    assert re.fullmatch("[0-9]{3}", said(client, 4))
    assert re.fullmatch(RECORD.regex or "", said(client, 6))
    free = [client.engine.cores[1].state.branches[name].segments[-1].rule for name in "bdef"]
    assert free == [None] * 4
    assert done(client, 10).reason == "stop"


@pytest.mark.parametrize("max_tokens", [3, 200])
def test_where_nothing_can_go_on(sim_class: Any, tokenizer: Tokenizer, max_tokens: int) -> None:
    """`continue` on free text, or behind a complete output, names what is missing."""
    given = None if max_tokens == 3 else RECORD
    client = client_of(sim_class, tokenizer, generate(2, constraint=given, max_tokens=max_tokens))
    before = client.engine.cores[1].state.branches["main"].position
    client.send(generate(3, constraint=GO_ON))
    client.engine.pump()
    (error,) = client.replies[3]
    assert error.code == "bad_request"
    assert error.details == {"field": "constraint.continue"}
    assert client.engine.cores[1].state.branches["main"].position == before


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (w.Constraint(regex="a", continue_=True), "constraint.regex"),
        (w.Constraint(choices=["a"], continue_=False), "constraint.choices"),
        (w.Constraint(continue_=True, after_thought=True), "constraint.after_thought"),
        (w.Constraint(grammar="start: /a/", after_thought=True), "constraint.after_thought"),
    ],
)
def test_fields_that_contradict(
    sim_class: Any, tokenizer: Tokenizer, constraint: w.Constraint, field: str
) -> None:
    client = client_of(sim_class, tokenizer, generate(2, constraint=constraint))
    (error,) = client.replies[2]
    assert (error.code, error.details["path"]) == ("bad_request", f"$[1].{field}")


def test_after_a_cancel_and_a_pause(sim_class: Any, tokenizer: Tokenizer) -> None:
    """Also before its first token: the turn stays open, and so does what it is to be."""
    text, _ = whole(sim_class, tokenizer, RECORD)
    for steps in (0, 3, 9, 15):
        engine = sim_class(tokenizer, eos_every=0, seed=3)
        client = engine.session(detach="pause")
        client.send(w.Append(id=1, text="hello"), generate(2, constraint=RECORD))
        engine.pump(steps)
        client.send(w.Cancel(id=3))
        engine.pump()
        client.send(generate(4, constraint=GO_ON))
        engine.pump(7)
        client.drop()
        engine.pump()
        client.connect()
        engine.pump()
        ends = [each for each in client.replies[2] if isinstance(each, w.Done)]
        assert "".join(each.text or "" for each in ends) + said(client, 4) == text


def test_a_thought_before_it(sim_class: Any, tokenizer: Tokenizer) -> None:
    """The answer's `content` is told, as of the generation that began it."""
    constraint = msgspec.structs.replace(RECORD, after_thought=True)
    client = client_of(sim_class, tokenizer, generate(2, constraint=constraint, max_tokens=6))
    client.send(generate(3))
    client.engine.pump()
    assert done(client, 3).content == said(client, 3)
    assert re.fullmatch(RECORD.regex or "", said(client, 2, 3))


# --- what outlives a server or an engine -----------------------------------------------------------


@pytest.mark.parametrize("at", [0, 2, 5, 9])
def test_restarts_and_moves(sim_class: Any, tokenizer: Tokenizer, at: int) -> None:
    """Saved after the cut, and while the second part runs; then another engine takes over."""
    text, _ = whole(sim_class, tokenizer, RECORD)
    client = client_of(
        sim_class, tokenizer, generate(2, constraint=RECORD, max_tokens=9), stored=True, constraints=1
    )
    engine = client.engine
    engine.save(1)
    engine.crash()
    client.connect()
    client.send(generate(3))
    engine.pump(at)
    engine.save(1)
    engine.crash()
    client.connect()
    engine.pump(at)
    engine.move()
    engine.pump()
    assert said(client, 2, 3) == text
    engine.save(1)
    names = [key for key in engine.saved[1] if key[0] == "c"]
    assert len(names) == 1
    client.send(w.Rollback(id=4, branch="main", to=1))
    engine.pump()
    engine.save(1)
    assert not [key for key in engine.saved[1] if key[0] == "c"]


def test_each_constraint_is_saved_once(sim_class: Any, tokenizer: Tokenizer) -> None:
    names = [f"b{i}" for i in range(20)]
    client = client_of(
        sim_class,
        tokenizer,
        generate(2, constraint=RECORD, n=20, as_=names, max_tokens=5),
        stored=True,
    )
    client.send(*(generate(10 + i, name, max_tokens=2) for i, name in enumerate(names)))
    client.engine.pump()
    client.engine.save(1)
    items = client.engine.saved[1]
    (rule,) = [msgspec.msgpack.decode(items[key], type=SavedRule) for key in items if key[0] == "c"]
    assert rule.spec.text == RECORD.regex
    branches = client.engine.cores[1].state.branches
    assert len({id(branches[name].segments[-1].rule) for name in names}) == 1


def test_a_file_takes_it_along(sim_class: Any, tokenizer: Tokenizer) -> None:
    text, _ = whole(sim_class, tokenizer, SCHEMA)
    client = client_of(sim_class, tokenizer, generate(2, constraint=SCHEMA, max_tokens=9))
    file = exported(client.engine.cores[1].state)
    engine = sim_class(tokenizer, eos_every=0, seed=3)
    other = engine.session()
    core = engine.cores[1] = engine.make_core(1, saved=True)
    restore(core, again(file), engine.now, 1e9, stored=False)
    other.key = "k_new"
    other.next_id = 2
    other.connect()
    other.send(generate(3))
    engine.pump()
    assert json.loads(said(client, 2) + said(other, 3))
    assert said(client, 2) + said(other, 3) == text


def broken(data: bytes, **changes: Any) -> str:
    """The file with fields of its constraint, or of the output under it, changed."""
    file = msgspec.msgpack.decode(data, type=Exported)
    items = dict(file.items)
    for key, body in items.items():
        if key[0] == "c":
            rule = msgspec.msgpack.decode(body, type=SavedRule)
            kept = {name: value for name, value in changes.items() if hasattr(rule, name)}
            items[key] = msgspec.msgpack.encode(msgspec.structs.replace(rule, **kept))
        elif key[0] == "s" and msgspec.msgpack.decode(body)[0] == 1:
            output = msgspec.msgpack.decode(body, type=SavedOutput)
            kept = {name: value for name, value in changes.items() if hasattr(output, name)}
            items[key] = msgspec.msgpack.encode(msgspec.structs.replace(output, **kept))
    file = msgspec.structs.replace(file, items=items)
    return base64.b64encode(msgspec.msgpack.encode(file)).decode()


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"since": 9}, "s2.since"),
        ({"since": -1}, "s2.since"),
        ({"rule": 7}, "s2.rule"),
        ({"rule": -1}, "s2.rule"),
        ({"rule": 3}, "c3"),
        ({"spec": ConstraintSpec("regex", "a" * 300_000)}, "c1"),
    ],
)
def test_a_file_that_says_nonsense(
    sim_class: Any, tokenizer: Tokenizer, changes: dict[str, Any], path: str
) -> None:
    client = client_of(sim_class, tokenizer, generate(2, constraint=SCHEMA, max_tokens=9))
    file = exported(client.engine.cores[1].state)
    with pytest.raises(BadRequest) as refused:
        imported(broken(file, **changes), into(), model="", vocab=384, context=1000, limits=Limits())
    assert (refused.value.details or {})["path"] == f"$.import.{path}"


# --- by chance -------------------------------------------------------------------------------------


def outputs_under(branch: Any, tokenizer: Tokenizer) -> list[tuple[SavedRule, str, bool]]:
    """The constrained outputs of a branch: the constraint, the text of all parts, whether it is whole.

    A part may end inside a character, so it is the tokens that make the text.
    """
    found: dict[int, tuple[SavedRule, list[int], bool]] = {}
    for segment in branch.segments:
        if isinstance(segment, OutputSegment) and segment.rule is not None:
            before = found[segment.since][1] if segment.since != segment.start else []
            found[segment.since] = segment.rule.what, [*before, *segment.tokens], segment.complete
    return [(rule, tokenizer.decode(tokens), whole) for rule, tokens, whole in found.values()]


def is_kept(rule: SavedRule, text: str) -> bool:
    kind, given = rule.spec.kind, rule.spec.text
    constraint = w.Constraint(
        regex=given if kind == "regex" else None,
        json_schema=json.loads(given) if kind == "json_schema" else None,
        grammar=given if kind == "lark" else None,
    )
    if kind == "lark":
        return re.fullmatch(r"\(*[a-z]{1,3}-[a-z]{9}\)*", text) is not None
    return obeys(constraint, text)


@pytest.mark.parametrize("seed", range(8))
def test_random_sessions(sim_class: Any, tokenizer: Tokenizer, seed: int) -> None:
    """Cuts, forks and rollbacks anywhere, pauses, moves and crashes: each whole output obeys."""
    rng = random.Random(seed)
    engine = sim_class(
        tokenizer, seed=seed, eos_every=0, stored=True, drafts=3 * (seed % 2), constraints=1, context=300
    )
    client = engine.session(detach="pause")
    client.send(w.Append(id=1, text="hello"))
    engine.pump()
    branches = engine.cores[1].state.branches
    for ident in range(2, 90):
        name = rng.choice(sorted(branches))
        at = rng.randint(5, max(5, branches[name].released))
        kind = rng.choice(["begin", "go on", "go on", "go on", "fork", "rollback", "cancel", "other"])
        if kind == "fork":
            client.send(w.Fork(id=ident, branch=name, as_=[f"f{ident}"], at=at))
        elif kind == "rollback":
            client.send(w.Rollback(id=ident, branch=name, to=at))
        elif kind == "cancel":
            client.send(w.Cancel(id=ident, branch=name))
        elif kind == "other" and rng.random() < 0.5:
            client.drop()
            engine.pump(rng.randrange(3))
            client.connect()
        elif kind == "other":
            engine.pump()
            engine.save(1)
            engine.crash() if rng.random() < 0.5 else engine.move()
            branches = engine.cores[1].state.branches
            if client.socket is None:
                client.connect()
        else:
            wanted = rng.choice([RECORD, SCHEMA, GRAMMAR]) if kind == "begin" else None
            most = rng.choice([2, 6, 90])
            client.send(
                generate(ident, name, constraint=wanted, max_tokens=most, temperature=1.0, seed=ident)
            )
        engine.pump(rng.randrange(14))
    engine.pump()
    every = [each for branch in branches.values() for each in outputs_under(branch, tokenizer)]
    assert [(rule, text) for rule, text, whole in every if whole and not is_kept(rule, text)] == []
    assert any(whole for *_, whole in every)
    assert not [each for known in client.replies.values() for each in known if is_stuck(each)]


@pytest.mark.parametrize("steps", range(10))
def test_a_cancel_beside_a_constraint_that_gives_way(
    sim_class: Any, tokenizer: Tokenizer, steps: int
) -> None:
    """One fits. A request cancelled while its constraint gives way is cancelled, and no error."""
    engine = sim_class(tokenizer, seed=3, eos_every=0, constraints=1)
    one, other = engine.session(), engine.session("d")
    for client in (one, other):
        client.send(w.Append(id=1, text="hello"))
    engine.pump()
    one.send(generate(2, constraint=RECORD))
    other.send(generate(2, constraint=SCHEMA))
    engine.pump(steps)
    one.send(w.Cancel(id=3, branch="main"))
    other.send(w.Cancel(id=3, branch="main"))
    engine.pump()
    assert {done(one, 2).reason, done(other, 2).reason} <= {"cancelled", "stop"}


def is_stuck(reply: Any) -> bool:
    return isinstance(reply, w.Done) and reply.reason == "error" and reply.error != "limit"
