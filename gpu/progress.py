"""How the slow parts of a start tell what they do. A person waits for them."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Told what is happening and how much of it is done, 0..1."""
