"""The loader of safetensors checkpoints into a decoder, straight into its merged weights.

Every tensor is checked: that it is there, its shape, its dtype. A fault raises ModelError, which names
the file and the tensor and says what to do. This file does not know architectures: the decoder says
which tensors it wants.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ramify.gpu.models.definition import ExpertNames, TensorNames
from ramify.gpu.models.split import Cut
from ramify.gpu.ops.linear.base import PlainWeight, Weight, plain_weight
from ramify.gpu.ops.linear.checkpoints import WeightFormat
from ramify.gpu.progress import Progress
from ramify.gpu.startup.packing import Packing
from ramify.protocol.errors import ModelError

_LOG = logging.getLogger("ramify.gpu.startup")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOWERS = {"vision_tower.", "visual."}  # of which a model that sees has one
_NAME_MOST = 255  # bytes of a file's name, as file systems have it
# Of tensors with all experts of a layer, by how their names end: their dimensions
_DIMENSIONS = {"": 3, "_bias": 2}
_FLOAT_NAMES = {"F32", "BF16", "F16", "F64"}  # as safetensors calls them
_FLOATS = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


def load_weights(
    folder: Path,
    views: dict[str, Tensor],
    progress: Progress,
    packing: Packing | None = None,
    called: TensorNames = TensorNames(),  # noqa: B008
    stored: WeightFormat | None = None,
    cuts: Mapping[str, Cut] | None = None,
) -> None:
    """Fill `views` (name in the decoder -> tensor) from the checkpoint in `folder`.

    `packing`: is told of each tensor that is filled, and takes those that it keeps. `called`: how names
    in the checkpoint differ. `stored`: the format of weights that are no floats. `cuts`: of tensors of
    which a rank reads its part alone. Raises ModelError.
    """
    packing = Packing(views, (), plain_weight) if packing is None else packing
    _read(folder, _Target(views, packing, called, stored, cuts or {}), progress, stored)


def check_weights(
    folder: Path, views: dict[str, Tensor], called: TensorNames, stored: WeightFormat | None
) -> None:
    """Check names, shapes and dtypes as `load_weights` does, without loading. Raises ModelError."""
    target = _Headers(views, Packing(views, (), plain_weight), called, stored, {})
    _read(folder, target, lambda what, share: None, stored)


def _read(folder: Path, target: "_Target", progress: Progress, stored: WeightFormat | None) -> None:
    files, skipped = checkpoint_files(folder), 0
    sizes = [path.stat().st_size for path in files]
    missing = target.missing
    for number, path in enumerate(files):
        what = f"loading {path.name} ({number + 1} of {len(files)})"
        before, size, total = sum(sizes[:number]), sizes[number], max(1, sum(sizes))
        progress(what, before / total)
        for part, left in _load_file(path, target):
            progress(what, (before + part * size) / total)
            skipped += left
    for name, parts in target.parts.items():
        assert stored is not None
        raise ModelError(f"{folder}: {name} has {stored.missing(parts)} in any file: the checkpoint is "
                         "incomplete")  # fmt: skip
    if missing:
        some = ", ".join(sorted(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelError(f"{folder}: {len(missing)} tensor(s) are in no file: {some}; the checkpoint is "
                         "incomplete or of another architecture than config.json says")  # fmt: skip
    if skipped:
        alone = _TOWERS.issubset(target.called.skipped)
        said = "text alone is served; " if alone else ""
        _LOG.info("%s: %s%d tensors of other parts are not read", folder, said, skipped)
    if target.widened:
        assert stored is not None
        _LOG.info("%s: %d weights in %s are widened to floats", folder, target.widened, stored.name)
    progress("weights loaded", 1.0)


class _Target:
    """The views to fill, and the parts that were read of weights stored in several tensors."""

    def __init__(
        self,
        views: dict[str, Tensor],
        packing: Packing,
        called: TensorNames,
        stored: WeightFormat | None,
        cuts: Mapping[str, Cut],
    ) -> None:
        self.views = views
        self.known = frozenset(views)
        self.cuts = cuts
        self.missing = {name for name in views if name not in cuts or cuts[name].pieces}
        self.parts: dict[str, dict[str, Tensor]] = {}  # of `stored` weights
        self.widened = 0
        self.called = called
        self._packing = packing
        self._stored = stored
        self._device = next((view.device for view in views.values()), None)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return what is to be read of a tensor, of which nothing is in memory yet."""
        return tensor

    def is_elsewhere(self, name: str) -> bool:
        """Whether only other ranks have this tensor of a file."""
        cut = self.cuts.get(_in_decoder(name, self.known, self.called))
        return cut is not None and not cut.pieces

    def read(self, file: Any, name: str) -> Tensor:
        """Read a tensor of a file; of one that is cut, this rank's part alone."""
        cut = self.cuts.get(_in_decoder(name, self.known, self.called))
        whole = None if cut is None else file.get_slice(name)
        codes = whole is not None and whole.get_dtype() not in _FLOAT_NAMES  # cut with their scales
        if cut is None or whole is None or codes or tuple(whole.get_shape()) != cut.shape:
            tensor: Tensor = file.get_tensor(name)
            return tensor
        ahead = (slice(None),) * cut.dim
        return torch.cat([whole[(*ahead, slice(*piece))] for piece in cut.pieces], cut.dim)

    def part(self, name: str, tensor: Tensor) -> tuple[str, str] | None:
        """See `WeightFormat.part`."""
        return None if self._stored is None else self._stored.part(name, tensor)

    def is_idle_bias(self, name: str, tensor: Tensor) -> bool:
        """Whether a quantizing tool made this bias of zeros, for a product that has none."""
        return self._stored is not None and name.endswith(".bias") and not bool(tensor.any())

    def take_part(self, path: Path, name: str, whole: str, part: str, tensor: Tensor) -> None:
        """Take tensor `name`, a part of weight `whole`, which is put in its place when complete."""
        stacked = None if whole in self.known else _ending(whole, self.called.experts)
        if self.is_elsewhere(whole):
            return
        if whole not in self.known and stacked is None:
            _check_ignorable(path, name, self.known)
        if not part or self._stored is None:
            return
        if stacked is None:
            self._check_new(path, name, whole)
        parts = self.parts.setdefault(whole, {})
        if part in parts:
            raise ModelError(
                f"{path} holds {name}, which is there already: download the checkpoint again"
            )
        parts[part] = tensor
        if self._stored.missing(parts) is not None:
            return
        del self.parts[whole]
        try:
            if stacked is None:
                self._put(path, name, whole, self._weight(parts, self._whole(whole)))
            else:
                self._take_experts(path, name, whole, parts)
        except ValueError as error:
            raise ModelError(f"{path}: {whole}: {error}; download the checkpoint again") from None

    def _weight(self, parts: dict[str, Tensor], shape: Sequence[int]) -> Weight:
        there = {key: part.to(self._device) for key, part in parts.items()}
        return self.stored.weight(there, _matrix(shape))

    @property
    def stored(self) -> WeightFormat:
        """The format of stored weights, where there are some."""
        assert self._stored is not None
        return self._stored

    def _take_experts(self, path: Path, name: str, whole: str, parts: dict[str, Tensor]) -> None:
        """Put the weights of all of a layer's experts in their places: gate and up, or down."""
        called = self.called.experts
        gate_up = whole.endswith(called.stacked[0])
        kinds = called.each[:-1] if gate_up else called.each[-1:]
        head = whole.removesuffix(called.stacked[0 if gate_up else 1])
        if called.interleaved and self._stored is not None and self._stored.name != "mxfp4":
            raise ValueError("inputs of experts come before their outputs, which this format has not")
        count = {len(part) if part.dim() > 2 else 0 for part in parts.values()}
        if len(count) > 1 or 0 in count:
            shapes = [list(part.shape) for part in parts.values()]
            raise ValueError(f"shapes {shapes} are not those of a layer's experts")
        for number in range(count.pop()):
            names = [f"{head}experts.{number}.{kind}.weight" for kind in kinds]
            if self.is_elsewhere(names[0]):
                continue
            if any(each not in self.views for each in names):
                raise ValueError("there are other experts than in config.json")
            rows, inputs = self._whole(names[0])
            weight = self._weight({key: each[number] for key, each in parts.items()},
                                  (rows * len(kinds), inputs))  # fmt: skip
            all_rows = torch.arange(rows * len(kinds), device=self._device)
            turns = all_rows.view(rows, -1).t() if called.interleaved else all_rows.view(-1, rows)
            for each, own in zip(names, turns, strict=True):
                self._put(path, name, each, weight.in_order(own))

    def _whole(self, wanted: str) -> Sequence[int]:
        """Return the shape of the tensor `wanted` in files."""
        cut = self.cuts.get(wanted)
        return self.views[wanted].shape if cut is None else cut.shape

    def _own(self, path: Path, name: str, weight: Weight, cut: Cut | None) -> Weight:
        """Cut out this rank's part of a weight. Raises ModelError where that is not possible."""
        try:
            return weight if cut is None else cut.of_weight(weight)
        except ValueError as error:
            raise ModelError(f"{path}: {name}: {error}: give another --tensor-parallel") from None

    def _put(self, path: Path, name: str, wanted: str, weight: Weight) -> None:
        """Put a stored weight in the place of `wanted`: as it is, if that is kept, else as floats."""
        if wanted.endswith(tuple(ending for ending, _ in self.called.scaled)):
            self.fill(path, name, wanted, weight.floats())
            self.widened += 1
        elif self._packing.keeps(wanted, type(weight)):
            self._note(path, name, wanted)
            self._packing.loaded(wanted, self._own(path, name, weight, self.cuts.get(wanted)))
        else:
            self.fill(path, name, wanted, weight.floats())
            self.widened += 1

    def fill(self, path: Path, name: str, wanted: str, part: Tensor) -> None:
        """Copy the floats of tensor `name`, or of a part of it, to the view `wanted`."""
        self._note(path, name, wanted)
        view, cut = self.views[wanted], self.cuts.get(wanted)
        if cut is not None and tuple(part.shape) == cut.shape:
            part = cut.of(part)
        _check_fits(path, name, part, view if cut is None or part.shape == view.shape else cut)
        if self._keeps(wanted, part):
            self._packing.loaded(wanted, PlainWeight(part.contiguous()))
            return
        self._packing.begin(wanted)
        view.copy_(part)
        _scale(wanted, view, self.called, cut)
        self._packing.loaded(wanted)

    def _keeps(self, wanted: str, part: Tensor) -> bool:
        """Whether floats are packed without a copy to the view."""
        scaled = tuple(ending for ending, _ in self.called.scaled)
        kept = part.dim() == 2 and part.dtype != torch.float64 and not wanted.endswith(scaled)
        return kept and self._packing.keeps(wanted, PlainWeight)

    def _note(self, path: Path, name: str, wanted: str) -> None:
        self._check_new(path, name, wanted)
        self.missing.discard(wanted)

    def _check_new(self, path: Path, name: str, wanted: str) -> None:
        if wanted not in self.missing:
            raise ModelError(f"{path} holds {name}, which an earlier file has too: "
                             "download the checkpoint again")  # fmt: skip


