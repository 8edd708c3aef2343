"""Chats and trees over a socket, with both placements of the executor and both codecs.

The fake model makes every answer predictable from the branch's tokens: a wrong page, a wrong
position or a neighbour's token changes the text.
"""

import asyncio
from typing import Any

import pytest

CODECS = pytest.mark.parametrize("codec", ["json", "msgpack"])
SLOW = {"step_seconds": 0.002}  # long enough for the client to act in mid-stream


@CODECS
async def test_a_turn_computes_what_is_new_and_one_more(serving: Any, executor: str, codec: str) -> None:
    async with serving(executor=executor, eos_every=40) as served, served.connect(codec) as peer:
        oracle = served.oracle
        state = await peer.open()
        assert state["branches"] == [{"branch": "main", "position": 0, "resident": 0}]
        assert peer.ws.subprotocol == f"ramify.v1+{codec}"
        branch: list[int] = []
        shown = ""
        for turn, content in enumerate(["Capital of France?", "And Spain?", "Äpfel, 東京, 🙂"]):
            before = len(branch)
            prompt = oracle.next_turn(branch, content) if branch else oracle.turn(content)
            done = await peer.say(2 * turn + 1, content, max_tokens=64)
            answer = oracle.output(prompt, 64)
            shown += oracle.text(answer)
            if peer.text()!=shown: print(turn, answer[-6:], [oracle.tokenizer.token_bytes[t] for t in answer[-6:]]); [print(m) for m in peer.log[-12:]]
            assert peer.text() == shown
            assert done["usage"]["prompt"] == len(prompt)
            assert done["usage"]["cached"] == max(0, before - 1)  # the last one was never run
            assert done["usage"]["computed"] == len(prompt) - done["usage"]["cached"]
            assert done["usage"]["output"] == len(answer)
            assert done["reason"] == ("stop" if answer[-1] == 2 else "length")
            branch = [*prompt, *answer]
            assert done["position"] == len(branch) == peer.position["main"]
        assert (await peer.tree(99))["main"] == branch


