"""Agents: a model that calls tools, in a loop. The names of `ramify.clients.agent`."""

from ramify.clients.agent import *  # noqa: F403
from ramify.clients.agent import __all__ as __all__