class _Headers(_Target):
    """A target that checks the headers of tensors and takes no numbers."""

    def tensor(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() < 2 else tensor.to("meta")

    def fill(self, path: Path, name: str, wanted: str, part: Tensor) -> None:
        self._note(path, name, wanted)
        _check_fits(path, name, part, self.views[wanted])

    def _put(self, path: Path, name: str, wanted: str, weight: Weight) -> None:
        self._note(path, name, wanted)

    def _weight(self, parts: dict[str, Tensor], shape: Sequence[int]) -> Weight:
        self.stored.check(parts, _matrix(shape))
        return _Unloaded()


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError("it is no matrix")
    return shape[0], shape[1]


class _Unloaded(Weight):
    """A stored weight that is not read."""

    __slots__ = ()

    def in_order(self, order: Tensor) -> Weight:
        return self


def checkpoint_files(folder: Path) -> list[Path]:
    """List the safetensors files of the checkpoint. Raises ModelError if one is missing."""
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


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}; download it again") from None
    for name in names:
        plain = isinstance(name, str) and Path(name).name == name
        if not plain or len(name.encode(errors="replace")) > _NAME_MOST:
            raise ModelError(f"{index} names the shard {name!r:.40}: must be a file beside it; download "
                             "it again")  # fmt: skip
    files = [index.parent / name for name in names]
    if not files:
        raise ModelError(f"{index} names no shards: download it again")
    absent = [path.name for path in files if not path.exists()]
    if absent:
        raise ModelError(f"{index.parent}: {len(absent)} of {len(files)} shards are missing: "
                         f"{', '.join(absent[:3])}; download them again")  # fmt: skip
    return files


