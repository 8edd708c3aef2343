"""A history that comes back through a stateless door goes on with the tokens that it had.

The fake model samples ids at random, so their text is other tokens when it is tokenized again.
"""

import json
import re
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from ramify.actors.scheduler.core import Scheduler
from ramify.protocol.messages import SchedulerEvent, Submit
from tests.conftest import write_tokenizer

VERSION = {"anthropic-version": "2023-06-01"}
TOOL: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}


def client_of(served: Any, **headers: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        base_url=served.http, headers={**VERSION, **headers}, trust_env=False, timeout=30
    )


async def metric(http: httpx2.AsyncClient, name: str) -> int:
    text = (await http.get("/metrics")).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


async def bound(http: httpx2.AsyncClient, outcome: str = "bound") -> int:
    return await metric(http, f'ramify_history_total{{outcome="{outcome}"}}')


class Door:
    """One stateless door: its history, and (prompt tokens, output tokens, text) of an answer."""

    def __init__(self, http: httpx2.AsyncClient, kind: str, model: str) -> None:
        self.http, self.kind, self.model = http, kind, model
        self.history: list[dict[str, Any]] = []
        self.misses: list[Any] = []

    async def say(self, text: str, **more: Any) -> tuple[int, int, str]:
        self.history.append({"role": "user", "content": text})
        path, body = self.request()
        reply = await self.http.post(path, json={**body, **more})
        assert reply.status_code == 200, reply.text
        self.misses.append(reply.json().get("ramify_cache_miss"))
        found = self.read(reply.json())
        self.history.append({"role": "assistant", "content": found[2]})
        return found

    def request(self) -> tuple[str, dict[str, Any]]:
        head = {"model": self.model, "messages": self.history}
        flat = {"name": "look", "description": "Looks.", "parameters": TOOL}
        match self.kind:
            case "chat":
                tools = [{"type": "function", "function": flat}]
                return "/v1/chat/completions", {
                    **head,
                    "max_tokens": 24,
                    "tools": tools,
                    "temperature": 0,
                }
            case "messages":
                own = [{"name": "look", "description": "Looks.", "input_schema": TOOL}]
                return "/v1/messages", {**head, "max_tokens": 24, "tools": own, "temperature": 0}
            case "ollama":
                tools = [{"type": "function", "function": flat}]
                options = {"num_predict": 24, "temperature": 0}
                return "/api/chat", {**head, "stream": False, "options": options, "tools": tools}
        tools = [{"type": "function", **flat}]
        body = {"model": self.model, "input": self.history, "max_output_tokens": 24, "tools": tools}
        return "/v1/responses", {**body, "store": False, "temperature": 0}

    def read(self, body: Any) -> tuple[int, int, str]:
        match self.kind:
            case "chat":
                usage, text = body["usage"], body["choices"][0]["message"]["content"]
                return usage["prompt_tokens"], usage["completion_tokens"], text
            case "messages":
                usage = body["usage"]
                prompt = sum(
                    usage[name]
                    for name in (
                        "input_tokens",
                        "cache_read_input_tokens",
                        "cache_creation_input_tokens",
                    )
                )
                return prompt, usage["output_tokens"], body["content"][0]["text"]
            case "ollama":
                return body["prompt_eval_count"], body["eval_count"], body["message"]["content"]
        usage = body["usage"]
        return usage["input_tokens"], usage["output_tokens"], body["output"][-1]["content"][0]["text"]


DOORS = ["chat", "messages", "responses", "ollama"]


@pytest.mark.parametrize("kind", DOORS)
async def test_each_turn_tokenizes_what_is_new(serving: Any, kind: str) -> None:
    async with serving() as served, client_of(served) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        door = Door(http, kind, model["id"])
        prompt, output, _ = await door.say("Hello. Look at this.")
        for turn in range(1, 4):
            before = await metric(http, "ramify_tokenized_tokens_total")
            longer, more, _ = await door.say("And this.")
            made = await metric(http, "ramify_tokenized_tokens_total") - before
            assert longer == prompt + output + made  # the sampled ids, and what stands behind them
            assert 0 < made < 40
            assert await bound(http) == turn
            prompt, output = longer, more
        assert await bound(http, "new") == 1
        door.history[-3]["content"] += " Edited."
        before = await metric(http, "ramify_tokenized_tokens_total")
        await door.say("Go on.")
        assert (await bound(http, "edited"), await bound(http)) == (1, 3)
        door.history[1]["content"] = "Said otherwise."
        await door.say("Go on.")
        assert await bound(http, "edited") == 2


