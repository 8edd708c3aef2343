"""The Responses API over the real engine, with the real `openai` client and a fake model."""

import asyncio
from typing import Any

import openai
import pytest

SECRET = "a key of ours"


def greedy(model: str) -> dict[str, Any]:
    return {"model": model, "temperature": 0, "max_output_tokens": 24}


async def test_a_conversation_is_a_branch(serving: Any, openai_of: Any) -> None:
    async with serving(eos_every=20) as served, openai_of(served) as (client, model):
        settings = greedy(model)
        oracle = served.oracle
        first = await client.responses.create(**settings, input="Hello.")
        prompt = oracle.turn("Hello.")
        said = oracle.output(prompt, 24)
        assert first.output_text == oracle.text(said)
        again = await client.responses.create(
            **settings, input="And then?", previous_response_id=first.id
        )
        prompt = oracle.next_turn([*prompt, *said], "And then?")
        assert again.output_text == oracle.text(oracle.output(prompt, 24))
        assert again.usage is not None
        assert again.usage.input_tokens == len(prompt)
        assert again.usage.input_tokens_details.cached_tokens >= len(prompt) - 20
        # an earlier response can be taken up again, and each is its own
        other = await client.responses.create(
            **settings, input="And then?", previous_response_id=first.id
        )
        assert other.output_text == again.output_text
        assert other.id != again.id
        kept = await client.responses.retrieve(again.id)
        assert kept.output_text == again.output_text
        assert kept.previous_response_id == first.id
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="not kept here"):
            await client.responses.create(**settings, input="?", previous_response_id=first.id)


async def test_a_stream_has_every_event_in_order(serving: Any, openai_of: Any) -> None:
    async with serving(eos_every=8) as served, openai_of(served) as (client, model):
        settings = greedy(model) | {"max_output_tokens": 400}
        said = served.oracle.output(served.oracle.turn("Hello."), 400)
        text = served.oracle.text(said)
        seen, pieces = [], ""
        async with client.responses.stream(**settings, input="Hello.") as stream:
            async for event in stream:
                seen.append(event.type)
                if event.type == "response.output_text.delta":
                    pieces += event.delta
            final = await stream.get_final_response()
        ends = [each for each in seen if each != "response.output_text.delta"]
        assert ends == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert (final.status, pieces, final.output_text) == ("completed", text, text)
        assert (await client.responses.retrieve(final.id)).output_text == text


async def test_a_stream_that_ends_by_its_length(serving: Any, openai_of: Any) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        stream = await client.responses.create(**greedy(model), input="Hello.", stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        final = events[-1].response
        assert (events[-1].type, final.status) == ("response.incomplete", "incomplete")
        assert final.incomplete_details.reason == "max_output_tokens"


async def test_nothing_is_kept_that_need_not_be(serving: Any, openai_of: Any) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        response = await client.responses.create(**greedy(model), input="Hi", store=False)
        await served.until_alone(sessions=0)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


async def test_in_the_background(serving: Any, openai_of: Any) -> None:
    async with serving(fake={"step_seconds": 0.002}) as served, openai_of(served) as (client, model):
        settings = greedy(model)
        queued = await client.responses.create(**settings, input="Hello.", background=True)
        assert queued.status == "queued"
        while (found := await client.responses.retrieve(queued.id)).status == "in_progress":
            await asyncio.sleep(0.01)
        text = served.oracle.text(served.oracle.output(served.oracle.turn("Hello."), 24))
        assert (found.status, found.output_text) == ("incomplete", text)
        long = settings | {"max_output_tokens": 3000}
        queued = await client.responses.create(**long, input="Hello.", background=True)
        assert (await client.responses.cancel(queued.id)).status == "cancelled"
        while (found := await client.responses.retrieve(queued.id)).status == "in_progress":
            await asyncio.sleep(0.01)
        assert found.status == "cancelled"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_123"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": []}, "input"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "store"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
async def test_errors(serving: Any, openai_of: Any, change: dict[str, Any], param: str) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        settings = {"model": model, "input": "Hi"} | change
        with pytest.raises(openai.BadRequestError) as raised:
            await client.responses.create(**settings)
        assert raised.value.param == param
        with pytest.raises(openai.BadRequestError) as raised:
            await client.responses.create(model=settings["model"], input="x " * 9000, stream=True)
        assert raised.value.code == "context_length_exceeded"


async def test_instructions_begin_the_conversation(serving: Any, openai_of: Any) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        settings = greedy(model)
        first = await client.responses.create(**settings, input="Hi", instructions="Be brief.")
        again = settings | {"previous_response_id": first.id, "input": "So?"}
        repeated = await client.responses.create(**again, instructions="Be brief.")
        silent = await client.responses.create(**again)
        assert repeated.output_text == silent.output_text
        with pytest.raises(openai.BadRequestError) as raised:
            await client.responses.create(**again, instructions="Be long.")
        assert raised.value.param == "instructions"


async def test_a_response_is_its_owners(serving: Any, openai_of: Any) -> None:
    async with serving(server={"tokens": (SECRET, "another key")}) as served:
        async with (
            openai_of(served, SECRET) as (client, model),
            openai_of(served, "another key") as (other, _),
        ):
            settings = greedy(model)
            response = await client.responses.create(**settings, input="Hi")
            assert (await client.responses.retrieve(response.id)).id == response.id
            with pytest.raises(openai.NotFoundError):
                await other.responses.retrieve(response.id)
            with pytest.raises(openai.BadRequestError, match="not kept here"):
                await other.responses.create(**settings, input="And?", previous_response_id=response.id)


async def test_the_oldest_conversation_makes_room(serving: Any, openai_of: Any) -> None:
    """Stored responses are never too many: half of a key's sessions may be theirs."""
    async with (
        serving(server={"tokens": (SECRET,)}, limits={"client_sessions": 8}) as served,
        openai_of(served, SECRET) as (client, model),
    ):
        made = [await client.responses.create(**greedy(model), input=f"{i}") for i in range(4)]
        again = await client.responses.create(
            **greedy(model), input="more", previous_response_id=made[0].id
        )
        made += [await client.responses.create(**greedy(model), input=f"{i}") for i in range(20)]
        await served.until_alone(sessions=4)
        for response in (*made[-4:],):
            assert (await client.responses.retrieve(response.id)).id == response.id
        for response in (*made[:-4], again):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(response.id)


async def test_a_stream_that_nobody_reads_to_its_end_leaves_no_branch(
    serving: Any, openai_of: Any
) -> None:
    async with serving(fake={"step_seconds": 0.005}) as served, openai_of(served) as (client, model):
        settings = greedy(model) | {"max_output_tokens": 3000}
        stream = await client.responses.create(**settings, input="Hello.", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await served.until_alone(sessions=0)
        await served.quiet()
