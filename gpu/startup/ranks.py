"""Ranks that hold a model together: each one's part, sizes that all agree on, and what is refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from ramify.gpu.devices import cores
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.definition import Definition
from ramify.gpu.models.split import Cut, cuts, part_of
from ramify.gpu.ranks.checks import check_ranks, refuse_no_experts, refused
from ramify.gpu.ranks.group import Ranks, RankSums
from ramify.gpu.ranks.ring import RankPlace
from ramify.gpu.startup.drafts import DraftChoice
from ramify.gpu.startup.quantization import Quantization, choose_quantization
from ramify.gpu.step.buckets import Bucket
from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExecutorInfo

if TYPE_CHECKING:
    from ramify.gpu.ops.triton_ops import TritonOps


@dataclass(frozen=True, slots=True)
class Split:
    """This rank's part, `shape`, of the model `whole`."""

    ranks: Ranks
    whole: Definition
    shape: Definition
    parameters: int  # of the whole

    def cuts(self, own: Decoder, whole: Definition | None = None) -> dict[str, Cut]:
        """List the cuts of tensors of which `own` has a part; `own`: this rank's part of `whole`."""
        return cuts(whole or self.whole, own, self.ranks.rank, self.ranks.count)

    def share(self, free: int) -> int:
        """Return this rank's share of `free` bytes, which ranks on a CPU have in common."""
        return free if self.ranks.on_gpu else free // self.ranks.count


def rehearsing_ops(split: Split | None, info: ExecutorInfo) -> "Callable[..., TritonOps]":
    """Return the constructor of operations for rehearsal: each rank measures steps in its own time."""
    from ramify.gpu.executors.cuda_ranks import ranked
    from ramify.gpu.ops.triton_ops import TritonOps

    alone = alone_of(split)
    return TritonOps if alone is None else ranked(alone, info)


def alone_of(split: Split | None) -> RankSums | None:
    """Return this rank's sums for rehearsal, which wait for no other rank."""
    return None if split is None else RankSums(split.ranks.rank, split.ranks.count)


def ranks_of(split: Split | None) -> Ranks | None:
    return None if split is None else split.ranks


def guessed_here(split: Split | None, draft: DraftChoice) -> DraftChoice:
    """Return this process' drafter on a GPU: rank 0's alone, or, of an MTP layer, each rank's part."""
    follows = split is not None and split.ranks.rank > 0 and draft.kind != "mtp"
    return DraftChoice("none", "rank 0 guesses") if follows else draft


def agreed_buckets(split: Split | None, buckets: list[Bucket]) -> list[Bucket]:
    """Return the buckets that all ranks found worth a graph: the same order, small to large, on all."""
    return buckets if split is None else buckets[: split.ranks.least([len(buckets)])[0]]


def agreed(split: Split | None, info: ExecutorInfo) -> ExecutorInfo:
    """Return `info` with the sizes that all ranks have room for."""
    if split is None:
        return info
    names = ("pages", "context", "state_slots", "window_pages", "host_blocks")
    least = split.ranks.least([getattr(info, name) for name in names])
    return msgspec.structs.replace(info, **dict(zip(names, least, strict=True)))


def join(
    config: ModelConfig, whole: Definition, device: torch.device, place: RankPlace | None
) -> Split | None:
    """Join the other ranks; None: there are none. Raises ModelError for settings that rule them out."""
    count = config.tensor_parallel
    if count == 1:
        return None
    if place is None:
        raise refused(count, "ranks are processes; give --executor process")
    check_ranks(config)
    if config.expert_parallel:
        refuse_no_experts(whole.has_experts, count)
    shape = part_of(whole, place.rank, place.ranks, config.expert_parallel)
    on_gpu = device.type == "cuda"
    kernels = on_gpu or config.attention == "triton"
    obstacles = {
        "on a CPU ranks hold floats, no integers; give --quantization none": not kernels
        and config.quantization in ("int8", "int4"),
    }
    for told, there in obstacles.items():
        if there:
            raise refused(count, told)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or max(1, cores() // count))
    parameters = Decoder(whole, 1, torch.float32, torch.device("meta")).parameters()
    return Split(Ranks(place, device), whole, shape, parameters)


def quantization_of(config: ModelConfig, shape: Definition, device: torch.device) -> Quantization:
    """Choose the format of weights; ranks on a CPU have floats. Raises ModelError."""
    if config.tensor_parallel > 1 and config.quantization == "auto" and device.type == "cpu":
        return Quantization("none", f"the part of each of {config.tensor_parallel} ranks is floats")
    return choose_quantization(config, shape, device)