@pytest.mark.parametrize("kind", DOORS)
async def test_a_history_that_is_computed_again_is_told_why(serving: Any, kind: str) -> None:
    """Told where it is so, and not where all of it was there."""
    text = "Look at this, then. " * 8
    async with serving(fake={"pages": 1600}) as served, client_of(served) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        door, other = (Door(http, each, model["id"]) for each in (kind, "chat"))
        for _ in range(3):
            await door.say(text)
        assert [miss and miss["reason"] for miss in door.misses] == ["new", None, None]
        door.history[2]["content"] = f"Edited. {text}"
        more = {"keep_alive": "1ms"} if kind == "ollama" else {}
        prompt, _, _ = await door.say(text, **more)
        edited = door.misses[-1]
        assert (edited["reason"], edited["message"]) == ("edited", 2)
        assert prompt // 3 < edited["tokens"] < prompt * 2 // 3
        for i in range(8):
            other.history = []
            await other.say(f"{i} {text * 2}")
        await door.say(text)
        gone = door.misses[-1]
        assert gone["reason"] == ("expired" if more else "evicted")
        assert 0 < gone["tokens"] <= prompt + 24
        assert "message" not in gone


@pytest.mark.parametrize("kind", DOORS)
async def test_sampled_ids_are_those_of_the_next_prompt(serving: Any, kind: str) -> None:
    """KV is found by ids: had one changed, what stands behind it would be computed again."""
    async with serving(fake={"pages": 1 << 15, "context": 1 << 14}) as served, client_of(served) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        door, tokenized, computed = Door(http, kind, model["id"]), 0, 0
        for turn in range(25):
            await door.say(f"And this, {turn}.")
            was = tokenized, computed
            tokenized = await metric(http, "ramify_tokenized_tokens_total")
            computed = await metric(http, 'ramify_prompt_tokens_total{source="computed"}')
            # The last sampled token has no KV yet.
            assert computed - was[1] == tokenized - was[0] + (turn > 0)
        assert await bound(http) == 24


@pytest.mark.parametrize("limits", [{}, {"histories": 1}])
async def test_names_do_not_meet(serving: Any, tmp_path: Path, limits: dict[str, int]) -> None:
    names = [{"name": "one", "token": "a key"}, {"name": "two", "token": "another"}]
    path = tmp_path / "tokens"
    path.write_text("\n".join(map(json.dumps, names)))
    path.chmod(0o600)
    async with (
        serving(server={"credentials_file": path}, limits=limits) as served,
        client_of(served, authorization="Bearer a key") as one,
        client_of(served, authorization="Bearer another") as two,
    ):
        (model,) = (await one.get("/v1/models")).json()["data"]
        mine, other = Door(one, "chat", model["id"]), Door(two, "chat", model["id"])
        await mine.say("Hello.")
        other.history = list(mine.history)
        await other.say("And?")
        assert await bound(one) == 0
        await mine.say("And?")
        assert await bound(one, "evicted" if limits else "bound") == 1


@pytest.mark.parametrize("how", ["restart", "gateways", "replicas"])
async def test_a_history_is_known_elsewhere_and_later(serving: Any, tmp_path: Path, how: str) -> None:
    """By the store, soon after the answer; replicas have one front, which knows it."""
    path = tmp_path / "store"
    settings: dict[str, Any] = {} if how == "restart" else {how: 2}
    if how != "replicas":
        settings["server"] = {"store": str(path), "persist_histories": True}
    history, known, answers = list[dict[str, Any]](), 0, 0
    for _ in range(2 if how == "restart" else 1):
        async with serving(**settings) as served:
            for _ in range(6):  # a connection each: the kernel spreads them
                async with client_of(served) as http:
                    (model,) = (await http.get("/v1/models")).json()["data"]
                    door = Door(http, "chat", model["id"])
                    door.history = history
                    before = await metric(http, "ramify_tokenized_tokens_total")
                    prompt, output, _ = await door.say("Go on.")
                    answers += 1

                    async def made() -> bool:
                        now = await metric(http, "ramify_tokenized_tokens_total")
                        return prompt == known + now - before  # noqa: B023

                    await soon(made)  # the counts of other processes come later
                    known = prompt + output
                    if how != "replicas":
                        await soon(lambda: saved(path) == answers)  # noqa: B023


