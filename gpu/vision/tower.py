"""What towers are made of: weights that the loader fills by their names, norms and products."""

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
"""By their names in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSettings(ABC):
    """What others know of a tower.

    `parts`: how checkpoints begin the names of its tensors; `renamed`: what some begin with, and what
    that is for us, as in `TensorNames`.
    """

    patch: int  # pixels of a patch's side
    merge: int = 1  # patches of a token's side
    frames: int = 1  # how many equal ones a picture is
    side: int | None = None  # pixels of every picture's side; None: they may be of any size
    output: int  # the decoder's size
    deep: tuple[int, ...] = ()  # behind these layers, what is added to the decoder's first ones
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
        """Pixels of a token's side."""
        return self.patch * self.merge

    @property
    def width(self) -> int:
        """Numbers that the decoder is given of a token: the embedding, and what is added to layers."""
        return (1 + len(self.deep)) * self.output

    @property
    def unread(self) -> tuple[str, ...]:
        """How names begin of those tensors that no picture needs."""
        return ()

    @abstractmethod
    def empty(self, dtype: torch.dtype, device: torch.device) -> "Tower":
        """A tower whose weights are to be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredTowerSettings(TowerSettings):
    """Of a tower whose layers are all alike, as config.json says them."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    activation: str


@dataclass(frozen=True, slots=True)
class Vision:
    """How a model sees pictures. Each is so many tokens called `token`, between `before` and `after`.

    `fit`: what its processor does with sizes. `lined`: tokens that the processor names end each row.
    `around`: text on both sides of `before` and `after`. `whole`: in which layers a picture's tokens see
    those of it that come behind them.
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
    """`bias`: None: a norm by the root of the mean square."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Tower(ABC):
    """Built empty: the loader fills what `weights` names."""

    def __init__(self, settings: TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        self.settings = settings
        self.dtype, self.device = dtype, device
        self.layers_run = 0  # since the start; read by other threads
        self._views: dict[str, Tensor] = {}

    def weights(self) -> dict[str, Tensor]:
        """What the loader fills, by its name in checkpoints."""
        return self._views

    @abstractmethod
    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """patches [B, rows * columns, inputs] of pictures of one size -> [B, tokens, 1 + deep, output].

        The decoder's embedding of each token comes first, then what is added behind its layers.
        """

    def _each(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """The layers, one after the other: those that were run are counted."""
        for block in blocks:
            yield block
            self.layers_run += 1

    def _empty(self, name: str, *shape: int, stored: Sequence[int] = ()) -> Tensor:
        """`stored`: how checkpoints shape it, if otherwise."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._views[name] = tensor.view(*stored) if stored else tensor
        return tensor

    def _product(self, name: str, inputs: int, outputs: int, bias: bool = True) -> Product:
        weight = self._empty(f"{name}.weight", outputs, inputs)
        return Product(weight, self._empty(f"{name}.bias", outputs) if bias else None)

    def _convolution(self, name: str, outputs: int, *kernel: int, bias: bool = True) -> Product:
        """Of patches that do not overlap, which is a product. `kernel`: channels first."""
        inputs = torch.Size(kernel).numel()
        weight = self._empty(f"{name}.weight", outputs, inputs, stored=(outputs, *kernel))
        return Product(weight, self._empty(f"{name}.bias", outputs) if bias else None)

    def _norm(self, name: str, size: int, eps: float, bias: bool = True) -> Norm:
        weight = self._empty(f"{name}.weight", size)
        return Norm(weight, self._empty(f"{name}.bias", size) if bias else None, eps)


def places(rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, int64[rows * columns]: those of a token follow each other."""
    numbers = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    order = numbers.transpose(1, 2).flatten()
    return order // columns, order % columns


def attended(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float | None = None) -> Tensor:
    """Attention of all patches of a picture to each other. [B, patches, size], and so the result.

    `scale`: None: by the size of a head.
    """
    q, k, v = (each.reshape(*each.shape[:2], heads, -1).transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of the last dimension, in float32."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
