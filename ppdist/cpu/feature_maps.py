"""Operations on feature maps in Paddle's layout or oneDNN's.

A *feature map* is a tensor [B, C, H, W], or, between layers that run on oneDNN, the same in its
layout, [B, C / block, H, W, block] (`onednn.layout`).  Float32 maps in Paddle's layout use Paddle's
operators.

`compute` takes over the operations of models/functional.py.  An operation without a kernel here
gets maps in Paddle's layout and dtypes.

A map is float32, or bfloat16 at level O2 of `precision.py`.  Maps in bfloat16 use oneDNN's
operators in either layout, because Paddle has few bfloat16 operators on CPUs: it lacks the sum of
two tensors and the gradients of concatenation, pooling and mean. It does sum gradients in bfloat16,
but element by element, so `share` passes a map to several layers.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from ppdist.cpu import onednn, precision
from ppdist.cpu.sampling import array_of
from ppdist.distributed import paddle_api
from ppdist.models import functional
from ppdist.models.functional import ACTIVATIONS


def layout_of(x: Tensor) -> onednn.Descriptor:
    """Returns the layout of a feature map."""
    if x.ndim == 4:
        return onednn.layout(tuple(x.shape), 0, dtype_of(x))
    batch, groups, height, width, block = x.shape
    return onednn.layout((batch, groups * block, height, width), block, dtype_of(x))


def dtype_of(x: Tensor) -> str:
    """Returns the dtype as text: float32, bfloat16, ..."""
    return _name_dtype(x.dtype)


@cache
def _name_dtype(dtype: paddle.dtype) -> str:
    """Names a dtype; Paddle takes 6 us each time, on the way of each of 300 maps of a step."""
    return str(dtype).removeprefix("paddle.")


def _is_low(x: Tensor) -> bool:
    """Returns True if a map is bfloat16 for oneDNN.

    On a GPU, `paddle.amp` makes bfloat16 maps for Paddle's operators.
    """
    return dtype_of(x) == precision.current().dtype == "bfloat16"


def _kernels_for(x: Tensor) -> precision.Kernels:
    """Returns the kernels for a map: float32 for float32, whatever convolutions round to."""
    return precision.current() if _is_low(x) else precision.FLOAT32


def contiguous(x: Tensor, dtype: str | None = None) -> Tensor:
    """Returns the map contiguous in memory, in the requested dtype.

    Args: dtype: None: the dtype of the map. A gradient may arrive in another dtype.
    """
    if dtype is not None and dtype_of(x) != dtype:
        x = x.astype(dtype)
    return x if x.is_contiguous() else x.contiguous()


_reorder = lru_cache(precision.CACHED_KERNELS)(onednn.Reorder)


@lru_cache(precision.CACHED_KERNELS)
def _concat_kernel(*parts: onednn.Descriptor) -> onednn.Concat | None:
    """Returns the kernel of a concatenation; None: these layouts cannot be concatenated."""
    batch, _, height, width = parts[0].shape
    channels = sum(part.shape[1] for part in parts)
    block = parts[0].block
    # Maps without a common block can only be concatenated where each has its channels in one block.
    if block not in onednn.BLOCKS or any(part.block != block for part in parts):
        if any(part.block != part.shape[1] for part in parts):
            return None
        block = channels
    assert block is not None
    concatenated = onednn.layout((batch, channels, height, width), block, parts[0].dtype)
    return onednn.Concat(parts, concatenated)


def _unify_dtypes(maps: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns maps of one dtype: float32 if they differ."""
    if len({x.dtype for x in maps}) == 1:
        return maps
    return [x if x.dtype == paddle.float32 else x.astype("float32") for x in maps]


class _Plain(PyLayer):
    """Reorder of a map into Paddle's layout."""

    @staticmethod
    def forward(ctx, x):
        source = layout_of(x)
        plain = onednn.layout(tuple(source.shape), 0, source.dtype)
        ctx.back, ctx.dtype = _reorder(plain, source), source.dtype
        return _reorder(source, plain)(contiguous(x))

    @staticmethod
    def backward(ctx, dy):
        return ctx.back(contiguous(dy, ctx.dtype))


class _Share(PyLayer):
    """Copies of a map for several readers, whose gradients oneDNN adds up."""

    @staticmethod
    def forward(ctx, x, count, total):
        ctx.dtype, ctx.total = dtype_of(x), total
        return tuple(x.view(x.shape) for _ in range(count))  # they share the memory

    @staticmethod
    def backward(ctx, dy, *other_gradients):
        dy = contiguous(dy, ctx.dtype)
        for gradient in other_gradients:
            dy = ctx.total(dy, contiguous(gradient, ctx.dtype))
        return dy


