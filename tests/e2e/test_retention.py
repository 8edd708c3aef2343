"""Retention as clients of each door say it: what was computed is there when they come back."""

from typing import Any

import httpx2
import pytest

VERSION = {"anthropic-version": "2023-06-01"}
MARK = {"type": "ephemeral", "ttl": "1h"}
ASKED = "What is a radix tree? " * 4


async def cached(http: httpx2.AsyncClient, model: str, door: str, text: str, *, kept: bool) -> int:
    """Ask a door; the tokens of the prompt that were cached."""
    chat = {"model": model, "messages": [{"role": "user", "content": text}]}
    if door == "/v1/messages":
        body: dict[str, Any] = {**chat, "max_tokens": 1}
        body |= {"cache_control": MARK} if kept else {}
    elif door == "/v1/chat/completions":
        body = {**chat, "max_tokens": 1} | ({"prompt_cache_retention": "24h"} if kept else {})
    elif door == "/v1/responses":
        body = {"model": model, "input": text, "max_output_tokens": 1, "store": False}
        body |= {"prompt_cache_key": "ours"} if kept else {}
    else:
        body = {**chat, "stream": False, "options": {"num_predict": 1}}
        body |= {"keep_alive": "5m"} if kept else {}
    answer = await http.post(door, json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json().get("usage") or {}
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if name in usage:
            return int(usage[name]["cached_tokens"])
    return int(usage.get("cache_read_input_tokens", -1))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("door", ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/api/chat"])
async def test_what_is_kept_is_there_after_others_filled_the_pool(
    serving: Any, door: str, kept: bool
) -> None:
    async with serving(fake={"pages": 600}) as served:
        http = httpx2.AsyncClient(base_url=served.http, headers=VERSION, trust_env=False)
        async with http:
            (model,) = (await http.get("/v1/models")).json()["data"]
            prompt = len(served.oracle.turn(ASKED))
            await cached(http, model["id"], door, ASKED, kept=kept)
            for i in range(20):
                await cached(
                    http, model["id"], "/v1/chat/completions", f"{i} fills it. " * 8, kept=False
                )
            found = await cached(http, model["id"], "/v1/messages", ASKED, kept=False)
            assert found == prompt - 1 if kept else found < prompt // 2
