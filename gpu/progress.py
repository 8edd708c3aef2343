"""The callback by which slow parts of a start report progress, for a person who waits."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Takes what is being done, and the part of it that is done, 0..1."""
