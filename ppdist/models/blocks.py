"""Building blocks of convolutional detectors.

Attribute names (`conv`, `bn`, `conv1`, `fc`, ...) are part of the contract: they are the keys under
which the published weights are stored.
"""

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn


def upsample2x(feature: Tensor) -> Tensor:
    """Nearest-neighbour x2, [B, C, H, W] -> [B, C, 2H, 2W].

    Written with stack and flatten: F.interpolate gives the same values, but Paddle 3.3's oneDNN
    predictor and its ONNX converter both fail on the operator's list-of-doubles attribute.
    """
    feature = paddle.stack([feature, feature], axis=-1).flatten(3, 4)
    return paddle.stack([feature, feature], axis=3).flatten(2, 3)


def swish(x: Tensor) -> Tensor:
    """x * sigmoid(x).

    Both of Paddle's operators compute it.  In a saved graph it is `swish`, which oneDNN makes part
    of the convolution before it; `silu` it does not know.
    """
    return F.silu(x) if paddle.in_dynamic_mode() else F.swish(x)


class ConvNorm(nn.Layer):
    """Convolution without bias, batch norm, and swish if `activate`.

    Args:
        padding: zeros on each side, pixels; None: (kernel - 1) // 2.
        epsilon: added to the variance; Paddle's default.
        momentum: weight of the old value in the running statistics (torch counts the new one's).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        stride: int = 1,
        activate: bool = True,
        *,
        padding: int | None = None,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
    ) -> None:
        super().__init__()
        if padding is None:
            padding = (kernel - 1) // 2
        self.conv = nn.Conv2D(
            in_channels, out_channels, kernel, stride, padding=padding, bias_attr=False
        )
        self.bn = nn.BatchNorm2D(out_channels, momentum=momentum, epsilon=epsilon)
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        return swish(x) if self.activate else x

    @paddle.no_grad()
    def fold_norm(self) -> None:
        """Folds the batch norm into the convolution, which gets a bias; same eval output."""
        if isinstance(self.bn, nn.Identity):
            return
        kernel, bias = _fold_norm(self)
        self.conv.weight.set_value(kernel)
        self.conv.bias = self.conv.create_parameter(bias.shape, is_bias=True)
        self.conv.bias.set_value(bias)
        self.bn = nn.Identity()


class RepConv(nn.Layer):
    """Parallel 3x3 and 1x1 convolutions, summed, swish; one 3x3 convolution after `fuse()`.

        y = swish(bn3(conv3x3(x)) + alpha * bn1(conv1x1(x)))

    alpha is 1, or with `scaled_branch` a learned scalar (PP-YOLOE+).
    Source: RepVGG, arXiv:2101.03697, section 3.3 for the fusion.
    """

    def __init__(self, channels: int, scaled_branch: bool = False) -> None:
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3, activate=False)
        self.conv2 = ConvNorm(channels, channels, 1, activate=False)
        self.alpha = None
        if scaled_branch:
            self.alpha = self.create_parameter(
                [1], default_initializer=nn.initializer.Constant(1.0)
            )
        self.conv: nn.Conv2D | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.conv is not None:
            return swish(self.conv(x))
        side = self.conv2(x)
        if self.alpha is not None:
            side = self.alpha * side
        return swish(self.conv1(x) + side)

    @paddle.no_grad()
    def fuse(self) -> None:
        """Replaces both branches by the 3x3 convolution (with bias) of the same eval output."""
        if self.conv is not None:
            return
        kernel, bias = _fold_norm(self.conv1)
        kernel_1x1, bias_1x1 = _fold_norm(self.conv2)
        if self.alpha is not None:
            kernel_1x1, bias_1x1 = self.alpha * kernel_1x1, self.alpha * bias_1x1
        channels = kernel.shape[0]
        fused = nn.Conv2D(channels, channels, 3, padding=1)
        fused.weight.set_value(kernel + F.pad(kernel_1x1, [1, 1, 1, 1]))
        fused.bias.set_value(bias + bias_1x1)
        del self.conv1, self.conv2, self.alpha
        self.conv = fused


def _fold_norm(block: ConvNorm) -> tuple[Tensor, Tensor]:
    """Kernel and bias of one convolution that equals convolution plus frozen batch norm."""
    norm = block.bn
    scale = norm.weight / paddle.sqrt(norm._variance + norm._epsilon)
    return block.conv.weight * scale.reshape([-1, 1, 1, 1]), norm.bias - norm._mean * scale


class RepBlock(nn.Layer):
    """3x3 ConvNorm, then RepConv; plus the input when `residual`."""

    def __init__(self, channels: int, residual: bool, scaled_branch: bool) -> None:
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3)
        self.conv2 = RepConv(channels, scaled_branch)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        return x + y if self.residual else y


class ChannelAttention(nn.Layer):
    """x * hardsigmoid(fc(mean over H and W of x)): the "effective SE" of arXiv:1911.06667."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2D(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.fc(F.adaptive_avg_pool2d(x, 1)))


class SpatialPyramid(nn.Layer):
    """The input beside its max-poolings of several sizes (stride 1), mixed by a 1x1 ConvNorm."""

    def __init__(self, channels: int, sizes: tuple[int, ...] = (5, 9, 13)) -> None:
        super().__init__()
        self.sizes = sizes
        self.conv = ConvNorm(channels * (len(sizes) + 1), channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = [F.max_pool2d(x, size, stride=1, padding=size // 2) for size in self.sizes]
        return self.conv(paddle.concat([x, *pooled], axis=1))