class _Add(PyLayer):
    """Sum of two maps of bfloat16."""

    @staticmethod
    def forward(ctx, x, y, total):
        ctx.needs = [not operand.stop_gradient for operand in (x, y)]
        return total(x, contiguous(y), in_place=False)

    @staticmethod
    def backward(ctx, dy):
        first, second = ctx.needs
        # Two tensors, because a preceding layer may overwrite the gradient that it receives.
        return dy if first else None, dy.clone() if second else None


class _Concat(PyLayer):
    """Concatenation along the channels."""

    @staticmethod
    def forward(ctx, concat, *maps):
        ctx.concat, ctx.needs = concat, [not x.stop_gradient for x in maps]
        return concat.forward([contiguous(x) for x in maps])

    @staticmethod
    def backward(ctx, dy):
        parts = ctx.concat.gradient(contiguous(dy, ctx.concat.concatenated.dtype))
        return tuple(part if need else None for part, need in zip(parts, ctx.needs, strict=True))


class _Activate(PyLayer):
    """Activation of a map of bfloat16."""

    @staticmethod
    def forward(ctx, x, kernel):
        ctx.x, ctx.kernel = contiguous(x), kernel
        return kernel.forward(ctx.x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.kernel.gradient(ctx.x, contiguous(dy, dtype_of(ctx.x)))


class _ApplyMapKernel(PyLayer):
    """Application of an `onednn.MapKernel`."""

    @staticmethod
    def forward(ctx, x, kernel):
        y, *ctx.saved = kernel.forward(contiguous(x))
        ctx.kernel = kernel
        return y

    @staticmethod
    def backward(ctx, dy):
        return ctx.kernel.gradient(contiguous(dy, ctx.kernel.y.dtype), *ctx.saved)


class _Softmax(PyLayer):
    """Softmax of rows, or its logarithm."""

    @staticmethod
    def forward(ctx, x, kernel):
        (y,) = kernel.forward(contiguous(x), into=paddle_api.allocate(x.shape, x.dtype))
        # Not y itself, whose node holds ctx: without a backward pass they would never be freed.
        ctx.y, ctx.kernel = y.detach(), kernel
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = paddle_api.allocate(ctx.y.shape, ctx.y.dtype)
        return ctx.kernel.gradient(ctx.y, contiguous(dy), into=dx)[0]


class _Largest(PyLayer):
    """The largest numbers of rows."""

    @staticmethod
    def forward(ctx, x, count):
        x = contiguous(x)
        values = array_of(x)
        width, bits = values.shape[-1], values.view(np.int32)
        # Integers in the order of the numbers, above those in the order of columns.
        keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).astype(np.int64) << 32
        keys |= np.arange(width - 1, -1, -1)
        keys.sort(axis=-1)
        ctx.columns = width - 1 - (keys[..., : -count - 1 : -1] & 0xFFFFFFFF)
        ctx.shape = x.shape
        y = paddle_api.allocate([*x.shape[:-1], count], x.dtype)
        array_of(y)[...] = np.take_along_axis(values, ctx.columns, axis=-1)
        return y

    @staticmethod
    def backward(ctx, dy):
        dy, dx = contiguous(dy), paddle.zeros(ctx.shape, dy.dtype)
        np.put_along_axis(array_of(dx), ctx.columns, array_of(dy), axis=-1)
        return dx


class _Affine(PyLayer):
    """scale * x + bias of a map with two numbers, which are the same for all channels."""

    @staticmethod
    def forward(ctx, x, scale_1, bias_1, kernel):
        ctx.needs = [not value.stop_gradient for value in (x, scale_1, bias_1)]
        x, channels = contiguous(x), layout_of(x).shape[1]
        scale_C, bias_C = (number.expand([channels]).contiguous() for number in (scale_1, bias_1))
        ctx.saved = kernel, x, scale_C
        return kernel.forward(x, scale_C, bias_C)

    @staticmethod
    def backward(ctx, dy):
        kernel, x, scale_C = ctx.saved
        dx, *sums_C = kernel.gradient(x, scale_C, contiguous(dy, dtype_of(x)))
        gradients = dx, *(sum_C.sum(axis=0, keepdim=True) for sum_C in sums_C)
        return tuple(g if need else None for g, need in zip(gradients, ctx.needs, strict=True))


