"""How many of its random examples a test tries: some in each run, all of them in a campaign.

`RAMIFY_ALL_EXAMPLES=1 make test` is the campaign (a single file: `RAMIFY_ALL_EXAMPLES=1 pytest FILE`).
"""

import os

ALL = bool(os.environ.get("RAMIFY_ALL_EXAMPLES"))


def examples(some: int, every: int) -> int:
    """`some`, in a campaign `every`."""
    return every if ALL else some


def stride(step: int) -> int:
    """Of cases in an order: each `step`-th, in a campaign each one."""
    return 1 if ALL else step
