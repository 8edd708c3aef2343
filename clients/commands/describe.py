"""Lines about turns and branches, as `ramify chat` shows them. Pure."""

from ramify.clients.generation import Result
from ramify.protocol.wire import BranchState, Usage

SAVED = {"lazy": "saved soon after each change", "sync": "saved before it is told"}


def describe(result: Result) -> str:
    """Describe a turn in one line, for example

    53 tokens, 41.2 tok/s, first after 11 ms, 120 of 133 prompt tokens cached
    """
    usage = result.usage
    parts = [f"{usage.output} tokens"]
    rate = decode_rate(usage)
    if rate is not None:
        parts.append(f"{rate:.1f} tok/s")
    if usage.ttft_ms is not None:
        parts.append(f"first after {usage.ttft_ms:.0f} ms")
    if usage.forced:
        parts.append(f"{usage.forced} forced")
    if usage.accepted:
        parts.append(f"{usage.accepted} guessed")
    parts.append(f"{usage.cached} of {usage.prompt} prompt tokens cached")
    if result.reason != "stop":
        parts.append(result.reason)
    return ", ".join(parts)


def decode_rate(usage: Usage) -> float | None:
    """Compute tokens a second after the first one; None where that cannot be said."""
    if usage.ttft_ms is None or usage.output < 2 or usage.total_ms <= usage.ttft_ms:
        return None
    return (usage.output - 1) / (usage.total_ms - usage.ttft_ms) * 1e3


def draw_tree(branches: list[BranchState], current: str) -> str:
    """Draw the branches as an indented tree. The current one is marked."""
    names = {branch.branch for branch in branches}
    children: dict[str | None, list[BranchState]] = {}
    for branch in branches:
        parent = branch.parent if branch.parent in names else None
        children.setdefault(parent, []).append(branch)
    lines: list[str] = []

    def walk(parent: str | None, depth: int) -> None:
        for branch in children.get(parent, ()):
            mark = "*" if branch.branch == current else " "
            at = f", forked at {branch.at}" if branch.at is not None and branch.parent else ""
            busy = ", generating" if branch.running is not None else ""
            kv = f", {branch.resident} with KV" if branch.resident is not None else ""
            warm = f", kept warm for {duration(branch.retain_s)}" if branch.retain_s else ""
            name = f"{mark} {'  ' * depth}{branch.branch}"
            lines.append(f"{name}: {branch.position} tokens{kv}{warm}{at}{busy}")
            walk(branch.branch, depth + 1)

    walk(None, 0)
    return "\n".join(lines)


def holding(branches: list[BranchState], ttl_s: float | None, persist: str | None) -> str:
    """Describe what the server has of a session, and for how long, for example

    on the server: KV of up to 133 tokens; the session lives 10 min without clients; not saved

    "Up to" of several branches: what a fork shares with its parent counts once, equal beginnings of
    others do not.
    """
    names = {branch.branch for branch in branches}
    shared = [branch.at or 0 if branch.parent in names else 0 for branch in branches]
    own = sum(max(0, (branch.resident or 0) - at) for branch, at in zip(branches, shared, strict=True))
    lives = f"the session lives {duration(ttl_s)} without clients; " if ttl_s is not None else ""
    saved = SAVED.get(persist or "", "not saved: a restart of the server ends it")
    most = "up to " if own and len(branches) > 1 else ""
    return f"on the server: KV of {most}{own} tokens; {lives}{saved}"


def duration(seconds: float) -> str:
    """Write a duration in the largest unit that fits twice, or once exactly: 90 s, 10 min, 6 h, 30 d."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or seconds == size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds:.4g} s"
