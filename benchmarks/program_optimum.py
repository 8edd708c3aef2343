"""The fewest prompt tokens that programs can be computed with: a cache that never forgets. Pure.

A plain trie over token sequences, independent of the engine's own tree. A generation needs the logits
behind its prompt, so at least the prompt's last token is run, even where all of it is known. Its output
is decoded, not prefilled, and its last token is sampled and not run. A choice between texts needs the
logits in front of each of their tokens, so each such place is run once for it, known or not.
"""

from collections.abc import Iterable, Sequence

from program_runs import Asked


class Trie:
    """Every prefix that was computed, as a number."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._next)

    def walk(self, tokens: Sequence[int], at: int = 0) -> list[tuple[int, bool]]:
        """Add tokens behind the node `at`. Each one's node, and whether it is new."""
        path = []
        for token in tokens:
            node = self._next.get((at, token))
            new = node is None
            if node is None:
                node = self._next[at, token] = len(self._next) + 1
            path.append((node, new))
            at = node
        return path


def least(calls: Iterable[Asked], outputs: Iterable[Sequence[int]], trie: Trie) -> tuple[int, int]:
    """Prompt tokens that must be computed, and that stateless clients send. `outputs`: of the calls."""
    computed = sent = 0
    for call, output in zip(calls, outputs, strict=True):
        path = trie.walk(call.prompt)
        run = {node for node, new in path if new}
        last = path[-1][0]
        run.add(last)
        if call.targets:
            for target in call.targets:
                sent += len(call.prompt) + len(target) - 1
                run.update(node for node, _ in trie.walk(target[:-1], last))
        else:
            sent += len(call.prompt)
            trie.walk(output[:-1], last)
        computed += len(run)
    return computed, sent
