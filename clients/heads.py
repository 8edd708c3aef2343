"""The branches of a session as one client knows them: names, lengths, how much text is here.

Pure bookkeeping of replies. What a branch holds is the server's business.
"""

from collections.abc import Iterable

from ramify.protocol.wire import (
    BranchState,
    Done,
    Drop,
    Event,
    Fork,
    JsonObject,
    Ok,
    Op,
    Prune,
    Rollback,
    Set,
    names,
)


class Head:
    """A branch as this client knows it.

    `position`: its length. `received`: how far its text is here, which is where a resume starts;
    it is behind `position` while a resume's deltas are under way.
    """

    __slots__ = ("position", "received")

    def __init__(self, position: int, received: int) -> None:
        self.position = position
        self.received = received


class Heads:
    """The branch table. `revision`: the newest change of the tree that was told.

    A reply or event waits for the deltas of its branch, so changes of different branches may be told
    in another order than they were made. Each is applied when it comes: the server tells of a fork
    before it tells of the children.
    """

    def __init__(self, revision: int | None) -> None:
        self.revision = revision
        self.by_name: dict[str, Head] = {}
        self._included: int  # the revision of the last `state`; no reply comes before the first one

    def get(self, name: str) -> Head:
        """Find the branch; makes a new entry if it was not known."""
        return self.by_name.setdefault(name, Head(0, 0))

    def have(self) -> dict[str, int]:
        """Make `open.have`: where each branch's text goes on."""
        return {name: head.received for name, head in self.by_name.items()}

    def attached(self, branches: Iterable[BranchState], revision: int, asked: set[str]) -> None:
        """Take a `state` that answered `open`: it has all branches there are.

        The text of a branch that was not in `have` comes from the running generation's start on;
        of one in `asked` it comes from position 0.
        """
        before, self.by_name = self.by_name, {}
        for branch in branches:
            head = before.get(branch.branch)
            if head is None:
                start = branch.position if branch.started_at is None else branch.started_at
                head = Head(branch.position, 0 if branch.branch in asked else start)
            head.position = branch.position
            self.by_name[branch.branch] = head
        self.revision = self._included = revision

    def news(self, revision: int | None) -> bool:
        """Whether a reply tells of something that the last `state` did not include."""
        if revision is None:
            return True
        self._heard(revision)
        return revision > self._included

    def _heard(self, revision: int) -> None:
        self.revision = max(self.revision or revision, revision)

    def applied(self, op: Op, ok: Ok) -> None:
        """Apply the reply of an op that is done."""
        if not self.news(ok.revision):
            return
        head = self.by_name.get(ok.branch or getattr(op, "branch", None) or "")
        match op:
            case Rollback() if head is not None and ok.position is not None:
                head.position = ok.position
                head.received = min(head.received, ok.position)
            case Fork():
                self._forked(op, ok)
            case Drop():
                for name in [ok.branch] if ok.branch else names(op.branch):
                    self.by_name.pop(name, None)
            case Set(name=str() as name) if op.branch in self.by_name:
                self.by_name[name] = self.by_name.pop(op.branch)
            case Prune():
                pass  # its result says which branches moved
            case _ if head is not None and ok.position is not None:
                rebased = (ok.result or {}).get("rebased")  # the strict template moved the branch back
                if rebased is None:
                    head.position = max(head.position, ok.position)
                else:
                    head.position = ok.position
                    head.received = min(head.received, rebased)
        self._placed(ok.result or {})

    def _placed(self, result: JsonObject) -> None:
        """Apply a prune: place the branches that it moved, whose text is known; drop the others."""
        for kept in result.get("kept", ()):
            if kept["into"] != kept["from"]:
                self.by_name[kept["into"]] = Head(kept["position"], kept["position"])
        for name in result.get("dropped", ()):
            self.by_name.pop(name, None)

    def _forked(self, op: Fork, ok: Ok) -> None:
        parent = self.by_name.get(op.branch) if op.branch is not None else None
        at = ok.position if ok.position is not None else op.at
        if at is None:
            at = parent.position if parent is not None else 0
        for name in op.as_:
            self.by_name.setdefault(name, Head(at, at))

    def ended(self, done: Done) -> None:
        """Apply the end of a generation. Its branch may have gone since, if `done` is sent again."""
        if self.news(done.revision) or done.branch in self.by_name:
            head = self.get(done.branch)
            if done.rebased is not None:  # a choice that begins with the branch's last text
                head.position = head.received = done.position
            head.position = max(head.position, done.position)
            head.received = max(head.received, done.position)

    def noted(self, event: Event) -> int | None:
        """Note another client's change of the tree. Returns the position that the event names."""
        self._heard(event.revision)
        details = event.details or {}
        position: int | None = details.get("position")
        if event.branch is None:
            return position
        if event.op == "drop":
            self.by_name.pop(event.branch, None)
        elif event.op != "prune" and position is not None:
            if details.get("from") in self.by_name:  # renamed
                self.by_name[event.branch] = self.by_name.pop(details["from"])
            head = self.get(event.branch)
            if event.op == "rollback":
                head.received = min(head.received, position)
            if "rebased" in details:  # the strict template moved the branch back first
                head.received = min(head.received, details["rebased"])
            if event.op != "fork":
                head.position = position
            for child in details.get("as", ()):
                self.by_name.setdefault(child, Head(position, position))
        self._placed(details)
        return position
