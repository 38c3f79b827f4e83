"""What happens to feature maps between convolutions, in Paddle's layout or oneDNN's.

A *feature map* is a tensor [B, C, H, W], or between layers that run on oneDNN the same in its
layout, [B, C / block, H, W, block] (`ops.layout`).  Models call these functions, so that a map
stays in the layout of the convolutions from one to the next; a map in Paddle's layout takes
Paddle's operators, and nothing of oneDNN is loaded.

A map is float32, or bfloat16 at level O2 of `precision.py`: that takes oneDNN's operators in either
layout.  Paddle has few of bfloat16 on CPUs: neither the sum of two tensors nor the gradient of
concatenation, pooling or a mean.  It sums gradients of bfloat16, but number by number: a map that
several layers read is passed to them by `share`.
"""

from collections.abc import Sequence
from functools import lru_cache

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer

from ppdist.models.onednn import ops, precision

CACHED_SHAPES = 4096  # kinds of operation x image sizes x batch sizes


def layout_of(x: Tensor) -> ops.Descriptor:
    """Of a feature map."""
    if x.ndim == 4:
        return ops.layout(tuple(x.shape), 0, dtype_of(x))
    batch, groups, height, width, block = x.shape
    return ops.layout((batch, groups * block, height, width), block, dtype_of(x))


def dtype_of(x: Tensor) -> str:
    """float32, bfloat16, ..."""
    return str(x.dtype).removeprefix("paddle.")


def _is_low(x: Tensor) -> bool:
    """Whether it is oneDNN's and bfloat16; `paddle.amp` on a card makes maps that are Paddle's."""
    return dtype_of(x) == precision.current().dtype == "bfloat16"


def _kernels_for(x: Tensor) -> precision.Kernels:
    """A float32 map takes those of float32 whatever convolutions round to."""
    return precision.current() if _is_low(x) else precision.FLOAT32


def contiguous(x: Tensor, dtype: str | None = None) -> Tensor:
    """Args: dtype: what it has to be; a gradient may come in another."""
    if dtype is not None and dtype_of(x) != dtype:
        x = x.astype(dtype)
    return x if x.is_contiguous() else x.contiguous()


_reorder = lru_cache(CACHED_SHAPES)(ops.Reorder)


@lru_cache(CACHED_SHAPES)
def _max_pool(kernels: precision.Kernels, x: ops.Descriptor, size: int) -> ops.MaxPool:
    return kernels.max_pool(x, size)


@lru_cache(CACHED_SHAPES)
def sum_of(kernels: precision.Kernels, x: ops.Descriptor) -> ops.Sum:
    """What adds two maps of this layout."""
    return kernels.sum(x)


@lru_cache(CACHED_SHAPES)
def _upsample(kernels: precision.Kernels, x: ops.Descriptor) -> ops.Upsample:
    batch, channels, height, width = x.shape
    assert x.block is not None
    whole = ops.layout((batch, channels, 2 * height, 2 * width), x.block, x.dtype)
    return kernels.upsample(x, whole)


@lru_cache(CACHED_SHAPES)
def _concat(*parts: ops.Descriptor) -> ops.Concat | None:
    """None: these layouts are none of one whole."""
    batch, _, height, width = parts[0].shape
    channels = sum(part.shape[1] for part in parts)
    block = parts[0].block
    if block not in ops.BLOCKS or any(part.block != block for part in parts):
        if any(part.block != part.shape[1] for part in parts):
            return None
        block = channels
    assert block is not None
    whole = ops.layout((batch, channels, height, width), block, parts[0].dtype)
    return ops.Concat(parts, whole)


class _Plain(PyLayer):
    @staticmethod
    def forward(ctx, x):
        given = layout_of(x)
        plain = ops.layout(tuple(given.shape), 0, given.dtype)
        ctx.back, ctx.dtype = _reorder(plain, given), given.dtype
        return _reorder(given, plain)(contiguous(x))

    @staticmethod
    def backward(ctx, dy):
        return ctx.back(contiguous(dy, ctx.dtype))


def to_plain(x: Tensor) -> Tensor:
    """The feature map in Paddle's layout, [B, C, H, W]."""
    return x if x.ndim == 4 else _Plain.apply(x)


