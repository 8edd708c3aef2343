"""Responses over WebSocket, with the real `openai` client and a fake model."""

import asyncio
import json
from typing import Any

import openai
import pytest
import websockets

SECRET = "a key of ours"
MANY = 64


async def said(connection: Any, stream_id: str | None = None) -> tuple[Any, str, list[str]]:
    """Read a lane to the end of its response: the response, its text, the names of events."""
    text, kinds = "", []
    async for event in connection:
        if event.type != "error" and event.stream_id != stream_id:
            continue
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type in ("response.completed", "response.incomplete", "response.failed"):
            return event.response, text, kinds
        assert event.type != "error", event
    raise AssertionError("the socket was closed")


async def test_a_conversation_without_its_history(serving: Any, openai_of: Any) -> None:
    async with serving(eos_every=12) as served, openai_of(served) as (client, model):
        async with client.responses.connect() as connection:
            prompt = served.oracle.turn("Hello.")
            tokens = served.oracle.output(prompt, 400)
            await connection.response.create(model=model, input="Hello.", temperature=0)
            first, text, kinds = await said(connection)
            assert text == first.output_text == served.oracle.text(tokens)
            assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.completed",
            ]
            await connection.response.create(
                model=model,
                input="And then?",
                previous_response_id=first.id,
                temperature=0,
                max_output_tokens=24,
            )
            again, text, _ = await said(connection)
            prompt = served.oracle.next_turn([*prompt, *tokens], "And then?")
            assert text == served.oracle.text(served.oracle.output(prompt, 24))
            assert again.usage.input_tokens == len(prompt)
        kept = await client.responses.retrieve(again.id)  # the same branch, by the other door
        assert kept.output_text == text
        await served.until_alone(sockets=0)


async def test_lanes_run_side_by_side_and_each_in_order(serving: Any, openai_of: Any) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        async with client.responses.connect() as connection:
            for i in range(24):
                await connection.response.create(
                    model=model,
                    input=f"Question {i}?",
                    temperature=0,
                    max_output_tokens=6,
                    stream_id=f"lane {i % 4}",
                )
            found: dict[str, list[str]] = {}
            while sum(map(len, found.values())) < 24:
                event = await connection.recv()
                assert event.type != "error", event
                if event.type == "response.incomplete":
                    found.setdefault(event.stream_id, []).append(event.response.output_text)
            for lane in range(4):
                wanted = [
                    served.oracle.text(served.oracle.output(served.oracle.turn(f"Question {i}?"), 6))
                    for i in range(lane, 24, 4)
                ]
                assert found[f"lane {lane}"] == wanted


async def test_a_response_that_is_not_stored_is_its_lanes_last(serving: Any, openai_of: Any) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        settings: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_output_tokens": 8,
            "store": False,
        }
        async with client.responses.connect() as connection:
            await connection.response.create(input="Hello.", **settings)
            first, _, _ = await said(connection)
            prompt = served.oracle.turn("Hello.")
            tokens = [*prompt, *served.oracle.output(prompt, 8)]
            await connection.response.create(input="On!", previous_response_id=first.id, **settings)
            second, text, _ = await said(connection)
            prompt = served.oracle.next_turn(tokens, "On!")
            assert text == served.oracle.text(served.oracle.output(prompt, 8))
            # the first one is no lane's last any more
            await connection.response.create(input="Again!", previous_response_id=first.id, **settings)
            event = await connection.recv()
            assert (event.type, event.status) == ("error", 400), event
            assert event.error.code == "previous_response_not_found"
            tokens = [*prompt, *served.oracle.output(prompt, 8)]
            await connection.response.create(input="On!", previous_response_id=second.id, **settings)
            _, text, _ = await said(connection)
            prompt = served.oracle.next_turn(tokens, "On!")
            assert text == served.oracle.text(served.oracle.output(prompt, 8))
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(second.id)
        await served.until_alone(sessions=0)


async def test_cancel(serving: Any, openai_of: Any) -> None:
    async with serving(fake={"step_seconds": 0.005}) as served, openai_of(served) as (client, model):
        async with client.responses.connect() as connection:
            for lane in ("a", "b"):
                await connection.response.create(
                    model=model, input="Hi", max_output_tokens=3000, stream_id=lane
                )
            running: dict[str, str] = {}
            while len(running) < 2:
                event = await connection.recv()
                if event.type == "response.created":
                    running[event.stream_id] = event.response.id
            await connection.send_raw(json.dumps({"type": "response.cancel", "stream_id": "a"}))
            response, _, _ = await said(connection, "a")
            assert response.status == "cancelled"
            by_id = {"type": "response.cancel", "response_id": running["b"]}
            await connection.send_raw(json.dumps(by_id))
            response, _, _ = await said(connection, "b")
            assert response.status == "cancelled"
            await connection.send_raw(json.dumps(by_id))
            event = await connection.recv()
            assert (event.type, event.status) == ("error", 404)
            assert event.error.code == "response_not_found"
        await served.quiet()


