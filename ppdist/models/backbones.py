"""CSPRepResNet, the backbone of PP-YOLOE (arXiv:2203.16250): images to features of strides 4 to 64.

Attribute names are the official state-dict keys, so published weights load unchanged.
"""

import paddle
from paddle import Tensor, nn

from ppdist.models.layers import ConvBNLayer, EffectiveSELayer, RepBlock

# At width 1 and depth 1, by the last level (stride 2^level).  With 6 the original has nothing: the
# widest stage moves up, as in other detectors of large images, and the neck keeps its 3/4 of it.
STAGE_CHANNELS = {5: (64, 128, 256, 512, 1024), 6: (64, 128, 256, 512, 768, 1024)}  # stem, P2 ...
STAGE_BLOCKS = (3, 6, 6, 3, 3)  # P2 ... P6


class Stem(nn.Layer):
    """Three 3x3 ConvNorms, the first with stride 2."""

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.conv1 = ConvBNLayer(3, out_channels // 2, 3, stride=2)
        self.conv2 = ConvBNLayer(out_channels // 2, out_channels // 2, 3)
        self.conv3 = ConvBNLayer(out_channels // 2, out_channels, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv3(self.conv2(self.conv1(images)))


class CSPResStage(nn.Layer):
    """Halves the resolution; half the channels pass through RepBlocks; channel attention."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, scaled: bool) -> None:
        super().__init__()
        middle = (in_channels + out_channels) // 2
        half = middle // 2
        self.conv_down = ConvBNLayer(in_channels, middle, 3, stride=2)
        self.conv1 = ConvBNLayer(middle, half, 1)
        self.conv2 = ConvBNLayer(middle, half, 1)
        self.blocks = nn.Sequential(*[RepBlock(half, True, scaled) for _ in range(blocks)])
        self.attn = EffectiveSELayer(2 * half)
        self.conv3 = ConvBNLayer(2 * half, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_down(x)
        mixed = paddle.concat([self.conv1(x), self.blocks(self.conv2(x))], axis=1)
        return self.conv3(self.attn(mixed))


class CSPRepResNet(nn.Layer):
    """CSPRepResNet: images to features of strides 2^first ... 2^last."""

    def __init__(self, depth: float, width: float, scaled: bool, first: int, last: int) -> None:
        super().__init__()
        channels = [scaled_width(c, width) for c in STAGE_CHANNELS[last]]
        counts = [max(round(n * depth), 1) for n in STAGE_BLOCKS]
        sizes = zip(channels, channels[1:], counts)
        self.stem = Stem(channels[0])
        self.stages = nn.LayerList([CSPResStage(*size, scaled) for size in sizes])
        self.first = first
        self.out_channels = channels[first - 1 :]

    def forward(self, images: Tensor) -> list[Tensor]:
        features = [self.stem(images)]
        for stage in self.stages:
            features.append(stage(features[-1]))
        return features[self.first - 1 :]  # the stem's is level 1


def scaled_width(channels: int, width: float) -> int:
    """Channels at a width multiple; at least 2, because stages work on halves."""
    return max(round(channels * width), 2)
