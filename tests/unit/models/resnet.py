"""ResNet-18 as somebody would add it: Paddle's operators, its own pooling, torchvision's keys."""

import paddle.nn.functional as F
from paddle import Tensor, nn

from ppdist.models.base import Backbone
from ppdist.models.layers import ConvBNLayer


class BasicBlock(nn.Layer):
    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.block1 = ConvBNLayer(in_channels, channels, 3, stride, "relu")
        self.block2 = ConvBNLayer(channels, channels, 3, activation=None)
        self.shortcut = None
        if stride > 1 or in_channels != channels:
            self.shortcut = ConvBNLayer(in_channels, channels, 1, stride, None)

    def forward(self, x: Tensor) -> Tensor:
        beside = x if self.shortcut is None else self.shortcut(x)
        return F.relu(beside + self.block2(self.block1(x)))


class ResNet18(Backbone):
    """arXiv:1512.03385, table 1."""

    finest, coarsest = 2, (5,)

    def __init__(self, depth: float, width: float, first: int, last: int) -> None:
        super().__init__()
        self.stem = ConvBNLayer(3, 64, 7, 2, "relu")
        before, stages = 64, []
        for channels in (64, 128, 256, 512):
            stride = 1 if channels == 64 else 2
            stages.append(
                nn.Sequential(
                    BasicBlock(before, channels, stride), BasicBlock(channels, channels, 1)
                )
            )
            before = channels
        self.stages = nn.LayerList(stages)
        self.first = first
        self.strides = tuple(2**level for level in range(first, last + 1))
        self.channels = (64, 128, 256, 512)[first - 2 :]
        self.stage_keys = (("stem",), *((f"stages.{i}",) for i in range(4)))

    def original_keys(self) -> dict[str, str]:
        parts = {
            "stem.conv": "conv1", "stem.bn": "bn1", "stages.": "layer", "block1.conv": "conv1",
            "block1.bn": "bn1", "block2.conv": "conv2", "block2.bn": "bn2",
            "shortcut.conv": "downsample.0", "shortcut.bn": "downsample.1",
            "_mean": "running_mean", "_variance": "running_var",
        }  # fmt: skip
        names = {}
        for key in self.state_dict():
            name = key
            for ours, theirs in parts.items():
                name = name.replace(ours, theirs)
            for stage in reversed(range(4)):  # theirs begin at 1
                name = name.replace(f"layer{stage}.", f"layer{stage + 1}.", 1)
            names[key] = name
        return names

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        x, features = F.max_pool2d(self.stem(images_B3HW), 3, 2, 1), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features[self.first - 2 :]
