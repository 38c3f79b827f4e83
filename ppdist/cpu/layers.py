"""Layers on oneDNN's CPU kernels, one for each plain layer.

Every layer takes feature maps in Paddle's layout or in oneDNN's (feature_maps.py).  `ConvBNLayer`
and `RepConv` output oneDNN's, in the dtype of `precision.py`, if `keeps_layout` says that every
reader accepts it; else, and any other `nn.Conv2D`, Paddle's in float32.  Each class only overrides
methods of its plain base class, so that changing the class of a built layer switches it
(switch.py).  Layers without a oneDNN kernel, with other dtypes or with other kinds of batch norm
run as plain layers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer

from ppdist.cpu import onednn, precision
from ppdist.cpu.feature_maps import contiguous, dtype_of, layout_of, to_plain
from ppdist.cpu.precision import Kernels
from ppdist.cpu.sampling import Points, SampledImage, array_of
from ppdist.distributed import paddle_api
from ppdist.models.attention import HEADS, Memory, MSDeformableAttention, MultiHeadAttention
from ppdist.models.layers import ConvBNLayer, RepConv


def _pair(value: Any) -> tuple[int, int] | None:
    """Returns a setting as [y, x]; None: it has another form."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(v) is int for v in value):
        return value[0], value[1]
    return None


def _kernel(
    conv: nn.Conv2D, x: Tensor, keeps_layout: bool = False, y_dtype: str = "float32"
) -> onednn.Convolution | None:
    """Returns the kernels of a layer for an input; None: the layer stays plain."""
    kernels = precision.current()
    settings = paddle_api.conv_settings(conv)
    stride, padding = _pair(settings.stride), _pair(settings.padding)
    dilation = _pair(settings.dilation)
    if stride is None or padding is None or dilation is None:
        return None
    if dtype_of(x) not in ("float32", kernels.dtype):
        return None
    if settings.data_format != "NCHW" or settings.padding_mode != "zeros" or 0 in x.shape:
        return None
    x_layout = layout_of(x)
    return kernels.find(
        "Convolution", tuple(x_layout.shape), tuple(conv.weight.shape), stride, padding, dilation,
        settings.groups, conv.bias is not None, x_layout.block, keeps_layout, kernels.dtype,
        x_layout.dtype, y_dtype,
    )  # fmt: skip


