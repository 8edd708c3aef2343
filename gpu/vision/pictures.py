"""Pictures of an executor: runs the tower on those that a step needs, and keeps what it made of them.

Outputs are kept in host memory, as many bytes as there is room for; what was not used for longest goes.
So branches and chunks of a prompt share one run. Pictures of one size run together.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ramify.gpu.ops.base import ShownPictures
from ramify.gpu.step.staging import Array
from ramify.gpu.vision.patches import Patches
from ramify.gpu.vision.placing import RowPictures, lines_of
from ramify.gpu.vision.tower import Tower
from ramify.protocol.pictures import Picture, PictureSettings, PlacedPicture

_KEPT_BYTES = 512 << 20
_TOGETHER = 1 << 14  # patches that run at once, or one picture


class Pictures:
    def __init__(self, tower: Tower, settings: PictureSettings, room: int = _KEPT_BYTES) -> None:
        """`room`: bytes of outputs that are kept; those of a step's pictures are in any case."""
        self._runs = 0
        self.turned = tower.settings.turned
        self.settings = settings
        self.tower = tower
        self._patches = Patches(settings, tower.settings.frames)
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._room, self._bytes = room, 0

    def shown(self, rows: Array, positions: Array, pictures: RowPictures) -> ShownPictures | None:
        """What takes the embedding's place in a step; None: it shows no picture.

        Raises ValueError where a picture is neither given nor kept.
        """
        found = list(lines_of(rows, positions, pictures))
        if not found:
            return None
        outputs = self._outputs([each.placed for each in found])
        values = [outputs[each.placed.key][torch.from_numpy(each.offsets)] for each in found]
        lines = torch.cat([torch.from_numpy(each.lines) for each in found])
        device = self.tower.device
        return ShownPictures(lines.to(device), torch.cat(values).to(device))

    def rehearse(self) -> None:
        """Run the tower on as many patches as it is ever given at once, of black pictures."""
        settings, unit = self.settings, self.settings.unit
        side = max(1, math.isqrt(settings.most) // unit) * unit
        black = Picture(side, side, bytes(3 * side * side))
        self._run([black] * max(1, _TOGETHER * settings.patch**2 // side**2))

    def taken(self) -> int:
        """How many pictures the tower ran on since this was asked last."""
        runs, self._runs = self._runs, 0
        return runs

    def _outputs(self, placed: Iterable[PlacedPicture]) -> dict[bytes, Tensor]:
        found: dict[bytes, Tensor] = {}
        missing: dict[bytes, Picture] = {}
        for each in placed:
            if each.key in self._kept:
                self._kept.move_to_end(each.key)
                found[each.key] = self._kept[each.key]
            elif each.picture is None:
                raise ValueError("a picture of the step is neither given nor kept")
            else:
                missing[each.key] = each.picture
        for batch in self._batches(missing):
            made = self._run([missing[key] for key in batch])
            self._runs += len(batch)
            for key, output in zip(batch, made, strict=True):
                found[key] = self._keep(key, output.clone() if len(batch) > 1 else output)
        return found

    def _run(self, batch: Sequence[Picture]) -> Tensor:
        """Pictures of one size -> [B, tokens, 1 + deep, output] in host memory."""
        rows, columns = self._patches.grid(batch[0])
        patches = torch.stack([self._patches.cut(each) for each in batch])
        return self.tower.forward(patches, rows, columns).cpu()

    def _batches(self, missing: dict[bytes, Picture]) -> list[list[bytes]]:
        """Keys of pictures of one size, so many at once as `_TOGETHER` says."""
        sizes: dict[tuple[int, int], list[bytes]] = {}
        for key, picture in missing.items():
            sizes.setdefault(self._patches.grid(picture), []).append(key)
        batches: list[list[bytes]] = []
        for (rows, columns), keys in sizes.items():
            most = max(1, _TOGETHER // (rows * columns))
            batches += [keys[at : at + most] for at in range(0, len(keys), most)]
        return batches

    def _keep(self, key: bytes, output: Tensor) -> Tensor:
        self._kept[key] = output
        self._bytes += output.nbytes
        while self._bytes > self._room and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return output
