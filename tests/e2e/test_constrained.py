"""Constrained outputs of the bundled model through a real server: valid, streamed, refused, hostile."""

import asyncio
import json
import random
import re
from typing import Any, Literal

import jsonschema
import msgspec
import openai
import pytest

import ramify
from ramify.clients.bench.server import get, http_url, served
from ramify.clients.errors import BadConstraint
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Constraint

DEEP: dict[str, object] = {"type": "string"}
for _ in range(25):
    DEEP = {"type": "array", "items": DEEP}

HOSTILE = [
    Constraint(regex="[a-z]*a[a-z]{18}"),
    Constraint(regex="((((a{1,50}){1,50}){1,50}){1,50})"),
    Constraint(regex=".{2000}"),
    Constraint(regex="(" * 2000 + "a" + ")" * 2000),
    Constraint(regex="[a-z]{1,1000}(x|[a-z]{1,900}y)"),
    Constraint(regex="(a?){1000}a{1000}"),
    Constraint(json_schema=DEEP),
    Constraint(json_schema={"$ref": "#"}),
    Constraint(json_schema={"enum": [str(i) for i in range(5000)]}),
    Constraint(grammar="start: /(a{1,500}){1,500}/"),
    Constraint(choices=["a" * 60_000]),
]


class Pet(msgspec.Struct):
    kind: Literal["cat", "dog"]
    age: int


@pytest.fixture
def url(bundled: str) -> str:
    return bundled


async def test_outputs_obey_and_stream(url: str) -> None:
    async with ramify.connect(url) as session:
        pattern = r'\{"name": "[A-Za-z ]{1,12}", "age": [1-9][0-9]?\}'
        running = session.main.chat("Who are you?", regex=pattern, temperature=1.0, seed=3)
        streamed = "".join([delta.text async for delta in running])
        result = await running
        assert streamed == result.text
        assert re.fullmatch(pattern, result.text)
        assert result.reason == "stop"
        assert 0 < result.usage.forced < result.usage.output
        pet = await session.main.chat("And your pet?", type=Pet, max_tokens=60).parsed()
        assert isinstance(pet, Pet)
        schema = {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 2, "maxItems": 3}
        listed = await session.main.chat("A list?", json_schema=schema, temperature=1.0)
        assert set(json.loads(listed.text)) <= {"a", 1, None}
        chosen = session.main.generate(choices=["yes", "no"], n=3, temperature=1.0)
        assert {(await each).text for each in chosen} <= {"yes", "no"}


async def test_regexes_and_choices_by_outlines_core_alone() -> None:
    """What our compiler or llguidance would take is refused; all else is as ever."""
    flags = ["--device=cpu", "--threads=1", "--kv-tokens=20000", "--grammar-backend=outlines"]
    with served(flags, None) as server:
        async with ramify.connect(server.url) as session:
            pattern = r"\p{Lu}[a-z]{3}-[0-9]{2,4}(no|none)"
            found = await session.main.chat("A code?", regex=pattern, temperature=1.0, seed=3)
            assert re.fullmatch("[^\\W\\d_][a-z]{3}-[0-9]{2,4}(no|none)", found.text)
            assert found.notes is None
            chosen = session.main.generate(choices=["yes", "no", "a (b|c)"], n=3, temperature=1.0)
            assert {(await each).text for each in chosen} <= {"yes", "no", "a (b|c)"}
            tags = {"tags": [{"begin": "<n>", "regex": "[0-9]{4}", "end": "</n>"}], "at_least_one": True}
            tagged = await session.main.generate(structural_tag=tags, max_tokens=200)
            if tagged.reason == "stop":
                assert re.search("<n>[0-9]{4}</n>", tagged.text)
            for pattern in (
                r"(?=[a-m])[a-z]{9}",
                "[ab]*a[ab]{15}",
                r"a\bb",
            ):
                with pytest.raises(BadConstraint):
                    await session.main.generate(regex=pattern)
            with pytest.raises(BadConstraint, match="--grammar-backend outlines"):
                await session.main.generate(regex="(?:^a|b$)")
            with pytest.raises(BadConstraint, match="never closed") as told:
                await session.main.generate(regex="ab(c")
            assert told.value.details == {"position": 2}
            again = await session.main.generate(regex="[ab]{4}")
            assert re.fullmatch("[ab]{4}", again.text)