def _load_file(path: Path, target: _Target) -> Iterator[tuple[float, int]]:
    """Copy a file's tensors. Yields now and then the part done, 0..1, and how many were skipped."""
    known, called = target.known, target.called
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not name.startswith(called.skipped)]  # noqa: SIM118
            yield 0.0, len(file.keys()) - len(names)
            for number, name in enumerate(names, 1):
                if target.is_elsewhere(name):
                    continue
                tensor = target.tensor(target.read(file, name))
                if (place := target.part(name, tensor)) is not None:
                    target.take_part(path, name, _in_decoder(place[0], known, called), place[1], tensor)
                    continue
                whole = _in_decoder(name, known, called)
                ending = None if whole in known else _ending(whole, called.experts)
                if whole not in known and ending is None:
                    if not target.is_idle_bias(name, tensor):
                        _check_ignorable(path, name, known)
                    continue
                parts: Iterable[tuple[str, Tensor]] = [(whole, tensor)]
                if ending is not None:
                    _check_stacked(path, name, tensor, ending)
                    base = whole.removesuffix(ending)
                    parts = _each(base, ending, tensor, called.experts)
                for wanted, part in parts:
                    if target.is_elsewhere(wanted):
                        continue
                    if wanted not in known:
                        shape = list(tensor.shape)
                        raise ModelError(f"{path}: {name} has shape {shape}, other experts than in "
                                         "config.json: the two are of different models")  # fmt: skip
                    target.fill(path, name, wanted, part)
                if number % 32 == 0:
                    yield number / len(names), 0
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}): download it again") from None


