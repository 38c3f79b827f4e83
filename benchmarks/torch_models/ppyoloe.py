"""PP-YOLOE+: CSPRepResNet, CSP-PAN, ET-head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.torch_models.layers import ConvBN, RepConv, double, scaled_repeats

_DEPTH_WIDTH = {"s": (0.33, 0.5), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.33, 1.25)}
_CHANNELS, _BLOCKS = (64, 128, 256, 512, 1024), (3, 6, 6, 3)  # of the backbone of size l
_NECK_CHANNELS, _NECK_BLOCKS = (768, 384, 192), 3  # coarse to fine
_POOLS = (5, 9, 13)  # pixels
_SIDES = 4 * 17  # logits of the distributions of the four sides


class RepBlock(nn.Module):
    """3x3 convolution, then RepConv; plus the input if `residual`."""

    def __init__(self, channels: int, residual: bool, scaled: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = ConvBN(channels, channels, 3), RepConv(channels, scaled)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        return x + y if self.residual else y


class EffectiveSE(nn.Module):
    """Channel attention."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.fc(x.mean((2, 3), keepdim=True)))


class SPP(nn.Module):
    """Max poolings of several sizes beside each other, then a 1x1 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = ConvBN((1 + len(_POOLS)) * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = [F.max_pool2d(x, size, 1, size // 2) for size in _POOLS]
        return self.conv(torch.cat([x, *pooled], 1))


class Stem(nn.Module):
    """Three 3x3 convolutions, the first at stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.conv1, self.conv2 = ConvBN(3, half, 3, 2), ConvBN(half, half, 3)
        self.conv3 = ConvBN(half, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(self.conv2(self.conv1(x)))


class Stage(nn.Module):
    """A stage of the backbone."""

    def __init__(self, c_in: int, c_out: int, blocks: int) -> None:
        super().__init__()
        middle = (c_in + c_out) // 2
        half = middle // 2
        self.conv_down = ConvBN(c_in, middle, 3, 2)
        self.conv1, self.conv2 = ConvBN(middle, half, 1), ConvBN(middle, half, 1)
        self.blocks = nn.Sequential(*(RepBlock(half, True, True) for _ in range(blocks)))
        self.attn = EffectiveSE(2 * half)
        self.conv3 = ConvBN(2 * half, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_down(x)
        return self.conv3(self.attn(torch.cat([self.conv1(x), self.blocks(self.conv2(x))], 1)))


class NeckStage(nn.Module):
    """A stage of the neck; the coarsest has an SPP in its middle."""

    def __init__(self, c_in: int, c_out: int, blocks: int, pyramid: bool = False) -> None:
        super().__init__()
        half = c_out // 2
        self.conv1, self.conv2 = ConvBN(c_in, half, 1), ConvBN(c_in, half, 1)
        self.convs = nn.Sequential()
        for index in range(blocks):
            self.convs.add_module(str(index), RepBlock(half, False, False))
            if pyramid and index == (blocks - 1) // 2:
                self.convs.add_module("spp", SPP(half))
        self.conv3 = ConvBN(2 * half, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(torch.cat([self.conv1(x), self.convs(self.conv2(x))], 1))


class Attention(nn.Module):
    """Channel attention of the head, which gets the mean."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)
        self.conv = ConvBN(channels, channels, 1)

    def forward(self, x: Tensor, mean: Tensor) -> Tensor:
        return self.conv(x * torch.sigmoid(self.fc(mean)))


class PPYOLOE(nn.Module):
    """Outputs class logits, then side logits, of each level, coarse to fine."""

    def __init__(self, variant: str, size: str, classes: int) -> None:
        super().__init__()
        if variant != "plus":
            raise RuntimeError("only PP-YOLOE+ is written in torch")
        depth, width = _DEPTH_WIDTH[size]
        channels = [round(c * width) for c in _CHANNELS]
        out = [round(c * width) for c in _NECK_CHANNELS]
        b, n, h = nn.Module(), nn.Module(), nn.Module()
        self.backbone, self.neck, self.yolo_head = b, n, h
        b.stem = Stem(channels[0])
        counts = [scaled_repeats(count, depth) for count in _BLOCKS]
        sizes = zip(channels, channels[1:], counts, strict=False)
        b.stages = nn.ModuleList([Stage(*one) for one in sizes])
        blocks = scaled_repeats(_NECK_BLOCKS, depth)
        coarse_first = channels[:1:-1]
        befores = [coarse_first[0], *(coarse_first[i] + out[i - 1] // 2 for i in (1, 2))]
        n.fpn_stages = nn.ModuleList(
            [nn.Sequential(NeckStage(befores[i], out[i], blocks, i == 0)) for i in range(3)]
        )
        n.fpn_routes = nn.ModuleList([ConvBN(c, c // 2, 1) for c in out[:-1]])
        n.pan_stages = nn.ModuleList(
            [nn.Sequential(NeckStage(out[i] + out[i + 1], out[i], blocks)) for i in (0, 1)]
        )
        n.pan_routes = nn.ModuleList([ConvBN(c, c, 3, 2) for c in out[1:]])
        h.stem_cls, h.stem_reg = (nn.ModuleList([Attention(c) for c in out]) for _ in range(2))
        h.pred_cls, h.pred_reg = (
            nn.ModuleList([nn.Conv2d(c, count, 3, padding=1) for c in out])
            for count in (classes, _SIDES)
        )

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        b, n, h = self.backbone, self.neck, self.yolo_head
        features = [b.stem(images_B3HW)]
        for stage in b.stages:
            features.append(stage(features[-1]))
        coarsest, *finer = features[:1:-1]
        maps = [n.fpn_stages[0](coarsest)]
        for route, stage, fine in zip(n.fpn_routes, n.fpn_stages[1:], finer, strict=True):
            maps.append(stage(torch.cat([double(route(maps[-1])), fine], 1)))
        for i in (1, 0):
            maps[i] = n.pan_stages[i](torch.cat([n.pan_routes[i](maps[i + 1]), maps[i]], 1))
        logits, sides = [], []
        for i, x in enumerate(maps):
            mean = x.mean((2, 3), keepdim=True)
            logits.append(h.pred_cls[i](h.stem_cls[i](x, mean) + x))
            sides.append(h.pred_reg[i](h.stem_reg[i](x, mean)))
        return [*logits, *sides]