async def test_forked_rolled_back_and_cancelled_in_the_midst(url: str) -> None:
    """On a real model: what ends by itself obeys, whatever happened to its neighbours."""
    patterns = [
        r"[0-9]{3}-[0-9]{4}",
        r"(no|none)",
        r"[a-z]{40,60}",
        r'\{"a": (true|false), "b": "[^"]{0,9}"\}',
    ]
    dice = random.Random(5)
    async with ramify.connect(url) as session:
        await session.main.append("Tell me: ")
        stopped = 0
        for round_ in range(6):
            branches = await session.main.fork(*(f"r{round_}.{i}" for i in range(4)))
            running = []
            for branch, pattern in zip(branches, patterns, strict=True):
                held = dice.choice([{"n": 2}, {}])
                started = branch.generate(
                    regex=pattern, temperature=1.0, seed=round_, max_tokens=90, **held
                )
                running += [(pattern, one) for one in (started if held else [started])]
            await asyncio.sleep(dice.random() * 0.05)
            victim = dice.choice(branches)
            await victim.cancel()
            for pattern, one in running:
                result = await one
                assert result.reason in ("stop", "cancelled")
                if result.reason == "stop":
                    assert re.fullmatch(pattern, result.text, re.A)
                    stopped += 1
            await victim.rollback(to=session.main.position)
            again = await victim.generate(regex=patterns[0])
            assert re.fullmatch(patterns[0], again.text)
        assert stopped >= 12


async def test_what_became_of_constraints_is_counted(url: str) -> None:
    async with ramify.connect(url) as session:
        await session.main.append("hello")
        for _ in range(2):
            await session.main.generate(regex="[xyz]{2}")
        with pytest.raises(BadConstraint):
            await session.main.generate(regex="(xyz")
    text = get(http_url(url) + "/metrics", None).decode()
    found = dict(re.findall(r'^ramify_constraints_total\{result="(\w+)"\} (\S+)$', text, re.M))
    assert float(found["compiled"]) >= 1
    assert float(found["failed"]) >= 1
    assert float(found["hit"]) >= 1
    assert "ramify_constraint_compile_seconds_total" in text
    assert re.search(r"^ramify_constraints_kept_bytes [1-9]", text, re.M)


async def test_a_grammar_that_gets_stuck_says_so(url: str) -> None:
    """Where that cannot be known before: the ending has the constraint's code, and names the mend."""
    async with ramify.connect(url) as session:
        await session.main.append("hello")
        with pytest.raises(BadConstraint, match="matches no text"):
            await session.main.generate(grammar='start: "a" T\nT: /b+/ & /c+/')
        with pytest.raises(BadConstraint, match="`x` can never end") as told:
            await session.main.generate(grammar='start: "a" | "b" x\nx: /[a-z]/ x')
        assert told.value.details == {"position": 19}
        assert (await session.main.generate(max_tokens=2)).usage.output


async def test_what_does_not_compile_changes_nothing(url: str) -> None:
    async with ramify.connect(url) as session:
        await session.main.append("hello")
        with pytest.raises(BadConstraint, match="never closed") as told:
            await session.main.generate(regex="ab(c")
        assert told.value.details == {"position": 2}
        assert session.main.position == 1 or (await session.main.generate(max_tokens=2)).usage.output


async def test_hostile_constraints_hold_up_nobody(url: str) -> None:
    """Each is refused, or compiled, within its time; generations beside them go on."""
    async with ramify.connect(url) as session:
        await session.main.append("hello")
        names = [f"hostile{i}" for i in range(len(HOSTILE))]
        branches = await session.main.fork(*names, "free")

        async def ask(branch: ramify.Branch, constraint: Constraint) -> str:
            try:
                return (await branch.generate(constraint=constraint, max_tokens=8)).reason
            except RamifyError as error:
                return error.code

        asked = [
            asyncio.create_task(ask(branch, constraint))
            for branch, constraint in zip(branches, HOSTILE, strict=False)
        ]
        beside = await branches[-1].generate(max_tokens=20, ignore_eos=True)
        assert beside.usage.output == 20
        ends = await asyncio.gather(*asked)
        assert len(ends) == len(HOSTILE)
        assert ends.count("bad_constraint") >= 5
        word = await branches[-1].generate(regex="[a-z]{3}")
        assert re.fullmatch("[a-z]{3}", word.text)