async def test_who_goes_away_cancels_everything(serving: Any, openai_of: Any) -> None:
    async with serving(fake={"step_seconds": 0.005}) as served, openai_of(served) as (client, model):
        async with client.responses.connect() as connection:
            for i in range(6):
                await connection.response.create(
                    model=model, input="Hi", max_output_tokens=3000, stream_id=str(i % 3)
                )
            await connection.recv()
        await served.until_alone(sessions=0)
        await served.quiet()
        assert not served.engine.front.gateway.hub.busy  # the client's own waits for a request


async def test_a_prompt_that_is_computed_ahead(serving: Any, openai_of: Any) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        async with client.responses.connect() as connection:
            await connection.response.create(model=model, input="word " * 300, generate=False)
            warmed, text, kinds = await said(connection)
            assert (warmed.status, warmed.output, text) == ("completed", [], "")
            assert kinds == ["response.created", "response.in_progress", "response.completed"]
            await connection.response.create(
                model=model,
                input="Hi",
                previous_response_id=warmed.id,
                max_output_tokens=4,
                temperature=0,
            )
            answer, text, _ = await said(connection)
            assert answer.usage.input_tokens_details.cached_tokens > 300
            assert answer.usage.input_tokens > answer.usage.input_tokens_details.cached_tokens
            prompt = served.oracle.tokenizer.encode(
                f"<|im_start|>user\n{'word ' * 300}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                "<|im_start|>assistant\n"
            )
            assert text == served.oracle.text(served.oracle.output(prompt, 4))


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("{", "bad_request", None),
        ("[]", "bad_request", None),
        ({"type": 3}, "bad_request", "type"),
        ({"type": "session.update"}, "bad_request", "type"),
        ({"type": "response.create"}, "bad_request", "input"),
        ({"type": "response.create", "input": "x", "model": "gpt-9"}, "model_not_found", "model"),
        ({"type": "response.create", "input": "x", "frobnicate": 1}, "bad_request", "frobnicate"),
        ({"type": "response.create", "input": "x", "background": True}, "bad_request", "background"),
        ({"type": "response.create", "input": "x", "stream_id": ""}, "bad_request", "stream_id"),
        (
            {"type": "response.create", "input": "x", "previous_response_id": "resp_no"},
            "previous_response_not_found",
            "previous_response_id",
        ),
        ({"type": "response.create", "input": "x " * 9000}, "context_length_exceeded", None),
    ],
)
async def test_errors(serving: Any, openai_of: Any, message: Any, code: str, param: str | None) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        async with client.responses.connect() as connection:
            await connection.send_raw(message if isinstance(message, str) else json.dumps(message))
            event = await connection.recv()
            assert event.type == "error"
            assert (event.error.code, event.error.param) == (code, param)
            assert event.error.message
            # and the socket goes on
            await connection.response.create(model=model, input="Hi", max_output_tokens=4)
            response, _, _ = await said(connection)
            assert response.status == "incomplete"


async def test_too_much(serving: Any, openai_of: Any) -> None:
    async with serving(fake={"step_seconds": 0.01}) as served, openai_of(served) as (client, model):
        async with client.responses.connect() as connection:
            settings: dict[str, Any] = {"model": model, "input": "Hi", "max_output_tokens": 3000}
            for _ in range(MANY + 2):  # one runs, one is too many
                await connection.response.create(**settings)
            while (event := await connection.recv()).type != "error":
                pass
            assert (event.status, event.error.type) == (429, "rate_limit_error")
            for i in range(MANY):
                await connection.response.create(**settings, stream_id=str(i))
            while (event := await connection.recv()).type != "error":
                pass
            assert (event.status, event.stream_id) == (429, str(MANY - 1))
        await served.until_alone(sessions=0)


async def test_keys(serving: Any, openai_of: Any) -> None:
    async with serving(server={"tokens": (SECRET,)}) as served:
        url = served.http.replace("http", "ws") + "/v1/responses"
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(websockets.InvalidStatus) as raised:
                async with websockets.connect(url, additional_headers=headers):
                    pass
            assert raised.value.response.status_code == 401
            assert json.loads(raised.value.response.body)["error"]["code"] == "invalid_api_key"
        async with openai_of(served, SECRET) as (client, model):
            async with client.responses.connect() as connection:
                await connection.response.create(model=model, input="Hi", max_output_tokens=4)
                response, _, _ = await said(connection)
                assert response.status == "incomplete"


async def test_the_server_stops_when_what_runs_has_ended(serving: Any, openai_of: Any) -> None:
    async with serving(fake={"step_seconds": 0.005}) as served, openai_of(served) as (client, model):
        async with client.responses.connect() as connection:
            await connection.response.create(model=model, input="Hi", max_output_tokens=60)
            await connection.recv()
            stopping = asyncio.create_task(served.engine.drain())
            response, _, _ = await said(connection)
            assert response.status == "incomplete"
            with pytest.raises(websockets.ConnectionClosed):
                await connection.recv()
            assert connection._connection.close_code == 1001
        await stopping
