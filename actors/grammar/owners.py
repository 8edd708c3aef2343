"""The owner of a constraint. Data only."""

from typing import NamedTuple


class Owner(NamedTuple):
    """A session of the credential `name`. Sessions without a credential share the name "": beside named
    ones they count as one, however many they are.
    """

    name: str = ""
    session: int = 0
