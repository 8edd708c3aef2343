"""Programs compute what a cache that never forgets would: each prompt token once."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ramify.actors.tokenizer import Tokenizer
from ramify.clients import connect
from ramify.clients.branch import Branch
from ramify.clients.generation import Generation
from ramify.clients.handles import Session

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "quiet": True}
QUESTION = "Several roads lead to the town. " * 20
SHOTS = "".join(f"Question {i}: which of them is {i}? Answer: {i}. " for i in range(12))


# --- the least ----------------------------------------------------------------------------------


class Trie:
    """Every prefix that was computed, as a number: a cache that never forgets."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}

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

    def least(
        self, prompt: Sequence[int], output: Sequence[int] = (), targets: Sequence[Sequence[int]] = ()
    ) -> int:
        """Prompt tokens that a call must compute.

        Its last one in any case, for its logits; and what stands in front of each token of a choice. An
        output is decoded, and its last token is sampled but never run.
        """
        path = self.walk(prompt)
        last = path[-1][0]
        run = {last, *(node for node, new in path if new)}
        for target in targets:
            run.update(node for node, _ in self.walk(target[:-1], last))
        self.walk(output[:-1], last)
        return len(run)


def test_the_least_is_counted_by_tokens() -> None:
    trie = Trie()
    assert trie.least([1, 2, 3], [7, 8]) == 3
    assert trie.least([1, 2, 3], [7, 8]) == 1  # its last token again
    assert trie.least([1, 2, 3, 7, 8, 9], [5]) == 2  # 8 was sampled
    assert trie.least([1, 2, 3], [4], [[4], [7, 6]]) == 2  # the logits behind 3, and behind 7


# --- programs -----------------------------------------------------------------------------------


@dataclass
class Notes:
    """What a run asked: branch, position in front, output tokens, choices and the one taken."""

    session: Session
    words: Tokenizer
    calls: list[tuple[Branch, int, int, Sequence[str], int]] = field(default_factory=list)

    async def ask(self, branch: Branch, text: str, output: int, **joined: Any) -> None:
        given = {"type": "join", **joined} if joined else {"type": "append", "text": text}
        result = await self._run(branch, given, {"type": "generate", "max_tokens": output, **GREEDY})
        assert result.usage.output == output
        self.calls.append((branch, result.position - output, output, (), 0))

    async def choose(self, branch: Branch, text: str, choices: Sequence[str]) -> None:
        given = {"type": "append", "text": text}
        result = await self._run(branch, given, {"type": "select", "choices": choices})
        assert result.choice is not None
        taken = len(self.words.encode(choices[result.choice]))
        self.calls.append((branch, result.position - taken, 0, choices, result.choice))

    async def _run(self, branch: Branch, *ops: dict[str, Any]) -> Any:
        """Input and question in one frame: input alone is computed ahead, with its last token."""
        _, handle = await self.session.send([{"branch": branch.name, **op} for op in ops])
        assert isinstance(handle, Generation)
        return await handle

    async def least(self, trie: Trie) -> tuple[int, int]:
        """Prompt tokens that these calls need, and that a client without branches would send."""
        held: dict[str, list[int]] = {}
        for branch in {call[0].name: call[0] for call in self.calls}.values():
            turns = (await branch.tree(tokens=True)).turns or []
            held[branch.name] = [token for turn in turns for token in turn.tokens or ()]
        best = sent = 0
        for branch, before, output, choices, taken in self.calls:
            tokens = held[branch.name]
            prompt, rest = tokens[:before], tokens[before : before + output]
            targets = [self.words.encode(text) for text in choices]
            if targets:
                rest = targets[taken]
                assert tokens[before : before + len(rest)] == rest
            best += trie.least(prompt, rest, targets)
            sent += sum(len(prompt) + len(target) - 1 for target in targets) or len(prompt)
        return best, sent

    def decoded(self) -> int:
        return sum(output - 1 for _, _, output, _, _ in self.calls if output)


async def tree_of_thought(notes: Notes) -> None:
    await notes.ask(notes.session.main, QUESTION, 1)
    await _grow(notes, notes.session.main, 3)


async def _grow(notes: Notes, at: Branch, levels: int) -> None:
    if levels:
        children = await at.fork(*notes.session.fresh_names(at.name, 3))
        texts = (f"Thought {number}: " for number in range(3))
        await asyncio.gather(*(notes.ask(*each, 8) for each in zip(children, texts, strict=True)))
        await asyncio.gather(*(_grow(notes, child, levels - 1) for child in children[:2]))


async def judges(notes: Notes) -> None:
    """Four opinions of one text, put together."""
    await notes.ask(notes.session.main, QUESTION, 1)
    opinions = await notes.session.main.fork(*(f"judge{number}" for number in range(4)))
    await asyncio.gather(*(notes.ask(each, f"By {each.name}: ", 12) for each in opinions))
    names = [each.name for each in opinions]
    joined = {"from": names, "keep": True, "role": None, "prefix": "All: ", "suffix": "So: "}
    await notes.ask(notes.session.main, "", 12, **joined)


async def exam(notes: Notes) -> None:
    """Questions behind the same examples, answered by one of four letters."""
    await notes.ask(notes.session.main, SHOTS, 1)
    questions = await notes.session.main.fork(*(f"q{number}" for number in range(5)))
    letters = ["A", "B.", "C, C", "D"]
    await asyncio.gather(*(notes.choose(each, f"{each.name}? Answer:\n", letters) for each in questions))


async def turns(notes: Notes) -> None:
    """One chain: what was said stays, whatever comes behind it."""
    for number in range(5):
        await notes.ask(notes.session.main, f"Observation {number}: {QUESTION[:60]}", 10)


def executor_tokens(metrics: bytes) -> int:
    """`ramify_executor_tokens_total`, as anybody can read it at /metrics."""
    found = re.search(rb"^ramify_executor_tokens_total (\d+)", metrics, re.MULTILINE)
    assert found
    return int(found[1])


@pytest.mark.parametrize("program", [tree_of_thought, judges, exam, turns])
async def test_no_prompt_token_is_computed_twice(serving: Any, program: Callable[..., Any]) -> None:
    """Three sessions run it at once, so most of it is shared between them too."""
    async with serving(fake={"context": 4096, "pages": 1 << 16, "verify": False}) as served:
        async with (
            connect(served.engine.url) as one,
            connect(served.engine.url) as two,
            connect(served.engine.url) as three,
        ):
            runs = [Notes(session, served.oracle.tokenizer) for session in (one, two, three)]
            await asyncio.gather(*map(program, runs))
            await served.quiet()
            ran = executor_tokens(served.engine.metrics.render())
            trie, best, sent = Trie(), 0, 0
            for notes in runs:
                needed, given = await notes.least(trie)
                best, sent = best + needed, sent + given
            assert ran - sum(notes.decoded() for notes in runs) == best < sent / 3


async def test_a_whole_prompt_is_found_where_branches_computed_it(serving: Any) -> None:
    """A client that knows no branches sends what they hold: one token is run, for its logits."""
    async with serving(fake={"context": 4096}) as served, connect(served.engine.url) as session:
        notes = Notes(session, served.oracle.tokenizer)
        await judges(notes)
        for branch, before, output, _, _ in notes.calls:
            turns = (await branch.tree(tokens=True)).turns or []
            prompt = [token for turn in turns for token in turn.tokens or ()][:before]
            (root,) = await session.root(*session.fresh_names("whole", 1))
            await root.append(tokens=prompt)
            result = await root.generate(max_tokens=output, **GREEDY)
            assert (result.usage.prompt, result.usage.computed) == (before, 1)
