"""`select` over OpenAI's API: a model whose log-probabilities are known, as its endpoints show them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.clients.program import AsyncState, assistant, program, select, user
from ramify.clients.program.api import ApiSession
from ramify.protocol.errors import BadRequest, Unsupported
from ramify.protocol.wire import Method

METHODS: list[Method] = [
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
]
PROMPT = "The capital is "
CHOICES = ["Paris", "Paris, France", "Rome", "R"]


def split(text: str) -> list[str]:
    """Tokens: two letters each, from the text's beginning on."""
    return [text[i : i + 2] for i in range(0, len(text), 2)]


def logprob(before: str, token: str) -> float:
    """Of a token behind a text; what is good depends on the end of the text."""
    return -((sum(map(ord, before[-3:] + token)) * 7919) % 997) / 100 - 0.01


class Endpoint:
    """`openai.AsyncOpenAI` as far as it is used. `shows`: whether it gives log-probabilities."""

    def __init__(self, shows: bool = True) -> None:
        self.asked: list[dict[str, Any]] = []
        self.shows = shows
        self.likely: dict[str, dict[str, float]] = {}
        self.completions = SimpleNamespace(create=self.complete)
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.answer))

    async def complete(self, prompt: Sequence[str], **options: Any) -> Any:
        self.asked.append(options | {"prompt": prompt})
        assert options["echo"]
        choices = []
        for index, text in enumerate(prompt):
            tokens = [*split(text), "!!"]  # and one that is generated
            offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
            values: list[float | None] = [
                logprob(text[:at], t) if at else None for at, t in zip(offsets, tokens, strict=True)
            ]
            shown = SimpleNamespace(tokens=tokens, token_logprobs=values, text_offset=offsets)
            choices.append(SimpleNamespace(index=index, logprobs=shown if self.shows else None))
        usage = SimpleNamespace(prompt_tokens=sum(len(split(text)) for text in prompt))
        return SimpleNamespace(choices=choices[::-1], usage=usage)

    async def answer(self, messages: list[dict[str, str]], **options: Any) -> Any:
        self.asked.append(options | {"messages": messages})
        assert options["top_logprobs"] == 20
        last = messages[-1]
        said = last["content"] if last["role"] == "assistant" else ""
        tops = [SimpleNamespace(token=t, logprob=p) for t, p in self.likely.get(said, {}).items()]
        content = [SimpleNamespace(top_logprobs=tops)] if self.shows else None
        choice = SimpleNamespace(logprobs=SimpleNamespace(content=content))
        return SimpleNamespace(choices=[choice], usage=SimpleNamespace(prompt_tokens=7))


def wanted(method: Method) -> tuple[int, list[float]]:
    """By definition. The prompt has 15 letters: the choice begins in the middle of a token."""
    rows = []
    for choice in CHOICES:
        text = PROMPT + choice
        places = range(14, len(text), 2)
        rows.append([logprob(text[:at], text[at : at + 2]) for at in places])
        if method == METHODS[2]:
            alone = text[14:]
            less = [logprob(alone[:at], alone[at : at + 2]) for at in range(2, len(alone), 2)]
            rows[-1] = [a - b for a, b in zip(rows[-1], [0.0, *less], strict=True)]
    scores = [sum(row) / len(row) for row in rows]
    if method != METHODS[1]:
        return max(range(4), key=scores.__getitem__), scores
    table = [row + [score] * (7 - len(row)) for row, score in zip(rows, scores, strict=True)]
    return max(range(4), key=table.__getitem__), scores


@program
async def capital(s: AsyncState, method: Method, choices: list[str]) -> str:
    s += PROMPT + select("city", choices=choices, method=method) + "."
    return await s["city"]


@pytest.mark.parametrize("method", METHODS)
async def test_a_completion_that_echoes(method: Method) -> None:
    endpoint = Endpoint()
    session = ApiSession(endpoint, "m", chat=False)
    run = await capital.using(session=session).arun(method, CHOICES)
    index, scores = wanted(method)
    assert run.value == CHOICES[index]
    assert run.results["city"].choice == index
    assert run.results["city"].scores == pytest.approx(scores)
    assert session.calls == len(endpoint.asked) == (2 if method == METHODS[2] else 1)
    assert session.prompt_tokens > 0


@pytest.mark.parametrize("chat", [True, False])
async def test_an_endpoint_that_shows_nothing(chat: bool) -> None:
    session = ApiSession(Endpoint(shows=False), "m", chat=chat)
    with pytest.raises(Unsupported, match="log-probabilities"):
        await capital.using(session=session).arun("greedy_token_selection", CHOICES)


@program
async def asked(s: AsyncState, choices: list[str], method: Method = "greedy_token_selection") -> str:
    s += user("Capital?")
    s += assistant(select("city", choices=choices, method=method))
    s += user("Sure?")
    return await s["city"]


async def test_a_chat_takes_the_likeliest_beginning() -> None:
    endpoint = Endpoint()
    endpoint.likely[""] = {"The": -0.1, "Ro": -1.0, "P": -2.0, "Par": -1.5}
    session = ApiSession(endpoint, "m")
    run = await asked.using(session=session).arun(["Paris", "Rome", "Oslo"])
    assert (run.value, run.results["city"].choice, run.results["city"].scores) == ("Rome", 1, None)
    assert [(m.role, m.content) for m in run.messages][1] == ("assistant", "Rome")
    assert session.calls == 1
    with pytest.warns(UserWarning, match="greedy_token_selection"):
        await asked.using(session=session).arun(["Paris", "Rome"], "token_length_normalized")
    with pytest.raises(BadRequest, match="none of the choices"):
        await asked.using(session=session).arun(["Oslo", "Lima"])


async def test_choices_that_begin_alike_need_an_endpoint_that_goes_on() -> None:
    endpoint = Endpoint()
    endpoint.likely[""] = {"R": -0.5, "Paris": -2.0}
    endpoint.likely["R"] = {"ome": -1.0, "iga": -0.2}
    run = await asked.using(session=ApiSession(endpoint, "m", continues=True)).arun(["Rome", "Riga"])
    assert run.value == "Riga"
    # one that has ended goes on with its mean
    run = await asked.using(session=ApiSession(endpoint, "m", continues=True)).arun(["R", "Rome"])
    assert run.value == "R"
    endpoint.likely["R"]["ome"] = -0.4
    run = await asked.using(session=ApiSession(endpoint, "m", continues=True)).arun(["R", "Rome"])
    assert run.value == "Rome"
    with pytest.raises(Unsupported, match="continues=True"):
        await asked.using(session=ApiSession(endpoint, "m")).arun(["Rome", "Riga"])


async def test_a_deadline_is_refused() -> None:
    @program
    async def late(s: AsyncState) -> str:
        s += "x" + select("y", choices=["a"], deadline_ms=5)
        return await s["y"]

    with pytest.raises(Unsupported, match="deadline_ms"):
        await late.using(session=ApiSession(Endpoint(), "m", chat=False)).arun()


@pytest.mark.parametrize("choices", [[], "yes", ["a", ""]])
def test_choices_that_make_no_sense(choices: Any) -> None:
    with pytest.raises(TypeError, match="choices"):
        select("x", choices=choices)


def test_only_in_an_assistants_turn() -> None:
    from ramify.clients.program.expressions import flatten

    with pytest.raises(TypeError, match=r"select\(\) stands in a 'user' turn"):
        list(flatten(user(select("x", choices=["a"]))))
