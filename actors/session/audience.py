"""Everybody who is attached to a session: who gets which reply, event and delta.

Pure. It holds the attachments and, for each client, the ids it used with their replies; how one
socket is served is in `attachment`.
"""

from collections.abc import Callable

from ramify.actors.session.attachment import Attachment
from ramify.actors.session.branch import Branch
from ramify.actors.session.ledger import Ledger
from ramify.actors.session.state import SessionState
from ramify.actors.session.tasks import Task
from ramify.protocol.wire import Done, Event, JsonObject, Ok, ServerMessage

LEDGERS_KEPT = 64  # clients of one session whose op ids are remembered


class Audience:
    """`now`: set before anything is sent. `on_forget(client)`: its ids are no longer remembered."""

    def __init__(self, state: SessionState, *, on_forget: Callable[[str], None]) -> None:
        self.attachments: dict[int, Attachment] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.now = 0.0
        self._state = state
        self._on_forget = on_forget

    def reply(
        self,
        client: str,
        ident: int,
        message: ServerMessage,
        branch: Branch | None,
        *,
        again: ServerMessage | None = None,
        keep: bool = True,
    ) -> None:
        """A terminal reply. `again`: what to keep for a repeated request instead; `keep`: or nothing."""
        self.ledger(client).record(ident, message if again is None else again, keep=keep)
        for attachment in self.attachments.values():
            if attachment.client == client:
                attachment.reply(branch, message, self.now)

    def announce(self, task: Task, reply: Ok | Done) -> None:
        """Tell the other clients that the tree changed."""
        if len(self.attachments) < 2:
            return
        client = task.frame.client
        details: JsonObject = {"position": reply.position}
        if isinstance(reply, Done):
            details["reason"] = reply.reason
        if task.children:
            details["as"] = list(task.children)
        event = Event(
            revision=self._state.revision, op=task.kind, branch=reply.branch, by=client, details=details
        )
        branch = self._state.branches.get(reply.branch or "")
        for attachment in self.attachments.values():
            # Who reads nothing for so long misses events: the next one's `revision` shows it.
            if attachment.client != client and attachment.held < self._state.limits.ops_in_flight:
                attachment.reply(branch, event, self.now)

    def flush(self, branch: Branch) -> None:
        """Send what `branch` released, to everybody who may have it now."""
        for attachment in self.attachments.values():
            tick = attachment.opened.tick_ms
            if not tick:
                attachment.flush(branch, self.now)
            elif self.now >= attachment.next_tick:
                attachment.flush(branch, self.now)
                attachment.next_tick = self.now + tick / 1e3
            else:
                self._state.out.wake(attachment.next_tick)

    def begin(self, branch: Branch) -> None:
        """A new branch: its text so far is known."""
        for attachment in self.attachments.values():
            attachment.begin(branch, branch.position)

    def cut(self, branch: Branch, to: int) -> None:
        """The branch was moved back to `to`."""
        for attachment in self.attachments.values():
            attachment.cut(branch, to)

    def rename(self, branch: Branch, name: str) -> None:
        """The branch is about to get another name."""
        for attachment in self.attachments.values():
            attachment.rename(branch, name)

    def drop(self, branch: Branch) -> None:
        """The branch is about to go."""
        for attachment in self.attachments.values():
            attachment.drop(branch)

    def ledger(self, client: str) -> Ledger:
        """The ids of `client`; forgets clients that are gone when there are too many."""
        ledger = self.ledgers.get(client)
        if ledger is None:
            attached = {attachment.client for attachment in self.attachments.values()}
            for other in list(self.ledgers):
                if len(self.ledgers) < LEDGERS_KEPT:
                    break
                if other not in attached and self.ledgers[other].idle:
                    self.ledgers.pop(other).forget()
                    self._on_forget(other)
            ledger = self.ledgers[client] = Ledger(client, self._state.limits, self._state.meter)
        return ledger
