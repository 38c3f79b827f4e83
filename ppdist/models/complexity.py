"""How large a model is: parameters, and operations for one image."""

from typing import Any, NamedTuple

import paddle
from paddle import nn

from ppdist.models.base import ImageModel

_SIDE = 2  # of the image that is counted with, in multiples of the model's


class Complexity(NamedTuple):
    """Of a model in its training form.

    parameters: trained and frozen, without statistics.
    gflops: of one image; of convolutions and linear layers, a multiplication and an addition being
        two operations.
    """

    parameters: int
    gflops: float

    def __str__(self) -> str:
        return f"{self.parameters / 1e6:.3g} M parameters, {self.gflops:.3g} GFLOPs"


def complexity(model: ImageModel, image_size: tuple[int, int]) -> Complexity:
    """Counts by one forward pass of a small image, whose operations grow with its pixels.

    Changes nothing.  The model is as built, before its convolutions are oneDNN's.
    Args: image_size: (height, width) in pixels.
    """
    counted = 0

    def count(layer: nn.Layer, _: Any, output: paddle.Tensor) -> None:
        nonlocal counted
        outputs = layer.weight.shape[0 if layer.weight.ndim == 4 else -1]
        counted += output.size // outputs * layer.weight.size

    layers = model.sublayers(include_self=True)
    training = [layer for layer in layers if layer.training]
    hooks = [
        layer.register_forward_post_hook(count)
        for layer in layers
        if isinstance(layer, nn.Conv2D | nn.Linear)
    ]
    side = _SIDE * model.size_multiple
    model.eval()
    try:
        with paddle.no_grad():
            model(model.normalize(paddle.zeros([1, 3, side, side], dtype="uint8")))
    finally:
        for hook in hooks:
            hook.remove()
        for layer in training:
            layer.training = True
    height, width = image_size
    parameters = sum(int(each.size) for each in model.parameters())
    return Complexity(parameters, 2e-9 * counted * height * width / side**2)