def _of_one_dtype(maps: Sequence[Tensor]) -> Sequence[Tensor]:
    """float32 where they differ: a layer that oneDNN has no kernel for gives that."""
    if len({x.dtype for x in maps}) == 1:
        return maps
    return [x if x.dtype == paddle.float32 else x.astype("float32") for x in maps]


class _Share(PyLayer):
    @staticmethod
    def forward(ctx, x, count, total):
        ctx.dtype, ctx.total = dtype_of(x), total
        return tuple(x.view(x.shape) for _ in range(count))  # the same memory

    @staticmethod
    def backward(ctx, dy, *others):
        dy = contiguous(dy, ctx.dtype)
        for other in others:
            dy = ctx.total(dy, contiguous(other, ctx.dtype))
        return dy


def share(x: Tensor, count: int) -> Sequence[Tensor]:
    """The feature map once for each of so many readers, whose gradients oneDNN sums if they are
    bfloat16 (6 to 8 % of a step of YOLOv5 where Paddle does)."""
    if not _is_low(x) or x.stop_gradient:
        return [x] * count
    x = contiguous(x)
    return _Share.apply(x, count, sum_of(precision.current(), layout_of(x)))


class _Add(PyLayer):
    @staticmethod
    def forward(ctx, x, y, total):
        ctx.needs = [not each.stop_gradient for each in (x, y)]
        return total(x.clone(), contiguous(y))

    @staticmethod
    def backward(ctx, dy):
        first, second = ctx.needs
        return dy if first else None, dy.clone() if second else None


def add(x: Tensor, y: Tensor) -> Tensor:
    """Their sum, element by element."""
    x, y = _of_one_dtype([x, y])
    # Of plain maps no shapes: in a graph that takes any batch and size they are not known.
    if x.ndim != y.ndim or (x.ndim == 5 and x.shape != y.shape):
        x, y = to_plain(x), to_plain(y)
    if _is_low(x):
        x = contiguous(x)
        return _Add.apply(x, y, sum_of(precision.current(), layout_of(x)))
    return x + y


class _Concat(PyLayer):
    @staticmethod
    def forward(ctx, concat, *maps):
        ctx.concat, ctx.needs = concat, [not x.stop_gradient for x in maps]
        return concat.forward([contiguous(x) for x in maps])

    @staticmethod
    def backward(ctx, dy):
        parts = ctx.concat.gradient(contiguous(dy, ctx.concat.whole.dtype))
        return tuple(part if need else None for part, need in zip(parts, ctx.needs, strict=True))


def concat(maps: Sequence[Tensor]) -> Tensor:
    """Feature maps of one size, one after the other along the channels."""
    maps = _of_one_dtype(maps)
    if any(x.ndim == 5 for x in maps):
        kernel = _concat(*(layout_of(x) for x in maps))
        if kernel is not None:
            return _Concat.apply(kernel, *maps)
    maps = [to_plain(x) for x in maps]
    if _is_low(maps[0]):
        return _Concat.apply(_concat(*(layout_of(x) for x in maps)), *maps)
    return paddle.concat(maps, axis=1)


class _MaxPool(PyLayer):
    @staticmethod
    def forward(ctx, x, size):
        ctx.kernel = _max_pool(_kernels_for(x), layout_of(x), size)
        y, ctx.chosen = ctx.kernel.forward(contiguous(x))
        return y

    @staticmethod
    def backward(ctx, dy):
        return ctx.kernel.gradient(contiguous(dy, ctx.kernel.layout.dtype), ctx.chosen)


