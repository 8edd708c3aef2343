"""The words of a schema: in order, as JSON spells them, bounded."""

from ramify.actors.grammar.likely import LONGEST, MOST, likely_words


def test_names_and_values_in_order() -> None:
    schema = {
        "properties": {
            "b": {"properties": {"inner": {"const": 5}}},
            'a"': {"enum": ["x y", None, 1.5, ["left out"]]},
        },
        "required": ["c", 7],
        "items": [{"const": True}],
    }
    assert likely_words(schema) == (
        b'b":', b'a\\"":', b'c":', b'inner":', b"5", b'x y"', b"null", b"1.5", b"true",
    )  # fmt: skip


def test_what_is_no_schema() -> None:
    assert likely_words(True) == ()
    assert likely_words({"properties": 5, "required": "a", "enum": {}}) == ()


def test_bounds() -> None:
    assert len(likely_words({"enum": [str(i) for i in range(5000)]})) == MOST
    assert likely_words({"enum": ["a" * LONGEST, "b"]}) == (b'b"',)
    deep: object = {"const": 1}
    for _ in range(5000):
        deep = [deep]
    assert likely_words(deep) == ()
