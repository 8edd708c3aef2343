"""Anthropic's API over the real engine and a fake model that is known, in raw requests.

The real `anthropic` packages are run by `test_other_clients.py`, where they are installed.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2

from tests.conftest import write_tokenizer

SECRET = "a key of ours"
VERSION = {"anthropic-version": "2023-06-01"}
HELLO: list[Any] = [{"role": "user", "content": "Hello."}]


def client_of(served: Any, **headers: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=served.http, headers={**VERSION, **headers}, trust_env=False)


def events(body: str) -> list[Any]:
    return [json.loads(each.partition("\ndata: ")[2]) for each in body.split("\n\n")[:-1]]


async def test_messages_whole_and_streamed(serving: Any) -> None:
    async with serving(eos_every=20) as served, client_of(served) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        prompt = served.oracle.turn("Hello.")
        tokens = served.oracle.output(prompt, 64)
        text = served.oracle.text(tokens)
        asked = {"model": model["id"], "max_tokens": 64, "messages": HELLO, "temperature": 0}
        counted = await http.post("/v1/messages/count_tokens", json={**asked, "max_tokens": None})
        assert counted.status_code == 400  # a field of the other request
        del asked["max_tokens"], asked["temperature"]
        counted = await http.post("/v1/messages/count_tokens", json=asked)
        assert counted.json() == {"input_tokens": len(prompt)}
        asked |= {"max_tokens": 64, "temperature": 0}
        answer = (await http.post("/v1/messages", json=asked)).json()
        assert answer["content"] == [{"type": "text", "text": text}]
        assert answer["stop_reason"] == ("end_turn" if tokens[-1] == 2 else "max_tokens")
        assert answer["usage"]["output_tokens"] == len(tokens)
        streamed = await http.post("/v1/messages", json={**asked, "stream": True})
        made = events(streamed.text)
        assert "".join(e["delta"].get("text", "") for e in made if "delta" in e) == text
        start, end = made[0]["message"]["usage"], made[-2]["usage"]
        assert start["cache_read_input_tokens"] == len(prompt) - 1  # in the same tree
        assert (start["input_tokens"], start["output_tokens"]) == (1, 0)
        assert end.pop("queue_ms") >= 0
        assert end == {**start, "output_tokens": len(tokens)}
        warm = [{"role": "user", "content": "Something else."}]
        warmed = await http.post("/v1/messages", json={**asked, "messages": warm, "max_tokens": 0})
        assert (warmed.json()["content"], warmed.json()["usage"]["output_tokens"]) == ([], 0)
        again = (await http.post("/v1/messages", json={**asked, "messages": warm})).json()["usage"]
        assert (again["input_tokens"], again["cache_creation_input_tokens"]) == (1, 0)
        late = [*HELLO, {"role": "system", "content": "Be brief."}]  # as Claude Code does
        told = (await http.post("/v1/messages", json={**asked, "messages": late})).json()["usage"]
        count = {"model": model["id"], "messages": late}
        counted = await http.post("/v1/messages/count_tokens", json=count)
        both = told["input_tokens"] + told["cache_read_input_tokens"]
        assert counted.json() == {"input_tokens": both}
        begun = [*HELLO, {"role": "assistant", "content": text[:4]}]
        raw = [*prompt, *served.oracle.tokenizer.encode(text[:4], after=prompt[-1])]
        went_on = (await http.post("/v1/messages", json={**asked, "messages": begun})).json()
        assert went_on["content"][0]["text"] == served.oracle.text(served.oracle.output(raw, 64))
        await served.until_alone(sessions=0)


async def test_who_may_ask_and_what_errors_look_like(serving: Any) -> None:
    async with serving(server={"tokens": (SECRET,)}) as served:
        async with client_of(served) as http:
            for headers in ({}, {"x-api-key": "no"}, {"authorization": "Bearer no"}):
                for method, path in (("GET", "/v1/models"), ("POST", "/v1/messages")):
                    answer = await http.request(method, path, headers=headers)
                    assert answer.status_code == 401
                    assert answer.json()["error"]["type"] == "authentication_error"
        for shown in ({"x-api-key": SECRET}, {"authorization": f"Bearer {SECRET}"}):
            async with client_of(served, **shown) as http:
                listed = (await http.get("/v1/models")).json()
                assert listed["data"][0]["type"] == "model"
                plain = await http.get("/v1/models", headers={"anthropic-version": ""})
                assert plain.status_code == 400
                for method, path, status, kind in (
                    ("GET", "/v1/messages", 405, "invalid_request_error"),
                    ("POST", "/v1/messages/batches", 404, "not_found_error"),
                    ("GET", "/v1/files", 404, "not_found_error"),
                    ("GET", "/v1/models/other", 404, "not_found_error"),
                    ("POST", "/v1/messages", 400, "invalid_request_error"),
                ):
                    answer = await http.request(method, path, content=b"[" * 5000)
                    told = answer.json()
                    assert (answer.status_code, told["error"]["type"]) == (status, kind), path
                    assert told["request_id"] == answer.headers["request-id"]
                large = await http.post("/v1/messages", content=b" " * (2 << 20))
                assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        async with httpx2.AsyncClient(base_url=served.http, trust_env=False) as http:
            unversioned = await http.post("/v1/messages", headers={"x-api-key": SECRET}, json={})
            assert "anthropic-version" in unversioned.json()["error"]["message"]
            theirs = await http.get("/v1/models", headers={"x-api-key": SECRET})
            assert theirs.json()["object"] == "list"


async def test_who_asks_too_much_at_once_is_told_when_to_come_again(serving: Any) -> None:
    limited: dict[str, Any] = {"limits": {"client_sessions": 1}, "server": {"tokens": (SECRET,)}}
    async with serving(**limited) as served, client_of(served, **{"x-api-key": SECRET}) as http:
        model = (await http.get("/v1/models")).json()["first_id"]
        asked = {"model": model, "max_tokens": 3, "messages": HELLO, "stream": True}
        async with served.connect() as peer:
            await peer.open(token=SECRET)  # the one session that there may be
            answer = await http.post("/v1/messages", json=asked)
            assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")


async def test_a_client_that_goes_away_cancels_its_request(serving: Any) -> None:
    async with serving() as served, client_of(served) as http:
        model = (await http.get("/v1/models")).json()["first_id"]
        asked = {"model": model, "max_tokens": 3000, "messages": HELLO, "stream": True}
        async with http.stream("POST", "/v1/messages", json=asked) as stream:
            async for _ in stream.aiter_bytes():
                break
        async with asyncio.timeout(60):
            await served.until_alone(sessions=0)


async def test_signatures_outlive_a_server_with_a_store(serving: Any, tmp_path: Path) -> None:
    secrets = []
    for store in (tmp_path / "s.db", tmp_path / "s.db", tmp_path / "other.db"):
        async with serving(server={"store": str(store)}) as served:
            secrets.append(served.engine.front.gateway.hub.secret)
    assert secrets[0] == secrets[1] != secrets[2]


async def test_thoughts_with_a_budget_and_signatures(serving: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    prompt = "<|im_start|>assistant\n"
    assert prompt in settings["chat_template"]
    settings["chat_template"] = (
        settings["chat_template"].replace(prompt, f"{prompt}<think>\n")
        + "{#- </think>, in front of which earlier thoughts are left out #}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    async with serving(model={"path": tmp_path}) as served, client_of(served) as http:
        model = (await http.get("/v1/models")).json()["first_id"]
        asked = {"model": model, "max_tokens": 1040, "messages": HELLO, "temperature": 0}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        answer = (await http.post("/v1/messages", json={**asked, "thinking": thinking})).json()
        thought, said = answer["content"]
        assert (thought["type"], said["type"], answer["stop_reason"]) == (
            "thinking",
            "text",
            "max_tokens",
        )
        assert answer["usage"]["output_tokens"] == 1040
        streamed = await http.post("/v1/messages", json={**asked, "thinking": thinking, "stream": True})
        deltas = [each["delta"] for each in events(streamed.text) if "delta" in each]
        assert "".join(each.get("thinking", "") for each in deltas) == thought["thinking"]
        assert [each["signature"] for each in deltas if "signature" in each] == [thought["signature"]]
        for block, status in ((thought, 200), ({**thought, "thinking": "Something else."}, 400)):
            again = [*HELLO, {"role": "assistant", "content": [block, said]}, *HELLO]
            body = {"model": model, "messages": again}
            assert (await http.post("/v1/messages/count_tokens", json=body)).status_code == status
        off = {**asked, "max_tokens": 20, "thinking": {"type": "disabled"}}
        (only,) = (await http.post("/v1/messages", json=off)).json()["content"]
        assert only["type"] == "text"


async def test_why_a_prompt_is_not_the_beginning_of_the_one_before(serving: Any) -> None:
    async with serving(eos_every=20) as served, client_of(served) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        asked = {"model": model["id"], "max_tokens": 8, "temperature": 0}

        async def ask(messages: list[Any], before: str | None, **fields: Any) -> Any:
            told = {"diagnostics": {"previous_message_id": before}, "messages": messages, **fields}
            return await http.post("/v1/messages", json={**asked, **told})

        first = (await ask(HELLO, None)).json()
        assert "diagnostics" not in first
        turns = [*HELLO, {"role": "assistant", "content": first["content"]}, *HELLO]
        second = (await ask(turns, first["id"])).json()
        assert "diagnostics" not in second  # it goes on from there
        edited = [{"role": "user", "content": "Hello!"}, *turns[1:]]
        third = (await ask(edited, second["id"])).json()
        reason = third["diagnostics"]["cache_miss_reason"]
        assert reason["type"] == "messages_changed"
        assert (
            0
            < reason["cache_missed_input_tokens"]
            <= sum(
                third["usage"][name]
                for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
            )
        )
        streamed = events((await ask(HELLO, "msg_unknown", stream=True)).text)
        found = streamed[0]["message"]["diagnostics"]
        assert found == {"cache_miss_reason": {"type": "previous_message_not_found"}}
        system = (await ask(turns, second["id"], system="Be brief.")).json()
        assert system["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
