"""bfloat16 kernels for processors without: float32 ones of oneDNN between two roundings.

What a processor's instructions do: operands are bfloat16, products exact, sums float32, and the
result is rounded to bfloat16 once (to nearest, ties to even).  Buffers hold bfloat16 here as there,
in the layouts of float32; so that layers, autograd, checkpoints and the exchange between ranks are
those of a run on a processor with bfloat16, and only these four classes are others.
"""

import paddle

from ppdist.models.onednn import ops
from ppdist.models.onednn.precision import Kernels


def wide(x):
    return x.astype("float32")


def rounded(x):
    return x.astype("bfloat16")


class Reorder:
    """`ops.Reorder` to or from bfloat16 buffers."""

    def __init__(self, reorder, dtype):
        self.reorder, self.dtype = reorder, dtype

    def __call__(self, buffer):
        return self.reorder(wide(buffer)).astype(self.dtype)

    def to_tensor(self, buffer):
        return self.reorder.to_tensor(wide(buffer)).astype(self.dtype)


class Convolution:
    def __init__(self, *shapes_and_settings, dtype, between):
        assert dtype == "bfloat16"
        self.inner = inner = ops.Convolution(*shapes_and_settings)
        self.x, self.y, self.has_bias = inner.x, inner.y, inner.has_bias
        self.x_in, self.y_in = Reorder(inner.x_in, dtype), Reorder(inner.y_in, dtype)
        self.x_out, self.y_out = Reorder(inner.x_out, between), Reorder(inner.y_out, between)

    def forward(self, x, weight, bias):
        return rounded(self.inner.forward(wide(x), wide(rounded(weight)), bias))

    def weight_gradient(self, x, dy):
        return self.inner.weight_gradient(wide(x), wide(dy))

    def data_gradient(self, dy, weight):
        return rounded(self.inner.data_gradient(wide(dy), wide(rounded(weight))))


class BatchNorm:
    def __init__(self, layout, epsilon):
        self.inner = ops.BatchNorm(layout, epsilon)

    def train(self, x, scale, shift):
        y, mean, variance = self.inner.train(wide(x), scale, shift)
        return rounded(y), mean, variance

    def infer(self, x, *others):
        return rounded(self.inner.infer(wide(x), *others))

    def gradient(self, x, scale, mean, variance, dy):
        dx, dscale, dshift = self.inner.gradient(wide(x), scale, mean, variance, wide(dy))
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


EMULATED = Kernels("bfloat16", "float32", Convolution, BatchNorm, Activation, Sum)
