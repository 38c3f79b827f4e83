"""HGNetv2, the backbone of D-FINE and of RT-DETR l and x.

Source: PaddleClas, PP-HGNetV2.

A block keeps the outputs of all its convolutions and mixes them by two 1x1 convolutions.  Keys are
those of D-FINE's torch implementation.
"""

from typing import NamedTuple

from paddle import Tensor, nn

from ppdist.models import functional
from ppdist.models.base import Backbone
from ppdist.models.layers import ConvBNLayer


class HGNetSize(NamedTuple):
    """Channels and counts of one HGNetv2.

    stem: channels inside and after the stem.
    inside: channels of the convolutions in the blocks of levels 2 to 5.
    out: channels of levels 2 to 5.
    blocks: number of blocks in each of these stages.
    convolutions: number of convolutions in each block.
    """

    stem: tuple[int, int]
    inside: tuple[int, int, int, int]
    out: tuple[int, int, int, int]
    blocks: tuple[int, int, int, int]
    convolutions: int


SIZES = {
    "b0": HGNetSize((16, 16), (16, 32, 64, 128), (64, 256, 512, 1024), (1, 1, 2, 1), 3),
    "b2": HGNetSize((24, 32), (32, 64, 128, 256), (96, 384, 768, 1536), (1, 1, 3, 1), 4),
    "b4": HGNetSize((32, 48), (48, 96, 192, 384), (128, 512, 1024, 2048), (1, 1, 3, 1), 6),
    "b5": HGNetSize((32, 64), (64, 128, 256, 512), (128, 512, 1024, 2048), (1, 2, 5, 2), 6),
}
LIGHT_FROM = 4  # first level whose blocks consist of light 5x5 convolutions


class LearnableAffine(nn.Layer):
    """scale * x + bias with two learned numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))
        self.bias = self.create_parameter([1], is_bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return functional.affine(x, self.scale, self.bias)


class AffineConvBNLayer(nn.Layer):
    """ConvBNLayer with ReLU, followed by `LearnableAffine`."""

    def __init__(self, block: ConvBNLayer) -> None:
        super().__init__()
        self.block = block
        self.lab = LearnableAffine()

    def forward(self, x: Tensor) -> Tensor:
        return self.lab(self.block(x))


def _conv(
    in_channels: int,
    out_channels: int,
    kernel: int,
    affine: bool,
    stride: int = 1,
    groups: int = 1,
    padding: int | None = None,
) -> nn.Layer:
    """Builds a ConvBNLayer with ReLU, followed by a `LearnableAffine` if `affine`."""
    block = ConvBNLayer(
        in_channels, out_channels, kernel, stride, "relu", groups=groups, padding=padding
    )
    return AffineConvBNLayer(block) if affine else block


class LightConv(nn.Layer):
    """1x1 ConvBNLayer without activation, then a depthwise convolution."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, affine: bool) -> None:
        super().__init__()
        self.conv1 = ConvBNLayer(in_channels, out_channels, 1, activation=None)
        self.conv2 = _conv(out_channels, out_channels, kernel, affine, groups=out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x))


class HGStem(nn.Layer):
    """Stem that reduces the resolution to a quarter.

    2x2 convolutions run in parallel with a 2x2 max pooling.  Their windows extend to the right and
    down, so zeros are added on those sides.
    """

    def __init__(self, middle: int, out_channels: int, affine: bool) -> None:
        super().__init__()
        self.stem1 = _conv(3, middle, 3, affine, stride=2)
        self.stem2a = _conv(middle, middle // 2, 2, affine, padding=0)
        self.stem2b = _conv(middle // 2, middle, 2, affine, padding=0)
        self.stem3 = _conv(2 * middle, middle, 3, affine, stride=2)
        self.stem4 = _conv(middle, out_channels, 1, affine)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        x = functional.pad(self.stem1(images_B3HW), _RIGHT_AND_DOWN)
        pooled = functional.max_pool2d(x, 2, stride=1)
        x = self.stem2b(functional.pad(self.stem2a(x), _RIGHT_AND_DOWN))
        return self.stem4(self.stem3(functional.concat([pooled, x], axis=1)))


_RIGHT_AND_DOWN = [0, 1, 0, 1]  # zeros left, right, above, below


class HGBlock(nn.Layer):
    """Chain of convolutions; all outputs are concatenated and mixed; plus the input if it fits."""

    def __init__(
        self,
        in_channels: int,
        inside: int,
        out_channels: int,
        convolutions: int,
        light: bool,
        affine: bool,
    ) -> None:
        super().__init__()
        width, layers = in_channels, list[nn.Layer]()
        for _ in range(convolutions):
            layers.append(
                LightConv(width, inside, 5, affine) if light else _conv(width, inside, 3, affine)
            )
            width = inside
        self.layers = nn.LayerList(layers)
        self.aggregation = nn.Sequential(
            _conv(in_channels + convolutions * inside, out_channels // 2, 1, affine),
            _conv(out_channels // 2, out_channels, 1, affine),
        )
        self.residual = in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        first, *branches = functional.share(x, 2 if not self.residual else 3)
        outputs, x = [first], branches[0]
        for layer in self.layers[:-1]:
            output, x = functional.share(layer(x), 2)
            outputs.append(output)
        x = self.aggregation(functional.concat([*outputs, self.layers[-1](x)], axis=1))
        return functional.add(x, branches[1]) if self.residual else x


class HGStage(nn.Layer):
    """Stage that halves the resolution, except the first, and then applies its blocks."""

    def __init__(self, in_channels: int, size: HGNetSize, level: int, affine: bool) -> None:
        super().__init__()
        self.downsample: nn.Layer | None = None
        if level > 2:
            self.downsample = ConvBNLayer(
                in_channels, in_channels, 3, 2, activation=None, groups=in_channels
            )
        inside, out, count = size.inside[level - 2], size.out[level - 2], size.blocks[level - 2]
        light = level >= LIGHT_FROM
        befores = [in_channels] + [out] * (count - 1)
        self.blocks = nn.Sequential(
            *[HGBlock(before, inside, out, size.convolutions, light, affine) for before in befores]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x if self.downsample is None else self.downsample(x))


class HGNetv2(Backbone):
    """HGNetv2.

    Args:
        size: a row of `SIZES`; RT-DETR calls b4 L and b5 X.
        first: level of the finest feature; the coarsest is 5.
        affine: whether a `LearnableAffine` follows each ReLU.
    """

    finest, coarsest = 2, (5,)

    def __init__(self, size: str, first: int = 3, affine: bool = False) -> None:
        super().__init__()
        row = SIZES[size]
        middle, before = row.stem
        self.stem = HGStem(middle, before, affine)
        befores = (before, *row.out)
        self.stages = nn.LayerList(
            [HGStage(befores[level - 2], row, level, affine) for level in range(2, 6)]
        )
        self.first = first
        self.strides = tuple(2**level for level in range(first, 6))
        self.channels = row.out[first - 2 :]
        self.stage_keys = (("stem",), *((f"stages.{i}",) for i in range(4)))

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        x, features = self.stem(images_B3HW), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features[self.first - 2 :]