def _run_plain(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Runs the plain layer on a plain float32 map."""
    if dtype_of(x) == "bfloat16":
        x = to_plain(x).astype("float32")
    with precision.compute_in(precision.current().at("O1")):
        return forward(x)


def _need_gradients(*inputs: Tensor | None) -> tuple[bool, ...]:
    """Tests for each tensor whether backward must return its gradient."""
    return tuple(not tensor.stop_gradient for tensor in inputs if tensor is not None)


def _select_needed(
    gradients: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Replaces gradients that are not needed by None."""
    return tuple(g if need else None for g, need in zip(gradients, needs, strict=True))


class _Convolve(PyLayer):
    """Convolution or linear layer, with or without bias."""

    @staticmethod
    def forward(ctx, x_given, weight, bias, conv, needs):
        x = conv.x_in(contiguous(x_given))
        ctx.save_for_backward(weight)
        ctx.saved = conv, x, needs
        return conv.y_out(conv.forward(x, weight, bias))

    @staticmethod
    def backward(ctx, dy_given):
        (weight,) = ctx.saved_tensor()
        conv, x, needs = ctx.saved
        dy = conv.y_in(contiguous(dy_given, conv.y_given.dtype))
        dw, db = conv.weight_gradient(x, dy)
        dx = conv.data_gradient(dy, weight) if needs[0] else None
        return _select_needed((dx, dw, db) if conv.has_bias else (dx, dw), needs)


class OneDNNConv2D(nn.Conv2D):
    """nn.Conv2D on oneDNN; outputs float32."""

    def forward(self, x: Tensor) -> Tensor:
        conv = _kernel(self, x)
        if conv is None:
            return _run_plain(super().forward, to_plain(x))
        inputs = (x, self.weight, self.bias)
        return _Convolve.apply(*inputs, conv, _need_gradients(*inputs))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Computes x w + b as float32; None: oneDNN does not compute it."""
    kernels, rows = precision.current(), math.prod(x.shape[:-1])
    takes = dtype_of(x) in ("float32", kernels.dtype) and dtype_of(weight) == "float32"
    if not takes or not rows:
        return None
    shape, outputs = (rows, x.shape[-1]), weight.shape[1]
    kernel = kernels.find(
        "Linear", shape, tuple(weight.shape), bias is not None, kernels.dtype, dtype_of(x),
        "float32",
    )  # fmt: skip
    if kernel is None:
        return None
    inputs = (x.reshape(shape), contiguous(weight), bias)
    return _Convolve.apply(*inputs, kernel, _need_gradients(*inputs)).reshape(
        [*x.shape[:-1], outputs]
    )


class OneDNNLinear(nn.Linear):
    """nn.Linear on oneDNN; outputs float32."""

    def forward(self, x: Tensor) -> Tensor:
        y = _linear(x, self.weight, self.bias)
        return super().forward(x) if y is None else y


class _NormalizeRows(PyLayer):
    """Layer norm of rows."""

    @staticmethod
    def forward(ctx, x, scale_D, shift_D, kernel):
        x, ctx.needs = contiguous(x), _need_gradients(x, scale_D, shift_D)
        y, *statistics = kernel.forward(x, scale_D, shift_D)
        ctx.save_for_backward(scale_D, shift_D)
        ctx.saved = kernel, x, statistics
        return y.reshape(x.shape)

    @staticmethod
    def backward(ctx, dy):
        kernel, x, statistics = ctx.saved
        dx, *parameter_gradients = kernel.gradient(
            x, *ctx.saved_tensor(), *statistics, contiguous(dy)
        )
        return _select_needed((dx.reshape(x.shape), *parameter_gradients), ctx.needs)


class OneDNNLayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last axis on oneDNN, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        affine = self.weight is not None and self.bias is not None
        if not affine or list(self.weight.shape) != x.shape[-1:] or dtype_of(x) != "float32":
            return super().forward(x)
        rows = math.prod(x.shape[:-1])
        form = (rows, x.shape[-1], paddle_api.epsilon(self))
        kernel = precision.FLOAT32.find("LayerNorm", *form) if rows else None
        if kernel is None:
            return super().forward(x)
        return _NormalizeRows.apply(x, self.weight, self.bias, kernel)


class _Attend(PyLayer):
    """Attention of all heads."""

    @staticmethod
    def forward(ctx, pairs, values, bias, kernel):
        ctx.needs = _need_gradients(pairs, values, bias)
        pairs, values = contiguous(pairs), contiguous(values)
        y, shares = kernel.forward(pairs, values, None if bias is None else contiguous(bias))
        ctx.saved = kernel, pairs, values, shares
        return y

    @staticmethod
    def backward(ctx, dy):
        kernel, *saved = ctx.saved
        gradients = (*kernel.gradient(*saved, contiguous(dy)), None)
        return _select_needed(gradients[: len(ctx.needs)], ctx.needs)


class OneDNNMultiHeadAttention(MultiHeadAttention):
    """MultiHeadAttention on oneDNN; its products are float32."""

    def project(self, x_BND: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = _linear(x_BND, weight, bias)
        return super().project(x_BND, weight, bias) if y is None else y

    def attend(self, pairs_BNX: Tensor, values_BND: Tensor, bias_B1MN: Tensor | None) -> Tensor:
        inputs, kernel = (pairs_BNX, values_BND, bias_B1MN), None
        is_learned = bias_B1MN is not None and not bias_B1MN.stop_gradient
        is_float32 = all(x is None or dtype_of(x) == "float32" for x in inputs)
        if not is_learned and is_float32 and 0 not in values_BND.shape:
            biased = 0 if bias_B1MN is None else bias_B1MN.shape[2]
            kernel = precision.FLOAT32.find("Attention", tuple(values_BND.shape), HEADS, biased)
        if kernel is None:
            return super().attend(*inputs)
        return _Attend.apply(*inputs, kernel)


class _Sample(PyLayer):
    """Weighted samples of feature maps."""

    @staticmethod
    def forward(ctx, cells, offsets, weights, boxes, points):
        ctx.needs = _need_gradients(cells, offsets, weights)
        inputs = [contiguous(x) for x in (cells, offsets, weights, boxes)]
        batch, queries = inputs[1].shape[:2]
        ctx.inputs = inputs  # their memory is read again
        cells_BLX, offsets_BQX, weights_BQHP, boxes_BQ4 = map(array_of, inputs)
        offsets_BQZ2 = offsets_BQX.reshape(batch, queries, -1, 2)
        weights_BQZ = weights_BQHP.reshape(batch, queries, -1)
        ctx.images = [
            SampledImage(*arrays, points)
            for arrays in zip(cells_BLX, offsets_BQZ2, weights_BQZ, boxes_BQ4, strict=True)
        ]
        y = paddle_api.allocate([batch, queries, cells_BLX.shape[2]], paddle.float32)
        for image, y_QX in zip(ctx.images, array_of(y), strict=True):
            y_QX[:] = image.sums().reshape(y_QX.shape)
        return y

    @staticmethod
    def backward(ctx, dy):
        gradients = [paddle_api.allocate(x.shape, paddle.float32) for x in ctx.inputs[:3]]
        arrays, dy = [array_of(gradient) for gradient in gradients], contiguous(dy)
        for number, image in enumerate(ctx.images):
            dy_XD = array_of(dy)[number].reshape(-1, image.cells_ND.shape[1])
            for array, gradient in zip(arrays, image.gradient(dy_XD), strict=True):
                array[number] = gradient.reshape(array.shape[1:])
        return _select_needed(gradients, ctx.needs)


class SparseMSDeformableAttention(MSDeformableAttention):
    """MSDeformableAttention whose samples are sparse products (sampling.py)."""

    def sample_offsets(
        self, memory: Memory, offsets_BQX: Tensor, weights_BQHP: Tensor, boxes_BQ4: Tensor
    ) -> Tensor:
        inputs = (memory.cells_BLD, offsets_BQX, weights_BQHP, boxes_BQ4)
        is_float32 = all(dtype_of(x) == "float32" for x in inputs)
        if not is_float32 or not boxes_BQ4.stop_gradient or not paddle.in_dynamic_mode():
            return super().sample_offsets(memory, offsets_BQX, weights_BQHP, boxes_BQ4)
        points = Points(
            np.tile(memory.size_P2.numpy(), [HEADS, 1]),
            np.tile(memory.start_P.numpy().astype(np.int32), HEADS),
            np.array(self.reach[::2], np.float32),
            HEADS,
        )
        return _Sample.apply(*inputs, points)


class _Branch:
    """Convolution, batch norm and perhaps ReLU in one call."""

    def __init__(
        self, kernels: Kernels, conv: onednn.Convolution, norm: nn.BatchNorm2D, has_relu: bool
    ) -> None:
        self.conv, self.norm = conv, norm
        self.bn = kernels.get("BatchNorm", conv.y, paddle_api.epsilon(norm), has_relu)

    def forward(self, x: Tensor, weight: Tensor, gamma_O: Tensor, beta_O: Tensor) -> Tensor:
        """Computes forward on buffers in the convolution's layouts; updates running statistics."""
        self.z = self.conv.forward(x, weight, None)
        out, self.mean_O, self.var_O, *self.workspaces = self.bn.train(self.z, gamma_O, beta_O)
        momentum = paddle_api.momentum(self.norm)
        mean_O, var_O = paddle_api.running_statistics(self.norm)
        # Paddle's CPU kernel uses the biased variance (1/n) as its running statistic; so do we.
        paddle_api.move_average(mean_O, self.mean_O, momentum)
        paddle_api.move_average(var_O, self.var_O, momentum)
        return out

    def infer(self, x: Tensor, weight: Tensor, gamma_O: Tensor, beta_O: Tensor) -> Tensor:
        """Computes forward from running statistics; saves nothing for backward."""
        z = self.conv.forward(x, weight, None)  # a buffer of its own, to be overwritten
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
        """Computes gradients of x (in its given layout), weight, gamma and beta.

        Args: in_place: dy may be overwritten.
        """
        dz, dgamma_O, dbeta_O = self.bn.gradient(
            self.z, gamma_O, self.mean_O, self.var_O, dy, in_place, *self.workspaces
        )
        dweight, _ = self.conv.weight_gradient(x, dz)
        dx = self.conv.data_gradient(dz, weight) if needs_dx else None
        return dx, dweight, dgamma_O, dbeta_O


class _Call:
    """One call of `_compute`: branches, their sum, the activation unless it is in the branch."""

    def __init__(self, kernels: Kernels, branches: list[_Branch], activation: str | None) -> None:
        self.branches, self.conv = branches, branches[0].conv
        self.activation = None
        if activation is not None:
            self.activation = kernels.get("Activation", activation, self.conv.y)
        self.sum_y = self.sum_x = None
        if len(branches) == 2:
            self.sum_y = kernels.get("Sum", self.conv.y)
            self.sum_x = kernels.get("Sum", self.conv.x_given)

    def total(self, method: str, x: Tensor, parameters: Sequence[Tensor], alpha: Any) -> Tensor:
        """Computes the sum of the branches.

        Args: method: `forward` or `infer`.
        """
        total = getattr(self.branches[0], method)(x, *parameters[:3])
        if self.sum_y is not None:
            weight, gamma_O, beta_O = parameters[3:]
            norm = _scale(gamma_O, alpha), _scale(beta_O, alpha)
            total = self.sum_y(total, getattr(self.branches[1], method)(x, weight, *norm))
        return total

    def infer(self, x_given: Tensor, parameters: Sequence[Tensor], alpha: Tensor | None) -> Tensor:
        """Computes the result from running statistics; saves nothing for backward."""
        y = self.total("infer", self.conv.x_in(contiguous(x_given)), parameters, alpha)
        if self.activation is not None:
            y = self.activation.forward(y, in_place=True)
        return self.conv.y_out(y)


class _ConvBNActivation(PyLayer):
    """activation(bn(conv(x)) + alpha * bn(conv(x))); the second branch may be missing.

    alpha scales gamma and beta of the second branch instead of a map, and its gradient follows from
    their gradients: d alpha = sum(gamma * d(alpha gamma) + beta * d(alpha beta)).
    """

    @staticmethod
    def forward(ctx, x_given, alpha, call, needs, *parameters):
        x = call.conv.x_in(contiguous(x_given))
        total = call.total("forward", x, parameters, alpha)
        ctx.save_for_backward(*parameters)
        if call.activation is None:
            ctx.saved = call, x, None, alpha, needs
            return call.conv.y_out(total)
        ctx.saved = call, x, total, alpha, needs
        return call.conv.y_out(call.activation.forward(total))

    @staticmethod
    def backward(ctx, dy_given):
        weight, gamma_O, _, *side = ctx.saved_tensor()
        call, x, total, alpha, needs = ctx.saved
        dy = call.conv.y_in(contiguous(dy_given, call.conv.y_given.dtype))
        if call.activation is not None:
            dy = call.activation.gradient(total, dy)
        is_own_buffer = dy is not dy_given
        dx, *gradients = call.branches[0].backward(
            x, dy, weight, gamma_O, needs[0], is_own_buffer and not side
        )
        if not side:
            return _select_needed((dx, *gradients), needs)
        weight, gamma_O, beta_O = side
        dx_side, dw, dgamma_O, dbeta_O = call.branches[1].backward(
            x, dy, weight, _scale(gamma_O, alpha), needs[0], is_own_buffer
        )
        if needs[0]:
            dx = call.sum_x(dx, dx_side)
        dalpha = []
        if alpha is not None:
            dalpha = [(gamma_O * dgamma_O + beta_O * dbeta_O).sum().reshape([1])]
        gradients += [dw, _scale(dgamma_O, alpha), _scale(dbeta_O, alpha)]
        return _select_needed((dx, *dalpha, *gradients), needs)


def _scale(values: Tensor, alpha: Tensor | None) -> Tensor:
    """Multiplies by alpha, if there is one."""
    return values if alpha is None else alpha * values


def _compute(
    layer: Any,
    plain: Callable[[Tensor], Tensor],
    x: Tensor,
    blocks: Sequence[ConvBNLayer],
    alpha: Tensor | None = None,
) -> Tensor:
    """Computes an activated sum of convolutions with batch norm, or what `plain` computes."""
    inputs = [x, alpha]
    for block in blocks:
        inputs += [block.conv.weight, block.bn.weight, block.bn.bias]
    is_fixed = [not b.bn.training or paddle_api.normalises_by_running(b.bn) for b in blocks]
    # No gradient is needed in evaluation, nor in training if all layers up to here are frozen.
    uses_running = all(is_fixed) and not (
        paddle.is_grad_enabled() and any(_need_gradients(*inputs))
    )
    uses_batch = not any(is_fixed) and all(type(b.bn) is nn.BatchNorm2D for b in blocks)
    kernels, convs = precision.current(), list[Any]()
    if uses_running or uses_batch:
        y_dtype = kernels.between if layer.keeps_layout else "float32"
        convs = [_kernel(b.conv, x, layer.keeps_layout, y_dtype) for b in blocks]
    if not convs or None in convs:
        return _run_plain(plain, x)
    # Two branches are added in one buffer, so their kernels need the same layouts.
    first, last = convs[0], convs[-1]
    if first is not last and not (first.x.equals(last.x) and first.y.equals(last.y)):
        return _run_plain(plain, x)
    has_relu = layer.activation == "relu" and len(blocks) == 1
    branches = [_Branch(kernels, conv, b.bn, has_relu) for conv, b in zip(convs, blocks)]
    call = _Call(kernels, branches, None if has_relu else layer.activation)
    if uses_running:
        return call.infer(x, inputs[2:], alpha)
    return _ConvBNActivation.apply(x, alpha, call, _need_gradients(*inputs), *inputs[2:])


class OneDNNConvBNLayer(ConvBNLayer):
    """ConvBNLayer on oneDNN.  Synchronised or frozen batch norm runs as before."""

    keeps_layout = False  # the output is in oneDNN's layout, if that has a name, and dtype

    def forward(self, x: Tensor) -> Tensor:
        is_folded = not isinstance(self.bn, nn.BatchNorm2D)
        return _compute(self, super().forward, x, [] if is_folded else [self])


class OneDNNRepConv(RepConv):
    """RepConv on oneDNN; fused for deployment it is one nn.Conv2D."""

    keeps_layout = False

    def forward(self, x: Tensor) -> Tensor:
        if self.conv is not None:
            return _compute(self, super().forward, x, [])
        return _compute(self, super().forward, x, [self.conv1, self.conv2], self.alpha)
