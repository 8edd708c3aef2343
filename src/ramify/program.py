"""A small language for programs that call a model. The names of `ramify.clients.program`."""

from ramify.clients.program import *  # noqa: F403
from ramify.clients.program import __all__ as __all__
