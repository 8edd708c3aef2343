"""Reads safetensors checkpoints into a decoder, straight into its merged weights.

Every tensor is checked: that it is there, its shape, its type. A fault raises ModelError, which names
the file and the tensor and says what to do. This file does not know architectures: the decoder says
which tensors it wants.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ramify.gpu.models.definition import ExpertNames, TensorNames
from ramify.gpu.progress import Progress
from ramify.protocol.errors import ModelError

_LOG = logging.getLogger("ramify.gpu.startup")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Of tensors with all experts of a layer, by how their names end: their dimensions
_DIMENSIONS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
_HALVES = ("_blocks", "_scales")  # of MXFP4
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOATS = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


def load_weights(
    folder: Path,
    views: dict[str, Tensor],
    progress: Progress,
    loaded: Callable[[str], None] = lambda name: None,
    called: TensorNames = TensorNames(),  # noqa: B008
) -> None:
    """Fill `views` (name in the decoder -> tensor) from the checkpoint in `folder`.

    `loaded` is told the name of each when it is filled, and may take views out that are. `called`: how
    names in the checkpoint differ.
    """
    files, skipped = checkpoint_files(folder), 0
    sizes = [path.stat().st_size for path in files]
    missing, names = set(views), frozenset(views)
    halves: dict[str, Tensor] = {}
    for number, path in enumerate(files):
        what = f"loading {path.name} ({number + 1} of {len(files)})"
        before, size, total = sum(sizes[:number]), sizes[number], max(1, sum(sizes))
        progress(what, before / total)
        for part, left in _load_file(path, views, names, missing, halves, loaded, called):
            progress(what, (before + part * size) / total)
            skipped += left
    if missing:
        some = ", ".join(sorted(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelError(f"{folder}: {len(missing)} tensor(s) are in no file: {some}; the checkpoint is "
                         "incomplete or of another architecture than config.json says")  # fmt: skip
    if skipped:
        _LOG.info("%s: text alone is served; %d tensors of other parts are not read", folder, skipped)
    progress("weights loaded", 1.0)


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint, all of them there."""
    index = folder / _INDEX
    if index.exists():
        return _indexed_files(index)
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        raise ModelError(f"{folder} holds {found[0].name} but neither {_SINGLE} nor {_INDEX}: "
                         "rename the file, or download the index")  # fmt: skip
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise ModelError(
            f"{folder} holds only pickled weights (.bin or .pth), which can run code: convert the "
            "checkpoint to safetensors (save_pretrained of transformers)"
        )
    raise ModelError(f"{folder} holds no weights: {_SINGLE} or {_INDEX} with its shards is missing")


def fill_random(
    views: dict[str, Tensor], seed: int = 0, loaded: Callable[[str], None] = lambda name: None
) -> None:
    """The `dummy` load format: norms 1, biases 0, all else normal with deviation 0.02.

    `loaded`: as for `load_weights`.
    """
    generator: torch.Generator | None = None
    for name in list(views):
        view = views[name]
        if name.endswith(("norm.weight", "layer_scalar")):
            view.fill_(1.0)
        elif name.endswith(".bias"):
            view.zero_()
        else:
            if generator is None:
                generator = torch.Generator(device=view.device).manual_seed(seed)
            view.normal_(0.0, 0.02, generator=generator)
        del view
        loaded(name)


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}; download it again") from None
    files = [index.parent / name for name in names]
    if not files:
        raise ModelError(f"{index} names no shards: download it again")
    absent = [path.name for path in files if not path.exists()]
    if absent:
        raise ModelError(f"{index.parent}: {len(absent)} of {len(files)} shards are missing: "
                         f"{', '.join(absent[:3])}; download them again")  # fmt: skip
    return files


def _load_file(
    path: Path,
    views: dict[str, Tensor],
    known: frozenset[str],
    missing: set[str],
    halves: dict[str, Tensor],
    loaded: Callable[[str], None],
    called: TensorNames,
) -> Iterator[tuple[float, int]]:
    """Copy one file's tensors; yields now and then how much is done, 0..1, and how many were left.

    `halves`: blocks and scales whose other half has not been read, by their names in the decoder.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not name.startswith(called.skipped)]  # noqa: SIM118
            yield 0.0, len(file.keys()) - len(names)
            for number, name in enumerate(names, 1):
                whole = _in_decoder(name, known, called)
                ending = None if whole in known else _ending(whole, called.experts)
                if whole not in known and ending is None:
                    _check_ignorable(path, name, known)
                    continue
                tensor = file.get_tensor(name)
                parts: Iterable[tuple[str, Tensor]] = [(whole, tensor)]
                if ending is not None:
                    _check_stacked(path, name, tensor, ending)
                    base = whole.removesuffix(ending)
                    parts = _each(path, base, ending, tensor, halves, called.experts)
                for wanted, part in parts:
                    if wanted not in known:
                        shape = list(tensor.shape)
                        raise ModelError(f"{path}: {name} has shape {shape}, other experts than in "
                                         "config.json: the two are of different models")  # fmt: skip
                    if wanted not in missing:
                        raise ModelError(f"{path} holds {name}, which an earlier file has too: "
                                         "download the checkpoint again")  # fmt: skip
                    _copy(path, name, part, views[wanted])
                    _scale(wanted, views[wanted], called)
                    missing.discard(wanted)
                    loaded(wanted)
                if number % 32 == 0:
                    yield number / len(names), 0
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}): download it again") from None


def _in_decoder(name: str, known: frozenset[str], called: TensorNames) -> str:
    """Checkpoints of the bare model leave out the `model.` in front."""
    for theirs, ours in called.renamed:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    prefixed = f"model.{name}"
    return prefixed if name not in known and prefixed in known else name


def _ending(name: str, called: ExpertNames) -> str | None:
    """What follows the name of a tensor that holds all of a layer's experts; None: this is none."""
    endings = _DIMENSIONS if called.interleaved else [""]
    return next((each for each in endings for one in called.stacked if name.endswith(one + each)), None)