OPEN = {
    "type": "object",
    "properties": {
        "path": {"enum": ["/a", "/b"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["path", "lines"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "open", "parameters": OPEN}}]


async def test_calls_are_exact(url: str) -> None:
    """The bundled model knows no such tool: what it calls is what the schema says."""
    async with ramify.connect(url, tools=TOOLS) as session:
        for choice in ("required", "open"):
            (branch,) = await session.main.fork(choice)
            result = await branch.chat(
                "Open it.", tool_choice=choice, parallel_tool_calls=False, temperature=1.0, seed=5
            )
            assert result.reason == "tool"
            (call,) = result.tool_calls or []
            jsonschema.validate(json.loads(call["function"]["arguments"]), OPEN)
        tags = {"tags": [{"begin": "<n>", "regex": "[0-9]{4}", "end": "</n>"}], "at_least_one": True}
        (branch,) = await session.main.fork("tags")
        text = (
            await branch.chat(
                "A year?", structural_tag={**tags, "stop_after_first": True}, max_tokens=60
            )
        ).text
        assert re.search(r"<n>[0-9]{4}</n>$", text) or "<n>" not in text


async def test_calls_are_exact_over_openais_api(url: str) -> None:
    base = url.replace("ws://", "http://").removesuffix("/ws")
    async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
        model = (await client.models.list()).data[0].id
        messages: Any = [{"role": "user", "content": "Open it."}]
        strict: Any = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
        answer = await client.chat.completions.create(
            model=model,
            messages=messages,
            tools=strict,
            tool_choice="required",
            parallel_tool_calls=False,
        )
        (call,) = answer.choices[0].message.tool_calls or []
        jsonschema.validate(json.loads(call.function.arguments), OPEN)  # type: ignore[union-attr]
        odd: Any = [
            {"type": "function", "function": {"name": "odd", "strict": True, "parameters": UNIQUE}}
        ]
        with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.parameters of 'odd'"):
            await client.chat.completions.create(model=model, messages=messages, tools=odd)
        form: Any = {
            "type": "structural_tag",
            "structures": [{"begin": "<o>", "schema": OPEN, "end": "</o>"}],
            "triggers": ["<o>"],
        }
        free = await client.chat.completions.create(
            model=model, messages=messages, response_format=form, max_tokens=20
        )
        assert free.choices[0].message.content


PICK = {
    "type": "object",
    "properties": {
        "ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 2}
    },
    "required": ["ids"],
    "additionalProperties": {"type": "integer"},
    "minProperties": 3,
}


async def test_names_and_items_of_tools_tags_and_answers_behind_thoughts_differ(url: str) -> None:
    """At temperature 1, through the real model; each call of an answer begins anew."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), pairs
        return dict(pairs)

    def check(text: str) -> None:
        jsonschema.validate(json.loads(text, object_pairs_hook=once), PICK)

    base = url.replace("ws", "http").split("/v1", maxsplit=1)[0] + "/v1"
    tools: Any = [{"type": "function", "function": {"name": "pick", "strict": True, "parameters": PICK}}]
    tag = {"tags": [{"begin": "<p>", "json_schema": PICK, "end": "</p>"}], "at_least_one": True}
    tagged: Any = {"structural_tag": tag | {"stop_after_first": True}}

    async def called(client: Any, model: str, seed: int) -> bool:
        answer = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Pick some numbers."}],
            tools=tools,
            tool_choice="required",
            temperature=1.0,
            seed=seed,
            max_tokens=400,
        )
        if answer.choices[0].finish_reason != "tool_calls":
            return False
        for call in answer.choices[0].message.tool_calls or []:
            check(call.function.arguments)
        return True

    async def answered(branch: ramify.Branch, seed: int) -> bool:
        form: Any = tagged if seed % 2 else {"json_schema": PICK}
        constraint = Constraint(**form, after_thought=seed > 1)
        rest = await branch.chat(
            "Pick.", constraint=constraint, temperature=1.0, seed=seed, max_tokens=25
        )
        text = rest.text
        for _ in range(12):
            if rest.reason == "stop":
                check(re.sub(r"(?s).*<p>|</p>|<think>.*?</think>\s*", "", text))
                return True
            rest = await branch.generate(temperature=1.0, max_tokens=40)  # it goes on where it was
            text += rest.text
        return False

    async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
        async with ramify.connect(url) as session:
            model = (await client.models.list()).data[0].id
            branches = await session.main.fork(*(f"b{seed}" for seed in range(4)))
            ended = await asyncio.gather(
                *(called(client, model, seed) for seed in range(6)),
                *(answered(branch, seed) for seed, branch in enumerate(branches)),
            )
    assert any(ended)  # how many do is a matter of the logits' last bits, which processors differ in


UNIQUE = {"type": "object", "properties": {"x": {"type": "array", "unevaluatedItems": False}}}