class _ScaleChannels(PyLayer):
    """Product of a map and a factor per image and channel, as a depthwise convolution."""

    @staticmethod
    def forward(ctx, x, factor_BC11, conv):
        ctx.needs = not x.stop_gradient, not factor_BC11.stop_gradient
        image = conv.x_in(contiguous(x).reshape(conv.x_given.tensor_shape))
        weight = contiguous(factor_BC11).reshape(conv.w_shape)
        ctx.saved = conv, image, weight, tuple(x.shape), tuple(factor_BC11.shape)
        return conv.y_out(conv.forward(image, weight, None)).reshape(x.shape)

    @staticmethod
    def backward(ctx, dy):
        conv, image, weight, shape, factors = ctx.saved
        dy = contiguous(dy, conv.y_given.dtype).reshape(conv.y_given.tensor_shape)
        dy, dx, dfactor_BC11 = conv.y_in(dy), None, None
        if ctx.needs[0]:
            dx = conv.data_gradient(dy, weight).reshape(shape)
        if ctx.needs[1]:
            dfactor_BC11 = conv.weight_gradient(image, dy)[0].reshape(factors)
        return dx, dfactor_BC11


def _scaling_kernel(x: Tensor) -> onednn.Convolution | None:
    """Returns the depthwise convolution that scales channels; None: there is none.

    The batch is treated as one image with the channels of all images, in the same memory. The
    product and its gradients take a thirtieth of Paddle's time; oneDNN's own product has no
    compiled kernel for a factor per image and channel.

    Returns: the kernel; None: oneDNN has no such convolution, or its output has another layout.
    """
    layout = layout_of(x)
    batch, channels, height, width = layout.shape
    if layout.block not in onednn.BLOCKS:
        return None
    all_channels, dtype = batch * channels, layout.dtype
    conv = _kernels_for(x).find(
        "Convolution", (1, all_channels, height, width), (all_channels, 1, 1, 1), (1, 1), (0, 0),
        (1, 1), all_channels,
        False, layout.block, True, dtype, dtype, dtype,
    )  # fmt: skip
    return conv if conv is not None and conv.y_given.equals(conv.x_given) else None


_Operator = Callable[..., Any]


def compute(operation: _Operator, operator: _Operator, *arguments: Any, **keywords: Any) -> Any:
    """Computes an operation of models/functional.py.

    Args: operator: Paddle's operator.
    """
    return _KERNELS.get(operation, _compute_by_paddle)(operator, *arguments, **keywords)


def to_plain(x: Tensor) -> Tensor:
    """Converts a map to Paddle's layout."""
    return _Plain.apply(x) if x.ndim == 5 else x


def _to_paddle(x: Tensor) -> Tensor:
    """Converts a map to Paddle's layout and float32: Paddle has few operators of bfloat16."""
    x = to_plain(x)
    return x.astype("float32") if _is_low(x) else x


def _compute_by_paddle(operator: _Operator, x: Tensor, *settings: Any, **keywords: Any) -> Any:
    """Computes an operation by Paddle's operator."""
    return operator(_to_paddle(x), *settings, **keywords)


def _share(operator: _Operator, x: Tensor, count: int) -> Sequence[Tensor]:
    """Sums gradients in oneDNN; Paddle's sum would take 6 % of the step time."""
    if not _is_low(x) or x.stop_gradient:
        return operator(x, count)
    x = contiguous(x)
    return _Share.apply(x, count, precision.current().get("Sum", layout_of(x)))


def _add(operator: _Operator, x: Tensor, y: Tensor) -> Tensor:
    """Adds two maps, in oneDNN if they are bfloat16."""
    x, y = _unify_dtypes([x, y])
    # Shapes of plain maps are not compared: they are unknown in a graph for any batch and image
    # size.
    if x.ndim != y.ndim or (x.ndim == 5 and x.shape != y.shape):
        x, y = to_plain(x), to_plain(y)
    if _is_low(x):
        x = contiguous(x)
        return _Add.apply(x, y, precision.current().get("Sum", layout_of(x)))
    return operator(x, y)


