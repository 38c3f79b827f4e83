"""Layers of several families."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


class ConvBN(nn.Module):
    """Convolution without bias, batch norm, activation; pad None: kernel // 2 rounded down."""

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel: int,
        stride: int = 1,
        activation: Activation | None = F.silu,
        *,
        pad: int | None = None,
        groups: int = 1,
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__()
        pad = (kernel - 1) // 2 if pad is None else pad
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, pad, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(c_out, eps, momentum)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        return x if self.activation is None else self.activation(x)


class RepConv(nn.Module):
    """3x3 and 1x1 convolutions side by side; the second times a learned number if `scaled`."""

    def __init__(self, channels: int, scaled: bool = False) -> None:
        super().__init__()
        self.conv1 = ConvBN(channels, channels, 3, activation=None)
        self.conv2 = ConvBN(channels, channels, 1, activation=None)
        self.alpha = nn.Parameter(torch.ones(1)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        side = self.conv2(x)
        return F.silu(self.conv1(x) + (side if self.alpha is None else self.alpha * side))


class MLP(nn.Module):
    """Linear layers with an activation between them."""

    def __init__(self, activation: Activation, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        *inner, last = self.layers
        for layer in inner:
            x = self.activation(layer(x))
        return last(x)


def double(x: Tensor) -> Tensor:
    """Upsamples to twice the height and width, by nearest neighbour."""
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def scaled_repeats(repeats: int, depth: float) -> int:
    """Returns the number of blocks of a stage at a depth multiple."""
    return max(round(repeats * depth), 1)
