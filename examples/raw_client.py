"""A client without our code: two branches of one prompt, over one WebSocket, with plain JSON."""

import argparse
import asyncio
import json

import websockets


async def main(url: str) -> None:
    async with websockets.connect(url) as ws:
        program = [
            {"type": "open", "client": "raw"},
            {"type": "append", "id": 1, "messages": [{"role": "user", "content": "Tell me a story."}]},
            {"type": "fork", "id": 2, "as": ["a", "b"]},
            {"type": "generate", "id": 3, "branch": ["a", "b"], "max_tokens": 60, "seed": 1},
        ]
        await ws.send(json.dumps(program))
        running = {"a", "b"}
        while running:
            frame = json.loads(await ws.recv())
            for message in frame if isinstance(frame, list) else [frame]:
                if message["type"] == "delta":
                    print(f"{message['branch']}@{message['position']}: {message['text']!r}")
                elif message["type"] == "done":
                    running.discard(message["branch"])
                    print(message["branch"], message["reason"], message["usage"])
                elif message["type"] == "error":
                    raise SystemExit(message["message"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="ws://127.0.0.1:8765/v1/ws")
    try:
        asyncio.run(main(parser.parse_args().url))
    except OSError as error:
        raise SystemExit(f"no server: {error}") from None