def max_pool(x: Tensor, size: int) -> Tensor:
    """Max pooling of windows size x size (odd) around every cell; as many cells out as in."""
    if x.ndim == 5 or _is_low(x):
        return _MaxPool.apply(x, size)
    return F.max_pool2d(x, size, stride=1, padding=size // 2)


class _Upsample2x(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.kernel = _upsample(_kernels_for(x), layout_of(x))
        return ctx.kernel.forward(contiguous(x))

    @staticmethod
    def backward(ctx, dy):
        return ctx.kernel.gradient(contiguous(dy, ctx.kernel.y.dtype))


def upsample2x(x: Tensor) -> Tensor:
    """Nearest-neighbour x2, [B, C, H, W] -> [B, C, 2H, 2W].

    Written with stack and flatten: F.interpolate gives the same values, but Paddle 3.3's oneDNN
    predictor and its ONNX converter both fail on the operator's list-of-doubles attribute.
    """
    if x.ndim == 5:
        return _Upsample2x.apply(x)
    x = paddle.stack([x, x], axis=-1).flatten(3, 4)
    return paddle.stack([x, x], axis=3).flatten(2, 3)


@lru_cache(CACHED_SHAPES)
def _mean_pool(kernels: precision.Kernels, x: ops.Descriptor) -> ops.MeanPool:
    return kernels.mean_pool(x)


class _SpatialMean(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.kernel = _mean_pool(_kernels_for(x), layout_of(x))
        y = ctx.kernel.forward(contiguous(x))
        return y.reshape([x.shape[0], -1, 1, 1]).astype("float32")

    @staticmethod
    def backward(ctx, dy):
        y = ctx.kernel.y
        return ctx.kernel.gradient(contiguous(dy, y.dtype).reshape(y.tensor_shape))


def spatial_mean(x: Tensor) -> Tensor:
    """Mean over all cells, [B, C, 1, 1], float32."""
    if x.ndim == 5:
        return _SpatialMean.apply(x)
    return F.adaptive_avg_pool2d(x.astype("float32") if dtype_of(x) == "bfloat16" else x, 1)


@lru_cache(CACHED_SHAPES)
def _channel_scale(kernels: precision.Kernels, x: ops.Descriptor) -> ops.Convolution | None:
    """A depthwise convolution of one image that has the channels of all: the same memory.

    With it a product and its gradients take a thirtieth of what Paddle's take; oneDNN's own product
    has no compiled kernel for a factor of each image and channel.  None: oneDNN has no such
    convolution, or it gives another layout.
    """
    batch, channels, height, width = x.shape
    if x.block not in ops.BLOCKS:
        return None
    every = batch * channels
    try:
        conv = kernels.convolution(
            (1, every, height, width), (every, 1, 1, 1), (1, 1), (0, 0), (1, 1), every, False,
            x.block, True, x.dtype, x.dtype, x.dtype,
        )  # fmt: skip
    except ops.OneDNNError:
        return None
    return conv if conv.y_given.equals(conv.x_given) else None


class _ScaleChannels(PyLayer):
    @staticmethod
    def forward(ctx, x, factor_BC11, conv):
        ctx.needs = not x.stop_gradient, not factor_BC11.stop_gradient
        image = conv.x_in(contiguous(x).reshape(conv.x_given.tensor_shape))
        weight = contiguous(factor_BC11).reshape(conv.w_shape)
        ctx.kept = conv, image, weight, tuple(x.shape), tuple(factor_BC11.shape)
        return conv.y_out(conv.forward(image, weight, None)).reshape(x.shape)

    @staticmethod
    def backward(ctx, dy):
        conv, image, weight, shape, factors = ctx.kept
        dy = contiguous(dy, conv.y_given.dtype).reshape(conv.y_given.tensor_shape)
        dy, dx, dfactor_BC11 = conv.y_in(dy), None, None
        if ctx.needs[0]:
            dx = conv.data_gradient(dy, weight).reshape(shape)
        if ctx.needs[1]:
            dfactor_BC11 = conv.weight_gradient(image, dy)[0].reshape(factors)
        return dx, dfactor_BC11


def scale_channels(x: Tensor, factor_BC11: Tensor) -> Tensor:
    """The feature map with each channel multiplied by its factor, which is float32."""
    if x.ndim == 5:
        conv = _channel_scale(_kernels_for(x), layout_of(x))
        if conv is not None:
            return _ScaleChannels.apply(x, factor_BC11, conv)
    if dtype_of(x) == "bfloat16":  # the gradient of a factor sums a whole map
        return scale_channels(x.astype("float32"), factor_BC11).astype("bfloat16")
    if x.ndim == 5:
        batch, groups, _, _, block = x.shape
        factor_BC11 = factor_BC11.reshape([batch, groups, 1, 1, block])
    return x * factor_BC11
