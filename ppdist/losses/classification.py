"""Cross entropy of a classifier, with label smoothing."""

from typing import Any

import paddle.nn.functional as F
from paddle import Tensor

from ppdist.config.loss import ClassificationLossConfig
from ppdist.losses.base import NOMINAL_BATCH, Loss, LossOutput


class ClassificationLoss(Loss):
    """Mean cross entropy over the images of a step.

    With smoothing e, C classes and log-probabilities l, an image of class y costs

        -(1 - e) * l_y - e / C * sum_c l_c

    Source: Szegedy et al. 2015, arXiv:1512.00567, section 7.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    @classmethod
    def build(
        cls,
        config: ClassificationLossConfig,
        model: Any,
        steps_per_epoch: float,
        reference_batch: int = NOMINAL_BATCH,
    ) -> "ClassificationLoss":
        """Builds the loss with the section's label smoothing."""
        return cls(config.label_smoothing)

    def forward(
        self,
        outputs: Any,
        boxes_BM4: Tensor,
        labels_BM: Tensor,
        mask_BM: Tensor,
        step: int,
        global_normalizers: Tensor | None = None,
    ) -> LossOutput:
        """Computes the loss of one micro-batch; see `Loss.forward`.

        Outputs are logits_BC, and the class of an image is that of its first box.  An image without
        a box has no class and does not count.

        Returns: normalizer is the number of images; the part `train_top1` counts those whose class
            has the highest logit.
        """
        # In float32, because bfloat16 has too few digits for a logarithm of small probabilities.
        log_p_BC = F.log_softmax(outputs.astype("float32"), axis=1)
        real_B = mask_BM[:, 0].astype("float32")
        label_B = labels_BM[:, 0] * real_B.astype("int64")  # padding needs a valid class, too
        log_p_label_B = log_p_BC.take_along_axis(label_B.unsqueeze(1), 1).squeeze(1)
        smoothing = self.label_smoothing
        cost_B = -(1.0 - smoothing) * log_p_label_B - smoothing * log_p_BC.mean(axis=1)
        correct_B = (log_p_BC.argmax(axis=1) == label_B).astype("float32")
        return LossOutput(
            total=(cost_B * real_B).sum(),
            normalizer=real_B.sum().detach(),
            parts={"train_top1": (correct_B * real_B).sum().detach()},
        )
