"""The loss: raw outputs and objects to a sum."""

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from blobs.keys import BlobsLossConfig
from blobs.model import Blobs, BlobsOutputs, boxes_of, by_cell
from ppdist.losses.base import NOMINAL_BATCH, Loss, LossOutput
from ppdist.models.outputs import anchor_points


class BlobsLoss(Loss):
    """Each object is learned by the cells around its centre."""

    def __init__(self, box_gain: float, num_classes: int, strides: tuple[int, ...]) -> None:
        super().__init__()
        self.box_gain, self.num_classes, self.strides = box_gain, num_classes, strides

    @classmethod
    def build(
        cls,
        config: BlobsLossConfig,
        model: Blobs,
        steps_per_epoch: float,
        reference_batch: int = NOMINAL_BATCH,
    ) -> "BlobsLoss":
        return cls(config.box_gain, model.num_classes, model.strides)

    def forward(
        self,
        outputs: BlobsOutputs,
        boxes_BM4: Tensor,
        labels_BM: Tensor,
        mask_BM: Tensor,
        step: int,
        global_normalizers: Tensor | None = None,
    ) -> LossOutput:
        points_N2, stride_N1 = anchor_points(outputs.sides, self.strides)
        centre_BM2 = (boxes_BM4[..., :2] + boxes_BM4[..., 2:]) / 2
        apart_BMN2 = (centre_BM2.unsqueeze(2) - points_N2).abs()
        near_BMN = (apart_BMN2.max(-1) < stride_N1.squeeze(-1)) & (mask_BM.unsqueeze(-1) > 0)
        object_BN = near_BMN.astype("int32").argmax(1)  # the first of several
        positive_BN = near_BMN.any(1).astype("float32")

        label_BN = paddle.take_along_axis(labels_BM, object_BN, 1).clip(0, self.num_classes - 1)
        wanted_BNC = F.one_hot(label_BN, self.num_classes) * positive_BN.unsqueeze(-1)
        logits_BNC = by_cell(outputs.class_logits).astype("float32")
        classes = F.binary_cross_entropy_with_logits(logits_BNC, wanted_BNC, reduction="sum")

        index_BN4 = object_BN.unsqueeze(-1).expand([-1, -1, 4])
        target_BN4 = paddle.take_along_axis(boxes_BM4, index_BN4, 1)
        sides_BN4 = by_cell(outputs.sides).astype("float32")
        giou_BN = giou(boxes_of(sides_BN4, points_N2, stride_N1), target_BN4)
        boxes = ((1 - giou_BN) * positive_BN).sum()
        return LossOutput(
            total=classes + self.box_gain * boxes,
            normalizer=positive_BN.sum(),
            parts={"loss_cls": classes.detach(), "loss_iou": boxes.detach()},
        )


def giou(pred_BN4: Tensor, target_BN4: Tensor) -> Tensor:
    """Generalized IoU [B, N], arXiv:1902.09630."""

    def area(low: Tensor, high: Tensor) -> Tensor:
        sides = (high - low).clip(min=0)
        return sides[..., 0] * sides[..., 1]

    (low, high), (low_t, high_t) = (paddle.split(each, 2, -1) for each in (pred_BN4, target_BN4))
    inside = area(paddle.maximum(low, low_t), paddle.minimum(high, high_t))
    union = area(low, high) + area(low_t, high_t) - inside
    hull = area(paddle.minimum(low, low_t), paddle.maximum(high, high_t))
    return inside / (union + 1e-9) - (hull - union) / (hull + 1e-9)
