"""How the next token is chosen. Plain values; the sampler itself lives in `ramify.gpu`."""

from typing import Annotated

import msgspec
from msgspec import Meta


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampling settings of one request, complete (model defaults are already filled in).

    Order of application: penalties, then temperature, then top-k, top-p, min-p on the
    renormalised rest. `temperature == 0` means greedy (argmax; ties go to the lowest id).

    `frequency_penalty` and `presence_penalty` count this request's output tokens (OpenAI's
    rule); `repetition_penalty` counts the tokens of the branch as well (Keskar et al. 2019).

    Random numbers are a function of (`seed`, index of the output token) alone, so a request's
    tokens do not depend on its neighbours in the batch, on chunking or on a retraction.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0  # 0: off
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    logprobs: Annotated[int, Meta(ge=0, le=20)] = 0  # k > 0: the token's and the k best

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """True if the sampler must know which tokens came before."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one output position, before temperature and penalties.

    `top_ids` / `top_logprobs`: the k most likely tokens, best first, k = `logprobs` asked for.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
