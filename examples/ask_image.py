"""Ask a model about pictures. Start a server with a model that sees, for example
`make serve MODEL=Qwen/Qwen3-VL-2B-Instruct`, then

    .venv/bin/python examples/ask_image.py "What is on the left?" photo.jpg chart.png

The pictures go up once: the branches that answer in several ways read them where they are.
The variable RAMIFY_URL names a server elsewhere.
"""

import asyncio
import os
import sys

import ramify

URL = os.environ.get("RAMIFY_URL", "ws://127.0.0.1:8765")


async def main(question: str, *files: str) -> None:
    async with ramify.connect(URL) as session:
        await session.main.say(question, images=[ramify.Image(file) for file in files])
        short, long = await session.main.fork("short", "long")
        brief = short.generate(max_tokens=24)
        async for delta in long.generate(max_tokens=256):
            print(delta.text, end="", flush=True)
        print("\n--- in short:", (await brief).text)
        print("seen before:", (await brief).usage.cached, "tokens")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        print(__doc__)
    else:
        asyncio.run(main(*sys.argv[1:]))
