"""Exceptions of the lowering of a schema."""


class UnsupportedSchema(Exception):
    """A schema, or a part of one, that the lowering cannot express.

    `pointer`: a JSON pointer into the schema (RFC 6901). `reason`: what is not possible there, and what
    would be. The schema may still be right for another back end. `recursive`: it can be expressed to a
    certain depth.
    """

    def __init__(self, pointer: str, reason: str, *, recursive: bool = False) -> None:
        super().__init__(f"{pointer or 'the schema'}: {reason}")
        self.pointer = pointer
        self.reason = reason
        self.recursive = recursive


class Circular(UnsupportedSchema):
    """A schema that is itself, without a value in between: it says nothing, to no back end."""


class Unchecked(UnsupportedSchema):
    """Values in which a check of what was written before could leave no way to go on."""


class TooLarge(UnsupportedSchema):
    """The schema is within its limits as text, but its language is not."""
