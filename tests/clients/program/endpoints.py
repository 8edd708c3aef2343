"""HTTP endpoints that tests make up, and the real `openai` client that talks to them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI


@asynccontextmanager
async def served(api: Any) -> AsyncIterator[AsyncOpenAI]:
    """`api.serve` gets each connection, as of `asyncio.start_server`."""
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with AsyncOpenAI(
            api_key="none", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0
        ) as client:
            yield client
    finally:
        server.close()
        await server.wait_closed()