async def soon(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    with anyio.fail_after(20):
        while not (found if isinstance(found := holds(), bool) else await found):
            await anyio.sleep(0.05)


def saved(path: Path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return int(db.execute("SELECT count(*) FROM sessions").fetchone()[0])


async def test_gateways_that_have_not_seen_a_history_serve_its_text(serving: Any) -> None:
    async with serving(gateways=2) as served:
        async with client_of(served) as http:
            (model,) = (await http.get("/v1/models")).json()["data"]
        door, history = "chat", list[dict[str, Any]]()
        for _ in range(8):  # a connection each: the kernel spreads them
            async with client_of(served) as http:
                each = Door(http, door, model["id"])
                each.history = history
                await each.say("Go on.")
        async with client_of(served) as http:
            counts = [await bound(http, each) for each in ("bound", "new", "edited", "evicted")]
        assert sum(counts) == 8
        assert counts[3] == 0


async def test_the_scheduler_hears_which_request_one_goes_on_from(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Submit] = []
    handle = Scheduler.handle

    def listen(self: Scheduler, event: SchedulerEvent, now: float) -> None:
        if isinstance(event, Submit) and event.max_tokens:
            heard.append(event)
        handle(self, event, now)

    monkeypatch.setattr(Scheduler, "handle", listen)
    async with serving() as served, client_of(served) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        door = Door(http, "chat", model)
        for text in ("one", "two", "three"):
            await door.say(text)
    first, second, third = heard
    assert (first.follows, second.follows, third.follows) == (b"", first.history, second.history)
    assert len({first.history, second.history, third.history}) == 3
    assert first.request >> 32 != second.request >> 32


FORGETS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% if loop.index0 > ns.last and m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("layout", [{}, {"replicas": 2}], ids=["one", "replicas"])
async def test_a_prompt_without_the_thoughts_is_there_before_it_comes(
    serving: Any, tmp_path: Path, layout: dict[str, int]
) -> None:
    """The next turn computes its own new tokens, through a stateless door and through ours."""
    write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": FORGETS}))
    said = "Go on, then. " * 9
    asked = {"max_tokens": 900, "thought_tokens": 30, "temperature": 0}
    async with (
        serving(**layout, model={"path": tmp_path}, eos_every=60) as served,
        client_of(served) as http,
        served.connect() as peer,
    ):
        end = {"prompt": f"{said}<|im_end|>\n<|im_start|>assistant\n<think>\n"}
        new = (await http.post("/tokenize", json=end)).json()["count"]
        body = {"model": (await http.get("/v1/models")).json()["data"][0]["id"], **asked}
        messages = [{"role": "user", "content": "Look at this. " * 20}]
        for turn in range(3):
            answer = await http.post("/v1/chat/completions", json={**body, "messages": messages})
            (choice,), usage = answer.json()["choices"], answer.json()["usage"]
            assert choice["finish_reason"] == "stop"
            assert choice["message"].pop("reasoning_content")
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert not turn or usage["prompt_tokens"] - cached == new
            await soon(lambda: computed(http, turn + 1))  # noqa: B023
            messages += [choice["message"], {"role": "user", "content": said}]
        await peer.open(template="strict")
        for turn in range(3):
            text = said if turn else "And at this. " * 20
            usage = (await peer.say(10 * turn + 1, text, **asked))["usage"]
            assert usage["thought"]
            assert not turn or usage["prompt"] - usage["cached"] == new
            await soon(lambda: computed(http, turn + 4))  # noqa: B023


async def computed(http: httpx2.AsyncClient, count: int) -> bool:
    """Whether so many requests that nobody waits for have been computed."""
    text = (await http.get("/metrics")).text
    found = re.findall(r'^ramify_spare_requests_total\{.*"computed".*\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found)) == count