def _concat(operator: _Operator, parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenates maps, in oneDNN's layout if theirs allow it."""
    parts = _unify_dtypes(parts)
    if axis == 1 and any(x.ndim == 5 for x in parts):
        kernel = _concat_kernel(*(layout_of(x) for x in parts))
        if kernel is not None:
            return _Concat.apply(kernel, *parts)
    parts = [to_plain(x) for x in parts]
    if axis == 1 and _is_low(parts[0]):
        return _Concat.apply(_concat_kernel(*(layout_of(x) for x in parts)), *parts)
    return operator([_to_paddle(x) for x in parts], axis)


def _is_float32_here(x: Tensor) -> bool:
    """Returns True for numbers of float32 in this machine's memory: not a GPU's, not a graph's."""
    return paddle.in_dynamic_mode() and dtype_of(x) == "float32" and x.place.is_cpu_place()


def _activate(name: str, operator: _Operator, x: Tensor) -> Tensor:
    """Applies an activation, in oneDNN to maps of bfloat16 and float32 rows."""
    if _is_low(x):
        return _Activate.apply(x, precision.current().get("Activation", name, layout_of(x)))
    if x.ndim == 3 and _is_float32_here(x) and 0 not in x.shape:
        rows = onednn.layout(tuple(x.shape), 0)
        return _Activate.apply(x, precision.FLOAT32.get("Activation", name, rows))
    return operator(x)


def _max_pool2d(
    operator: _Operator, x: Tensor, size: int, stride: int | None = None, padding: int = 0
) -> Tensor:
    """Pools square windows of a map of oneDNN's layout in oneDNN."""
    if x.ndim == 5 or _is_low(x):
        kernel = _kernels_for(x).get("max_pool", layout_of(x), size, stride or size, padding)
        return _ApplyMapKernel.apply(x, kernel)
    return _compute_by_paddle(operator, x, size, stride, padding)


def _pad(operator: _Operator, x: Tensor, sides: Sequence[int], *settings: Any) -> Tensor:
    """Adds zeros to the right and below in oneDNN; Paddle takes 7 ms for a map of 1.6 M numbers."""
    left, right, above, below = sides
    in_onednn = x.ndim == 5 or _is_float32_here(x)
    if in_onednn and not (left or above or settings):
        return _ApplyMapKernel.apply(x, _kernels_for(x).get("Pad", layout_of(x), right, below))
    return _compute_by_paddle(operator, x, sides, *settings)


def _affine(operator: _Operator, x: Tensor, scale_1: Tensor, bias_1: Tensor) -> Tensor:
    """Computes scale * x + bias in one pass over the map, and so its three gradients."""
    if x.ndim == 4:
        return operator(x, scale_1, bias_1)
    return _Affine.apply(x, scale_1, bias_1, _kernels_for(x).get("ChannelAffine", layout_of(x)))


def _softmax(is_log: bool, operator: _Operator, x: Tensor) -> Tensor:
    """Computes the softmax of float32 rows in oneDNN; Paddle takes ten times as long."""
    if not _is_float32_here(x) or 0 in x.shape:
        return operator(x)
    rows = math.prod(x.shape[:-1]), x.shape[-1]
    return _Softmax.apply(x, precision.FLOAT32.get("Softmax", rows, is_log))


def _largest(operator: _Operator, x: Tensor, count: int) -> Tensor:
    """Selects the largest of float32 rows in numpy; Paddle takes three times as long."""
    if not _is_float32_here(x):
        return operator(x, count)
    return _Largest.apply(x, count)


def _upsample2x(operator: _Operator, x: Tensor) -> Tensor:
    """Upsamples a map of oneDNN's layout in oneDNN."""
    if x.ndim == 4:
        return operator(x)
    return _ApplyMapKernel.apply(x, _kernels_for(x).get("upsample2x", layout_of(x)))


def _spatial_mean(operator: _Operator, x: Tensor) -> Tensor:
    """Averages a map of oneDNN's layout in oneDNN."""
    if x.ndim == 4:
        return operator(x)
    y = _ApplyMapKernel.apply(x, _kernels_for(x).get("mean_pool", layout_of(x)))
    return y.reshape([x.shape[0], -1, 1, 1]).astype("float32")


def _scale_channels(operator: _Operator, x: Tensor, factor_BC11: Tensor) -> Tensor:
    """Scales channels of a map in oneDNN's layout."""
    if x.ndim == 4:
        return operator(x, factor_BC11)
    conv = _scaling_kernel(x)
    if conv is not None:
        return _ScaleChannels.apply(x, factor_BC11, conv)
    batch, groups, _, _, block = x.shape
    return operator(x, factor_BC11.reshape([batch, groups, 1, 1, block]))


_KERNELS: dict[_Operator, _Operator] = {
    functional.share: _share,
    functional.add: _add,
    functional.concat: _concat,
    functional.max_pool2d: _max_pool2d,
    functional.pad: _pad,
    functional.affine: _affine,
    functional.softmax: partial(_softmax, False),
    functional.log_softmax: partial(_softmax, True),
    functional.largest: _largest,
    functional.upsample2x: _upsample2x,
    functional.spatial_mean: _spatial_mean,
    functional.scale_channels: _scale_channels,
    **{activation: partial(_activate, name) for name, activation in ACTIVATIONS.items()},
}
