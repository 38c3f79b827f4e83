"""Layers on oneDNN's CPU kernels, one for each plain layer.

Every layer takes feature maps in Paddle's layout or in oneDNN's (feature_maps.py).  `ConvBNLayer`
and `RepConv` give theirs in oneDNN's where `keeps_layout` says that all who get it take it; any
other `nn.Conv2D` gives Paddle's.  Each class only changes `forward` of the plain layer it derives
from, so that a built layer can be switched by its class (convert.py).  What oneDNN has no kernel
for, other dtypes and other kinds of batch norm run as they always did.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer

from ppdist.distributed import paddle_api
from ppdist.models.layers import ConvBNLayer, RepConv
from ppdist.models.onednn import ops, precision
from ppdist.models.onednn.feature_maps import (
    CACHED_SHAPES,
    contiguous,
    dtype_of,
    layout_of,
    sum_of,
    to_plain,
)
from ppdist.models.onednn.precision import Kernels


class _Unit:
    """The kernels of one convolution, and those of what may follow it in its layout."""

    def __init__(self, kernels: Kernels, convolution: ops.Convolution) -> None:
        self.conv = convolution
        self._kernels = kernels
        self._norms: dict[float, ops.BatchNorm] = {}
        self._activations: dict[str, ops.Activation] = {}

    def sum(self, layout: ops.Descriptor) -> ops.Sum:
        return sum_of(self._kernels, layout)

    def norm(self, epsilon: float) -> ops.BatchNorm:
        if epsilon not in self._norms:
            self._norms[epsilon] = self._kernels.batch_norm(self.conv.y, epsilon)
        return self._norms[epsilon]

    def activation(self, name: str) -> ops.Activation:
        if name not in self._activations:
            self._activations[name] = self._kernels.activation(name, self.conv.y)
        return self._activations[name]


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(v) is int for v in value):
        return value[0], value[1]
    return None


@lru_cache(CACHED_SHAPES)
def _make_unit(kernels: Kernels, *key: Any) -> _Unit | None:
    """Layers of one kind share their kernels; None: oneDNN cannot."""
    try:
        return _Unit(kernels, kernels.convolution(*key))
    except ops.OneDNNError:
        return None


def _unit(
    conv: nn.Conv2D, x: Tensor, keeps_layout: bool = False, y_dtype: str = "float32"
) -> _Unit | None:
    """Kernels for this layer and this input; None: run the plain layer."""
    kernels = precision.current()
    made = paddle_api.conv_settings(conv)
    if made is None:
        return None
    stride, padding, dilation = _pair(made.stride), _pair(made.padding), _pair(made.dilation)
    if stride is None or padding is None or dilation is None or not kernels.take(dtype_of(x)):
        return None
    if made.data_format != "NCHW" or made.padding_mode != "zeros" or 0 in x.shape:
        return None
    given = layout_of(x)
    return _make_unit(
        kernels, tuple(given.shape), tuple(conv.weight.shape), stride, padding, dilation,
        made.groups, conv.bias is not None, given.block, keeps_layout, kernels.dtype,
        given.dtype, y_dtype,
    )  # fmt: skip


def _by_batch(norm: nn.Layer) -> bool:
    """Whether it is plain batch norm that normalises by the statistics of this batch."""
    plain = type(norm) is nn.BatchNorm2D
    return plain and norm.training and not paddle_api.normalises_by_running(norm)


def _by_constants(norm: nn.BatchNorm2D, inputs: Sequence[Tensor]) -> bool:
    """Whether it normalises by its running statistics, and no gradient is wanted of what it and its
    convolution take in: in evaluation, and in training where all up to it is frozen."""
    wanted = paddle.is_grad_enabled() and any(_needs(*inputs))
    return (not norm.training or paddle_api.normalises_by_running(norm)) and not wanted


def _paddles_own(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What oneDNN does not compute as a whole, from a float32 map in Paddle's layout and to one."""
    if dtype_of(x) == "bfloat16":
        x = to_plain(x).astype("float32")
    with precision.compute_in(precision.current().at("O1")):
        return forward(x)


def _needs(*inputs: Tensor | None) -> tuple[bool, ...]:
    """Of each tensor, whether backward shall return its gradient (else None, or Paddle raises)."""
    return tuple(not tensor.stop_gradient for tensor in inputs if tensor is not None)


