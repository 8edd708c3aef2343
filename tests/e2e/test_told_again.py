"""Streams of responses in the background, told again from any place: with the real `openai` client."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from ramify.clients import connect
from ramify.protocol.stored_response import Stored

SECRET, OTHER = "a key of ours", "another key"
SLOW = {"step_seconds": 0.002}
ENDS = ("response.completed", "response.incomplete", "response.failed")


def asked(model: str, tokens: int = 120, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "input": "Hello.",
        "temperature": 0,
        "max_output_tokens": tokens,
        "background": True,
        **fields,
    }


def flat(events: list[Any]) -> list[tuple[Any, ...]]:
    """What must be the same however often a stream is told."""
    return [(e.sequence_number, e.type, getattr(e, "delta", None)) for e in events]


def text_of(events: list[Any]) -> str:
    return "".join(each.delta for each in events if each.type == "response.output_text.delta")


async def some(stream: Any, count: int) -> list[Any]:
    """Its first events; then the client leaves."""
    events = []
    async for event in stream:
        events.append(event)
        if len(events) == count:
            break
    await stream.close()
    return events


async def all_of(client: Any, ident: str, after: int | None = None) -> list[Any]:
    behind = {} if after is None else {"starting_after": after}
    return [event async for event in await client.responses.retrieve(ident, stream=True, **behind)]


async def test_a_client_leaves_and_comes_back_many_times(
    serving: Any, placement: dict[str, Any], openai_of: Any
) -> None:
    """By whichever process: nothing is said twice, nothing is lost, and there is one end."""
    async with serving(**placement, fake=SLOW) as served, openai_of(served) as (client, model):
        wanted = served.oracle.text(served.oracle.output(served.oracle.turn("Hello."), 120))
        seen = await some(await client.responses.create(**asked(model), stream=True), 2)
        ident = seen[0].response.id
        for _ in range(60):
            after = seen[-1].sequence_number
            async with openai_of(served) as (again, _):
                stream = await again.responses.retrieve(ident, stream=True, starting_after=after)
                seen += await some(stream, 3)
            if seen[-1].type in ENDS:
                break
        assert [each.sequence_number for each in seen] == list(range(len(seen)))
        assert [each.type for each in seen if each.type in ENDS] == ["response.incomplete"]
        final = seen[-1].response
        assert text_of(seen) == wanted == final.output_text
        assert (await client.responses.retrieve(ident)).output_text == wanted
        whole = await all_of(client, ident)
        assert flat(whole) == flat(seen)
        assert whole[-1].response.usage == final.usage
        for after in range(len(whole)):
            assert flat(await all_of(client, ident, after)) == flat(whole[after + 1 :])
        async with client.responses.stream(response_id=ident, starting_after=7) as helper:
            helped = [event async for event in helper]
        assert text_of(helped) == text_of(whole[8:])


async def test_after_a_restart_the_same_stream_goes_on(
    serving: Any, placement: dict[str, Any], openai_of: Any, tmp_path: Path
) -> None:
    """The process that began it is gone: whoever comes is told the rest, and what it was in the end."""
    kept: dict[str, Any] = {**placement, "server": {"store": tmp_path / "s.db", "grace_s": 0.0}}
    async with serving(**kept, fake=SLOW, idle_at_end=False) as served:
        async with openai_of(served) as (client, model):
            wanted = served.oracle.text(served.oracle.output(served.oracle.turn("Hello."), 300))
            seen = await some(await client.responses.create(**asked(model, 300), stream=True), 9)
            ident = seen[0].response.id
    async with serving(**kept, fake=SLOW) as served, openai_of(served) as (client, model):
        seen += await all_of(client, ident, seen[-1].sequence_number)
        assert [each.sequence_number for each in seen] == list(range(len(seen)))
        final = seen[-1].response
        assert (final.status, final.output_text, text_of(seen)) == ("incomplete", wanted, wanted)
        assert final.usage.output_tokens == 300
        found = await client.responses.retrieve(ident)
        assert (found.status, found.output_text) == ("incomplete", wanted)
        assert flat(await all_of(client, ident)) == flat(seen)
    async with serving(**kept, fake=SLOW) as served, openai_of(served) as (client, model):
        assert flat(await all_of(client, ident)) == flat(seen)


async def test_a_cancelled_one_has_one_end(serving: Any, openai_of: Any) -> None:
    async with serving(fake=SLOW) as served, openai_of(served) as (client, model):
        stream = await client.responses.create(**asked(model, 3000), stream=True)
        told = [await anext(stream) for _ in range(5)]
        ident = told[0].response.id
        other = asyncio.create_task(all_of(client, ident))
        await asyncio.sleep(0.05)
        assert (await client.responses.cancel(ident)).status == "cancelled"
        told += [event async for event in stream]
        for events in (told, await other, await all_of(client, ident)):
            assert [each.type for each in events if each.type in ENDS] == ["response.incomplete"]
            assert events[-1].response.status == "cancelled"
            assert flat(events) == flat(told)
        await served.quiet()


async def test_one_that_is_deleted_has_one_end(serving: Any, openai_of: Any) -> None:
    """Its generation ends and its branch is gone at once: both are told, and asked after, apart."""
    async with serving(fake=SLOW) as served, openai_of(served) as (client, model):
        ident = (await client.responses.create(**asked(model, 3000))).id
        reader = asyncio.create_task(all_of(client, ident))
        await asyncio.sleep(0.05)
        await client.responses.delete(ident)
        events = await reader
        assert [each.type for each in events if each.type in (*ENDS, "error")] == ["error"]
        assert "is not kept here" in events[-1].message
        await served.quiet()


async def test_an_output_that_is_too_long_to_be_kept(serving: Any, openai_of: Any) -> None:
    """It is told from its branch, and so is one that goes on behind it."""
    async with (
        serving(limits={"meta_bytes": 4096}) as served,
        openai_of(served) as (client, model),
    ):
        first = await client.responses.create(**asked(model, 3000))
        events = await all_of(client, first.id)
        assert len(text_of(events)) > 4096
        found = await client.responses.retrieve(first.id)
        assert found.output_text == text_of(events) == events[-1].response.output_text
        follows = await client.responses.create(
            **asked(model, 20, input="And then?"), previous_response_id=first.id, stream=True
        )
        told = [event async for event in follows]
        assert flat(await all_of(client, told[0].response.id)) == flat(told)


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "", "9" * 20, "%C2%B2"])
async def test_a_place_that_is_no_number(serving: Any, openai_of: Any, after: str) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        made = await client.responses.create(**asked(model, 8))
        with pytest.raises(openai.BadRequestError, match="starting_after") as raised:
            await client.get(f"/responses/{made.id}?stream=true&starting_after={after}", cast_to=object)
        assert raised.value.param == "starting_after"


async def test_what_cannot_be_told(serving: Any, openai_of: Any) -> None:
    async with serving(server={"tokens": (SECRET, OTHER)}) as served:
        async with openai_of(served, SECRET) as (client, model), openai_of(served, OTHER) as (other, _):
            made = await client.responses.create(**asked(model, 8))
            events = await all_of(client, made.id)
            last = events[-1].sequence_number
            assert await all_of(client, made.id, last) == []
            with pytest.raises(openai.BadRequestError, match=f"last event is {last}"):
                await all_of(client, made.id, last + 1)
            with pytest.raises(openai.BadRequestError, match="needs `stream=true`"):
                await client.get(f"/responses/{made.id}?starting_after=1", cast_to=object)
            with pytest.raises(openai.NotFoundError):
                await all_of(other, made.id)
            whole = await client.responses.create(**asked(model, 8, background=False))
            with pytest.raises(openai.BadRequestError, match="created with `background: true`"):
                await all_of(client, whole.id)
            await client.responses.delete(made.id)
            with pytest.raises(openai.NotFoundError):
                await all_of(client, made.id)


async def test_ids_that_were_altered(serving: Any, openai_of: Any) -> None:
    """Of another branch, of no branch's letters, and of another place in the same branch."""
    async with serving() as served, openai_of(served) as (client, model):
        ident = (await client.responses.create(**asked(model, 8))).id
        stored = Stored.of(ident)
        assert stored is not None
        assert stored.start
        changes = [{"branch": "r" + "0" * 12}, {"branch": "r\x01"}, {"branch": "main"}]
        changes += [{"start": start} for start in (0, stored.start - 1, stored.start + 1, None)]
        for change in [*changes, {"instructions": 1}, {"transient": True}]:
            altered = msgspec.structs.replace(stored, **change).ident
            for ask in (client.responses.retrieve, client.responses.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    await ask(altered)
            if change != {"start": None}:
                with pytest.raises(openai.NotFoundError):
                    await all_of(client, altered)
        assert (await all_of(client, ident))[0].response.id == ident


async def test_long_tools_and_instructions_are_named_alone(serving: Any, openai_of: Any) -> None:
    """There is no room beside a branch for all that a client says."""
    tools = [
        {
            "type": "function",
            "name": f"tool_{n}",
            "description": "so " * 99,
            "parameters": {},
            "strict": True,
        }
        for n in range(60)
    ]
    async with serving() as served, openai_of(served) as (client, model):
        for fields in ({"tools": tools, "tool_choice": "none"}, {"instructions": "so " * 900}):
            long = {"instructions": "word " * 400, **fields}
            ident = (await client.responses.create(**asked(model, 8, **long))).id
            events = await all_of(client, ident)
            assert events[-1].type in ENDS
            found = await client.responses.retrieve(ident)
            assert (found.id, found.output_text) == (ident, text_of(events))
            assert [each.name for each in found.tools] == [
                each["name"] for each in long.get("tools", [])
            ]
            cut = "tools" in fields
            assert (found.instructions is None) == cut
            assert (getattr(found, "ramify_left_out", None) is not None) == cut


async def test_what_is_kept_may_have_been_written_by_its_client(serving: Any, openai_of: Any) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        ident = (await client.responses.create(**asked(model, 8))).id
        await all_of(client, ident)
        stored = Stored.of(ident)
        assert stored is not None
        place = {"session": stored.session, "key": stored.key}
        for more in ({}, {"status": "queued", "top_logprobs": 0, "tools": [1]}, {"status": 1}):
            bare = msgspec.structs.replace(stored, key="").ident
            async with connect(served.engine.url, keep=True, **place) as session:
                await session.branch(stored.branch).set(meta={"response": {"id": bare, **more}})
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(ident)
            with pytest.raises(openai.NotFoundError):
                await all_of(client, ident)


async def test_one_that_cannot_begin_is_refused_at_once(serving: Any, openai_of: Any) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await client.responses.create(**asked(model, input="x " * 9000), stream=stream)
