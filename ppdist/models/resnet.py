"""ResNet-vd: ResNet (arXiv:1512.03385) as in the bag of tricks (arXiv:1812.01187), variant D.

The 7x7 stem is three 3x3 convolutions, and a shortcut that halves the resolution averages first.
Keys are those of RT-DETR's torch implementation, but for its `norm`, ours `bn`.
"""

from paddle import Tensor, nn

from ppdist.models import functional
from ppdist.models.base import Backbone
from ppdist.models.layers import ConvBNLayer

STAGE_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
STAGE_CHANNELS = (64, 128, 256, 512)  # of levels 2 to 5, within a block
BOTTLENECK_FROM = 50  # depth from which blocks are bottlenecks,
EXPANSION = 4  # whose outputs are so many times wider


class AveragedShortcut(nn.Layer):
    """Shortcut at half the resolution: 2x2 mean, then 1x1 ConvBNLayer."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = ConvBNLayer(in_channels, out_channels, 1, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.avg_pool2d(x, 2))


class ResNetBlock(nn.Layer):
    """Residual block, basic (3x3, 3x3) or bottleneck (1x1, 3x3, 1x1).

    The shortcut is the input, or `short` at the beginning of a stage; ReLU follows the sum.
    """

    def __init__(
        self, in_channels: int, channels: int, stride: int, bottleneck: bool, begins: bool
    ) -> None:
        super().__init__()
        out_channels = channels * EXPANSION if bottleneck else channels
        self.short: nn.Layer | None = None
        if begins and stride == 2:
            self.short = AveragedShortcut(in_channels, out_channels)
        elif begins:
            self.short = ConvBNLayer(in_channels, out_channels, 1, activation=None)
        self.branch2c = None
        if bottleneck:
            self.branch2a = ConvBNLayer(in_channels, channels, 1, activation="relu")
            self.branch2b = ConvBNLayer(channels, channels, 3, stride, "relu")
            self.branch2c = ConvBNLayer(channels, out_channels, 1, activation=None)
        else:
            self.branch2a = ConvBNLayer(in_channels, channels, 3, stride, "relu")
            self.branch2b = ConvBNLayer(channels, channels, 3, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        x, shortcut = functional.share(x, 2)
        shortcut = shortcut if self.short is None else self.short(shortcut)
        x = self.branch2b(self.branch2a(x))
        x = x if self.branch2c is None else self.branch2c(x)
        return functional.relu(functional.add(x, shortcut))


class ResNetStage(nn.Layer):
    """The blocks of one resolution."""

    def __init__(self, blocks: list[ResNetBlock]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class ResNetVd(Backbone):
    """ResNet-vd.

    Args:
        depth: a row of `STAGE_BLOCKS`.
        first: level of the finest feature; the coarsest is 5.

    Attributes:
        blocks: number of blocks of each stage.
    """

    finest, coarsest = 2, (5,)

    def __init__(self, depth: int, first: int = 3) -> None:
        super().__init__()
        self.blocks = STAGE_BLOCKS[depth]
        bottleneck = depth >= BOTTLENECK_FROM
        stem = STAGE_CHANNELS[0]
        self.conv1 = nn.Sequential(
            ("conv1_1", ConvBNLayer(3, stem // 2, 3, 2, "relu")),
            ("conv1_2", ConvBNLayer(stem // 2, stem // 2, 3, activation="relu")),
            ("conv1_3", ConvBNLayer(stem // 2, stem, 3, activation="relu")),
        )
        width, stages = stem, []
        for channels, count in zip(STAGE_CHANNELS, self.blocks):
            blocks = []
            for i in range(count):
                # The stem has already reduced the resolution for the first stage.
                stride = 2 if i == 0 and channels != stem else 1
                blocks.append(ResNetBlock(width, channels, stride, bottleneck, begins=i == 0))
                width = channels * EXPANSION if bottleneck else channels
            stages.append(ResNetStage(blocks))
        self.res_layers = nn.LayerList(stages)
        self.first = first
        self.strides = tuple(2**level for level in range(first, 6))
        widened = EXPANSION if bottleneck else 1
        self.channels = tuple(widened * c for c in STAGE_CHANNELS[first - 2 :])
        self.stage_keys = (("conv1",), *((f"res_layers.{i}",) for i in range(len(stages))))

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        x, features = functional.max_pool2d(self.conv1(images_B3HW), 3, 2, 1), []
        for stage in self.res_layers:
            x = stage(x)
            features.append(x)
        return features[self.first - 2 :]