def _only(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(g if need else None for g, need in zip(gradients, needs, strict=True))


class _Convolve(PyLayer):
    """Convolution with or without bias."""

    @staticmethod
    def forward(ctx, x_given, weight, bias, unit, needs):
        conv = unit.conv
        x = conv.x_in(contiguous(x_given))
        ctx.save_for_backward(weight)
        ctx.kept = unit, x, needs
        return conv.y_out(conv.forward(x, weight, bias))

    @staticmethod
    def backward(ctx, dy_given):
        (weight,) = ctx.saved_tensor()
        unit, x, needs = ctx.kept
        conv = unit.conv
        dy = conv.y_in(contiguous(dy_given, conv.y_given.dtype))
        dw, db = conv.weight_gradient(x, dy)
        dx = conv.data_gradient(dy, weight) if needs[0] else None
        return _only((dx, dw, db) if conv.has_bias else (dx, dw), needs)


class OneDNNConv2D(nn.Conv2D):
    """nn.Conv2D on oneDNN.  It predicts or feeds a gate of Paddle's, so it gives float32."""

    def forward(self, x: Tensor) -> Tensor:
        unit = _unit(self, x)
        if unit is None:
            return _paddles_own(super().forward, to_plain(x))
        inputs = (x, self.weight, self.bias)
        return _Convolve.apply(*inputs, unit, _needs(*inputs))


class _Branch:
    """Convolution and batch norm of one call, between its forward and its backward."""

    def __init__(self, unit: _Unit, norm: nn.BatchNorm2D) -> None:
        self.unit, self.norm = unit, norm
        self.bn = unit.norm(paddle_api.epsilon(norm))

    def forward(self, x: Tensor, weight: Tensor, gamma_O: Tensor, beta_O: Tensor) -> Tensor:
        """Buffers in the convolution's layouts; also moves the running statistics."""
        self.z = self.unit.conv.forward(x, weight, None)
        out, self.mean_O, self.var_O = self.bn.train(self.z, gamma_O, beta_O)
        keep = paddle_api.momentum(self.norm)
        mean_O, var_O = paddle_api.running_statistics(self.norm)
        # Paddle's CPU kernel keeps the biased variance (1/n) as its running statistic; so do we.
        paddle.assign(keep * mean_O + (1 - keep) * self.mean_O, mean_O)
        paddle.assign(keep * var_O + (1 - keep) * self.var_O, var_O)
        return out

    def infer(self, x: Tensor, weight: Tensor, gamma_O: Tensor, beta_O: Tensor) -> Tensor:
        """Buffers in the convolution's layouts; running statistics, nothing kept."""
        z = self.unit.conv.forward(x, weight, None)
        return self.bn.infer(z, gamma_O, beta_O, *paddle_api.running_statistics(self.norm))

    def backward(
        self,
        x: Tensor,
        dy: Tensor,
        weight: Tensor,
        gamma_O: Tensor,
        needs_dx: bool,
        in_place: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """dx (as x was given), dweight, dgamma, dbeta.  Args: in_place: nobody else needs dy."""
        conv = self.unit.conv
        dz, dgamma_O, dbeta_O = self.bn.gradient(
            self.z, gamma_O, self.mean_O, self.var_O, dy, in_place
        )
        dweight, _ = conv.weight_gradient(x, dz)
        return conv.data_gradient(dz, weight) if needs_dx else None, dweight, dgamma_O, dbeta_O


class _ConvolveNormalize(PyLayer):
    """activation(batch_norm(conv(x))), or without the activation (None)."""

    @staticmethod
    def forward(ctx, x_given, weight, gamma_O, beta_O, branch, activation, needs):
        conv = branch.unit.conv
        x = conv.x_in(contiguous(x_given))
        normal = branch.forward(x, weight, gamma_O, beta_O)
        ctx.save_for_backward(weight, gamma_O)
        if activation is None:
            ctx.kept = branch, x, None, None, needs
            return conv.y_out(normal)
        activate = branch.unit.activation(activation)
        ctx.kept = branch, x, normal, activate, needs
        return conv.y_out(activate.forward(normal))

    @staticmethod
    def backward(ctx, dy_given):
        weight, gamma_O = ctx.saved_tensor()
        branch, x, normal, activate, needs = ctx.kept
        conv = branch.unit.conv
        dy = conv.y_in(contiguous(dy_given, conv.y_given.dtype))
        if activate is not None:
            dy = activate.gradient(normal, dy)
        dx, *rest = branch.backward(x, dy, weight, gamma_O, needs[0], dy is not dy_given)
        return _only((dx, *rest), needs)


class OneDNNConvBNLayer(ConvBNLayer):
    """ConvBNLayer on oneDNN.  Synchronised or frozen batch norm runs as it is.

    Attributes:
        keeps_layout: the result is in oneDNN's layout, where it has a name.
    """

    keeps_layout = False

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.bn, nn.BatchNorm2D):  # folded
            return _paddles_own(super().forward, x)
        inputs = (x, self.conv.weight, self.bn.weight, self.bn.bias)
        constants = _by_constants(self.bn, inputs)
        unit = None
        if constants or _by_batch(self.bn):
            unit = _unit(self.conv, x, self.keeps_layout, precision.current().between)
        if unit is None:
            return _paddles_own(super().forward, x)
        if constants:
            x = unit.conv.x_in(contiguous(x))
            y = _Branch(unit, self.bn).infer(x, self.conv.weight, self.bn.weight, self.bn.bias)
            if self.activation is not None:
                y = unit.activation(self.activation).forward(y)
            return unit.conv.y_out(y)
        return _ConvolveNormalize.apply(
            *inputs, _Branch(unit, self.bn), self.activation, _needs(*inputs)
        )


class _TwoBranches(PyLayer):
    """activation(bn3(conv3x3(x)) + alpha * bn1(conv1x1(x))); both share their layouts.

    alpha scales gamma1 and beta1 instead of a map, and its gradient is that of these two:
    d alpha = sum(gamma1 * d(alpha gamma1) + beta1 * d(alpha beta1)).
    """

    @staticmethod
    def forward(ctx, x_given, w3, gamma3_O, beta3_O, w1, gamma1_O, beta1_O, alpha, *rest):
        wide, side, activation, needs = rest
        conv, activate = wide.unit.conv, wide.unit.activation(activation)
        x = conv.x_in(contiguous(x_given))
        total = wide.forward(x, w3, gamma3_O, beta3_O)
        scaled_gamma1_O = _scaled(gamma1_O, alpha)
        addend = side.forward(x, w1, scaled_gamma1_O, _scaled(beta1_O, alpha))
        total = wide.unit.sum(conv.y)(total, addend)
        ctx.save_for_backward(w3, gamma3_O, w1, gamma1_O, beta1_O)
        ctx.kept = wide, side, x, total, alpha, scaled_gamma1_O, activate, needs
        return conv.y_out(activate.forward(total))

    @staticmethod
    def backward(ctx, dy_given):
        w3, gamma3_O, w1, gamma1_O, beta1_O = ctx.saved_tensor()
        wide, side, x, total, alpha, scaled_gamma1_O, activate, needs = ctx.kept
        conv = wide.unit.conv
        dtotal = activate.gradient(total, conv.y_in(contiguous(dy_given, conv.y_given.dtype)))
        dx, *rest3 = wide.backward(x, dtotal, w3, gamma3_O, needs[0], False)
        dx_side, dw1, dgamma1_O, dbeta1_O = side.backward(
            x, dtotal, w1, scaled_gamma1_O, needs[0], True
        )
        if needs[0]:
            dx = wide.unit.sum(conv.x_given)(dx, dx_side)
        dalpha = []
        if alpha is not None:
            dalpha = [(gamma1_O * dgamma1_O + beta1_O * dbeta1_O).sum().reshape([1])]
        rest1 = dw1, _scaled(dgamma1_O, alpha), _scaled(dbeta1_O, alpha)
        return _only((dx, *rest3, *rest1, *dalpha), needs)


def _scaled(values: Tensor, alpha: Tensor | None) -> Tensor:
    return values if alpha is None else alpha * values


class OneDNNRepConv(RepConv):
    """RepConv on oneDNN; fused for deployment it is one nn.Conv2D.

    Attributes:
        keeps_layout: the result is in oneDNN's layout, where it has a name.
    """

    keeps_layout = False

    def forward(self, x: Tensor) -> Tensor:
        if self.conv is not None:
            return _paddles_own(super().forward, x)
        parameters = [
            p
            for layer in (self.conv1, self.conv2)
            for p in (layer.conv.weight, layer.bn.weight, layer.bn.bias)
        ]
        inputs = (x, *parameters, self.alpha)
        constants = all(_by_constants(layer.bn, inputs) for layer in (self.conv1, self.conv2))
        branches = self._branches(x, constants)
        if branches is None:
            return _paddles_own(super().forward, x)
        if constants:
            return self._infer(x, *branches)
        return _TwoBranches.apply(*inputs, *branches, self.activation, _needs(*inputs))

    def _branches(self, x: Tensor, constants: bool) -> list[_Branch] | None:
        layers = (self.conv1, self.conv2)
        if not constants and not all(_by_batch(layer.bn) for layer in layers):
            return None
        gives = self.keeps_layout, precision.current().between
        units = [_unit(layer.conv, x, *gives) for layer in layers]
        if units[0] is None or units[1] is None or not _same_layouts(units[0], units[1]):
            return None
        return [_Branch(u, layer.bn) for u, layer in zip(units, layers, strict=True) if u]

    def _infer(self, x: Tensor, wide: _Branch, side: _Branch) -> Tensor:
        conv, first, second = wide.unit.conv, self.conv1, self.conv2
        x = conv.x_in(contiguous(x))
        scaled = (_scaled(each, self.alpha) for each in (second.bn.weight, second.bn.bias))
        addend = side.infer(x, second.conv.weight, *scaled)
        total = wide.infer(x, first.conv.weight, first.bn.weight, first.bn.bias)
        total = wide.unit.sum(conv.y)(total, addend)
        return conv.y_out(wide.unit.activation(self.activation).forward(total))


def _same_layouts(a: _Unit, b: _Unit) -> bool:
    return a.conv.x.equals(b.conv.x) and a.conv.y.equals(b.conv.y)
