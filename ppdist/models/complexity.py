"""Size of a model: its number of parameters and operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import paddle
from paddle import nn

from ppdist.models.base import ImageModel

# Sides of the images used for counting, in multiples of `size_multiple`. One size if all operations
# grow with the number of pixels; else two, both with more cells than the model selects queries.
_SIDE, _SIDES = 2, (8, 10)


class Amount(NamedTuple):
    """A quantity per image: a fixed part plus a part per pixel."""

    fixed: float
    pixel: float

    def of(self, size: tuple[int, int]) -> float:
        """Returns the quantity for an image.

        Args: size: (height, width).
        """
        return self.fixed + self.pixel * size[0] * size[1]


@dataclass(frozen=True)
class Complexity:
    """Size of a model.

    parameters: number of trained and frozen weights, without statistics.
    operations: number in convolutions and linear layers; a multiply-add counts as two.
    """

    parameters: int
    operations: Amount

    def describe(self, image_size: tuple[int, int]) -> str:
        """Describes the size, as in `1.77 M parameters, 0.28 GFLOPs at 160 x 160`.

        Args: image_size: (height, width).
        """
        height, width = image_size
        gflops = 1e-9 * self.operations.of(image_size)
        return (
            f"{self.parameters / 1e6:.3g} M parameters, {gflops:.3g} GFLOPs at {height} x {width}"
        )


def complexity(model: ImageModel) -> Complexity:
    """Counts a model's parameters and, from predictions on small images, its operations.

    Local; changes nothing.

    Args: model: as built, with eager convolutions.
    """
    training = [layer for layer in model.sublayers(include_self=True) if layer.training]
    sides = (_SIDE,) if getattr(model, "strides", True) else _SIDES
    counts: list[tuple[int, int]] = []
    # In eval mode, so that batch norms do not update their statistics.
    model.eval()
    try:
        for side in sides:
            shape = [1, 3, side * model.size_multiple, side * model.size_multiple]
            images = model.normalize(paddle.zeros(shape, dtype="uint8"))
            counts.append((shape[-1] ** 2, _operations(model, images)))
    finally:
        for layer in training:
            layer.training = True
    pixels, operations = zip(*counts)
    parameters = sum(int(parameter.size) for parameter in model.parameters())
    return Complexity(parameters, _amount(pixels, operations))


def _amount(pixels: Sequence[int], counts: Sequence[int]) -> Amount:
    """Fits an `Amount` to the values measured at one or two image sizes."""
    if len(counts) == 1:
        return Amount(0.0, counts[0] / pixels[0])
    per_pixel = (counts[1] - counts[0]) / (pixels[1] - pixels[0])
    return Amount(counts[0] - per_pixel * pixels[0], per_pixel)


@paddle.no_grad()
def _operations(model: ImageModel, images_B3HW: paddle.Tensor) -> int:
    """Counts the operations of one prediction."""
    products = 0

    def count(layer: nn.Layer, _: Any, output: paddle.Tensor) -> None:
        nonlocal products
        outputs = layer.weight.shape[0 if layer.weight.ndim == 4 else -1]
        products += output.size // outputs * layer.weight.size

    hooks = [
        layer.register_forward_post_hook(count)
        for layer in model.sublayers()
        if isinstance(layer, nn.Conv2D | nn.Linear)
    ]
    try:
        model(images_B3HW)
    finally:
        for hook in hooks:
            hook.remove()
    return 2 * products
