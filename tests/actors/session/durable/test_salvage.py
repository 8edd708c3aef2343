"""A saved session with a gap opens up to it, and never with another branch's text."""

from typing import Any

import msgspec
import pytest

from ramify.actors.session.branches.state import LIFE
from ramify.actors.session.restore import Damaged
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import wire as w
from ramify.protocol.saved import SavedHead
from tests.actors.session.alone import restore

decode, encode = msgspec.msgpack.decode, msgspec.msgpack.encode


@pytest.fixture
def saved(sim_class: Any, tokenizer: Tokenizer) -> Any:
    """An engine, its session's items, and the tokens of its branches then.

    main: three turns; a, b: forks behind the second turn, with a turn each.
    """
    engine = sim_class(tokenizer, stored=True)
    client = engine.session()

    def turn(text: str, branch: str = "main") -> None:
        client.send(
            w.Append(id=client.id(), branch=branch, text=text),
            w.Generate(id=client.id(), branch=branch, max_tokens=5, temperature=0, ignore_eos=True),
        )
        engine.pump()

    turn("one two")
    turn("three")
    client.send(w.Fork(id=client.id(), branch="main", as_=["a", "b"]))
    turn("four")
    turn("five", "a")
    turn("six", "b")
    changes = engine.cores[1].changes(0.0, whole=True)
    branches = engine.cores[1].state.branches
    return engine, dict(changes.put), {name: branch.tokens() for name, branch in branches.items()}


def chain(items: dict[str, bytes], name: str) -> list[int]:
    head = decode(items["head"], type=SavedHead)
    number = next(b.top for b in head.branches if head.labels[b.label].name == name)
    found = []
    while number:
        found.append(number)
        number = decode(items[f"s{number}"])[1]
    return found[::-1]


def restored(engine: Any, items: dict[str, bytes]) -> Any:
    core = engine.make_core(9, saved=True)
    return core, restore(core, items, 1.0, 1.0)


def test_what_is_sound_is_whole(saved: Any) -> None:
    engine, items, tokens = saved
    core, sound = restored(engine, items)
    assert sound
    assert {name: branch.tokens() for name, branch in core.state.branches.items()} == tokens


@pytest.mark.parametrize("name", ["main", "a", "b"])
@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("how", ["missing", "damaged", "elsewhere"])
def test_a_branch_opens_up_to_its_gap(saved: Any, name: str, place: int, how: str) -> None:
    """A branch is a beginning of what it was; one without a gap is all of it."""
    engine, items, tokens = saved
    number = chain(items, name)[place]
    hit = {each for each in tokens if number in chain(items, each)}
    match how:
        case "missing":
            del items[f"s{number}"]
        case "damaged":
            items[f"s{number}"] = b"\xc1"
        case _:
            record = decode(items[f"s{number}"])
            items[f"s{number}"] = encode([*record[:2], record[2] + 1, *record[3:]])
    core, sound = restored(engine, items)
    assert not sound
    for each, branch in core.state.branches.items():
        found = branch.tokens()
        assert found == tokens[each][: len(found)], each
        assert (found == tokens[each]) == (each not in hit), each
    if place >= 4:  # behind the fork: what the others have in common with it is not lost
        assert core.state.branches[name].position >= 10
    assert core.state.lost(LIFE - 1)
    assert not list(core.generations.begun)


def test_the_last_turns_of_a_single_branch(sim_class: Any, tokenizer: Tokenizer) -> None:
    """As a database leaves it that has lost its end and was told more: all up to there is found."""
    engine = sim_class(tokenizer, stored=True)
    client = engine.session()
    for text in ("one", "two", "three", "four"):
        client.send(w.Append(id=client.id(), text=text))
        engine.pump()
    items = dict(engine.cores[1].changes(0.0, whole=True).put)
    del items["s3"]
    core, sound = restored(engine, items)
    assert not sound
    assert core.state.branches["main"].segments[-1].text == "two"


def test_names_in_a_circle_are_damage(saved: Any) -> None:
    engine, items, _ = saved
    head = decode(items["head"], type=SavedHead)
    labels = [msgspec.structs.replace(head.labels[0], above=0), *head.labels[1:]]
    items["head"] = encode(msgspec.structs.replace(head, labels=labels))
    with pytest.raises(Damaged, match=r"labels\[0\].above"):
        restored(engine, items)


def test_what_was_being_written_ends_before_it(saved: Any) -> None:
    engine, items, tokens = saved
    numbers = chain(items, "a")
    record = decode(items[f"s{numbers[-1]}"])
    items[f"s{numbers[-1]}"] = encode([*record[:4], False, [], [], "", *record[8:]])
    del items[f"s{chain(items, 'b')[-1]}"]
    core, sound = restored(engine, items)
    assert not sound
    assert core.state.branches["a"].tokens() == tokens["a"][:-5]
