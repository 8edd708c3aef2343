"""The inputs of one step: which fields there are, how long each is, how it is padded.

`StepInputs` declares every field once. The pinned buffer, the inputs of the CUDA graphs, the views on
the device and the arrays of the CPU's kernels follow from the declaration (`layout`, `from_parts`), and
so does the padding (`pad`). To add a field, add a line to `StepInputs` and write the field in `lay`.
This file does not know who reads the fields, nor how they are copied (see `staging`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.rows import StepRows
from ramify.gpu.step.staging import Array, StagedArrays

Plan = dict[str, Array]
"""The arrays that an attention back end adds to a step, by the names under which it reads them."""

Part = TypeVar("Part")  # Array on the host, Tensor on the device
SPARE: Literal["spare"] = "spare"  # padding with the number of the executor's spare row


@dataclass(frozen=True, slots=True)
class Field:
    """Declaration of an input: dtype, padding, and `length` by bucket (None: not in such steps)."""

    dtype: str
    length: Callable[[Bucket], int | None]
    padding: Literal[0, "spare"] = 0


def _lines(bucket: Bucket) -> int:
    return bucket.lines


def _sampling(bucket: Bucket) -> int:
    return bucket.sampling


def _sampling_of_extends(bucket: Bucket) -> int | None:
    return bucket.sampling if bucket.extended else None


@dataclass(slots=True)
class StepInputs(Generic[Part]):
    """The inputs of a step of T = `bucket.lines` tokens, of which S = `bucket.sampling` sample.

    The tokens of the extends come first, then one of each decode. On the host the parts are arrays,
    on the device tensors.
    """

    # a token, or -(row + 1) for the token that the row sampled last
    input_ids: Annotated[Part, Field("int32", _lines)]
    rows: Annotated[Part, Field("int32", _lines, SPARE)]
    positions: Annotated[Part, Field("int32", _lines)]
    temperatures: Annotated[Part, Field("float32", _sampling)]
    # the random number in [0, 1) of each draw
    uniforms: Annotated[Part, Field("float64", _sampling)]
    # Indices into the T lines, and their rows. None in steps of decodes alone, whose lines all sample.
    sampled_lines: Annotated[Part | None, Field("int32", _sampling_of_extends)]
    sampled_rows: Annotated[Part | None, Field("int32", _sampling_of_extends, SPARE)]
    plan: dict[str, Part]  # the attention back end's own fields
    bucket: Bucket

    @classmethod
    def from_parts(cls, bucket: Bucket, parts: Mapping[str, Part]) -> "StepInputs[Part]":
        """Sort `parts`, by their names of `layout`; those that are not declared here are the plan's."""
        named: dict[str, Any] = {name: parts.get(name) for name in DECLARED}
        plan = {name: part for name, part in parts.items() if name not in DECLARED}
        return cls(**named, plan=plan, bucket=bucket)

    def on(self: "StepInputs[Array]", device: torch.device) -> "StepInputs[Tensor]":
        """Copy the inputs to tensors on `device`; on a CPU they are views of the arrays."""
        parts = {name: getattr(self, name) for name in DECLARED} | self.plan
        tensors = {
            name: torch.from_numpy(part).to(device) for name, part in parts.items() if part is not None
        }
        return StepInputs.from_parts(self.bucket, tensors)

    def cut(self: "StepInputs[Array]", bucket: Bucket) -> "StepInputs[Array]":
        """Cut each array to its length in `bucket`, without a copy."""
        lengths = {name: field.length(bucket) for name, field in DECLARED.items()}
        parts = {
            name: getattr(self, name)[:length] for name, length in lengths.items() if length is not None
        }
        return StepInputs.from_parts(bucket, parts)

    @property
    def extended(self) -> int:
        """The number of lines of the extends, padding included; the decodes' lines follow."""
        return self.bucket.extended

    @property
    def rows_that_sample(self) -> Part:
        """The row of each line that samples: int32[S]."""
        return self.rows if self.sampled_rows is None else self.sampled_rows


