"""The accounts of sessions and their tenants, and of programs whose requests have sessions of their own.

Does not know requests' order, pages or steps.
"""

from ramify.actors.scheduler.queue import WaitingQueue
from ramify.actors.scheduler.request import Account, Tenant
from ramify.protocol.messages import Submit

PROGRAMS = 4096  # histories of stateless requests whose service is remembered


class Accounts:
    """`sessions`: by number. `tenants`: those that have a credential, by its name."""

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self.sessions: dict[int, Account] = {}
        self.tenants: dict[str, Tenant] = {}
        self._programs: dict[bytes, Account] = {}  # by the history of their request; the oldest first
        self._sweep_at = 1024

    def forget(self, session: int) -> Account | None:
        """Take a session's account out. Returns it; None: there is none."""
        return self.sessions.pop(session, None)

    def of(self, session: int, owner: str) -> Account:
        """The session's account. Without a credential a session is a tenant of its own."""
        account = self.sessions.get(session)
        if account is None:
            if len(self.sessions) >= self._sweep_at:
                self.sweep()
            tenant = self.tenants.setdefault(owner, Tenant()) if owner else Tenant()
            account = self.sessions[session] = Account(session, tenant)
        return account

    def go_on(self, account: Account, submit: Submit) -> None:
        """Count the service of the request whose history `submit` goes on from.

        `submit` has a session of its own, which would start as one without service.
        """
        before = self._programs.get(submit.follows)
        if before is not None:
            account.served = max(account.served, before.served)
            account.tenant.served = max(account.tenant.served, before.tenant.served)
        self._programs.pop(submit.history, None)
        self._programs[submit.history] = account
        if len(self._programs) > PROGRAMS:
            del self._programs[next(iter(self._programs))]

    def sweep(self) -> None:
        """Forget idle sessions that would start at the current virtual time anyway."""
        virtual = self._queue.virtual
        self.sessions = {
            session: account
            for session, account in self.sessions.items()
            if account.requests
            or account.served > account.tenant.virtual
            or account.tenant.served > virtual
        }
        left = {id(account.tenant) for account in self.sessions.values()}
        self.tenants = {
            owner: tenant
            for owner, tenant in self.tenants.items()
            if id(tenant) in left or tenant.served > virtual
        }
        self._sweep_at = max(1024, 2 * len(self.sessions))
