"""The program line that is running: the first line on the stack that is not the language's own."""

import sys
from pathlib import Path

SOMEWHERE = "somewhere"
_OWN = str(Path(__file__).parent)
_CLIENTS = str(Path(__file__).parent.parent)


def place() -> str:
    """Name the place, as `at file.py:12`; one that is not known is `somewhere`."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OWN, _CLIENTS)):
            return SOMEWHERE if "asyncio" in Path(file).parts else f"at {file}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return SOMEWHERE
