"""The structure of an output, part by part: free text, tags, calls of tools. Data only.

A session makes a `Structure` of what a client asks for; the compile workers make one automaton of it.
Texts may hold *marks*: names of tokens that are no text (`<tool_call>` is one in many vocabularies).
Where `Structure.marks` names them, the token is meant. Where free text is searched for them, the same
text spelled by other tokens counts too.
"""

from typing import Any, Literal, TypeAlias

import msgspec


class _StructurePart(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="is"):
    """Base of the parts."""


class TextPart(_StructurePart, frozen=True, tag="text"):
    """Exactly this."""

    text: str


class RegexPart(_StructurePart, frozen=True, tag="regex"):
    """Text that a regex matches as a whole. `at`: where it was given, for errors."""

    regex: str
    at: str = ""


class JsonPart(_StructurePart, frozen=True, tag="json"):
    """A value that is valid under a JSON Schema.

    `at`: where the schema was given, for errors and notes. `strict`: it is an error if the schema cannot
    be kept; else any object is allowed then, and a note says so.
    """

    schema: Any
    at: str = ""
    strict: bool = True


ParameterStyle: TypeAlias = Literal["tags", "glm45", "glm47", "minimax", "python", "gemma"]
"""Between tags ("tags": Qwen3-Coder's), as Python's keywords (LFM2), or as Gemma 4 writes them."""


class XmlPart(_StructurePart, frozen=True, tag="xml"):
    """The parameters of a call, one by one. `quote`: a mark around strings, where the style has one."""

    schema: Any
    at: str = ""
    strict: bool = True
    style: ParameterStyle = "tags"
    quote: str = ""


class SequencePart(_StructurePart, frozen=True, tag="sequence"):
    """The parts one behind the other."""

    parts: "list[Part]"


class UnionPart(_StructurePart, frozen=True, tag="union"):
    """Any of the parts."""

    parts: "list[Part]"


class ListPart(_StructurePart, frozen=True, tag="list"):
    """`part` once or more often, with `separator` between."""

    part: "Part"
    separator: str


class UntilPart(_StructurePart, frozen=True, tag="until"):
    """Free text up to the first of `marks`, which belongs to it."""

    marks: list[str]


class UnlessPart(_StructurePart, frozen=True, tag="unless"):
    """The texts of `part` that do not begin with one of `openings`, behind any blanks."""

    part: "Part"
    openings: list[str]


class ThoughtPart(_StructurePart, frozen=True, tag="thought"):
    """`part`, or first free text between `begin` and `end`, with blanks around it, and then `part`."""

    begin: str
    end: str
    part: "Part"


class StructureTag(msgspec.Struct, frozen=True):
    """The text behind a trigger: `begin` (which begins with the trigger), `content`, `end`."""

    begin: str
    content: "Part"
    end: str


class TagsPart(_StructurePart, frozen=True, tag="tags"):
    """Free text in which each trigger begins one of the tags; behind its end, text is free again.

    `triggers`: empty for the whole `begin` of each tag. `at_least_one`: the text may not end before a
    tag. `stop_after_first`: it ends behind it.
    """

    tags: list[StructureTag]
    triggers: list[str] = []
    at_least_one: bool = False
    stop_after_first: bool = False


Part: TypeAlias = (
    TextPart
    | RegexPart
    | JsonPart
    | XmlPart
    | SequencePart
    | UnionPart
    | ListPart
    | UntilPart
    | UnlessPart
    | ThoughtPart
    | TagsPart
)


class Structure(msgspec.Struct, frozen=True, omit_defaults=True):
    """`after`: a beginning that stands there already; what is allowed is what may follow it."""

    root: Part
    marks: list[str] = []
    after: str = ""


def encode_structure(structure: Structure) -> str:
    """The structure as JSON."""
    return msgspec.json.encode(structure).decode()


def decode_structure(text: str) -> Structure:
    """Raises msgspec.DecodeError."""
    found: Structure = _DECODER.decode(text)
    return found


_DECODER = msgspec.json.Decoder(Structure)
