"""Base of all losses: raw outputs and ground truth to sums."""

from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn

NOMINAL_BATCH = 64  # images of a step for which the recipes' learning rates are tuned


class Term(NamedTuple):
    """A distillation loss: its weight, and the temperature of the logits."""

    weight: float
    temperature: float


class Teaching(NamedTuple):
    """The distillation losses of a student; None: this loss is not used."""

    logits: Term | None
    features: Term | None
    boxes: Term | None


class LossOutput(NamedTuple):
    """Loss of one micro-batch, not yet normalised.

        loss of a step = sum of totals / max(1, sum of normalizers)

    over all micro-batches and ranks of the step, plus the same quotient of `separate_loss`.  The
    trainer divides, because only it sees all of them.

    total: 0-D float32, weighted SUM over this micro-batch; the gradient flows here, and reaches
        every output of the model even where no image has an object.
    normalizer: 0-D float32 without gradient: sum of the assigned soft labels; 0 for a loss that has
        already divided by `global_normalizers` (see `Loss.local_normalizers`).
    parts: the unweighted sums by name, 0-D float32, detached, for the log.
    separate_loss: a loss with a normalizer of its own.  Its gradient reaches exactly the parameters
        of `Loss.separate_keys`, and no other loss reaches these, so that the trainer can divide
        gradients that have been added up.  None: there is none.
    normalizer_B: float32 without gradient: each image's part of the normalizer, for `distil`.
    """

    total: Tensor
    normalizer: Tensor
    parts: dict[str, Tensor]
    separate_loss: "LossOutput | None" = None
    normalizer_B: Tensor | None = None


class Loss(nn.Layer):
    """Base of all losses, as the training step sees them.

    Attributes:
        separate_keys: state-dict key prefixes of parameters that only `LossOutput.separate_loss`
            trains; if there are any, every output for the training step has a separate loss.
    """

    separate_keys: tuple[str, ...] = ()

    @classmethod
    def build(
        cls,
        config: Any,
        model: Any,
        steps_per_epoch: float,
        reference_batch: int = NOMINAL_BATCH,
    ) -> "Loss":
        """Builds the loss of a `loss:` section for its model, on every rank.

        Args:
            steps_per_epoch: optimizer steps of an epoch as the section counts them; not an integer
                if the run was lengthened (train.epochs_compensation).
            reference_batch: images of a step for which the learning rate was tuned.
        """
        raise NotImplementedError

    def prepare(self, model: Any, step: int) -> None:
        """Sets the parts of the model that depend on the step.

        The trainer calls it before the forward passes of a step.
        """

    def begin(self) -> None:
        """Prepares the loss for the first step, once the model has its weights and anchors."""

    def before_forward(self, images_B3HW: Tensor) -> None:
        """Receives the images of a micro-batch before the model does, in the step's precision.

        Args: images_B3HW: uint8 RGB.
        """

    @property
    def without_teacher(self) -> "Loss":
        """Returns the loss against the ground truth alone, for validation."""
        return self

    def local_normalizers(
        self, boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor, size: tuple[int, int]
    ) -> Tensor | None:
        """Computes numbers for normalisation from the targets alone, float32 [K]; None: none.

        The step adds them up over its micro-batches and all ranks, before any forward pass, and
        passes the sum to every `forward` as `global_normalizers`.  They are meant for losses with
        several terms that are divided by different numbers.

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
        global_normalizers: Tensor | None = None,
    ) -> LossOutput:
        """Computes the loss of one micro-batch.

        Args:
            outputs: raw outputs of the model, any floating precision; computed in float32.
            boxes_BM4: xyxy input pixels, zero padded, M >= 1.
            labels_BM: int64 in [0, C); any value where padded.
            mask_BM: 1 for a real box, 0 for padding.
            step: optimizer step, counted from 0; the same on every rank.
            global_normalizers: the step's sum of `local_normalizers`, where those are not None.
        """
        raise NotImplementedError

    def teacher_mismatch(self, teacher: Any) -> str:
        """Explains why a student cannot learn from a teacher's outputs; "" if it can.

        A teacher is a detector of the same family, classes and strides.  The text also suggests a
        fix.
        """
        if type(self).distil is Loss.distil:
            return "this detector has no loss for a teacher; leave distill out"
        return ""

    def distil(
        self,
        output: LossOutput,
        outputs: Any,
        taught: Any,
        teaching: Teaching,
        global_normalizers: Tensor | None,
    ) -> LossOutput:
        """Adds a teacher's part to the loss of a micro-batch, in float32.

        Args:
            output: the result of `forward`.
            outputs, taught: raw outputs of student and teacher for the same images.
            teaching: the terms.  With a weight of 1 logits count as much as the classes of the
                ground truth, and features and boxes as much as its boxes (a PP-YOLOE's boxes as
                much as its distributions of sides).
            global_normalizers: as in `forward`.
        Returns: the loss with further parts `loss_distill_logits`, `loss_distill_features` and
            `loss_distill_boxes`, weights and gains included.
        """
        raise NotImplementedError


def with_terms(output: LossOutput, terms: dict[str, Tensor], factor: float = 1.0) -> LossOutput:
    """Adds the terms of a distillation to a loss.

    Their sum counts `factor` times; see `Loss.distil`.
    """
    return output._replace(
        total=output.total + factor * paddle.add_n(list(terms.values())),
        parts=output.parts | {f"loss_distill_{k}": term.detach() for k, term in terms.items()},
    )
