"""Formats: some of each, some that are none, and what Python's own parsers say of random ones."""

import datetime
import ipaddress
import random
from typing import Any

import pytest

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.schema.formats import FORMATS

EXAMPLES = {
    "date": (
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31"],
    ),
    "time": (["12:00:00Z", "23:59:59.5+01:30"], ["24:00:00Z", "12:00:00", "12:60:00Z"]),
    "date-time": (["2024-02-29T12:00:00Z"], ["2024-02-30T12:00:00Z", "2024-02-29"]),
    "duration": (["P1Y2M3D", "PT1H", "P2W", "P1DT5M"], ["P", "PT", "1D", "P1H"]),
    "email": (["a.b+c@x-y.org", "a@localhost"], ["a", "@b", "a@", "a..b@c", "a b@c"]),
    "hostname": (["a", "a-b.example.org"], ["-a", "a-", "a..b", "a" * 64]),
    "ipv4": (["0.0.0.0", "255.1.20.199"], ["256.1.1.1", "1.1.1", "01.1.1.1"]),
    "ipv6": (
        ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4"],
        [":::", "1:2", "1:2:3:4:5:6:7:8:9"],
    ),
    "uri": (["http://a.b:8/c?d#e", "mailto:x@y.z", "http://[::1]/"], ["abc", "/a", "http://a b"]),
    "uri-reference": (["a/b", "/a", "?x", "#y", "http://a", ""], ["a b", "\\"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "json-pointer": (["", "/a/~0~1"], ["a", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["/a", "01"]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    automaton = Automaton.from_regex(FORMATS[name])
    good, bad = EXAMPLES[name]
    for text in good:
        assert automaton.accepts(text.encode()), text
    for text in bad:
        assert not automaton.accepts(text.encode()), text


@pytest.mark.parametrize(
    ("name", "parse"),
    [
        ("date", datetime.date.fromisoformat),
        ("ipv4", ipaddress.IPv4Address),
        ("ipv6", ipaddress.IPv6Address),
    ],
)
def test_random_ones_are_read(walker: Any, name: str, parse: Any) -> None:
    walk = walker(Automaton.from_regex(FORMATS[name]))
    rng = random.Random(2)
    for _ in range(200):
        parse(walk.text(rng).decode())
