"""What an output has written, against what `json` finds in its text."""

import json
import random
from typing import Any

import pytest

from ramify.gpu.constraints.written import Cursor, WrittenOutput
from ramify.protocol.constraints import CheckedPlace
from ramify.protocol.errors import ConstraintError

# {"u": items that differ, "d": names that differ, "f": not checked, any other name: items that differ}
PLACES = (
    CheckedPlace(names={"u": 1, "d": 2, "f": -1}, others=1),
    CheckedPlace(unique=True, rest=1, others=-1),
    CheckedPlace(distinct=True, names={"u": 1}),
)
WORDS = ("", "a", "ab", 'q"', "[1, 1]", "x\\", "é")


class Doubled(Exception):
    pass


def model(text: str) -> bool:
    """Whether `text` keeps to `PLACES`."""

    def pairs(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return found

    def plain(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], tuple):
            return {name: plain(inner) for name, inner in value}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    def look(value: Any, place: int) -> None:
        if place < 0 or not isinstance(value, list):
            return
        here = PLACES[place]
        if value and isinstance(value[0], tuple):
            names = [name for name, _ in value]
            if here.distinct and len(set(names)) < len(names):
                raise Doubled
            for name, inner in value:
                look(inner, here.names.get(name, here.others))
            return
        texts = [json.dumps(plain(item), sort_keys=True) for item in value]
        if here.unique and len(set(texts)) < len(texts):
            raise Doubled
        for item in value:
            look(item, here.rest)

    try:
        look(json.loads(text, object_pairs_hook=pairs), 0)
    except Doubled:
        return False
    return True


def text_of(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(6 if depth > 0 else 2)
    if kind == 0:
        return rng.choice(("1", "12", "-1", "true", "null", "1.5"))
    if kind == 1:
        return json.dumps(rng.choice(WORDS), ensure_ascii=False)
    if kind < 4:
        return f"[{', '.join(text_of(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 3))))}]"
    return object_of(rng, depth)


def object_of(rng: random.Random, depth: int) -> str:
    names = rng.choices(("u", "d", "f", "x", 'q"'), k=rng.choice((1, 2, 3)))
    members = (f"{json.dumps(name)}: {text_of(rng, depth - 1)}" for name in names)
    return f"{{{', '.join(members)}}}"


def test_a_byte_that_doubles_is_not_taken() -> None:
    """In pieces of any size, kept and taken back in between."""
    rng = random.Random(3)
    seen = {True: 0, False: 0}
    for _ in range(1500):
        text = object_of(rng, 3)
        data, written = text.encode(), WrittenOutput(PLACES)
        way: list[tuple[int, Cursor, list[Any]]] = [(0, written.start(), [])]
        taken = True
        while taken and way[-1][0] < len(data):
            at, cursor, _ = way[-1]
            if len(way) > 2 and rng.random() < 0.1:
                gone = [way.pop() for _ in range(min(len(way) - 1, rng.randint(1, 3)))]
                undone = [one for *_, kept in gone for one in reversed(kept)]
                written.take_back(way[-1][1].size, undone)
                continue
            size = rng.choice((1, 1, 2, 5))
            following = written.walk(cursor, data[at : at + size])
            taken = following is not None
            if following is not None:
                way.append((at + size, following, written.commit(following)))
        assert taken == model(text), text
        seen[taken] += 1
    assert min(seen.values()) > 60


def test_members_in_another_order_are_the_same() -> None:
    written = WrittenOutput((CheckedPlace(unique=True),))
    first = b'[{"a": 1, "b": [2]}, {"b": [2], "a": 1'
    cursor = written.walk(written.start(), first)
    assert cursor is not None
    assert written.step(cursor, ord("}")) is None
    assert written.walk(cursor, b"1}]") is not None


def test_near_is_only_the_beginning_of_an_earlier_one() -> None:
    written = WrittenOutput((CheckedPlace(unique=True),))
    near = {b"[": False, b'["ab"': False, b'["ab", ': True, b'["ab", "a': True, b'["ab", "b': False}
    for data, expected in near.items():
        cursor = written.walk(written.start(), data)
        assert cursor is not None
        assert cursor.near == expected
        assert cursor.watched


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.gpu.constraints.written.MOST_BYTES", 10)
    written = WrittenOutput((CheckedPlace(unique=True),))
    cursor = written.walk(written.start(), b'["abcdefghij", ')
    assert cursor is not None
    with pytest.raises(ConstraintError, match="more than 10 bytes"):
        written.commit(cursor)
