"""bfloat16 kernels for processors without: float32 ones of oneDNN between two roundings.

What a processor's instructions do: operands are bfloat16, products exact, sums float32, and the
result is rounded to bfloat16 once (to nearest, ties to even).  Buffers hold bfloat16 here as there,
in the layouts of float32; so that layers, autograd, checkpoints and the exchange between ranks are
those of a run on a processor with bfloat16, and only these classes are others.
"""

import sys
from dataclasses import replace
from types import ModuleType

import paddle

from ppdist.cpu import onednn
from ppdist.cpu.precision import Kernels


def wide(x):
    return x.astype("float32")


def rounded(x):
    return x.astype("bfloat16")


class Convolution:
    kernels = onednn.Convolution

    def __init__(self, *shapes_and_settings):
        *settings, dtype, x_dtype, y_dtype = shapes_and_settings
        assert dtype == "bfloat16"
        self.inner = inner = self.kernels(*settings)
        self.x, self.y, self.has_bias = inner.x, inner.y, inner.has_bias
        shapes = [(tuple(each.shape), each.block) for each in (inner.x_given, inner.y_given)]
        self.w_shape = inner.w_shape
        self.x_given, self.y_given = (
            onednn.layout(*shapes[0], x_dtype),
            onednn.layout(*shapes[1], y_dtype),
        )

    def x_in(self, x):
        return rounded(self.inner.x_in(wide(x)))

    def y_in(self, dy):
        return rounded(self.inner.y_in(wide(dy)))

    def y_out(self, y):
        return self.inner.y_out(wide(y)).astype(self.y_given.dtype)

    def forward(self, x, weight, bias):
        return rounded(self.inner.forward(wide(x), wide(rounded(weight)), bias))

    def weight_gradient(self, x, dy):
        return self.inner.weight_gradient(wide(x), wide(dy))

    def data_gradient(self, dy, weight):
        dx = self.inner.data_gradient(wide(dy), wide(rounded(weight)))
        return rounded(dx).astype(self.x_given.dtype)


class Linear(Convolution):
    kernels = onednn.Linear


class BatchNorm:
    def __init__(self, layout, epsilon, has_relu=False):
        self.inner = onednn.BatchNorm(layout, epsilon, has_relu)

    def train(self, x, scale, shift):
        y, *others = self.inner.train(wide(x), scale, shift)
        return rounded(y), *others

    def infer(self, x, *others):
        return rounded(self.inner.infer(wide(x), *others))  # in place of the wide copy

    def gradient(self, x, scale, mean, variance, dy, *others):
        dx, *parameters = self.inner.gradient(wide(x), scale, mean, variance, wide(dy), *others)
        return rounded(dx), *parameters


class ChannelAffine:
    def __init__(self, layout):
        self.inner = onednn.ChannelAffine(float32(layout))

    def forward(self, x, scale, shift):
        return rounded(self.inner.forward(wide(x), scale, shift))

    def gradient(self, x, scale, dy):
        dx, dscale, dshift = self.inner.gradient(wide(x), scale, wide(dy))
        return rounded(dx), dscale, dshift


class Activation:
    def __init__(self, name, layout):
        self.inner = onednn.Activation(name, layout)

    def forward(self, x, in_place=False):
        return rounded(self.inner.forward(wide(x)))

    def gradient(self, x, dy):
        return rounded(self.inner.gradient(wide(x), wide(dy)))


class Sum:
    def __init__(self, layout):
        pass

    def __call__(self, first, second, in_place=True):
        return paddle.add_n([first, second])


def float32(layout):
    """The same layout of float32."""
    return onednn.layout(tuple(layout.shape), layout.block)


class MapKernel:
    """Around one of onednn.py."""

    def __init__(self, inner, dtype):
        self.inner, self.y = inner, onednn.layout(tuple(inner.y.shape), inner.y.block, dtype)

    def forward(self, x):
        y, *kept = self.inner.forward(wide(x))
        return y.astype(self.y.dtype), *kept

    def gradient(self, dy, *kept):
        return self.inner.gradient(wide(dy), *kept).astype(self.y.dtype)


def max_pool(x, size, stride, padding):
    return MapKernel(onednn.max_pool(float32(x), size, stride, padding), x.dtype)


def Pad(x, right, below):
    return MapKernel(onednn.Pad(float32(x), right, below), x.dtype)


def mean_pool(x):
    return MapKernel(onednn.mean_pool(float32(x)), x.dtype)


def upsample2x(x):
    return MapKernel(onednn.upsample2x(float32(x)), x.dtype)


EMULATED = Kernels("bfloat16", made_by=sys.modules[__name__])


def with_wrong_gradient() -> Kernels:
    """Kernels of which the gradient of weights is half as large again."""

    class Wrong(Convolution):
        def weight_gradient(self, x, dy):
            dw, db = super().weight_gradient(x, dy)
            return dw * 1.5, db

    made_by = ModuleType("wrong")
    vars(made_by).update(vars(sys.modules[__name__]), Convolution=Wrong)
    return replace(EMULATED, made_by=made_by)
