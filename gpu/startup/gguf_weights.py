"""The loader of GGUF files into a decoder, as `weights` is that of safetensors.

The file is memory-mapped, and a tensor is read in parts. This file knows llama.cpp's names of tensors,
not which an architecture has: the decoder says which it wants.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ramify.gpu.models.decoder import EMBEDDING
from ramify.gpu.models.definition import Definition, ExpertSettings, TensorNames
from ramify.gpu.ops.linear.base import PlainWeight, Weight
from ramify.gpu.ops.linear.blocks import BlockWeight
from ramify.gpu.ops.linear.grouped import GroupedWeight, grouped, joined, plain_floats
from ramify.gpu.progress import Progress
from ramify.gpu.startup.packing import Packing
from ramify.protocol.checkpoint.gguf import GgufFile, TensorPlace, read_gguf
from ramify.protocol.checkpoint.gguf_config import INTERLEAVED, architecture

_PART = 1 << 24  # bytes that are read at a time, about
_READ_ELSEWHERE = "rope_freqs.weight"  # in the config


def load_gguf(
    path: Path,
    views: dict[str, Tensor],
    progress: Progress,
    definition: Definition,
    packing: Packing,
) -> None:
    """Fill `views` (name in the decoder -> tensor) from the file, or give `packing` its blocks.

    Raises ModelError that names the tensor.
    """
    file = read_gguf(path, arrays=False)
    dim = definition.attention.head_dim if architecture(file) in INTERLEAVED else None
    wanted: dict[str, list[str]] = {}
    for ours, there in tensor_names(definition).items():
        if ours in views:
            wanted.setdefault(there, []).append(ours)
    _check(file, {there: (len(each), views[each[0]]) for there, each in wanted.items()})
    total, done = sum(place.bytes for place in file.tensors.values()), 0
    with path.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # until nothing is left of it
    for there, stacked in wanted.items():
        progress(f"loading {path.name}", done / max(1, total))
        whole = file.tensors[there]
        size = whole.bytes // len(stacked)
        for number, ours in enumerate(stacked):
            place = TensorPlace(whole.type, tuple(views[ours].shape), whole.offset + number * size, size)
            order = row_order(there, place.shape[0], dim)
            weight = _kept(data, place, order, ours, packing)
            if weight is None or (ours == EMBEDDING and not packing.keeps(ours, PlainWeight)):
                for first, rows in _parts(data, place):
                    _copy(views[ours], first, rows, order)
            packing.loaded(ours, weight)
        done += whole.bytes
    progress("weights loaded", 1.0)


def tensor_names(definition: Definition) -> dict[str, str]:
    """Map names in a decoder to names in a GGUF file, of tensors that this decoder may not have.

    The tensors of experts, in their order, have one name: they are parts of one tensor.
    """
    names = definition.names
    mixer = (*names.qkv, names.output, *names.qk_norms)
    feed_forward = (*names.gate_up, names.down)
    layer = {f"self_attn.{name}": f"attn_{own}" for name, own in zip(mixer, _MIXER, strict=True)}
    layer |= {f"{names.feed_forward}.{name}": f"ffn_{own}"
              for name, own in zip(feed_forward, ("gate", "up", "down"), strict=True)}  # fmt: skip
    second = "post_attention_norm" if definition.architecture == _SECOND_NORM else "ffn_norm"
    layer |= {names.before[0]: "attn_norm", names.before[1]: second}
    if any(each.norms != "before" for each in definition.layers):
        layer |= {names.after[0]: "post_attention_norm", names.after[1]: "post_ffw_norm"}
    found = {
        "model.embed_tokens": "token_embd",
        f"model.{names.last_norm}": "output_norm",
        "lm_head": "output",
    }
    for index in range(len(definition.layers)):
        found |= {f"model.layers.{index}.{ours}": f"blk.{index}.{own}" for ours, own in layer.items()}
        fed = definition.layers[index].feed_forward
        if isinstance(fed, ExpertSettings):
            experts = _expert_names(names, fed.experts)
            found |= {f"model.layers.{index}.{ours}": f"blk.{index}.{own}" for ours, own in experts}
    kinds = ("weight", "bias")
    whole = {f"{ours}.{kind}": f"{there}.{kind}" for ours, there in found.items() for kind in kinds}
    for index in range(len(definition.layers)):
        whole[f"model.layers.{index}.self_attn.sinks"] = f"blk.{index}.attn_sinks.weight"
    return whole


_MIXER = ("q", "k", "v", "output", "q_norm", "k_norm")
_SECOND_NORM = "GptOssForCausalLM"  # whose second norm is called as if it were behind attention


def _expert_names(names: TensorNames, many: int) -> list[tuple[str, str]]:
    """Pair our names with the file's, of a layer's feed-forward with experts."""
    part, called = names.feed_forward, names.experts
    found = [(f"{part}.{called.router}", "ffn_gate_inp"),
             (f"{part}.{called.shared_gate}", "ffn_gate_inp_shexp")]  # fmt: skip
    own = ("gate", "up", "down")
    shared = (*names.gate_up, names.down)
    if len(shared) == len(own):
        found += [(f"{part}.{called.shared}.{each}", f"ffn_{name}_shexp")
                  for each, name in zip(shared, own, strict=True)]  # fmt: skip
    for each, name in zip(called.each, own, strict=True):
        found += [(f"{part}.experts.{number}.{each}", f"ffn_{name}_exps") for number in range(many)]
    return found


def row_order(name: str, rows: int, dim: int | None) -> Tensor | None:
    """Compute where each row of a tensor belongs; None: rows stay as they are.

    llama.cpp rotates neighbours where we rotate halves, so it has the rows of q and k in another order,
    in heads of `dim` rows. `dim` None: the architecture's order is ours.
    """
    if dim is None or name.split(".")[2:3] not in (["attn_q"], ["attn_k"]):
        return None
    return torch.arange(rows).view(-1, 2, dim // 2).transpose(1, 2).flatten()


def _check(file: GgufFile, wanted: dict[str, tuple[int, Tensor]]) -> None:
    """Check that the file has the `wanted` tensors, (number stacked, view) by name, and no others."""
    missing = sorted(wanted.keys() - file.tensors.keys())
    if missing:
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise file.refused(f"{len(missing)} tensor(s) are missing: {some}; download the file again")
    for name, place in file.tensors.items():
        if name == _READ_ELSEWHERE:
            continue
        if name not in wanted:
            raise file.refused(f"tensor {name} has no place in the architecture that the file names; "
                               "give the model's safetensors checkpoint")  # fmt: skip
        stacked, one = wanted[name]
        shape = (stacked, *one.shape) if stacked > 1 else tuple(one.shape)
        if place.shape != shape and (1, *place.shape) != shape:  # the gate of a shared expert is a row
            raise file.refused(f"tensor {name} has shape {list(place.shape)}, the metadata say "
                               f"{list(shape)}: the two are of different models")  # fmt: skip


def _parts(data: mmap.mmap, place: TensorPlace) -> Iterator[tuple[int, Tensor]]:
    """Yield parts of a tensor as floats, each with the number of its first row; a vector as one part."""
    for first, raw in _raw(data, place):
        values = numbers(place.type.name, raw)
        yield first, values if len(place.shape) > 1 else values.view(-1)


def _kept(
    data: mmap.mmap, place: TensorPlace, order: Tensor | None, name: str, packing: Packing
) -> Weight | None:
    """Read a tensor as `packing` keeps it, its rows put in `order`; None: it is to be floats."""
    kind = place.type.name
    whole: Weight | None = None
    if place.type.numbers == 1:
        floats = plain_floats(kind, _whole(data, place)) if packing.keeps(name, PlainWeight) else None
        whole = None if floats is None else PlainWeight(floats)
    elif packing.keeps(name, BlockWeight):
        whole = BlockWeight([(kind, _whole(data, place))], place.shape[1])
    elif packing.keeps(name, GroupedWeight):
        whole = joined([grouped(kind, raw) for _, raw in _raw(data, place)])
    return whole if whole is None or order is None else whole.in_order(order.argsort())


def _whole(data: mmap.mmap, place: TensorPlace) -> Tensor:
    """View all rows in the file: uint8 [rows, bytes]."""
    raw = torch.frombuffer(data, dtype=torch.uint8, count=place.bytes, offset=place.offset)
    return raw.view(place.shape[0], -1)


def _raw(data: mmap.mmap, place: TensorPlace) -> Iterator[tuple[int, Tensor]]:
    """Yield views of rows in the file, uint8 [rows, bytes], each with the number of its first row."""
    rows = place.shape[0] if len(place.shape) > 1 else 1
    size = place.bytes // rows
    step = max(1, _PART // size)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        raw = torch.frombuffer(
            data, dtype=torch.uint8, count=count * size, offset=place.offset + first * size
        )
        yield first, raw.view(count, size)


def numbers(kind: str, raw: Tensor) -> Tensor:
    """Decode rows uint8 [rows, bytes] of type `kind` to floats."""
    values = plain_floats(kind, raw)
    return grouped(kind, raw).floats() if values is None else values


def _copy(view: Tensor, first: int, rows: Tensor, order: Tensor | None) -> None:
    if order is None:
        view[first : first + len(rows)] = rows
    else:
        own = order[first : first + len(rows)].to(view.device)
        view[own] = rows.to(view.device, view.dtype)
