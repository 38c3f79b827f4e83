"""YOLOv5's image classifier: the backbone up to stride 32, a 1x1 convolution, mean, linear.

images -> Backbone -> stride 32 -> ClassifierHead -> logits_BC
"""

import paddle.nn.functional as F
from paddle import Tensor, nn

from ppdist.config.model import YOLOv5ClsConfig
from ppdist.models.blocks import ConvNorm
from ppdist.models.detector import ImageModel
from ppdist.models.yolov5 import (
    DEPTH_WIDTH,
    P5_CHANNELS,
    P5_REPEATS,
    Backbone,
    scaled_channels,
    scaled_repeats,
    start_uniform,
)
from ppdist.models.yolov5_keys import CLASSIFIER_ROWS, original_keys

HEAD_CHANNELS = 1280  # of every size
STRIDE = 32


class ClassifierHead(nn.Layer):
    """1x1 ConvNorm, mean over H and W, dropout, linear."""

    def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        # Of all norms only this one keeps epsilon 1e-5 and momentum 0.9.
        self.conv = ConvNorm(in_channels, HEAD_CHANNELS, 1)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(HEAD_CHANNELS, num_classes)

    def forward(self, feature: Tensor) -> Tensor:
        mean_BX = F.adaptive_avg_pool2d(self.conv(feature), 1).flatten(1)
        return self.linear(self.dropout(mean_BX))


class YOLOv5Classifier(ImageModel):
    """The classifier; see the module text and `ImageModel`.  Pixels: ImageNet mean, deviation."""

    class_layers = ("head.linear.",)

    def __init__(self, config: YOLOv5ClsConfig) -> None:
        super().__init__(
            config.num_classes, STRIDE, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
        )
        depth, width = DEPTH_WIDTH[config.size]
        depth, width = config.depth_multiple or depth, config.width_multiple or width
        channels = scaled_channels(P5_CHANNELS, width)
        blocks = [scaled_repeats(n, depth) for n in P5_REPEATS]
        self.backbone = Backbone(channels, blocks, pooling=False)
        self.head = ClassifierHead(channels[-1], config.num_classes, config.dropout)
        start_uniform(self)

    def official_keys(self) -> dict[str, str]:
        return original_keys(list(self.state_dict()), CLASSIFIER_ROWS)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """logits_BC of normalised images; H and W are multiples of `size_multiple`."""
        return self.head(self.backbone(images_B3HW)[-1])

    def decode(self, outputs: Tensor) -> Tensor:
        """probabilities_BC: softmax of the logits, float32."""
        return F.softmax(outputs.astype("float32"), axis=-1)
