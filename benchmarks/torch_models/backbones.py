"""Backbones of RT-DETR and D-FINE: ResNet-vd of basic blocks, HGNetv2 B0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.torch_models.layers import ConvBN

_RESNET_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_RESNET_CHANNELS = (64, 128, 256, 512)
_HGNET_STEM = 16
_HGNET_INSIDE, _HGNET_OUT = (16, 32, 64, 128), (64, 256, 512, 1024)
_HGNET_BLOCKS, _HGNET_CONVOLUTIONS = (1, 1, 2, 1), 3
_LIGHT_FROM = 2  # first stage with light convolutions


class AveragedShortcut(nn.Module):
    """2x2 mean, then a 1x1 convolution."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv = ConvBN(c_in, c_out, 1, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.avg_pool2d(x, 2))


class ResNetBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, c_in: int, c_out: int, stride: int, begins: bool) -> None:
        super().__init__()
        self.short: nn.Module | None = None
        if begins:
            self.short = (
                AveragedShortcut(c_in, c_out)
                if stride == 2
                else ConvBN(c_in, c_out, 1, activation=None)
            )
        self.branch2a = ConvBN(c_in, c_out, 3, stride, F.relu)
        self.branch2b = ConvBN(c_out, c_out, 3, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.short is None else self.short(x)
        return F.relu(self.branch2b(self.branch2a(x)) + shortcut)


class ResNetStage(nn.Module):
    """The blocks of one resolution."""

    def __init__(self, c_in: int, c_out: int, count: int, stride: int) -> None:
        super().__init__()
        first = ResNetBlock(c_in, c_out, stride, True)
        rest = (ResNetBlock(c_out, c_out, 1, False) for _ in range(count - 1))
        self.blocks = nn.Sequential(first, *rest)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class ResNetVd(nn.Module):
    """Outputs features of strides 8, 16, 32."""

    channels = _RESNET_CHANNELS[1:]

    def __init__(self, depth: int) -> None:
        super().__init__()
        stem = _RESNET_CHANNELS[0]
        self.conv1 = nn.Sequential()
        rows = ((3, stem // 2, 2), (stem // 2, stem // 2, 1), (stem // 2, stem, 1))
        for number, (c_in, c_out, stride) in enumerate(rows, 1):
            self.conv1.add_module(f"conv1_{number}", ConvBN(c_in, c_out, 3, stride, F.relu))
        befores = (stem, *_RESNET_CHANNELS)
        self.res_layers = nn.ModuleList(
            [
                ResNetStage(befores[i], out, _RESNET_BLOCKS[depth][i], 2 if i else 1)
                for i, out in enumerate(_RESNET_CHANNELS)
            ]
        )

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        x, features = F.max_pool2d(self.conv1(images_B3HW), 3, 2, 1), []
        for stage in self.res_layers:
            x = stage(x)
            features.append(x)
        return features[1:]


class Affine(nn.Module):
    """scale * x + bias with two learned numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.bias


class AffineConvBN(nn.Module):
    """ConvBN with ReLU, then `Affine`."""

    def __init__(
        self, c_in: int, c_out: int, kernel: int, stride: int = 1, pad: int | None = None,
        groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.block = ConvBN(c_in, c_out, kernel, stride, F.relu, pad=pad, groups=groups)
        self.lab = Affine()

    def forward(self, x: Tensor) -> Tensor:
        return self.lab(self.block(x))


class LightConv(nn.Module):
    """1x1 without activation, then a depthwise 5x5."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv1 = ConvBN(c_in, c_out, 1, activation=None)
        self.conv2 = AffineConvBN(c_out, c_out, 5, groups=c_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x))


class HGStem(nn.Module):
    """2x2 convolutions beside a 2x2 max pooling, to a quarter of the resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem1 = AffineConvBN(3, width, 3, 2)
        self.stem2a = AffineConvBN(width, width // 2, 2, pad=0)
        self.stem2b = AffineConvBN(width // 2, width, 2, pad=0)
        self.stem3 = AffineConvBN(2 * width, width, 3, 2)
        self.stem4 = AffineConvBN(width, width, 1)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        x = F.pad(self.stem1(images_B3HW), (0, 1, 0, 1))
        pooled = F.max_pool2d(x, 2, 1)
        x = self.stem2b(F.pad(self.stem2a(x), (0, 1, 0, 1)))
        return self.stem4(self.stem3(torch.cat([pooled, x], 1)))


class HGBlock(nn.Module):
    """A chain of convolutions, all of whose outputs are mixed; plus the input if it fits."""

    def __init__(self, c_in: int, inside: int, c_out: int, light: bool) -> None:
        super().__init__()
        befores = [c_in, *[inside] * (_HGNET_CONVOLUTIONS - 1)]
        self.layers = nn.ModuleList(
            [
                LightConv(before, inside) if light else AffineConvBN(before, inside, 3)
                for before in befores
            ]
        )
        self.aggregation = nn.Sequential(
            AffineConvBN(c_in + _HGNET_CONVOLUTIONS * inside, c_out // 2, 1),
            AffineConvBN(c_out // 2, c_out, 1),
        )
        self.residual = c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        y = self.aggregation(torch.cat(outputs, 1))
        return y + x if self.residual else y


class HGStage(nn.Module):
    """Halves the resolution, except in the first stage, then applies its blocks."""

    def __init__(self, index: int, c_in: int) -> None:
        super().__init__()
        self.downsample: nn.Module | None = None
        if index > 0:
            self.downsample = ConvBN(c_in, c_in, 3, 2, None, groups=c_in)
        out, light = _HGNET_OUT[index], index >= _LIGHT_FROM
        befores = [c_in] + [out] * (_HGNET_BLOCKS[index] - 1)
        blocks = [HGBlock(before, _HGNET_INSIDE[index], out, light) for before in befores]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x if self.downsample is None else self.downsample(x))


class HGNetv2(nn.Module):
    """HGNetv2 B0; outputs features from level `first` (stride 2^first) to 5."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.stem = HGStem(_HGNET_STEM)
        befores = (_HGNET_STEM, *_HGNET_OUT)
        self.stages = nn.ModuleList([HGStage(i, befores[i]) for i in range(4)])
        self.first, self.channels = first, _HGNET_OUT[first - 2 :]

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        x, features = self.stem(images_B3HW), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features[self.first - 2 :]
