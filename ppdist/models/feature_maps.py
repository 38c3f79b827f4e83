"""What layers do with feature maps between convolutions.

Models join, pool and scale maps by `maps` alone.  So they need not know in which layout a map lies:
here all maps are [B, C, H, W] and Paddle's operators compute; the engine may switch on kernels that
keep maps in a layout of their own from one convolution to the next (ppdist/cpu/).
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

LEAKY_SLOPE = 0.1  # of negative inputs, as in YOLOv3 and the first YOLOv5


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), also called swish.

    Both of Paddle's operators compute it.  In a saved graph it is `swish`, which oneDNN makes part
    of the convolution before it; `silu` it does not know.
    """
    return F.silu(x) if paddle.in_dynamic_mode() else F.swish(x)


def leaky_relu(x: Tensor) -> Tensor:
    """x where positive, else LEAKY_SLOPE * x.

    In a saved graph max(x, LEAKY_SLOPE * x), the same numbers: Paddle 3.3's oneDNN predictor dies
    (SIGSEGV) when it loads a graph with the operator.
    """
    if paddle.in_dynamic_mode():
        return F.leaky_relu(x, LEAKY_SLOPE)
    return paddle.maximum(x, x * LEAKY_SLOPE)


# By the value of `model.activation`.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu": F.relu,
    "hardswish": F.hardswish,
    "leaky_relu": leaky_relu,
}


class FeatureMaps:
    """Operations on feature maps, by Paddle's operators."""

    def to_plain(self, x: Tensor) -> Tensor:
        """The feature map in Paddle's layout, [B, C, H, W]."""
        return x

    def for_paddle(self, x: Tensor) -> Tensor:
        """The feature map in a layout and type that Paddle's operators take."""
        return x

    def share(self, x: Tensor, count: int) -> Sequence[Tensor]:
        """The map once for each of `count` readers."""
        return [x] * count

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Their sum, element by element."""
        return x + y

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Feature maps of one size, one after the other along the channels."""
        return paddle.concat(parts, axis=1)

    def activate(self, x: Tensor, name: str) -> Tensor:
        """A row of `ACTIVATIONS` of every element."""
        return ACTIVATIONS[name](x)

    def max_pool(self, x: Tensor, size: int, stride: int = 1) -> Tensor:
        """Max pooling of windows size x size (odd) around every `stride`-th cell."""
        return F.max_pool2d(x, size, stride=stride, padding=size // 2)

    def upsample2x(self, x: Tensor) -> Tensor:
        """Nearest-neighbour x2, [B, C, H, W] -> [B, C, 2H, 2W].

        Written with stack and flatten: F.interpolate gives the same values, but Paddle 3.3's oneDNN
        predictor and its ONNX converter both fail on the operator's list-of-doubles attribute.
        """
        x = paddle.stack([x, x], axis=-1).flatten(3, 4)
        return paddle.stack([x, x], axis=3).flatten(2, 3)

    def spatial_mean(self, x: Tensor) -> Tensor:
        """Mean over all cells, [B, C, 1, 1]."""
        return F.adaptive_avg_pool2d(x.astype("float32") if x.dtype == paddle.bfloat16 else x, 1)

    def scale_channels(self, x: Tensor, factor_BC11: Tensor) -> Tensor:
        """Multiplies each channel by its factor, which is float32."""
        if x.dtype == paddle.bfloat16:  # the gradient of a factor sums a whole map
            return (x.astype("float32") * factor_BC11).astype("bfloat16")
        return x * factor_BC11

    def affine(self, x: Tensor, scale_1: Tensor, bias_1: Tensor) -> Tensor:
        """scale * x + bias for the whole map; both are float32."""
        if x.dtype == paddle.bfloat16:  # the gradients of both sum a whole map
            return (x.astype("float32") * scale_1 + bias_1).astype("bfloat16")
        return x * scale_1 + bias_1


maps = FeatureMaps()

_passing: set[type[nn.Layer]] = {nn.Sequential, nn.LayerList}
_Class = TypeVar("_Class", bound=type[nn.Layer])


def passes_maps(layer: _Class) -> _Class:
    """Declares that a class only passes feature maps on.

    Its `forward` hands them to `maps`, to convolutions and to layers declared like it, so those may
    give maps in a layout of their own.  A class that derives from it may do more with them: it
    declares itself.  An undeclared layer gets every map in Paddle's layout, slower on a CPU.
    """
    _passing.add(layer)
    return layer


def is_passing(layer: nn.Layer) -> bool:
    """Whether its very class was declared by `passes_maps`."""
    return type(layer) in _passing
