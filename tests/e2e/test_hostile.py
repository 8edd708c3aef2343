"""Frames of valid shapes with hostile values, a small part of `benchmarks/hostile_frames.py`.

Another client chats all the while and gets exactly what it should (`undisturbed`).
"""

import asyncio
import json
import random
from typing import Any

import msgspec
import websockets

from tests.e2e.hostile import MIXES, Codec, Hostile, Memory

FRAMES = 150  # of each socket


async def attack(served: Any, codec: Codec, seed: int) -> int:
    """Send frames, over a new socket when the server closes one; returns how many were answered."""
    rng = random.Random(seed)
    memory = Memory()
    frames = Hostile(rng, codec, memory)
    sent = answered = 0
    while sent < FRAMES:
        frames.mix = rng.choice(MIXES)
        async with served.connect(codec) as peer:

            async def read(ws: Any = peer.ws) -> None:
                nonlocal answered
                async for data in ws:
                    frame = json.loads(data) if codec == "json" else msgspec.msgpack.decode(data)
                    for message in frame if isinstance(frame, list) else [frame]:
                        memory.take(message)
                        answered += 1

            reading = asyncio.create_task(read())
            try:
                opening = frames.encode(frames.opening(f"attacker-{seed}", "plain"))
                for _ in range(rng.choice([5, 40])):
                    frame, opening = opening or frames.frame(), None
                    data = frame.data if frame.binary else frame.data.decode("utf-8", "replace")
                    await peer.ws.send(data)
                    sent += 1
                    if rng.random() < 0.2:
                        await asyncio.sleep(0)
                if rng.random() < 0.3:
                    peer.abort()
            except websockets.ConnectionClosed:
                pass
            finally:
                await peer.ws.close()
                await asyncio.gather(reading, return_exceptions=True)
    return answered


async def test_hostile_frames_disturb_nobody(serving: Any) -> None:
    async with serving(server={"session_ttl_s": 0.5}) as served:
        async with served.undisturbed():
            answers = await asyncio.gather(
                *(attack(served, codec, seed) for seed, codec in enumerate(["json", "msgpack"] * 2))
            )
            assert all(answer > FRAMES / 3 for answer in answers), answers
