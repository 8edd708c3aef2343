"""Holes: stand-ins for generated texts while a program is traced, where there is no model.

A hole may be passed on, kept and returned. Code that needs its text ends the trace there.
"""

from typing import Any, NoReturn

from ramify.clients.program.call_sites import place


class NeedsText(Exception):
    """A traced program needs a text that only a run has. `place`: where."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.place = place()


class Hole:
    """A text (or a result) that is not there."""

    __slots__ = ("_ramify_name",)

    def __init__(self, name: str | None) -> None:
        object.__setattr__(self, "_ramify_name", name)

    def __repr__(self) -> str:
        return f"<the text of {object.__getattribute__(self, '_ramify_name')!r}>"

    def __getattribute__(self, attribute: str) -> Any:
        if attribute == "text":  # of a result
            return self
        return _needed(self, f".{attribute}")


def _needed(hole: Hole, what: str) -> NoReturn:
    name = object.__getattribute__(hole, "_ramify_name")
    raise NeedsText(f"Python uses the text of {name!r} ({what})")


def _hook(method: str) -> Any:
    def needed(self: Hole, *_: Any) -> NoReturn:
        _needed(self, method.strip("_"))

    return needed


_NEED_IT = """
    __str__ __format__ __bool__ __len__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __iter__
    __getitem__ __contains__ __add__ __radd__ __mul__ __rmul__ __mod__ __rmod__ __int__ __float__
    __index__ __bytes__ __reduce_ex__
"""
for _method in _NEED_IT.split():
    setattr(Hole, _method, _hook(_method))
