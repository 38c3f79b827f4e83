"""How large a model is: parameters, operations, and memory for training."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn

from ppdist.config.train import AmpConfig
from ppdist.models.base import ImageModel, Targets

_SIDE = 2  # of the image that is counted with, in multiples of the model's


@dataclass(frozen=True)
class Complexity:
    """Size of a model in its training form.

    Operations and bytes grow with the pixels of its input.

    parameters: trained and frozen, without statistics.
    operations: of a pixel; of convolutions and linear layers, a multiplication and an addition
        being two.
    saved: bytes of a pixel that forward keeps for backward, input and weights excluded.
    outputs: bytes of a pixel.
    """

    parameters: int
    operations: float
    saved: float
    outputs: float

    def told(self, image_size: tuple[int, int]) -> str:
        """`1.77 M parameters, 0.28 GFLOPs at 160 x 160`; sizes are (height, width)."""
        height, width = image_size
        gflops = 1e-9 * self.operations * height * width
        return (
            f"{self.parameters / 1e6:.3g} M parameters, {gflops:.3g} GFLOPs at {height} x {width}"
        )


def complexity(
    model: ImageModel, amp: AmpConfig | None = None, frozen: Collection[str] = ()
) -> Complexity:
    """Counts by one forward pass of a small image.  Local; changes nothing.

    In eval mode, which saves the same tensors and leaves running statistics alone.
    Args:
        model: as built: on eager convolutions, batch norms not yet synchronised.
        amp: with it memory is counted in its precision.
        frozen: state-dict keys of what will not be trained.
    """
    amp = amp or AmpConfig()
    products = 0
    kept: dict[int, int] = {}  # by address: several layers may keep one tensor

    def count(layer: nn.Layer, _: Any, output: paddle.Tensor) -> None:
        nonlocal products
        outputs = layer.weight.shape[0 if layer.weight.ndim == 4 else -1]
        products += output.size // outputs * layer.weight.size

    def keep(tensor: paddle.Tensor) -> paddle.Tensor:
        kept[tensor.data_ptr()] = tensor_bytes(tensor)
        return tensor

    layers = model.sublayers(include_self=True)
    training = [layer for layer in layers if layer.training]
    hooks = [
        layer.register_forward_post_hook(count)
        for layer in layers
        if isinstance(layer, nn.Conv2D | nn.Linear)
    ]
    learn = dict(model.named_parameters())
    side = _SIDE * model.size_multiple
    model.eval()
    try:
        with (
            _frozen([learn[key] for key in frozen if key in learn]),
            paddle.amp.auto_cast(enable=amp.enabled, dtype=amp.dtype),
            paddle.autograd.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            images = model.normalize(paddle.zeros([1, 3, side, side], dtype="uint8"))
            outputs = model(*model.training_inputs(images, Targets.example(images)))
    finally:
        for hook in hooks:
            hook.remove()
        for layer in training:
            layer.training = True
    weights = {tensor.data_ptr() for tensor in model.state_dict().values()}
    saved = sum(size for address, size in kept.items() if address not in weights)
    pixels = side**2
    return Complexity(
        parameters=sum(int(each.size) for each in learn.values()),
        operations=2 * products / pixels,
        saved=saved / pixels,
        outputs=sum(map(tensor_bytes, _tensors(outputs))) / pixels,
    )


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


def _tensors(outputs: Any) -> Iterator[paddle.Tensor]:
    """All in nested tuples, lists and dictionaries."""
    if isinstance(outputs, paddle.Tensor):
        yield outputs
    elif outputs is not None:
        for part in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from _tensors(part)


def tensor_bytes(tensor: paddle.Tensor) -> int:
    return int(tensor.size * tensor.element_size())
