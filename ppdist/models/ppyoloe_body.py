"""YOLOv5's backbone and neck as the body of a PP-YOLOE: all before the head.

    images -> YOLOv5's Backbone -> strides 8, 16, 32 (, 64) -> its Neck -> coarse to fine -> ET-head

Plain CSP stages instead of re-parameterised ones: nothing is merged for deployment, and the body is
the published YOLOv5's, layer by layer; head, assignment and loss are PP-YOLOE's.
"""

from paddle import Tensor

from ppdist.models.yolov5 import (
    NECK_REPEATS,
    P5_CHANNELS,
    P5_REPEATS,
    P6_CHANNELS,
    P6_REPEATS,
    Backbone,
    Neck,
    scaled_channels,
    scaled_repeats,
    start_uniform,
)


class CoarseFirstNeck(Neck):
    """YOLOv5's neck with its outputs in PP-YOLOE's order: strides falling (32, 16, 8).

    Attributes:
        out_channels: of the outputs, coarse to fine.
    """

    def __init__(self, channels: list[int], blocks: int) -> None:
        super().__init__(channels, blocks)
        self.out_channels = channels[::-1]

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        return super().forward(features)[::-1]


def yolov5_body(depth: float, width: float, last: int) -> tuple[Backbone, CoarseFirstNeck]:
    """Backbone and neck with fresh weights, drawn as YOLOv5's recipe needs them.

    Args:
        depth, width: blocks per stage and channels as multiples of size l.
        last: the coarsest level, 5 or 6 (stride 2^last).
    """
    channels, repeats = (P6_CHANNELS, P6_REPEATS) if last == 6 else (P5_CHANNELS, P5_REPEATS)
    scaled = scaled_channels(channels, width)
    backbone = Backbone(scaled, [scaled_repeats(n, depth) for n in repeats], pooling=True)
    neck = CoarseFirstNeck(scaled[2:], scaled_repeats(NECK_REPEATS, depth))
    start_uniform(backbone)
    start_uniform(neck)
    return backbone, neck