def _declared() -> dict[str, Field]:
    hints = get_type_hints(StepInputs, include_extras=True)
    return {
        name: field
        for name, hint in hints.items()
        for field in getattr(hint, "__metadata__", ())
        if isinstance(field, Field)
    }


DECLARED = _declared()
"""The declared fields by name, in the order of the buffer."""


def layout(bucket: Bucket, room: Plan) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Work out dtype and shape of each field in `bucket`. `room`: the plan's fields at their largest."""
    made: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, field in DECLARED.items():
        length = field.length(bucket)
        if length is not None:
            made[name] = field.dtype, (length,)
    for name, array in room.items():
        if name in DECLARED:
            raise ValueError(f"a plan's field is called {name!r} as one of every step")
        made[name] = str(array.dtype), array.shape
    return made


def host_inputs(bucket: Bucket, room: Plan) -> "StepInputs[Array]":
    """Allocate arrays for a step, not initialised."""
    parts = {name: np.empty(shape, dtype) for name, (dtype, shape) in layout(bucket, room).items()}
    return StepInputs.from_parts(bucket, parts)


@dataclass(frozen=True, slots=True)
class Draws:
    """Temperature and random number of each line that samples."""

    temperatures: npt.NDArray[np.float32]  # [S]
    uniforms: npt.NDArray[np.float64]  # [S]


NO_DRAWS = Draws(np.empty(0, dtype=np.float32), np.empty(0))


def pad(inputs: StepInputs[Array], spare: int) -> None:
    """Fill every field with its padding, and the plan with zeros."""
    for name, field in DECLARED.items():
        array: Array | None = getattr(inputs, name)
        if array is not None:
            array.fill(spare if field.padding == SPARE else field.padding)
    for array in inputs.plan.values():
        array.fill(0)


def lay(inputs: StepInputs[Array], step: StepRows, draws: Draws, plan: Plan, spare: int) -> None:
    """Write the step into `inputs`, padding behind it.

    `plan`: the attention back end's, each array at most as long as its room. What it leaves out stays
    zeros: nothing is attended to, or nothing shared.
    """
    pad(inputs, spare)
    first = inputs.bucket.extended
    decodes = slice(first, first + len(step.rows) - step.extends)
    inputs.rows[decodes] = step.rows[step.extends :]
    inputs.positions[decodes] = step.starts[step.extends :]
    np.subtract(-1, inputs.rows[decodes], out=inputs.input_ids[decodes])
    given = inputs.input_ids[first : first + len(step.given)]
    np.copyto(given, step.given, where=step.given >= 0)
    if inputs.sampled_lines is not None and inputs.sampled_rows is not None:
        sampled = len(step.sampling)
        _lay_extends(inputs, step)
        ends = np.concatenate(
            [np.cumsum(step.counts[: step.extends]) - 1, np.arange(first, decodes.stop)]
        )
        inputs.sampled_lines[:sampled] = ends[step.sampling]
        inputs.sampled_rows[:sampled] = step.rows[step.sampling]
    inputs.temperatures[: len(draws.temperatures)] = draws.temperatures
    inputs.uniforms[: len(draws.uniforms)] = draws.uniforms
    for name, array in plan.items():
        inputs.plan[name][: len(array)] = array


def _lay_extends(inputs: StepInputs[Array], step: StepRows) -> None:
    n, tokens = step.extends, len(step.tokens)
    counts = step.counts[:n]
    first = np.cumsum(counts) - counts
    inputs.rows[:tokens] = np.repeat(step.rows[:n], counts)
    inputs.input_ids[:tokens] = step.tokens
    inputs.positions[:tokens] = np.arange(tokens) - np.repeat(first - step.starts[:n], counts)


class StepFrame:
    """A step's inputs in a pinned buffer: filled as `host`, sent, and read as `device`."""

    def __init__(self, bucket: Bucket, frame: StagedArrays) -> None:
        self.host: StepInputs[Array] = StepInputs.from_parts(bucket, frame.arrays)
        self.device: StepInputs[Tensor] = StepInputs.from_parts(bucket, frame.views)
        self.send = frame.send
