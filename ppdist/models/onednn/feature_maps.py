"""What happens to feature maps between convolutions, in Paddle's layout or oneDNN's.

A *feature map* is a tensor [B, C, H, W], or between layers that run on oneDNN the same in its
layout, [B, C / block, H, W, block] (`ops.layout`).  Models call these functions, so that a map stays
in the layout of the convolutions from one to the next; a map in Paddle's layout takes Paddle's
operators, and nothing of oneDNN is loaded.
"""

from collections.abc import Sequence
from functools import lru_cache

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer

from ppdist.models.onednn import ops

CACHED_SHAPES = 4096  # kinds of operation x image sizes x batch sizes


def layout_of(x: Tensor) -> ops.Descriptor:
    """Of a feature map."""
    if x.ndim == 4:
        return ops.layout(tuple(x.shape), 0)
    batch, groups, height, width, block = x.shape
    return ops.layout((batch, groups * block, height, width), block)


def contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


_reorder = lru_cache(CACHED_SHAPES)(ops.Reorder)
_max_pool = lru_cache(CACHED_SHAPES)(ops.MaxPool)


@lru_cache(CACHED_SHAPES)
def _upsample(x: ops.Descriptor) -> ops.Upsample:
    batch, channels, height, width = x.shape
    assert x.block is not None
    return ops.Upsample(x, ops.layout((batch, channels, 2 * height, 2 * width), x.block))


@lru_cache(CACHED_SHAPES)
def _concat(*parts: ops.Descriptor) -> ops.Concat | None:
    """None: these layouts are none of one whole."""
    batch, _, height, width = parts[0].shape
    channels = sum(part.shape[1] for part in parts)
    blocks = {part.block for part in parts}
    if len(blocks) == 1:
        block = blocks.pop()
    elif all(part.block == part.shape[1] for part in parts):
        block = channels
    else:
        return None
    assert block is not None
    return ops.Concat(parts, ops.layout((batch, channels, height, width), block))


class _Plain(PyLayer):
    @staticmethod
    def forward(ctx, x):
        given = layout_of(x)
        plain = ops.layout(tuple(given.shape), 0)
        ctx.back = _reorder(plain, given)
        return _reorder(given, plain)(contiguous(x))

    @staticmethod
    def backward(ctx, dy):
        return ctx.back(contiguous(dy))


def to_plain(x: Tensor) -> Tensor:
    """The feature map in Paddle's layout, [B, C, H, W]."""
    return x if x.ndim == 4 else _Plain.apply(x)


def add(x: Tensor, y: Tensor) -> Tensor:
    """Their sum, element by element."""
    if x.shape == y.shape:
        return x + y
    return to_plain(x) + to_plain(y)


class _Concat(PyLayer):
    @staticmethod
    def forward(ctx, concat, *maps):
        ctx.concat, ctx.needs = concat, [not x.stop_gradient for x in maps]
        return concat.forward([contiguous(x) for x in maps])

    @staticmethod
    def backward(ctx, dy):
        parts = ctx.concat.gradient(contiguous(dy))
        return tuple(part if need else None for part, need in zip(parts, ctx.needs, strict=True))


def concat(maps: Sequence[Tensor]) -> Tensor:
    """Feature maps of one size, one after the other along the channels."""
    if any(x.ndim == 5 for x in maps):
        kernel = _concat(*(layout_of(x) for x in maps))
        if kernel is not None:
            return _Concat.apply(kernel, *maps)
    return paddle.concat([to_plain(x) for x in maps], axis=1)


class _MaxPool(PyLayer):
    @staticmethod
    def forward(ctx, x, size):
        ctx.kernel = _max_pool(layout_of(x), size)
        y, ctx.chosen = ctx.kernel.forward(contiguous(x))
        return y

    @staticmethod
    def backward(ctx, dy):
        return ctx.kernel.gradient(contiguous(dy), ctx.chosen)


def max_pool(x: Tensor, size: int) -> Tensor:
    """Max pooling of windows size x size (odd) around every cell; as many cells out as in."""
    if x.ndim == 5:
        return _MaxPool.apply(x, size)
    return F.max_pool2d(x, size, stride=1, padding=size // 2)


class _Upsample2x(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.kernel = _upsample(layout_of(x))
        return ctx.kernel.forward(contiguous(x))

    @staticmethod
    def backward(ctx, dy):
        return ctx.kernel.gradient(contiguous(dy))


def upsample2x(x: Tensor) -> Tensor:
    """Nearest-neighbour x2, [B, C, H, W] -> [B, C, 2H, 2W].

    Written with stack and flatten: F.interpolate gives the same values, but Paddle 3.3's oneDNN
    predictor and its ONNX converter both fail on the operator's list-of-doubles attribute.
    """
    if x.ndim == 5:
        return _Upsample2x.apply(x)
    x = paddle.stack([x, x], axis=-1).flatten(3, 4)
    return paddle.stack([x, x], axis=3).flatten(2, 3)


def spatial_mean(x: Tensor) -> Tensor:
    """Mean over all cells, [B, C, 1, 1]."""
    if x.ndim == 5:
        return x.mean([2, 3]).reshape([x.shape[0], -1, 1, 1])
    return F.adaptive_avg_pool2d(x, 1)


def scale_channels(x: Tensor, factor_BC11: Tensor) -> Tensor:
    """The feature map with each channel multiplied by its factor."""
    if x.ndim == 5:
        batch, groups, _, _, block = x.shape
        return x * factor_BC11.reshape([batch, groups, 1, 1, block])
    return x * factor_BC11
