"""Base of all losses: raw outputs and ground truth to sums."""

from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn

NOMINAL_BATCH = 64  # images of a step that the recipes' learning rates are for


class Term(NamedTuple):
    """One loss: its weight, and the temperature of the logits."""

    weight: float
    temperature: float


class Teaching(NamedTuple):
    """Which losses a student has; None: not this one."""

    logits: Term | None
    features: Term | None
    boxes: Term | None


class LossOutput(NamedTuple):
    """One micro-batch's loss, not yet normalised.

        loss of a step = sum of totals / max(1, sum of normalizers)

    over all micro-batches and ranks of the step, and the same of `separate_loss` added.  The
    trainer divides: only it sees them all.

    total: 0-D float32, weighted SUM over this micro-batch; the gradient flows here, and reaches
        every output of the model even where no image has an object.
    normalizer: 0-D float32 without gradient: sum of the assigned soft labels; 0 for a loss that
        has divided by `global_normalizers` (see `Loss.local_normalizers`) already.
    parts: the unweighted sums by name, 0-D float32, detached, for the log.
    separate_loss: with a normalizer of its own.  Its gradient reaches the parameters of
        `Loss.separate_keys` and no others, and only it reaches these, so that the trainer can
        divide gradients that have been added up.  None: there is none.
    normalizer_B: float32 without gradient: what each image has of the normalizer, for `distil`.
    """

    total: Tensor
    normalizer: Tensor
    parts: dict[str, Tensor]
    separate_loss: "LossOutput | None" = None
    normalizer_B: Tensor | None = None


class Loss(nn.Layer):
    """Base of all losses, as the training step sees them.

    Attributes:
        separate_keys: state-dict key prefixes of what only `LossOutput.separate_loss` trains; with
            any of them every output for the training step has one.
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
        """The loss of a `loss:` section for its model.

        Every rank builds one.

        Args:
            steps_per_epoch: optimizer steps of an epoch as the section counts them; not whole
                where the run was lengthened (train.epochs_compensation).
            reference_batch: images of a step that the learning rate was tuned for.
        """
        raise NotImplementedError

    def prepare(self, model: Any, step: int) -> None:
        """Sets what in the model depends on the step.

        Called before the forward passes of a step.
        """

    def begin(self) -> None:
        """Called before the first step, once the model has its weights and anchors."""

    def before_forward(self, images_B3HW: Tensor) -> None:
        """Called before the model sees a micro-batch, in the precision of the step.

        Args: images_B3HW: uint8 RGB.
        """

    @property
    def without_teacher(self) -> "Loss":
        """What the ground truth alone says, for a validation."""
        return self

    def local_normalizers(
        self, boxes_BM4: Tensor, labels_BM: Tensor, mask_BM: Tensor, size: tuple[int, int]
    ) -> Tensor | None:
        """What the targets alone say about normalisation, float32 [K]; None: nothing.

        The step adds these up over its micro-batches and over all ranks, before any forward pass,
        and hands the sum to every `forward` as `global_normalizers`.  For losses with several terms
        that are each divided by a number of their own.

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
        """The loss of one micro-batch.

        Args:
            outputs: raw outputs of the model, any floating precision; computed in float32.
            boxes_BM4: xyxy input pixels, zero padded, M >= 1.
            labels_BM: int64 in [0, C); anything where padded.
            mask_BM: 1 for a real box, 0 for padding.
            step: optimizer step, counted from 0; the same on every rank.
            global_normalizers: the step's sum of `local_normalizers`, where those are not None.
        """
        raise NotImplementedError

    def teacher_mismatch(self, teacher: Any) -> str:
        """Why nothing can be learned from a teacher's outputs; "": it can.

        A teacher is a detector of the same family, classes and strides. The text says what to do,
        too.
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
        """Loss of a micro-batch with a teacher's part, in float32.

        Args:
            output: of `forward`.
            outputs, taught: raw outputs of student and teacher for the same images.
            teaching: which terms.  A weight of 1 makes logits count like the classes of the ground
                truth, and features and boxes like its boxes (a PP-YOLOE's boxes like its
                distributions of sides).
            global_normalizers: as in `forward`.
        Returns: parts `loss_distill_logits`, `loss_distill_features`, `loss_distill_boxes` as well,
            weights and gains included.
        """
        raise NotImplementedError


def with_terms(output: LossOutput, terms: dict[str, Tensor], factor: float = 1.0) -> LossOutput:
    """A loss with the terms of a distillation added.

    Their sum counts `factor` times; see `distil`.
    """
    return output._replace(
        total=output.total + factor * paddle.add_n(list(terms.values())),
        parts=output.parts | {f"loss_distill_{k}": each.detach() for k, each in terms.items()},
    )
