"""`select` over endpoints that know no branches: scores from the log-probabilities that they show.

*Completions* that echo their prompt with log-probabilities (vLLM does, SGLang's OpenAI endpoint does
not): prompt and choice are one text, and a score is that of docs/protocol.md, over the tokens that do
not lie in the prompt alone. One call for all choices; two for "unconditional_likelihood_normalized".

*Chat* endpoints show no log-probabilities of given text, only their own 20 most likely next tokens.
There "greedy_token_selection" is all there is: the choice that begins with the likeliest of them, one
call for each token at which choices still begin alike. It has no scores, and another method warns.

What endpoints answer is read here, and what is asked of them is said by `api`.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from ramify.protocol.errors import BadRequest, Unsupported
from ramify.protocol.wire import Method

BEST = 20  # tokens that a chat endpoint shows at most


class Echoed(NamedTuple):
    """A token of an echoed text. `logprob` None: nothing stands before it."""

    at: int
    token: str
    logprob: float | None


def echoed(choice: Any, text: str) -> list[Echoed]:
    """Read the tokens of `text`, which a completion echoes before what it generates."""
    logprobs = choice.logprobs
    if (
        logprobs is None
        or not logprobs.token_logprobs
        or not logprobs.text_offset
        or logprobs.text_offset[0] != 0  # -1: it does not know
    ):
        raise Unsupported(
            "this endpoint does not echo a prompt with log-probabilities, which `select` needs: use "
            "another one, or gen() with a stop string"
        )
    tokens = zip(logprobs.text_offset, logprobs.tokens, logprobs.token_logprobs, strict=True)
    return [Echoed(*each) for each in tokens if each[0] < len(text)]


async def by_echo(
    prompt: str,
    choices: Sequence[str],
    method: Method,
    complete: Callable[[list[str]], Awaitable[Sequence[Any]]],
) -> tuple[int, list[float]]:
    """Find the best choice and the scores. `complete(prompts)`: the endpoint's choices, one for each."""
    texts = [prompt + choice for choice in choices]
    found = [echoed(*each) for each in zip(await complete(texts), texts, strict=True)]
    ends = [next((t.at for t in row if t.at + len(t.token) > len(prompt)), 0) for row in found]
    at = min(ends)  # the first token that is not the prompt's alone, of any of them
    rows = [[t for t in row if t.at >= at] for row in found]
    if not all(rows):
        raise Unsupported("this endpoint echoes a choice without tokens")
    sums = [sum(t.logprob or 0.0 for t in row) for row in rows]
    if method == "unconditional_likelihood_normalized":
        alone = [text[at:] for text in texts]
        for i, each in enumerate(zip(await complete(alone), alone, strict=True)):
            sums[i] -= sum(t.logprob or 0.0 for t in echoed(*each))
    scores = [total / len(row) for total, row in zip(sums, rows, strict=True)]
    if method == "greedy_token_selection":
        return _greedy(rows, scores), scores
    return max(range(len(scores)), key=scores.__getitem__), scores


def _greedy(rows: Sequence[Sequence[Echoed]], means: Sequence[float]) -> int:
    """Choose token by token. A choice that has ended goes on with its mean. Equal tokens count once."""
    known: dict[tuple[str, ...], float] = {}
    left = list(range(len(rows)))
    for place in range(max(map(len, rows))):
        values = []
        for i in left:
            if place < len(rows[i]):
                key = tuple(t.token for t in rows[i][: place + 1])
                values.append(known.setdefault(key, rows[i][place].logprob or 0.0))
            else:
                values.append(means[i])
        best = max(values)
        left = [i for i, value in zip(left, values, strict=True) if value == best]
        if len(left) == 1:
            break
    return left[0]


async def by_next_tokens(
    choices: Sequence[str], best: Callable[[str], Awaitable[dict[str, float]]]
) -> int:
    """Find the choice that a greedy walk ends at. `best(said)`: the likeliest tokens behind it."""
    left, said = dict.fromkeys(choices), ""
    sums: list[float] = []
    while len(left) > 1:
        tokens = await best(said)
        mean = sum(sums) / len(sums) if sums else 0.0
        begun = {
            token: logprob
            for token, logprob in tokens.items()
            if token and any(choice.startswith(said + token) for choice in left)
        }
        if said in left and mean >= max(begun.values(), default=mean):
            break  # it has ended, and is likelier than what goes on
        if not begun:
            raise BadRequest(
                f"none of the choices goes on with one of the {BEST} tokens that the endpoint shows: "
                "say in the prompt what the choices are"
            )
        token = max(begun, key=begun.__getitem__)
        said += token
        sums.append(begun[token])
        left = dict.fromkeys(choice for choice in left if choice.startswith(said))
    return choices.index(said if said in left else next(iter(left)))


def next_tokens(completion: Any) -> dict[str, float]:
    """Read the most likely tokens from a chat completion of one token."""
    logprobs = completion.choices[0].logprobs
    if logprobs is None or not logprobs.content:
        raise Unsupported("this endpoint shows no log-probabilities, which `select` needs")
    return {each.token: each.logprob for each in reversed(logprobs.content[0].top_logprobs)}