def _in_decoder(name: str, known: frozenset[str], called: TensorNames) -> str:
    """Translate a name to the decoder's. Checkpoints of the bare model leave out `model.`."""
    for theirs, ours in called.renamed:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    prefixed = f"model.{name}"
    return prefixed if name not in known and prefixed in known else name


def _ending(name: str, called: ExpertNames) -> str | None:
    """Find the ending of the name of a tensor of all of a layer's experts; None: it is none."""
    endings = _DIMENSIONS if called.interleaved else [""]
    return next((each for each in endings for one in called.stacked if name.endswith(one + each)), None)


def _check_stacked(path: Path, name: str, tensor: Tensor, ending: str) -> None:
    if tensor.dim() != _DIMENSIONS[ending]:
        dimensions = {2: "two", 3: "three"}[_DIMENSIONS[ending]]
        raise ModelError(f"{path}: {name} has shape {list(tensor.shape)}: a layer's experts "
                         f"have {dimensions} dimensions; download the checkpoint again")  # fmt: skip


def _each(name: str, ending: str, stacked: Tensor, called: ExpertNames) -> Iterator[tuple[str, Tensor]]:
    """Split a tensor of all of a layer's experts: yields names in the decoder, and parts."""
    gate_up = name.endswith(called.stacked[0])
    if called.inputs and called.inputs != stacked.shape[2 if gate_up else 1]:
        stacked = stacked.transpose(1, 2)
    kinds = called.each[:-1] if gate_up else called.each[-1:]
    head = name.removesuffix(called.stacked[0 if gate_up else 1])
    count, what = len(kinds), "bias" if ending == "_bias" else "weight"
    for number, one in enumerate(stacked):
        if called.interleaved and one.dim() == 2:
            one = one.t()
        parts = (
            [one[at::count] for at in range(count)] if called.interleaved else one.tensor_split(count)
        )
        for kind, part in zip(kinds, parts, strict=True):
            yield f"{head}experts.{number}.{kind}.{what}", part


def _check_fits(path: Path, name: str, tensor: Tensor, view: Tensor | Cut) -> None:
    if tensor.shape != view.shape:
        raise ModelError(f"{path}: {name} has shape {list(tensor.shape)}, config.json says "
                         f"{list(view.shape)}: the two are of different models")  # fmt: skip
    if tensor.dtype not in _FLOATS:
        raise ModelError(f"{path}: {name} is {str(tensor.dtype).removeprefix('torch.')}: only float32, "
                         "bfloat16 and float16 weights are supported")  # fmt: skip


def _scale(name: str, view: Tensor, called: TensorNames, cut: Cut | None) -> None:
    for ending, parts in called.scaled:
        if name.endswith(ending):
            factors = torch.cat([torch.full((size,), factor) for size, factor in parts]).to(view.device)
            if cut is not None and not cut.dim:
                factors = cut.of(factors)
            view.mul_(factors.view(-1, *[1] * (view.dim() - 1)))


def _check_ignorable(path: Path, name: str, known: frozenset[str]) -> None:
    """Check that a tensor without a place carries no information. Raises ModelError."""
    tied_head = name == "lm_head.weight" and "lm_head.weight" not in known
    if tied_head or name.endswith("rotary_emb.inv_freq"):
        return
    raise ModelError(f"{path} holds {name}, which the architecture in config.json has no place for: "
                     "the two are of different models")  # fmt: skip
