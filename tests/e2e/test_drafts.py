"""Drafts through the whole server: the text is that of a server without them, and the counts agree."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

CHATS = ["one two one two one two", "Capital of France?", "The quick brown fox. The quick brown"]
TOKENS = 48
LIST = r'(\{"name": "(one|two|three)", "count": [1-3]\}, ){40}'


async def counters(served: Any) -> dict[str, tuple[str, float]]:
    """Drafted and accepted: drafter and count."""
    text = (await asyncio.to_thread(served.engine.metrics.render)).decode()
    pattern = r'^ramify_(draft_tokens|accepted_draft_tokens)_total\{drafter="(\w+)"\} (\S+)$'
    return {name: (drafter, float(count)) for name, drafter, count in re.findall(pattern, text, re.M)}


async def answers(served: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """The texts and the usages of chats at once, each with a second turn on two branches."""

    async def chat(number: int) -> tuple[list[str], list[dict[str, Any]]]:
        seeded = {"temperature": 0.3, "seed": number, "max_tokens": TOKENS, "ignore_eos": True}
        held = seeded | {"ignore_eos": False}
        async with served.connect() as peer:
            await peer.open(client=f"c{number}")
            first = await peer.say(1, CHATS[number], max_tokens=TOKENS, ignore_eos=True)
            await peer.send(
                {"type": "fork", "id": 3, "as": ["a"]},
                {"type": "generate", "id": 4, "branch": ["main", "a"], **seeded},
            )
            both = await peer.terminals(4, ["main", "a"])
            usages = [first["usage"], *(done["usage"] for done in both.values())]
            await peer.send(
                {"type": "fork", "id": 5, "branch": "a", "as": ["b"]},
                {"type": "generate", "id": 6, "branch": "b", "constraint": {"regex": LIST}, **held},
            )
            done = await peer.terminal(6)
            assert done["type"] == "done", done
            return [peer.text(), peer.text("a"), peer.text("b")], [*usages, done["usage"]]

    done = await asyncio.gather(*(chat(number) for number in range(len(CHATS))))
    return [text for texts, _ in done for text in texts], [usage for _, some in done for usage in some]


@pytest.mark.parametrize("drafter", ["ngram", "model"])
async def test_counts_of_drafts_add_up(serving: Any, llama_folder: Path, drafter: str) -> None:
    """`--draft ngram`, and a draft model: here the model itself, which guesses greedy tokens right."""
    draft = str(llama_folder) if drafter == "model" else drafter
    model = {"path": llama_folder, "device": "cpu", "dtype": "float32", "threads": 1}
    async with serving(real=True, model=model | {"draft": "none"}) as served:
        texts, usages = await answers(served)
        assert await counters(served) == {}
        # without a drafter the end of a forced text is guessed
        assert not any(usage.get("accepted") for usage in usages if not usage.get("forced"))
    async with serving(real=True, model=model | {"draft": draft}) as served:
        drafted_texts, usages = await answers(served)
        await served.quiet()
        found = await counters(served)
    assert drafted_texts == texts
    accepted = sum(usage.get("accepted", 0) for usage in usages)
    assert found["accepted_draft_tokens"] == (drafter, accepted)
    assert 0 < accepted <= found["draft_tokens"][1]
    assert sum(usage["output"] for usage in usages) == TOKENS * len(usages)
