"""Labels beside chunks: however a segment is cut into deltas, the parts of a delta are its text."""

import random

from ramify.actors.calls.dialects import THOUGHTS, dialect_of
from ramify.actors.calls.labels import Label, Labels, kind_of, label_bytes, merged
from ramify.actors.calls.reader import Reader
from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.session.branches.segments import OutputSegment
from ramify.protocol.wire import Part

TEXT = (
    "<think>Hm, a < b.</think>\n\nSo: <tool_call>\n"
    '{"name": "add", "arguments": {"a": [1, "x"]}}\n</tool_call> and <tool_call>broken</tool_call>.'
)
DIALECT = dialect_of("")._replace(thought=THOUGHTS[0])
TOOLS = Toolbox([{"name": "add"}])


def chunked(rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(TEXT)), k=25))
    return [TEXT[a:b] for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]


def test_parts_of_any_deltas_are_their_text() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        segment = OutputSegment(5)
        segment.read(Labels(Reader(DIALECT, TOOLS, 5)))
        for count, chunk in enumerate(chunked(rng), 1):
            segment.tokens.append(count)
            segment.release(count, chunk)
            assert segment.labelled <= len(segment.chunks)
        segment.ends()
        assert segment.labelled == len(segment.chunks)
        assert segment.reading is None
        seen = []
        first = 0
        while first < len(segment.chunks):
            last = rng.randint(first + 1, len(segment.chunks))
            parts = segment.parts(first, last)
            assert "".join(part.text for part in parts) == "".join(segment.chunks[first:last])
            seen += parts
            first = last
        assert "".join(p.text for p in seen if p.kind == "reasoning") == "Hm, a < b."
        assert "".join(p.text for p in seen if p.kind == "text") == (
            "So:  and <tool_call>broken</tool_call>."
        )
        assert [p.name for p in seen if p.name] == ["add"]
        assert "".join(p.arguments or "" for p in seen) == '{"a": [1, "x"]}'


def test_a_piece_that_is_cut_keeps_its_labels() -> None:
    segment = OutputSegment(0)
    segment.read(Labels(Reader(DIALECT, TOOLS, 0)))
    chunks = ["<think>", "Hm", ", so", "</think>", "Yes"]
    for count, chunk in enumerate(chunks, 1):
        segment.tokens.extend([count, count])
        segment.release(2 * count, chunk)
    segment.ends()
    cut = segment.cut(5, lambda tokens: ", ")
    assert [part.kind for part in cut.parts(0, 3)] == ["markup", "reasoning"]
    assert cut.labelled == len(cut.chunks) == 3


def test_plain_chunks_take_no_room() -> None:
    labels = Labels(Reader(DIALECT, TOOLS, 0))
    plain = labels.add("Well, ") + labels.add("then")
    assert plain == ["text", "text"]
    assert sum(map(label_bytes, plain)) == 16
    assert [part.text for part in merged(plain, ["Well, ", "then"])] == ["Well, then"]
    assert [kind_of(each) for each in plain] == ["text", "text"]
    assert labels.grown() > 0
    labels.finish()
    assert labels.grown() < 0


def test_a_label_says_what_its_text_begins_with() -> None:
    call = Part(kind="call", text="{", call=0)
    assert kind_of("reasoning") == "reasoning"
    assert kind_of((Part(kind="markup", text="<"), call)) == "markup"
    assert kind_of((call, Part(kind="text", text="x"))) == "call"
    assert kind_of(()) == "text"


def test_neighbours_of_one_kind_are_one_part() -> None:
    first = Part(kind="call", text="{", call=0, id="c", name="f", arguments="{")
    more = Part(kind="call", text="}", call=0, arguments="}")
    other = Part(kind="call", text="{}", call=1, id="d", name="g", arguments="{}")
    labels: list[Label] = ["text", "text", (first,), (more, other), "text", "text"]
    merged_parts = merged(labels, ["a", "b", "{", "}{}", "", "c"])
    assert merged_parts == [
        Part(kind="text", text="ab"),
        Part(kind="call", text="{}", call=0, id="c", name="f", arguments="{}"),
        other,
        Part(kind="text", text="c"),
    ]


def test_what_a_label_weighs() -> None:
    assert label_bytes("text") == 8
    call = Part(kind="call", text="abc", call=0, arguments="{}")
    assert label_bytes((call, Part(kind="markup", text="<"))) == 300 + 3 + 2 + 300 + 1
    assert label_bytes(()) == 0


def test_a_run_keeps_the_first_id_and_name_that_it_has() -> None:
    parts = (
        Part(kind="call", text="a", call=0),
        Part(kind="call", text="b", call=0, id="c", name="f"),
        Part(kind="call", text="c", call=0, id="d", name="g", arguments="{"),
    )
    assert merged([parts], ["abc"]) == [
        Part(kind="call", text="abc", call=0, id="c", name="f", arguments="{")
    ]
    assert merged([parts[:1], parts[:1]], ["a", "a"]) == [Part(kind="call", text="aa", call=0)]
