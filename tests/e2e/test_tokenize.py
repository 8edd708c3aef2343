"""/tokenize and /detokenize over the real engine: the ids that the model reads, and back."""

from typing import Any

import httpx
import pytest

HELLO = [{"role": "user", "content": "Hello."}]
TEXT = "A café, 27 + 48."


@pytest.mark.parametrize("gateways", [0, 2])
async def test_there_and_back(serving: Any, gateways: int) -> None:
    async with (
        serving(gateways=gateways, limits={"tree_bytes": 1024}) as served,
        httpx.AsyncClient(base_url=served.http) as client,
    ):
        for prefix in ("/v1", ""):
            for name in ("prompt", "content"):
                told = (await client.post(f"{prefix}/tokenize", json={name: TEXT})).json()
                ids = served.oracle.tokenizer.encode(TEXT)
                assert told == {
                    "count": len(ids),
                    "max_model_len": told["max_model_len"],
                    "tokens": ids,
                    "token_strs": None,
                }
            back = (await client.post(f"{prefix}/detokenize", json={"tokens": ids})).json()
            assert back == {"prompt": TEXT, "content": TEXT}
        asked: dict[str, Any] = {"messages": HELLO, "return_token_strs": True}
        told = (await client.post("/tokenize", json=asked)).json()
        assert told["tokens"] == served.oracle.turn("Hello.")
        spelled = "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
        assert "".join(told["token_strs"]) == spelled
        body = {"messages": HELLO, "max_tokens": 1}
        usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
        assert told["count"] == usage["prompt_tokens"]
        back = (await client.post("/detokenize", json={"tokens": told["tokens"]})).json()
        assert back["prompt"] == spelled
        assert (await client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
        assert (await client.post("/detokenize", json={"tokens": []})).json()["prompt"] == ""
        # many turns are many segments, which are told in several pages
        long = [{"role": ("user", "assistant")[i % 2], "content": "word " * 8} for i in range(41)]
        told = (await client.post("/tokenize", json={"messages": long})).json()
        usage = (
            await client.post("/v1/chat/completions", json={"messages": long, "max_tokens": 1})
        ).json()["usage"]
        assert told["count"] == len(told["tokens"]) == usage["prompt_tokens"]
        await served.until_alone(sessions=0)


async def test_what_cannot_be_asked_is_named(serving: Any) -> None:
    async with serving() as served:
        async with httpx.AsyncClient(base_url=served.http) as client:
            for path, body, field, mend in (
                ("/tokenize", {}, None, "give one of `prompt`, `content` and `messages`"),
                ("/tokenize", {"prompt": "a", "messages": HELLO}, None, "give one of"),
                ("/tokenize", {"prompt": "a", "tools": []}, "tools", "goes with `messages`"),
                ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces", "return_token_strs"),
                ("/tokenize", {"prompt": "a", "add_special": False}, "add_special", "as the model"),
                ("/detokenize", {"tokens": [1 << 30]}, "tokens", "the model's ids end at"),
                ("/detokenize", {"tokens": [-1]}, "tokens[0]", ">= 0"),
                ("/detokenize", {"tokens": [5] * 100_000}, "tokens", "send fewer"),
                ("/detokenize", {}, "tokens", "tokens"),
            ):  # fmt: skip
                answer = await client.post(path, json=body)
                error = answer.json()["error"]
                assert answer.status_code == 400, (path, body)
                assert (error["param"], mend in error["message"]) == (field, True), (error, mend)
            missing = await client.post("/tokenize", json={"prompt": "a", "model": "other"})
            assert missing.status_code == 404
            assert (await client.get("/tokenize")).status_code == 405
