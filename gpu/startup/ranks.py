"""Ranks that hold a model together: what each has of it, and what cannot be had with them."""

import os
from dataclasses import dataclass

import msgspec
import torch

from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.definition import Definition
from ramify.gpu.models.split import Cut, cuts, part_of
from ramify.gpu.ranks.group import Ranks
from ramify.gpu.ranks.ring import RankPlace
from ramify.gpu.startup.quantization import Quantization
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExecutorInfo


@dataclass(frozen=True, slots=True)
class Split:
    """This rank's part, `shape`, of the `whole`."""

    ranks: Ranks
    whole: Definition
    shape: Definition
    parameters: int  # of the whole
    floats: Quantization

    def cuts(self, own: Decoder) -> dict[str, Cut]:
        """Of the tensors that `own`, a decoder of `shape`, has not whole."""
        return cuts(self.whole, own, self.ranks.rank, self.ranks.count)

    def share(self, free: int) -> int:
        """Of the `free` bytes that ranks on a CPU see, each of them."""
        return free if self.ranks.on_gpu else free // self.ranks.count

    def agreed(self, info: ExecutorInfo) -> ExecutorInfo:
        """`info` with the sizes that all ranks have room for."""
        names = ("pages", "context", "state_slots", "window_pages", "host_blocks")
        least = self.ranks.least([getattr(info, name) for name in names])
        return msgspec.structs.replace(info, **dict(zip(names, least, strict=True)))


def join(
    config: ModelConfig, whole: Definition, device: torch.device, place: RankPlace | None
) -> Split | None:
    """Find the other ranks; None: there are none. Raises ModelError for what does not go with them."""
    count = config.tensor_parallel
    if count == 1:
        return None
    if place is None:
        raise _refused(count, "ranks are processes; give --executor process")
    shape = part_of(whole, place.rank, place.ranks)
    obstacles = {
        f"a {device.type} is one of them": device.type != "cpu",
        "a GGUF file is not divided; give a folder of safetensors": config.path.is_file(),
        f"--quantization {config.quantization} is not; give none": config.quantization
        not in ("auto", "none"),
        "--attention triton is for a GPU": config.attention not in ("auto", "torch"),
        "--draft mtp reads the whole model; give ngram, or a draft model": config.draft == "mtp",
    }
    for told, there in obstacles.items():
        if there:
            raise _refused(count, told)
    threads = config.threads or max(1, (os.cpu_count() or 1) // count)
    torch.set_num_threads(threads)
    parameters = Decoder(whole, 1, torch.float32, torch.device("meta")).parameters()
    floats = Quantization("none", f"the part of each of {count} ranks is floats")
    return Split(Ranks(place, device), whole, shape, parameters, floats)


def _refused(count: int, told: str) -> ModelError:
    return ModelError(f"--tensor-parallel {count}: {told}; or leave --tensor-parallel out")
