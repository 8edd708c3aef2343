"""Lines about turns and branches, as `ramify chat` shows them. Pure."""

from ramify.clients.generation import Result
from ramify.protocol.wire import BranchState, Usage


def describe(result: Result) -> str:
    """One line on a turn, for example

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
    """Tokens a second after the first one; None where that cannot be said."""
    if usage.ttft_ms is None or usage.output < 2 or usage.total_ms <= usage.ttft_ms:
        return None
    return (usage.output - 1) / (usage.total_ms - usage.ttft_ms) * 1e3


def draw_tree(branches: list[BranchState], current: str) -> str:
    """The branches as an indented tree; the current one is marked."""
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
            lines.append(f"{mark} {'  ' * depth}{branch.branch}: {branch.position} tokens{at}{busy}")
            walk(branch.branch, depth + 1)

    walk(None, 0)
    return "\n".join(lines)
