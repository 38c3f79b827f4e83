"""Building blocks of convolutional detectors.

In this order: blocks of both families, of PP-YOLOE, of YOLOv5; functions that set the activation
and the initial weights of a model.

Attribute names (`conv`, `bn`, `conv1`, `fc`, ...) are part of the contract: they are the keys under
which the published weights are stored.
"""

import math

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ppdist.distributed import paddle_api
from ppdist.models import functional
from ppdist.models.functional import ACTIVATIONS

OF_MODEL = "of the model"  # the activation that `model.activation` names


class ConvBNLayer(nn.Layer):
    """Convolution without bias, batch norm, activation.

    Args:
        activation: OF_MODEL; or a row of `ACTIVATIONS`, which `set_activation` does not change;
            None: no activation follows the batch norm.
        padding: zeros on each side, pixels; None: (kernel - 1) // 2.
        epsilon: added to the variance; Paddle's default.
        momentum: weight of the old value in the running statistics (in torch: of the new value).
        groups: number of channel groups, convolved separately; `in_channels`: depthwise.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        stride: int = 1,
        activation: str | None = OF_MODEL,
        *,
        padding: int | None = None,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        groups: int = 1,
    ) -> None:
        super().__init__()
        if padding is None:
            padding = (kernel - 1) // 2
        self.conv = nn.Conv2D(
            in_channels, out_channels, kernel, stride, padding, groups=groups, bias_attr=False
        )
        self.bn = nn.BatchNorm2D(out_channels, momentum=momentum, epsilon=epsilon)
        self.follows_model = activation == OF_MODEL
        self.activation = "silu" if activation == OF_MODEL else activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        return x if self.activation is None else ACTIVATIONS[self.activation](x)

    @paddle.no_grad()
    def fuse_conv_bn(self) -> None:
        """Fuses the batch norm into the convolution, in place."""
        if isinstance(self.bn, nn.Identity):
            return
        kernel, bias = _fuse_parameters(self)
        self.conv.weight.set_value(kernel)
        self.conv.bias = self.conv.create_parameter(bias.shape, is_bias=True)
        self.conv.bias.set_value(bias)
        self.bn = nn.Identity()


def _fuse_parameters(block: ConvBNLayer) -> tuple[Tensor, Tensor]:
    """Computes the kernel and bias of a convolution with its batch norm folded in."""
    # norm(conv(x)) = w x * s + (b - mean * s) with s = gamma / sqrt(variance + epsilon).
    norm = block.bn
    mean, variance = paddle_api.running_statistics(norm)
    scale = norm.weight / paddle.sqrt(variance + paddle_api.epsilon(norm))
    return block.conv.weight * scale.reshape([-1, 1, 1, 1]), norm.bias - mean * scale


class RepConv(nn.Layer):
    """Parallel 3x3 and 1x1 convolutions, summed, activated; one 3x3 convolution after `fuse()`.

        y = activation(bn3(conv3x3(x)) + alpha * bn1(conv1x1(x)))

    alpha is 1, or with `scaled_branch` a learned scalar (PP-YOLOE+).
    Source: RepVGG, arXiv:2101.03697, section 3.3 for the fusion.
    """

    def __init__(self, channels: int, scaled_branch: bool = False) -> None:
        super().__init__()
        self.conv1 = ConvBNLayer(channels, channels, 3, activation=None)
        self.conv2 = ConvBNLayer(channels, channels, 1, activation=None)
        self.alpha = None
        if scaled_branch:
            self.alpha = self.create_parameter(
                [1], default_initializer=nn.initializer.Constant(1.0)
            )
        self.conv: nn.Conv2D | None = None
        self.activation = "silu"

    def forward(self, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.activation]
        if self.conv is not None:
            return activation(self.conv(x))
        side = self.conv2(x)
        if self.alpha is not None:
            side = self.alpha * side
        return activation(self.conv1(x) + side)

    @paddle.no_grad()
    def fuse(self) -> None:
        """Replaces both branches by one 3x3 convolution, in place."""
        if self.conv is not None:
            return
        kernel, bias = _fuse_parameters(self.conv1)
        kernel_1x1, bias_1x1 = _fuse_parameters(self.conv2)
        if self.alpha is not None:
            kernel_1x1, bias_1x1 = self.alpha * kernel_1x1, self.alpha * bias_1x1
        channels = kernel.shape[0]
        # A 1x1 kernel is a 3x3 kernel with zeros around it.
        fused = nn.Conv2D(channels, channels, 3, padding=1)
        fused.weight.set_value(kernel + F.pad(kernel_1x1, [1, 1, 1, 1]))
        fused.bias.set_value(bias + bias_1x1)
        del self.conv1, self.conv2, self.alpha
        self.conv = fused


class _TwoConvs(nn.Layer):
    """Base of blocks that compute conv2(conv1(x)), plus the input if `residual`."""

    conv1: nn.Layer
    conv2: nn.Layer
    residual: bool

    def forward(self, x: Tensor) -> Tensor:
        if not self.residual:
            return self.conv2(self.conv1(x))
        x, residual = functional.share(x, 2)
        return functional.add(residual, self.conv2(self.conv1(x)))


class RepBlock(_TwoConvs):
    """3x3 ConvBNLayer, then RepConv; plus the input if `residual`."""

    def __init__(self, channels: int, residual: bool, scaled_branch: bool) -> None:
        super().__init__()
        self.conv1 = ConvBNLayer(channels, channels, 3)
        self.conv2 = RepConv(channels, scaled_branch)
        self.residual = residual


class EffectiveSELayer(nn.Layer):
    """Effective squeeze and excitation (arXiv:1911.06667).

    x * hardsigmoid(fc(mean over H and W of x))
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2D(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, pool_input = functional.share(x, 2)
        return functional.scale_channels(
            x, F.hardsigmoid(self.fc(functional.spatial_mean(pool_input)))
        )


class SPP(nn.Layer):
    """Spatial pyramid pooling.

    Concatenates the input with its max-pooled versions (kernel sizes SIZES, stride 1) and projects
    the result with a 1x1 ConvBNLayer.
    """

    SIZES = (5, 9, 13)  # pixels

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = ConvBNLayer(channels * (len(self.SIZES) + 1), channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = [functional.max_pool2d(x, size, 1, size // 2) for size in self.SIZES]
        return self.conv(functional.concat([x, *pooled], axis=1))


def yolov5_conv(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, padding: int | None = None
) -> ConvBNLayer:
    """Builds a ConvBNLayer with the batch norm of YOLOv5."""
    return ConvBNLayer(
        in_channels, out_channels, kernel, stride, padding=padding, epsilon=1e-3, momentum=0.97
    )


class Bottleneck(_TwoConvs):
    """1x1, then 3x3 convolution; plus the input if `residual`."""

    def __init__(self, channels: int, residual: bool) -> None:
        super().__init__()
        self.conv1 = yolov5_conv(channels, channels, 1)
        self.conv2 = yolov5_conv(channels, channels, 3)
        self.residual = residual


class C3(nn.Layer):
    """Cross-stage partial block with three convolutions.

    Half the channels pass through bottlenecks, half bypass them; a 1x1 mixes the two halves.
    """

    def __init__(self, in_channels: int, out_channels: int, blocks: int, residual: bool) -> None:
        super().__init__()
        half = out_channels // 2
        self.conv1 = yolov5_conv(in_channels, half, 1)
        self.conv2 = yolov5_conv(in_channels, half, 1)
        self.conv3 = yolov5_conv(2 * half, out_channels, 1)
        self.blocks = nn.Sequential(*[Bottleneck(half, residual) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x, bypass = functional.share(x, 2)
        mixed = functional.concat([self.blocks(self.conv1(x)), self.conv2(bypass)], axis=1)
        return self.conv3(mixed)


class SPPF(nn.Layer):
    """Spatial pyramid pooling as a chain.

    A 1x1 convolution, then a chain of three 5x5 max-poolings (receptive fields 5, 9, 13); another
    1x1 mixes all four maps.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = yolov5_conv(channels, channels // 2, 1)
        self.conv2 = yolov5_conv(channels // 2 * 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.conv1(x)]
        for _ in range(3):
            parts.append(functional.max_pool2d(parts[-1], 5, 1, 2))
        return self.conv2(functional.concat(parts, axis=1))


def set_activation(model: nn.Layer, name: str) -> None:
    """Sets the activation of all layers whose activation is not fixed.

    Args: name: a row of `ACTIVATIONS`.
    """
    for layer in model.sublayers():
        if isinstance(layer, RepConv) or (isinstance(layer, ConvBNLayer) and layer.follows_model):
            layer.activation = name


@paddle.no_grad()
def start_uniform(model: nn.Layer) -> None:
    """Initialises convolutions and linear layers as torch does: U(-b, b), b = fan_in ** -0.5.

    Paddle's default is sqrt(6) times as large.  Before a batch norm the norm of a weight does not
    change the output but divides its learning rate (arXiv:1706.05350), so the published recipe
    needs this initialisation.
    """
    for layer in model.sublayers():
        if isinstance(layer, nn.Conv2D | nn.Linear):
            shape = layer.weight.shape
            fan_in = shape[0] if isinstance(layer, nn.Linear) else math.prod(shape[1:])
            bound = fan_in**-0.5
            layer.weight.set_value(paddle.uniform(shape, "float32", -bound, bound))
