"""bfloat16 kernels for processors without: float32 ones of oneDNN between two roundings.

What a processor's instructions do: operands are bfloat16, products exact, sums float32, and the
result is rounded to bfloat16 once (to nearest, ties to even).  Buffers hold bfloat16 here as there,
in the layouts of float32; so that layers, autograd, checkpoints and the exchange between ranks are
those of a run on a processor with bfloat16, and only these classes are others.
"""

import paddle

from ppdist.models.onednn import ops
from ppdist.models.onednn.precision import Kernels


def wide(x):
    return x.astype("float32")


def rounded(x):
    return x.astype("bfloat16")


class Convolution:
    def __init__(self, *shapes_and_settings):
        *settings, dtype, x_dtype, y_dtype = shapes_and_settings
        assert dtype == "bfloat16"
        self.inner = inner = ops.Convolution(*settings)
        self.x, self.y, self.has_bias = inner.x, inner.y, inner.has_bias
        shapes = [(tuple(each.shape), each.block) for each in (inner.x_given, inner.y_given)]
        self.w_shape = inner.w_shape
        self.x_given, self.y_given = (
            ops.layout(*shapes[0], x_dtype),
            ops.layout(*shapes[1], y_dtype),
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


class BatchNorm:
    def __init__(self, layout, epsilon):
        self.inner = ops.BatchNorm(layout, epsilon)

    def train(self, x, scale, shift):
        y, mean, variance = self.inner.train(wide(x), scale, shift)
        return rounded(y), mean, variance

    def infer(self, x, *others):
        return rounded(self.inner.infer(wide(x), *others))

    def gradient(self, x, scale, mean, variance, dy, in_place):
        dx, dscale, dshift = self.inner.gradient(wide(x), scale, mean, variance, wide(dy), in_place)
        return rounded(dx), dscale, dshift


class Activation:
    def __init__(self, name, layout):
        self.inner = ops.Activation(name, layout)

    def forward(self, x):
        return rounded(self.inner.forward(wide(x)))

    def gradient(self, x, dy):
        return rounded(self.inner.gradient(wide(x), wide(dy)))


class Sum:
    def __init__(self, layout):
        pass

    def __call__(self, first, second):
        return paddle.add_n([first, second])


def float32(layout):
    """The same layout of float32."""
    return ops.layout(tuple(layout.shape), layout.block)


class MaxPool:
    def __init__(self, layout, size):
        self.inner, self.layout = ops.MaxPool(float32(layout), size), layout

    def forward(self, x):
        y, chosen = self.inner.forward(wide(x))
        return y.astype(self.layout.dtype), chosen

    def gradient(self, dy, chosen):
        return self.inner.gradient(wide(dy), chosen).astype(self.layout.dtype)


class Resize:
    """Around one of ops.py whose gradient needs dy alone."""

    def __init__(self, inner, dtype):
        self.inner, self.y = inner, ops.layout(tuple(inner.y.shape), inner.y.block, dtype)

    def forward(self, x):
        return self.inner.forward(wide(x)).astype(self.y.dtype)

    def gradient(self, dy):
        return self.inner.gradient(wide(dy)).astype(self.y.dtype)


def mean_pool(x):
    return Resize(ops.MeanPool(float32(x)), x.dtype)


def upsample(x, y):
    return Resize(ops.Upsample(float32(x), float32(y)), y.dtype)


EMULATED = Kernels(
    "bfloat16", "float32", Convolution, BatchNorm, Activation, Sum, MaxPool, mean_pool, upsample
)
