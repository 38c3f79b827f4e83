"""Operations on feature maps [B, C, H, W] and on rows, for models; names are Paddle's.

Paddle's operators compute them, unless kernels that keep maps in a layout of their own have taken
over (`compute_by`, which ppdist/cpu/ calls).  Models of this package pass the output of a layer
to these functions and to layers only, and to any other operator through `plain`.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import paddle
import paddle.nn.functional as F
from paddle import Tensor

LEAKY_SLOPE = 0.1  # slope for negative inputs, as in YOLOv3 and the first YOLOv5

_Operation = TypeVar("_Operation", bound=Callable[..., Any])
_compute: Callable[..., Any] | None = None


def compute_by(kernels: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Makes `kernels` compute the operations of this module from now on.

    Args: kernels: called with the operation, Paddle's operator, and the arguments.  None: Paddle's
        operators compute them.
    Returns: the kernels until now.
    """
    global _compute
    before, _compute = _compute, kernels
    return before


def _operation(operator: _Operation) -> _Operation:
    """Wraps a Paddle operator as an operation that kernels may take over."""

    @wraps(operator)
    def run(*arguments: Any, **keywords: Any) -> Any:
        if _compute is None:
            return operator(*arguments, **keywords)
        return _compute(run, operator, *arguments, **keywords)

    return run  # type: ignore[return-value]


@_operation
def plain(x: Tensor) -> Tensor:
    """Returns the map as any operator accepts it: [B, C, H, W] in memory, in a Paddle dtype."""
    return x


@_operation
def share(x: Tensor, count: int) -> Sequence[Tensor]:
    """Returns the map for each of `count` readers.

    Calling it is optional. In bfloat16 training on a CPU, it avoids Paddle's slow sum of the
    readers' gradients.
    """
    return [x] * count


add = _operation(paddle.add)
concat = _operation(paddle.concat)
chunk = _operation(paddle.chunk)
pad = _operation(F.pad)
max_pool2d = _operation(F.max_pool2d)
avg_pool2d = _operation(F.avg_pool2d)
relu = _operation(F.relu)
hardswish = _operation(F.hardswish)
softmax = _operation(F.softmax)  # both over the last axis
log_softmax = _operation(F.log_softmax)


@_operation
def silu(x: Tensor) -> Tensor:
    """Computes x * sigmoid(x), also called swish.

    Paddle has two operators for it. A saved graph uses `swish`, which oneDNN fuses into the
    preceding convolution; oneDNN does not support `silu`.
    """
    return F.silu(x) if paddle.in_dynamic_mode() else F.swish(x)


@_operation
def leaky_relu(x: Tensor) -> Tensor:
    """Computes x where positive, else LEAKY_SLOPE * x.

    A saved graph uses max(x, LEAKY_SLOPE * x), which gives the same numbers: Paddle 3.3's oneDNN
    predictor crashes (SIGSEGV) when it loads a graph with the leaky ReLU operator.
    """
    if paddle.in_dynamic_mode():
        return F.leaky_relu(x, LEAKY_SLOPE)
    return paddle.maximum(x, x * LEAKY_SLOPE)


# By the value of `model.activation`.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu": relu,
    "hardswish": hardswish,
    "leaky_relu": leaky_relu,
}


@_operation
def upsample2x(x: Tensor) -> Tensor:
    """Upsamples by nearest neighbour, [B, C, H, W] -> [B, C, 2H, 2W].

    Written with stack and flatten: F.interpolate gives the same values, but Paddle 3.3's oneDNN
    predictor and its ONNX converter both fail on the operator's list-of-doubles attribute.
    """
    x = paddle.stack([x, x], axis=-1).flatten(3, 4)
    return paddle.stack([x, x], axis=3).flatten(2, 3)


@_operation
def largest(x: Tensor, count: int) -> Tensor:
    """Returns the `count` largest numbers of the last axis, falling."""
    return x.topk(count, axis=-1)[0]


@_operation
def spatial_mean(x: Tensor) -> Tensor:
    """Averages over all cells, [B, C, 1, 1]."""
    return F.adaptive_avg_pool2d(x.astype("float32") if x.dtype == paddle.bfloat16 else x, 1)


@_operation
def scale_channels(x: Tensor, factor_BC11: Tensor) -> Tensor:
    """Multiplies each channel by its factor, which is float32."""
    if x.dtype == paddle.bfloat16:  # the gradient of a factor is a sum over a map
        return (x.astype("float32") * factor_BC11).astype("bfloat16")
    return x * factor_BC11


@_operation
def affine(x: Tensor, scale_1: Tensor, bias_1: Tensor) -> Tensor:
    """Computes scale * x + bias for a map in any layout; scale and bias are float32."""
    if x.dtype == paddle.bfloat16:  # the gradients of scale and bias are sums over a map
        return (x.astype("float32") * scale_1 + bias_1).astype("bfloat16")
    return x * scale_1 + bias_1
