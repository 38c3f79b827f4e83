"""Training losses.  Each takes raw outputs and padded ground truth; none talks to other ranks."""

from typing import Any, NamedTuple

from paddle import Tensor, nn


class LossOutput(NamedTuple):
    """One micro-batch's loss, not yet normalised.

        loss of a step = sum of totals / max(1, sum of normalizers)

    over all micro-batches and ranks of the step.  The trainer divides: only it sees them all.

    total: 0-D float32, weighted SUM over this micro-batch; the gradient flows here, and reaches
        every output of the model even where no image has an object.
    normalizer: 0-D float32 without gradient: sum of the assigned soft labels; 0 for a loss that
        has divided by `totals` (see `Loss.counts`) already.
    parts: the unweighted sums by name, 0-D float32, detached, for the log.
    """

    total: Tensor
    normalizer: Tensor
    parts: dict[str, Tensor]


class Loss(nn.Layer):
    """Base of all losses: what the training step needs to know of one."""

    @classmethod
    def build(
        cls, config: Any, model: Any, steps_per_epoch: float, reference_batch: int = 64
    ) -> "Loss":
        """The loss of a `loss:` section for the model it belongs to; every rank builds one.

        Args:
            steps_per_epoch: optimizer steps of an epoch as the section counts them; not whole
                where the run was lengthened (train.epochs_compensation).
            reference_batch: images of a step that the learning rate was tuned for.
        """
        raise NotImplementedError

    def prepare(self, model: Any, step: int) -> None:
        """Before the forward passes of a step: sets what in the model depends on the step."""

    def counts(
        self, boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor, size: tuple[int, int]
    ) -> Tensor | None:
        """What the targets alone say about normalisation, float32 [K]; None: nothing.

        The step adds these up over its micro-batches and over all ranks, before any forward pass,
        and hands the sum to every `forward` as `totals`.  For losses with several terms that are
        each divided by a number of their own.

        Args:
            size: (height, width) of the input in pixels.
        """
        return None

    def forward(
        self,
        outputs: Any,
        boxes_BM4: Tensor,
        labels_BM: Tensor,
        mask_BM: Tensor,
        step: int,
        totals: Tensor | None = None,
    ) -> LossOutput:
        """The loss of one micro-batch.

        Args:
            outputs: raw outputs of the model, any floating precision; computed in float32.
            boxes_BM4: xyxy input pixels, zero padded, M >= 1.
            labels_BM: int64 in [0, C); anything where padded.
            mask_BM: 1 for a real box, 0 for padding.
            step: optimizer step, counted from 0; the same on every rank.
            totals: the step's sum of `counts`, where those are not None.
        """
        raise NotImplementedError