def _check_stacked(path: Path, name: str, tensor: Tensor, ending: str) -> None:
    if tensor.dim() != _DIMENSIONS[ending]:
        dimensions = {2: "two", 3: "three", 4: "four"}[_DIMENSIONS[ending]]
        raise ModelError(f"{path}: {name} has shape {list(tensor.shape)}: a layer's experts "
                         f"have {dimensions} dimensions; download the checkpoint again")  # fmt: skip
    if ending in _HALVES and (
        tensor.dtype != torch.uint8 or (ending == "_blocks" and tensor.shape[-1] != 16)
    ):
        raise ModelError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}: MXFP4 has bytes, "
                         "blocks of 16 of them; download the checkpoint again")  # fmt: skip


def _each(
    path: Path, name: str, ending: str, stacked: Tensor, halves: dict[str, Tensor], called: ExpertNames
) -> Iterator[tuple[str, Tensor]]:
    """The experts of a tensor that holds all of a layer, by their names in the decoder.

    Of blocks or scales, once the other half is there.
    """
    gate_up = name.endswith(called.stacked[0])
    kinds = called.each[:-1] if gate_up else called.each[-1:]
    head = name.removesuffix(called.stacked[0 if gate_up else 1])
    count, what = len(kinds), "bias" if ending == "_bias" else "weight"
    scales: Tensor | None = None
    if ending in _HALVES:
        halves[name + ending] = stacked
        if not all(name + half in halves for half in _HALVES):
            return
        stacked, scales = (halves.pop(name + half) for half in _HALVES)
        if stacked.shape[:-1] != scales.shape:
            raise ModelError(f"{path}: {name} has blocks {list(stacked.shape)} and scales "
                             f"{list(scales.shape)}: download the checkpoint again")  # fmt: skip
    for number, one in enumerate(stacked):
        if scales is not None:
            one = widened(one, scales[number])
        elif called.interleaved and one.dim() == 2:
            one = one.t()
        if called.interleaved:
            parts = [one[at::count] for at in range(count)]
        else:
            parts = list(one.tensor_split(count))
        for kind, part in zip(kinds, parts, strict=True):
            yield f"{head}experts.{number}.{kind}.{what}", part


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 as float32 [.., 32 * groups]: uint8 blocks [.., groups, 16], scales [.., groups].

    A byte has two numbers, the lower bits' first; a scale is a power of two, 127 above its exponent.
    """
    values = torch.tensor([*_FP4, *(-value for value in _FP4)])
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)
    floats = F.embedding(blocks.int(), pairs).flatten(-2)
    return torch.ldexp(floats, scales.int()[..., None] - 127).flatten(-2)


def _copy(path: Path, name: str, tensor: Tensor, view: Tensor) -> None:
    if tensor.shape != view.shape:
        raise ModelError(f"{path}: {name} has shape {list(tensor.shape)}, config.json says "
                         f"{list(view.shape)}: the two are of different models")  # fmt: skip
    if tensor.dtype not in _FLOATS:
        raise ModelError(f"{path}: {name} is {str(tensor.dtype).removeprefix('torch.')}: only float32, "
                         "bfloat16 and float16 weights are supported")  # fmt: skip
    view.copy_(tensor)


def _scale(name: str, view: Tensor, called: TensorNames) -> None:
    for ending, parts in called.scaled:
        if name.endswith(ending):
            pieces = torch.split(view, [size for size, _ in parts])
            for piece, (_, factor) in zip(pieces, parts, strict=True):
                piece.mul_(factor)


def _check_ignorable(path: Path, name: str, known: frozenset[str]) -> None:
    """Some tensors carry no information here; any other would be silently lost."""
    tied_head = name == "lm_head.weight" and "lm_head.weight" not in known
    if tied_head or name.endswith("rotary_emb.inv_freq"):
        return
    raise ModelError(f"{path} holds {name}, which the architecture in config.json has no place for: "
                     "the two are of different models")  # fmt: skip
