"""Sampling parameters. Plain values; the sampler itself lives in `ramify.gpu`."""

from operator import le
from typing import Annotated

import msgspec
from msgspec import Meta

from ramify.protocol.errors import InvalidField

# What each setting may be, wherever it comes from: a client, a model's folder, another process. The
# sampler works in float32 and int32; within these bounds nothing of it overflows or becomes 0.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),  # and not between 0 and MIN_TEMPERATURE
    "top_k": (0, 2**31 - 1),
    "top_p": (1e-20, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "seed": (0, 2**63 - 1),
    "logprobs": (0, 20),
}
_LOW, _HIGH = zip(*RANGES.values(), strict=True)
MIN_TEMPERATURE = 1e-30  # above 0; this is greedy already, and far less is 0 as a float32


def _within(name: str) -> Meta:
    low, high = RANGES[name]
    return Meta(ge=low, le=high)


Temperature = Annotated[float, _within("temperature")]
TopK = Annotated[int, _within("top_k")]
TopP = Annotated[float, _within("top_p")]
MinP = Annotated[float, _within("min_p")]
FrequencyPenalty = Annotated[float, _within("frequency_penalty")]
PresencePenalty = Annotated[float, _within("presence_penalty")]
RepetitionPenalty = Annotated[float, _within("repetition_penalty")]
Seed = Annotated[int, _within("seed")]
Logprobs = Annotated[int, _within("logprobs")]


def check_temperature(value: float | None) -> None:
    """Refuse temperatures above 0 that are too small to be useful. Raises InvalidField."""
    if value is not None and 0.0 < value < MIN_TEMPERATURE:
        raise InvalidField(f"`temperature` is {value}: must be 0 (greedy) or at least {MIN_TEMPERATURE}")


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampling settings of one request, complete (model defaults are already filled in).

    Order of application: penalties, then temperature, then top-k, top-p, min-p on the
    renormalised rest. `temperature == 0` means greedy (argmax; ties go to the lowest id).

    `frequency_penalty` and `presence_penalty` count this request's output tokens (OpenAI's
    rule); `repetition_penalty` counts the tokens of the branch as well (Keskar et al. 2019).

    Random numbers are a function of (`seed`, index of the output token) alone, so a request's
    tokens do not depend on its neighbours in the batch, on chunking or on a retraction.

    One that is out of range cannot be made (InvalidField): an executor relies on it.
    """

    temperature: Temperature = 1.0
    top_k: TopK = 0  # 0: off
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    presence_penalty: PresencePenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Seed = 0
    logprobs: Logprobs = 0  # k > 0: the token's and the k best

    def __post_init__(self) -> None:
        values = msgspec.structs.astuple(self)
        if not (all(map(le, _LOW, values)) and all(map(le, values, _HIGH))):
            for (name, (low, high)), value in zip(RANGES.items(), values, strict=True):
                if not low <= value <= high:
                    raise InvalidField(f"`{name}` is {value}: must be {low} to {high}")
        check_temperature(self.temperature)

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
