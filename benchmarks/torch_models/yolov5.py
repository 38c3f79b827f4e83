"""YOLOv5: CSPDarknet, PAN, 1x1 heads."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.torch_models.layers import ConvBN, double, scaled_repeats

_DEPTH_WIDTH = {
    "n": (0.33, 0.25), "s": (0.33, 0.5), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.33, 1.25),
}  # fmt: skip
_CHANNELS, _BLOCKS, _NECK_BLOCKS = (64, 128, 256, 512, 1024), (3, 6, 9, 3), 3  # of size l
_ANCHORS = 3  # of a cell
_conv = partial(ConvBN, eps=1e-3, momentum=0.03)


class Bottleneck(nn.Module):
    """1x1, then 3x3 convolution; plus the input if `residual`."""

    def __init__(self, channels: int, residual: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(channels, channels, 1), _conv(channels, channels, 3)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        return x + y if self.residual else y


class C3(nn.Module):
    """Cross-stage partial block with three convolutions."""

    def __init__(self, c_in: int, c_out: int, blocks: int, residual: bool) -> None:
        super().__init__()
        half = c_out // 2
        self.conv1, self.conv2 = _conv(c_in, half, 1), _conv(c_in, half, 1)
        self.conv3 = _conv(2 * half, c_out, 1)
        self.blocks = nn.Sequential(*(Bottleneck(half, residual) for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(torch.cat([self.blocks(self.conv1(x)), self.conv2(x)], 1))


class SPPF(nn.Module):
    """A chain of three 5x5 max poolings between 1x1 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, channels // 2, 1)
        self.conv2 = _conv(channels * 2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.conv1(x)]
        for _ in range(3):
            maps.append(F.max_pool2d(maps[-1], 5, 1, 2))
        return self.conv2(torch.cat(maps, 1))


class YOLOv5(nn.Module):
    """Outputs the logits of each level."""

    def __init__(self, variant: str, size: str, classes: int) -> None:
        super().__init__()
        depth, width = _DEPTH_WIDTH[size]
        widths = [math.ceil(channels * width / 8) * 8 for channels in _CHANNELS]
        repeats = [scaled_repeats(count, depth) for count in _BLOCKS]
        neck = scaled_repeats(_NECK_BLOCKS, depth)
        c1, _, c3, c4, c5 = widths
        b, n, h = nn.Module(), nn.Module(), nn.Module()
        self.backbone, self.neck, self.head = b, n, h
        b.stem = _conv(3, c1, 6, 2, pad=2)
        for level in range(2, 6):
            c_in, c_out = widths[level - 2], widths[level - 1]
            b.add_module(f"down{level}", _conv(c_in, c_out, 3, 2))
            b.add_module(f"stage{level}", C3(c_out, c_out, repeats[level - 2], True))
        b.sppf = SPPF(c5)
        n.reduce5, n.topdown4 = _conv(c5, c4, 1), C3(2 * c4, c4, neck, False)
        n.reduce4, n.topdown3 = _conv(c4, c3, 1), C3(2 * c3, c3, neck, False)
        n.down4, n.bottomup4 = _conv(c3, c3, 3, 2), C3(2 * c3, c4, neck, False)
        n.down5, n.bottomup5 = _conv(c4, c4, 3, 2), C3(2 * c4, c5, neck, False)
        for level, channels in zip((3, 4, 5), (c3, c4, c5), strict=True):
            predict = nn.Conv2d(channels, _ANCHORS * (5 + classes), 1)
            h.add_module(f"predict{level}", predict)

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        b, n, h = self.backbone, self.neck, self.head
        x = b.stage2(b.down2(b.stem(images_B3HW)))
        p3 = b.stage3(b.down3(x))
        p4 = b.stage4(b.down4(p3))
        p5 = n.reduce5(b.sppf(b.stage5(b.down5(p4))))
        p4 = n.reduce4(n.topdown4(torch.cat([double(p5), p4], 1)))
        p3 = n.topdown3(torch.cat([double(p4), p3], 1))
        p4 = n.bottomup4(torch.cat([n.down4(p3), p4], 1))
        p5 = n.bottomup5(torch.cat([n.down5(p4), p5], 1))
        return [h.predict3(p3), h.predict4(p4), h.predict5(p5)]
