"""A story, forked into two endings that are written at once; the shared part is computed once."""

import argparse
import asyncio

import ramify


async def main(url: str) -> None:
    async with ramify.connect(url) as session:
        async for delta in session.main.chat("Tell me a very short story.", max_tokens=80, seed=1):
            print(delta.text, end="", flush=True)
        # The story stops after 80 tokens, in mid-sentence; two branches go on with it at once.
        one, other = await session.main.fork("one", "other")
        endings = await asyncio.gather(
            one.generate(max_tokens=200, seed=2),
            other.generate(max_tokens=200, seed=3),
        )
        for ending in endings:
            print(f"\n\n{ending.branch}: ...{ending.text}")
            print(f"  ({ending.usage.cached} of {ending.usage.prompt} prompt tokens were cached)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="ws://127.0.0.1:8765/v1/ws")
    try:
        asyncio.run(main(parser.parse_args().url))
    except ramify.ConnectionLost as lost:
        raise SystemExit(str(lost)) from None
