"""The parts of towers: settings, weights that the loader fills by name, norms and products."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.protocol.pictures import PictureFit

Block = TypeVar("Block")  # the parts of a layer


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "silu": F.silu,
}
"""Activations by their names in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSettings(ABC):
    """Base of the settings of a tower, as other files need them.

    `parts`: beginnings of its tensors' names in checkpoints; `renamed`: other beginnings, and ours of
    them, as in `TensorNames`.
    """

    patch: int  # pixels of a patch's side
    merge: int = 1  # patches of a token's side
    frames: int = 1  # how many equal ones a picture is
    side: int | None = None  # pixels of every picture's side; None: they may be of any size
    output: int  # the decoder's size
    deep: tuple[int, ...] = ()  # the layers after which terms of the decoder's first layers are made
    turned: bool = False  # tokens of the decoder have three positions (M-RoPE)

    parts: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")
    renamed: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.vision_tower.vision_model.", "vision_tower."),
        ("model.vision_tower.", "vision_tower."),
        ("vision_tower.vision_model.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    )

    @property
    def unit(self) -> int:
        """The pixels of a token's side."""
        return self.patch * self.merge

    @property
    def width(self) -> int:
        """The numbers of a token for the decoder: the embedding, and the terms to add after layers."""
        return (1 + len(self.deep)) * self.output

    @property
    def unread(self) -> tuple[str, ...]:
        """The beginnings of names of tensors that no picture needs."""
        return ()

    @abstractmethod
    def empty(self, dtype: torch.dtype, device: torch.device) -> "Tower":
        """Make a tower whose weights are to be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredTowerSettings(TowerSettings):
    """The settings of a tower whose layers are all alike, as of config.json."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    activation: str


@dataclass(frozen=True, slots=True)
class Vision:
    """A model's vision. A picture is a number of tokens `token`, between `before` and `after`.

    `fit`: how its processor fits sizes. `lined`: tokens that the processor names end each row.
    `around`: text on both sides of `before` and `after`. `whole`: in which layers a picture's tokens see
    its later ones.
    """

    tower: TowerSettings
    token: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    fit: PictureFit = "area"
    lined: bool = False
    around: str = ""
    whole: Literal["none", "windows", "all"] = "none"


@dataclass(slots=True)
class Product:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Norm:
    """A norm. `bias`: None: by the root of the mean square."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Tower(ABC):
    """Base of towers. Built empty: the loader fills `weights`."""

    def __init__(self, settings: TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        self.settings = settings
        self.dtype, self.device = dtype, device
        self.layers_run = 0  # since the start; read by other threads
        self._views: dict[str, Tensor] = {}

    def weights(self) -> dict[str, Tensor]:
        """Map names in checkpoints to the tensors that the loader fills."""
        return self._views

    @abstractmethod
    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Run patches [B, rows * columns, inputs] of like pictures: [B, tokens, 1 + deep, output].

        The decoder's embedding of each token comes first, then the terms to add after its layers.
        """

    def _each(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yield the layers, and count those that were run."""
        for block in blocks:
            yield block
            self.layers_run += 1

    def _empty(self, name: str, *shape: int, stored: Sequence[int] = ()) -> Tensor:
        """Make a tensor for the loader. `stored`: its shape in checkpoints, if another."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._views[name] = tensor.view(*stored) if stored else tensor
        return tensor

    def _product(self, name: str, inputs: int, outputs: int, bias: bool = True) -> Product:
        weight = self._empty(f"{name}.weight", outputs, inputs)
        return Product(weight, self._empty(f"{name}.bias", outputs) if bias else None)

    def _convolution(self, name: str, outputs: int, *kernel: int, bias: bool = True) -> Product:
        """Make a convolution of patches that do not overlap: a product. `kernel`: channels first."""
        inputs = torch.Size(kernel).numel()
        weight = self._empty(f"{name}.weight", outputs, inputs, stored=(outputs, *kernel))
        return Product(weight, self._empty(f"{name}.bias", outputs) if bias else None)

    def _norm(self, name: str, size: int, eps: float, bias: bool = True) -> Norm:
        weight = self._empty(f"{name}.weight", size)
        return Norm(weight, self._empty(f"{name}.bias", size) if bias else None, eps)


def places(rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Compute row and column of each patch, int64[rows * columns]: those of a token in a row."""
    numbers = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    order = numbers.transpose(1, 2).flatten()
    return order // columns, order % columns


def attended(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float | None = None) -> Tensor:
    """Attend of all patches of a picture to each other: [B, patches, size] -> [B, patches, size].

    `scale`: None: by the size of a head.
    """
    q, k, v = (each.reshape(*each.shape[:2], heads, -1).transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of the last dimension, in float32."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
