"""How large a model is: parameters, operations, and memory for training."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import paddle
from paddle import nn

from ppdist.config.train import AmpConfig
from ppdist.models.base import ImageModel, Targets, tensors_in

# Sides of the images that are counted with, in multiples of the model's: of one where all grows
# with the pixels; else of two in which there are more places to look at than a model asks for.
_SIDE, _SIDES = 2, (8, 10)


class Amount(NamedTuple):
    """Something of an image: a fixed part, and one for each pixel."""

    fixed: float
    pixel: float

    def of(self, size: tuple[int, int]) -> float:
        """Args: size: (height, width)."""
        return self.fixed + self.pixel * size[0] * size[1]


@dataclass(frozen=True)
class Complexity:
    """Size of a model.

    parameters: trained and frozen, without statistics.
    operations: of convolutions and linear layers, a multiplication and an addition being two.
    saved: bytes that a training forward keeps for backward, input and weights excluded.
    outputs: bytes, in training.
    """

    parameters: int
    operations: Amount
    saved: Amount
    outputs: Amount

    def told(self, image_size: tuple[int, int]) -> str:
        """`1.77 M parameters, 0.28 GFLOPs at 160 x 160`.  Args: image_size: (height, width)."""
        height, width = image_size
        gflops = 1e-9 * self.operations.of(image_size)
        return (
            f"{self.parameters / 1e6:.3g} M parameters, {gflops:.3g} GFLOPs at {height} x {width}"
        )


def complexity(
    model: ImageModel, amp: AmpConfig | None = None, frozen: Collection[str] = ()
) -> Complexity:
    """Counts by forward passes of small images.  Local; changes nothing.

    In eval mode, which saves the same tensors and leaves running statistics alone.
    Args:
        model: as built: on eager convolutions, batch norms not yet synchronised.
        amp: with it memory is counted in its precision.
        frozen: state-dict keys of what will not be trained.
    """
    amp = amp or AmpConfig()
    learn = dict(model.named_parameters())
    training = [layer for layer in model.sublayers(include_self=True) if layer.training]
    sides = (_SIDE,) if getattr(model, "strides", True) else _SIDES
    counts: list[tuple[int, ...]] = []
    model.eval()
    try:
        with (
            _frozen([learn[key] for key in frozen if key in learn]),
            paddle.amp.auto_cast(enable=amp.enabled, dtype=amp.dtype),
        ):
            for side in sides:
                shape = [1, 3, side * model.size_multiple, side * model.size_multiple]
                images = model.normalize(paddle.zeros(shape, dtype="uint8"))
                counts.append((shape[-1] ** 2, _operations(model, images), *_kept(model, images)))
    finally:
        for layer in training:
            layer.training = True
    pixels, *columns = zip(*counts)
    operations, saved, outputs = (_amount(pixels, column) for column in columns)
    return Complexity(sum(int(each.size) for each in learn.values()), operations, saved, outputs)


def _amount(pixels: Sequence[int], counts: Sequence[int]) -> Amount:
    """What goes through one or two points."""
    if len(counts) == 1:
        return Amount(0.0, counts[0] / pixels[0])
    of_pixel = (counts[1] - counts[0]) / (pixels[1] - pixels[0])
    return Amount(counts[0] - of_pixel * pixels[0], of_pixel)


@paddle.no_grad()
def _operations(model: ImageModel, images_B3HW: paddle.Tensor) -> int:
    """Of a prediction."""
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


def _kept(model: ImageModel, images_B3HW: paddle.Tensor) -> tuple[int, int]:
    """Bytes kept for backward in training, and those of the outputs."""
    # By address, because several layers may keep one tensor; the graph itself keeps none, because
    # Paddle 3.3 never frees what a hook returned.
    kept: dict[int, paddle.Tensor] = {}

    def keep(tensor: paddle.Tensor) -> None:
        kept[tensor.data_ptr()] = tensor

    inputs = model.training_inputs(images_B3HW, Targets.example(images_B3HW))
    with paddle.autograd.saved_tensors_hooks(keep, lambda nothing: nothing):
        outputs = model(*inputs)
    weights = {tensor.data_ptr() for tensor in model.state_dict().values()}
    saved = sum(tensor_bytes(kept[address]) for address in kept.keys() - weights)
    return saved, sum(map(tensor_bytes, tensors_in(outputs)))


@contextmanager
def _frozen(weights: Sequence[paddle.Tensor]) -> Iterator[None]:
    """Inside, these weights get no gradient."""
    learning = [each for each in weights if not each.stop_gradient]
    try:
        for each in learning:
            each.stop_gradient = True
        yield
    finally:
        for each in learning:
            each.stop_gradient = False


def tensor_bytes(tensor: paddle.Tensor) -> int:
    return int(tensor.size * tensor.element_size())
