"""Sums of a step's losses over micro-batches and ranks, and their divisors.

    loss = total / max(1, normalizer)  +  separate total / max(1, separate normalizer)

The second term exists if some parameters, given by the prefix of their keys (`Loss.separate_keys`),
have a divisor of their own: a one-to-one head, which only its own loss trains.
"""

from collections.abc import Sequence
from typing import NamedTuple

import paddle
from paddle import Tensor, nn

from ppdist.data.types import Batch
from ppdist.losses.base import Loss, LossOutput

_NORMALIZER, _LOSS = "normalizer", "loss"
_SEPARATE = "separate "  # prefix of the names of the loss with its own normalizer


class NormalisedLosses(NamedTuple):
    """Losses of a step over all ranks and micro-batches.

    losses: `loss` and its parts, normalised.
    divisor: the number by which gradients are divided.
    """

    losses: dict[str, float]
    divisor: float


class Totals(NamedTuple):
    """Numbers of a step, summed over all ranks, in the order in which they are exchanged."""

    images: float
    micro_batches: float  # of images, not padding
    votes: dict[str, float]  # of the policies
    broken: float  # ranks whose loss or running statistics are not finite
    terms: list[float]  # see `LossSums`

    @classmethod
    def of(cls, values: Sequence[float], names: Sequence[str]) -> "Totals":
        """Parses the exchanged numbers of a step.  Args: names: names of the votes."""
        images, micro_batches, *rest = values
        votes = dict(zip(names, rest))
        return cls(images, micro_batches, votes, rest[len(names)], [*rest[len(names) + 1 :]])


class LossSums:
    """Sums of losses over this rank's micro-batches by name, [1] float32 each, on the device."""

    def __init__(self) -> None:
        self.terms: dict[str, Tensor] = {}

    def add(self, output: LossOutput) -> None:
        """Adds a micro-batch; every call must have the same names of losses."""
        terms = {_NORMALIZER: output.normalizer, _LOSS: sum_losses(output), **output.parts}
        if output.separate_loss is not None:
            separate = output.separate_loss
            terms[_SEPARATE + _NORMALIZER] = separate.normalizer
            terms[_SEPARATE + _LOSS] = separate.total
            terms |= {_SEPARATE + name: part for name, part in separate.parts.items()}
        for name, value in terms.items():
            added = value.detach().reshape([1])
            self.terms[name] = self.terms[name] + added if name in self.terms else added

    @property
    def loss(self) -> Tensor:
        """Returns the total loss of this rank, not normalised."""
        return self.terms[_LOSS]

    def not_finite(self) -> list[str]:
        """Names the parts of the loss that are not finite, or `loss` if no part is the cause."""
        counts = (_NORMALIZER, _SEPARATE + _NORMALIZER)
        names = [name for name, value in self.terms.items() if not bool(paddle.isfinite(value))]
        names = [name.removeprefix(_SEPARATE) for name in names if name not in counts]
        return sorted({*names} - {_LOSS}) or names

    def normalise(self, values: Sequence[float]) -> NormalisedLosses:
        """Divides sums over all ranks.

        Args: values: values of the terms, in the order of `terms`.
        """
        sums = dict(zip(self.terms, values, strict=True))
        divisor = max(1.0, sums[_NORMALIZER])
        losses = {
            name: value / divisor
            for name, value in sums.items()
            if name != _NORMALIZER and not name.startswith(_SEPARATE)
        }
        if _SEPARATE + _NORMALIZER not in sums:
            return NormalisedLosses(losses, divisor)
        separate = max(1.0, sums[_SEPARATE + _NORMALIZER])
        total = sums[_SEPARATE + _LOSS]
        losses[_LOSS] = (sums[_LOSS] - total) / divisor + total / separate
        for name, value in sums.items():
            kind = name.removeprefix(_SEPARATE)
            if kind != name and kind not in (_NORMALIZER, _LOSS):
                losses[kind] = value / separate
        return NormalisedLosses(losses, divisor)


class SeparateDivisor:
    """The divisor of the parameters whose keys begin with `Loss.separate_keys`.

    All gradients are later divided by the common divisor, so the gradients of these parameters are
    first multiplied by

        max(1, normalizer) / max(1, separate normalizer)
    """

    def __init__(self, model: nn.Layer, prefixes: tuple[str, ...]) -> None:
        named = model.named_parameters()
        self._parameters = [p for key, p in named if prefixes and key.startswith(prefixes)]

    def apply(self, sums: LossSums, totals: Tensor) -> None:
        """Multiplies the gradients of these parameters, without waiting for the device.

        Args: totals: a tensor that ends with the totals of the terms over all ranks, in their
            order.
        """
        if not self._parameters:
            return
        names = [*sums.terms]
        first = totals.shape[0] - len(names)
        normalizers = _NORMALIZER, _SEPARATE + _NORMALIZER
        common, separate = (first + names.index(name) for name in normalizers)
        divisors = paddle.clip(totals.astype("float64"), min=1.0)
        factor = (divisors[common] / divisors[separate]).astype("float32")
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.multiply_(factor)


@paddle.no_grad()
def local_normalizers(loss: Loss, micro_batches: Sequence[Batch]) -> Tensor | None:
    """Sums the normalizers that the loss computes from this rank's targets alone.

    Returns: the sums; None if the loss needs predictions for its normalizer.  That depends only on
        the kind of loss, so all ranks return the same kind of result.
    """
    counts = []
    for batch in micro_batches:
        size = batch.images_B3HW.shape[2], batch.images_B3HW.shape[3]
        count = loss.local_normalizers(batch.boxes_BM4, batch.labels_BM, batch.mask_BM, size)
        if count is None:
            return None
        counts.append(count if batch.real else paddle.zeros_like(count))
    return paddle.add_n(counts)


def sum_losses(output: LossOutput) -> Tensor:
    """Adds the losses of a micro-batch up to the 0-D loss that is differentiated."""
    if output.separate_loss is None:
        return output.total
    return output.total + output.separate_loss.total


def zero_losses(output: LossOutput) -> LossOutput:
    """Returns zeros under the same names.

    Multiplying by 0 would not suffice: 0 x NaN is NaN, and a blank image may produce NaN in
    evaluation mode.
    """
    return LossOutput(
        total=paddle.zeros_like(output.total),
        normalizer=paddle.zeros_like(output.normalizer),
        parts={name: paddle.zeros_like(part) for name, part in output.parts.items()},
        separate_loss=None if output.separate_loss is None else zero_losses(output.separate_loss),
    )
