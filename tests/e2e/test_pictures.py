"""Pictures through the whole server, with a tiny random model, against `transformers`."""

import asyncio
import base64
import io
import json
import re
import runpy
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import websockets
from PIL import Image

import ramify
from ramify.actors.tokenizer import fetching
from ramify.clients.program import AsyncState, assistant, gen, image, program, user
from ramify.protocol.pictures import FIRST, MARK, Picture, fitted, placeholders, words
from ramify.protocol.plan import pack, unpack
from ramify.protocol.wire import ChatMessage
from tests.conftest import SPECIAL
from tests.e2e.test_other_clients import FOLDER, NODE, run
from tests.e2e.test_real_model import llama
from tests.gpu.vision.test_models import CASES, IDS, PROCESSOR, TEXT, TOWER, reference, save

EOS = 2
EXAMPLES = Path(__file__).parents[2] / "examples"
GREEDY: Any = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def seeing(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a model that sees, and the model."""
    import transformers

    folder = tmp_path_factory.mktemp("seeing")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder)
    torch.manual_seed(7)
    _, text, tower = CASES["qwen3_vl"]
    vocabulary = {"vocab_size": 384, "eos_token_id": EOS, "initializer_range": 0.1}
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | text | vocabulary, vision_config=TOWER | tower, **IDS
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():
        if "visual" in name:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name and "weight" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder, model


def drawn(width: int, height: int, seed: int, kind: str = "PNG") -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(values).save(out, kind)
    return out.getvalue()


def seen(settings: Any, data: bytes) -> Picture:
    source = Image.open(io.BytesIO(data)).convert("RGBA")
    source = Image.alpha_composite(Image.new("RGBA", source.size, "white"), source).convert("RGB")
    width, height = fitted(*source.size, settings)
    bilinear = settings.fit == "stretch"
    resized = source.resize((width, height), Image.Resampling[["BICUBIC", "BILINEAR"][bilinear]])
    return Picture(width, height, resized.tobytes())


class Expected:
    """What the model says of prompts with pictures."""

    def __init__(self, served: Any, model: Any) -> None:
        self.encode = served.oracle.tokenizer.encode
        self.settings = served.engine.executor.info.pictures
        self._model = model

    def tokens(self, text: str, files: Sequence[bytes]) -> list[int]:
        """Of text with marks, as the model's vocabulary calls them."""
        around = self.settings.around
        pieces, found = text.replace(MARK, around + MARK + around).split(MARK), list[int]()
        for number, piece in enumerate(pieces):
            if number:
                settings, picture = self.settings, seen(self.settings, files[number - 1])
                ids = [*settings.before, *placeholders(picture, settings), *settings.after]
                found += unpack(words(pack(ids), settings))
            found += self.encode(piece)
        return found

    def said(self, text: str, files: Sequence[bytes], n: int) -> list[int]:
        tokens = self.tokens(text, files)
        pictures = [seen(self.settings, each) for each in files]
        said = reference(self._model, self.settings, tokens, pictures, n)
        return said[: said.index(EOS) + 1] if EOS in said else said


def question(ident: int, content: str, files: Sequence[Any], **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"type": "append", "id": ident, "messages": messages, "images": list(files), **more}


def turn(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("case", ["qwen3_vl", "mistral3", "gemma3", "gemma4"])
async def test_a_chat_about_pictures(
    case: str, serving: Any, seeing: tuple[Path, Any], tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Two in one message; a fork before, behind and inside; one more turn; after a restart again."""
    folder, model = seeing
    small = {}
    if case.startswith("gemma"):  # no chunk may end inside of a picture, which takes half of a step
        small = {"step_tokens": 32 if case == "gemma3" else 48, "max_rows": 16}
    if case != "qwen3_vl":  # Mistral: rows that end in tokens of their own
        folder = tmp_path / case
        shutil.copytree(tokenizer_folder, folder)
        ends = {"image_break_token": SPECIAL[0], "image_end_token": SPECIAL[1]}
        (folder / "processor_config.json").write_text(json.dumps(ends))
        model = save(folder, case, vocab_size=384, eos_token_id=EOS, initializer_range=0.1)
    files = [drawn(37, 61, 1, "PNG"), drawn(90, 17, 2, "JPEG")]
    sent = [base64.b64encode(each).decode() for each in files]
    content = f"Here is {MARK} and{MARK}: compare."
    kept = {"store": tmp_path / "s.db", "grace_s": 0.0}
    async with serving(**llama(folder, **small), server=kept) as served:
        expected = Expected(served, model)
        async with served.connect() as peer:
            state = await peer.open(tokens=True)
            await peer.send(question(1, content, sent), peer.greedy(2, max_tokens=12))
            done = await peer.terminal(2)
            assert done["type"] == "done", done
            assert peer.tokens["main"] == expected.said(turn(content), files, 12)
            prompt = expected.tokens(turn(content), files)
            assert done["usage"]["prompt"] == len(prompt)
            ids = (await peer.tree(3))["main"][: len(prompt)]
            word = expected.settings.token
            assert [word if each >= FIRST else each for each in ids] == prompt
            first = prompt.index(word)
            await peer.send({"type": "fork", "id": 50, "branch": "main", "as": ["no"], "at": first + 3})
            refused = await peer.terminal(50)
            assert refused["code"] == "bad_request"
            assert f"give {first - len(expected.settings.before)} or" in refused["message"]
            await peer.send({"type": "rollback", "id": 51, "to": first + 3})
            assert (await peer.terminal(51))["code"] == "bad_request"
            begin = first - len(expected.settings.before)
            await peer.send(
                {"type": "fork", "id": 52, "branch": "main", "as": ["other"], "at": begin},
                {
                    "type": "append",
                    "id": 53,
                    "branch": "other",
                    "text": MARK + " or",
                    "images": sent[1:],
                },
                peer.greedy(54, branch="other", max_tokens=6),
            )
            await peer.terminal(54)
            around = expected.settings.around
            text = turn(content).split(MARK)[0] + around + MARK + " or"
            assert peer.tokens["other"] == expected.said(text, files[1:], 6)
            joined = {"from": ["other"], "prefix": "Or: ", "branch": "both"}
            await peer.send(
                {"type": "fork", "id": 55, "branch": "main", "as": ["both"]},
                {"type": "join", "id": 56, **joined},
            )
            assert (await peer.terminal(56))["result"]["dropped"] == ["other"]
            await peer.send(peer.greedy(58, branch="both", max_tokens=1))
            begins = (await peer.terminal(58))["usage"]["prompt"]
            ids = [word if each >= FIRST else each for each in (await peer.tree(57))["both"]]
            shown = [seen(expected.settings, each) for each in files]
            said = reference(model, expected.settings, ids[:begins], shown, 1)
            assert ids[begins:] == said
            assert "Or: " in served.oracle.tokenizer.decode(ids[len(prompt) : begins])
        await served.quiet()
    async with serving(**llama(folder, **small), server=kept) as served, served.connect() as again:
        login = {"session": state["session"], "key": state["key"]}
        assert (await again.open(**login, tokens=True))["resumed"]
        await again.send(
            {"type": "rollback", "id": 60, "to": len(prompt)}, again.greedy(61, max_tokens=12)
        )
        assert (await again.terminal(61))["type"] == "done"
        assert again.tokens["main"][-12:] == expected.said(turn(content), files, 12)[-12:]


async def test_a_picture_is_seen_and_computed_once(serving: Any, seeing: tuple[Path, Any]) -> None:
    """64 forks and 16 sessions on one picture; others that differ in a pixel or in size."""
    folder, _ = seeing
    picture = drawn(64, 64, 3)
    values = np.array(Image.open(io.BytesIO(picture)))
    values[20, 20, 0] ^= 1
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG")
    others = [out.getvalue(), drawn(64, 72, 3)]
    async with serving(**llama(folder)) as served:
        metrics = served.engine.metrics
        async with served.connect("msgpack") as peer:
            await peer.open()
            names = [f"f{number}" for number in range(64)]
            await peer.send(
                question(1, f"{MARK} What?", [picture]),
                {"type": "fork", "id": 2, "branch": "main", "as": names},
                peer.greedy(3, branch=names, max_tokens=2),
            )
            done = await peer.terminals(3, names)
            assert {each["type"] for each in done.values()} == {"done"}
            prompt = done["f0"]["usage"]["prompt"]
            assert metrics.pictures_seen == 1
            assert (
                sum(each["usage"]["prompt"] - each["usage"]["cached"] for each in done.values())
                < prompt + 3 * 64
            )
        for _ in range(16):
            async with served.connect("msgpack") as peer:
                await peer.open()
                await peer.send(question(1, f"{MARK} What?", [picture]), peer.greedy(2, max_tokens=2))
                assert (await peer.terminal(2))["usage"]["cached"] >= prompt - 2
        assert metrics.pictures_seen == 1
        async with served.connect("msgpack") as peer:
            await peer.open()
            for number, other in enumerate(others):
                ident = 10 + 3 * number
                await peer.send(
                    {"type": "fork", "id": ident, "as": [f"o{number}"]},
                    question(ident + 1, f"{MARK} What?", [other], branch=f"o{number}"),
                    peer.greedy(ident + 2, branch=f"o{number}", max_tokens=2),
                )
                assert (await peer.terminal(ident + 2))["usage"]["cached"] < 12
        assert metrics.pictures_seen == 3


@pytest.mark.parametrize("room", [1, 1 << 29], ids=["forgotten", "kept"])
async def test_pictures_whose_keys_and_values_are_evicted(
    room: int, serving: Any, seeing: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool holds one branch of four, and room 1 no picture that is not needed. Each goes on as the
    model says of its own picture: two differ in one pixel, one has another size. After a restart, too.
    """
    folder, model = seeing
    monkeypatch.setattr("ramify.gpu.vision.pictures.ROOM", room)
    picture = drawn(40, 40, 3)
    source = Image.open(io.BytesIO(picture))
    other, wide = io.BytesIO(), io.BytesIO()
    source.resize((64, 40)).save(wide, "PNG")
    source.putpixel((20, 20), (1, 2, 3))
    source.save(other, "PNG")
    files = dict(
        zip("abcd", (picture, other.getvalue(), wide.getvalue(), drawn(40, 40, 4)), strict=True)
    )
    kept = {"store": tmp_path / "s.db", "grace_s": 0.0}
    settings = llama(folder, kv_tokens=96)
    ident, missed, said = count(10), 0, dict[str, list[int]]()

    async def go_on(peer: Any, settings: Any, name: str) -> int:
        """How many prompt tokens were not cached."""
        asked, shown = next(ident), [seen(settings, files[name])]
        await peer.send(peer.greedy(asked, branch=name, max_tokens=4, ignore_eos=True))
        usage = (await peer.terminal(asked))["usage"]
        assert usage["prompt"] == len(said[name])
        answer = reference(model, settings, said[name], shown, 4)
        assert peer.tokens[name][-4:] == answer
        said[name] += answer
        return int(usage["prompt"] - usage["cached"])

    async with serving(**settings, server=kept) as served, served.connect("msgpack") as peer:
        state = await peer.open({"type": "fork", "id": 1, "as": list(files)}, tokens=True)
        expected = Expected(served, model)
        shows = expected.settings
        for name, file in files.items():
            text = f"Of {name}: {MARK}."
            said[name] = expected.tokens(text, [file])
            await peer.send(
                {"type": "append", "id": next(ident), "branch": name, "text": text, "images": [file]}
            )
            missed += await go_on(peer, shows, name) > 16  # of its picture
        assert (missed, served.engine.metrics.pictures_seen) == (4, 4)
        for _ in range(2):
            for name in files:
                missed += await go_on(peer, shows, name) > 16
        assert missed == 12  # what the others had left of it was not enough
        assert served.engine.metrics.pictures_seen == (4 if room > 1 else 12)
    async with serving(**settings, server=kept) as served, served.connect("msgpack") as peer:
        await peer.open(session=state["session"], key=state["key"], tokens=True)
        for name in files:
            await go_on(peer, shows, name)
        assert served.engine.metrics.pictures_seen == 4


async def test_the_client_and_programs(
    serving: Any, seeing: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What `ramify.Image` and `image(...)` send, and the example."""
    folder, model = seeing
    files = [drawn(37, 61, 1), drawn(90, 17, 2)]
    path = tmp_path / "a.png"
    path.write_bytes(files[0])

    @program
    async def two(s: AsyncState) -> str:
        s += user("First ", image(path), " then ", image(files[1])) + assistant(gen("a", **GREEDY))
        return await s["a"]

    async with serving(**llama(folder)) as served:
        expected = Expected(served, model)

        def text(content: str, pictures: Sequence[bytes]) -> str:
            return str(served.oracle.text(expected.said(turn(content), pictures, 12)))

        async with ramify.connect(served.engine.url) as session:
            said = await session.main.chat("And?", images=[ramify.Image(path)], **GREEDY)
            assert said.text == text(f"{MARK}And?", files[:1])
            parts = [ChatMessage(role="user", content=f"{MARK}And?")]
            async with ramify.connect(served.engine.url, template="strict") as strict:
                await strict.main.append(messages=parts, images=[ramify.Image(path)])
                assert (await strict.main.generate(**GREEDY)).text == said.text
            run = await two.using(session=session).arun()
            assert run.value == text(f"First {MARK} then {MARK}", files)
        monkeypatch.setenv("RAMIFY_URL", served.engine.url)
        main = runpy.run_path(str(EXAMPLES / "ask_image.py"))["main"]
        await main("What?", str(path))
    assert "seen before:" in capsys.readouterr().out


async def test_other_clients(serving: Any, seeing: tuple[Path, Any], tmp_path: Path) -> None:
    """The `openai` and `ollama` packages, `anthropic` where it is; the AI SDK's frames by hand."""
    openai = pytest.importorskip("openai")
    folder, model = seeing
    picture = drawn(37, 61, 1)
    data = base64.b64encode(picture).decode()
    url = f"data:image/png;base64,{data}"
    cut = base64.b64encode(picture[:200]).decode()
    async with serving(**llama(folder)) as served:
        expected, name = Expected(served, model), served.engine.executor.info.model

        def text(content: str, count: int = 1) -> str:
            return str(served.oracle.text(expected.said(turn(content), [picture] * count, 12)))

        async with openai.AsyncOpenAI(base_url=f"{served.http}/v1", api_key="x") as client:
            shown = {"type": "image_url", "image_url": {"url": url}}
            parts = [{"type": "text", "text": "a\ufffcb "}, shown, {"type": "text", "text": " what?"}]
            said = await client.chat.completions.create(
                model=name, max_tokens=12, temperature=0, messages=[{"role": "user", "content": parts}]
            )
            assert said.choices[0].message.content == text(f"a\ufffdb {MARK} what?")
            for bad, why in (
                ("http://127.0.0.1/a.png", "others are not fetched"),
                (f"data:image/png;base64,{cut}", "is damaged"),
            ):
                parts[1]["image_url"] = {"url": bad}
                with pytest.raises(openai.BadRequestError, match=why) as refused:
                    await client.chat.completions.create(
                        model=name, messages=[{"role": "user", "content": parts}]
                    )
                assert refused.value.param == "messages[0].content[1].image_url.url"
            await responses(client, url, cut, text)
        async with websockets.connect(f"{served.engine.url.rpartition('/')[0]}/ai") as socket:
            for given in (data, cut):
                file = {
                    "type": "file",
                    "mediaType": "image/png",
                    "url": f"data:image/png;base64,{given}",
                }
                message = {"id": "u", "role": "user", "parts": [file, {"type": "text", "text": "what?"}]}
                await socket.send(json.dumps(AI_SENT | {"messages": [message]}))
                frames = [json.loads(await socket.recv())]
                while frames[-1]["type"] == "chunk":
                    frames.append(json.loads(await socket.recv()))
                if given == cut:
                    assert "`messages[0].parts[0].url`" in frames[-1]["errorText"]
                else:
                    chunks = [each.get("chunk", {}) for each in frames]
                    assert "".join(each.get("delta", "") for each in chunks) == text(f"{MARK}what?")
        await asyncio.to_thread(ollama_and_anthropic, served.http, name, data, cut, text)
        (tmp_path / "a.png").write_bytes(picture)
        for way, answer in (
            await asyncio.to_thread(ai_sdk, served.http, name, tmp_path / "a.png")
        ).items():
            assert answer == text(f"{MARK}\nwhat?" if way == "messages" else f"{MARK}what?"), way


AI_SENT: Any = {
    "type": "send", "requestId": "r", "id": "c", "trigger": "submit-message", "headers": {},
    "body": {"temperature": 0, "maxOutputTokens": 12},
}  # fmt: skip


async def responses(client: Any, url: str, cut: str, text: Callable[..., str]) -> None:
    """A picture in a turn, one in a tool's result, and a damaged one; what is kept of them."""
    import openai

    greedy: Any = {"temperature": 0, "max_output_tokens": 12}
    shown = {"type": "input_image", "image_url": url, "detail": "auto"}
    parts = [{"type": "input_text", "text": "a\ufffcb"}, shown]
    said = await client.responses.create(input=[{"role": "user", "content": parts}], **greedy)
    assert said.output_text == text(f"a\ufffdb{MARK}")
    kept = (await client.responses.input_items.list(said.id)).data[0].content
    assert [each.type for each in kept] == ["input_text", "input_image"]
    assert kept[1].image_url is None
    again = await client.responses.create(
        input="And?", previous_response_id=said.id, include=["message.input_image.image_url"], **greedy
    )
    assert again.usage.input_tokens_details.cached_tokens >= said.usage.input_tokens
    call = {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [shown]}
    seen = await client.responses.create(input=[call, output], **greedy)
    assert seen.status in ("completed", "incomplete")
    for part, field in (
        ({"type": "input_image", "image_url": f"data:image/png;base64,{cut}"}, "image_url"),
        ({"type": "input_image"}, "image_url"),
        ({"type": "input_image", "file_id": "f"}, "file_id"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(input=[call, output | {"output": [shown, part]}])
        assert refused.value.param == f"input[1].output[1].{field}"


def ollama_and_anthropic(http: str, name: str, data: str, cut: str, text: Callable[..., str]) -> None:
    """Blocks. By the packages, Anthropic's by hand where it is not installed."""
    import ollama

    with ollama.Client(http) as client:
        options = {"temperature": 0, "num_predict": 12}
        message = {"role": "user", "content": "what?", "images": [data]}
        told = client.chat(name, [message], options=options)
        assert told.message.content == text(f"{MARK}what?")
        made = client.generate(name, "what?", images=[data, data], options=options)
        assert made.response == text(f"{MARK}{MARK}what?", 2)
        with pytest.raises(ollama.ResponseError, match=r"`images\[1\]`"):
            client.generate(name, "what?", images=[data, cut], options=options)
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    broken = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": cut}}
    marked = {"type": "text", "text": "what?", "cache_control": {"type": "ephemeral"}}
    asked: Any = {
        "model": name,
        "max_tokens": 12,
        "messages": [{"role": "user", "content": [block, marked]}],
    }
    use = {"type": "tool_use", "id": "t", "name": "see", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block, broken]}
    results = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [use]}]
    results += [{"role": "user", "content": [result]}]
    where = "messages[2].content[0].content[1].source.data"
    if find_spec("anthropic") is None:
        answer = posted(f"{http}/v1/messages", {**asked, "temperature": 0})
        assert "".join(each["text"] for each in answer["content"]) == text(f"{MARK}\nwhat?")
        with pytest.raises(urllib.error.HTTPError) as failed:
            posted(f"{http}/v1/messages", {**asked, "messages": results})
        with failed.value as refused:
            assert where in refused.read().decode()
        return
    anthropic: Any = import_module("anthropic")
    with anthropic.Anthropic(base_url=http, api_key="none", max_retries=0) as theirs:
        with theirs.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            assert stream.get_final_text() == text(f"{MARK}\nwhat?")
        with pytest.raises(anthropic.BadRequestError, match=re.escape(where)):
            theirs.messages.create(**{**asked, "messages": results})
        result["content"] = [block, block]
        assert theirs.messages.create(**{**asked, "messages": results}).usage.output_tokens


def ai_sdk(http: str, name: str, path: Path) -> dict[str, str]:
    """What the packages of the AI SDK were answered, where they are (see `test_other_clients`)."""
    if NODE is None or not (FOLDER / "node_modules" / "@ai-sdk/anthropic").exists():
        return {}
    program = EXAMPLES.parent / "tests/e2e/programs/pictures_with_ai_sdk.mjs"
    said = run(NODE, str(program), f"{http}/v1", name, str(FOLDER), str(path))
    return dict(json.loads(line) for line in said.splitlines())


def posted(url: str, body: dict[str, Any]) -> Any:
    """The answer to a request."""
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01", "x-api-key": "x"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read())


async def test_pictures_that_are_fetched(
    serving: Any, seeing: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From this server's own page, which is taken for a public place; of another host, none."""
    folder, model = seeing
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    origin = f"http://127.0.0.1:{port}"
    async with serving(**llama(folder), server={"port": port, "fetch_images": (origin,)}) as served:
        expected, name = Expected(served, model), served.engine.executor.info.model
        icon = await asyncio.to_thread(got, f"{origin}/icon-192.png")
        text = str(served.oracle.text(expected.said(turn(f"{MARK}what?"), [icon], 12)))

        def asked(url: str) -> dict[str, Any]:
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
            messages = [{"role": "user", "content": parts}]
            return {"model": name, "max_tokens": 12, "temperature": 0, "messages": messages}

        chats = f"{served.http}/v1/chat/completions"
        answer = await asyncio.to_thread(posted, chats, asked(f"{origin}/icon-192.png"))
        assert answer["choices"][0]["message"]["content"] == text
        for url, why in (
            ("https://example.org/a.png", "fetches none"),
            (f"{origin}/nothing.png", "answered 404"),
            (f"{origin}/chat.js", "is damaged, or no PNG"),
        ):
            with pytest.raises(urllib.error.HTTPError) as failed:
                await asyncio.to_thread(posted, chats, asked(url))
            with failed.value as refused:
                error = json.loads(refused.read())["error"]
            assert why in error["message"]
            assert error["param"] == "messages[0].content[0].image_url.url"
        async with ramify.connect(served.engine.url) as session:
            image = ramify.Image(f"{origin}/icon-192.png")
            said = await session.main.chat("what?", images=[image], **GREEDY)
            assert said.text == text


def got(url: str) -> bytes:
    with urllib.request.urlopen(url) as response:
        return bytes(response.read())


async def test_what_is_no_picture_is_refused(serving: Any, seeing: tuple[Path, Any]) -> None:
    folder, _ = seeing
    whole = drawn(64, 64, 3)
    async with serving(**llama(folder)) as served:
        async with served.connect("msgpack") as peer:
            await peer.open()
            cases = [
                (question(0, "no mark", [whole]), "images"),
                (question(0, f"{MARK}{MARK}", [whole]), "images"),
                (question(0, MARK, [b"not a picture"]), "images[0]"),
                (question(0, MARK, [whole[:300]]), "images[0]"),
                (question(0, MARK, [b"https://example.org/a.png"]), "images[0]"),
                (question(0, MARK, [drawn(2000, 4, 1)]), "images[0]"),
                (question(0, MARK, []), None),
                ({"type": "append", "id": 0, "text": MARK, "images": [whole], "logprobs": 1}, "images"),
                ({"type": "append", "id": 0, "text": MARK, "audio": [whole]}, "audio"),
                ({"type": "append", "id": 0, "tokens": [FIRST + 5]}, "tokens"),
            ]
            for ident, (op, field) in enumerate(cases, 1):
                await peer.send({**op, "id": ident})
                reply = await peer.terminal(ident)
                if field is None:
                    assert reply["type"] == "ok", reply
                else:
                    assert reply["type"] == "error", reply
                    assert field in reply["message"]


async def test_a_model_without_a_tower_takes_no_pictures(serving: Any) -> None:
    async with serving() as served, served.connect("msgpack") as peer:
        await peer.open()
        await peer.send(question(1, MARK, [drawn(64, 64, 3)]))
        assert "takes no pictures" in (await peer.terminal(1))["message"]
