"""The home of a tenant: few replicas, always the same ones, unless it needs more.

A tenant that spreads over all replicas takes room in every cache, and its own prefixes are computed
everywhere. So each tenant orders the replicas in its own way (rendezvous hashing, Thaler and Ravishankar
1998): a replica that joins or leaves changes no other tenant's order. As many of the first as its load
needs are its home.

Does not know caches, or what a place elsewhere costs.
"""

import math
from collections import OrderedDict
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from ramify.actors.kit.blocks import mix

LEAST = 2  # replicas: one may be busy
HALF_LIFE = 20.0  # seconds, of what a tenant's load is measured by
MOST_TENANTS = 4096
_FILL = 0.5  # of a home's replicas, so much is the tenant's own load


class _Tenant:
    __slots__ = ("order", "rate", "seed", "since", "version")

    def __init__(self, name: str, now: float) -> None:
        self.seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        self.rate = 0.0  # tokens a second that are computed for it, a mean that forgets
        self.since = now
        self.version = -1
        self.order: npt.NDArray[np.intp] = np.empty(0, dtype=np.intp)


class Tenancy:
    """The longest unused tenants are forgotten."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def computes(self, name: str, tokens: float, now: float) -> None:
        """Note that `tokens` tokens are going to be computed for a tenant."""
        tenant = self._tenant(name, now)
        self._age(tenant, now)
        tenant.rate += tokens * math.log(2) / HALF_LIFE

    def strangers(
        self, name: str, ids: npt.NDArray[np.uint64], version: int, capacity: float, now: float
    ) -> npt.NDArray[np.intp] | None:
        """Indices into `ids` of replicas that are not the tenant's home; None: it needs all.

        `version` changes with `ids`. `capacity`: tokens a second that one replica computes.
        """
        tenant = self._tenant(name, now)
        self._age(tenant, now)
        count = max(LEAST, math.ceil(tenant.rate / max(1.0, _FILL * capacity)))
        if count >= len(ids):
            return None
        if tenant.version != version:
            tenant.order = np.argsort(mix(ids ^ np.uint64(tenant.seed)))
            tenant.version = version
        return tenant.order[count:]

    def _age(self, tenant: _Tenant, now: float) -> None:
        if now > tenant.since:
            tenant.rate *= 0.5 ** ((now - tenant.since) / HALF_LIFE)
            tenant.since = now

    def _tenant(self, name: str, now: float) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, now)
            if len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(name)
        return tenant
