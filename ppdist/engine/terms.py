"""The sums of a step that a loss gives, and what to divide which of them by."""

from typing import NamedTuple

import paddle
from paddle import Tensor

from ppdist.losses import LossOutput

_NORMALIZER, _LOSS = "normalizer", "loss"
_APART = "apart "  # before the names of the loss that has a normalizer of its own


class Divided(NamedTuple):
    """What a step's sums over all ranks and micro-batches say.

    losses: `loss` and its parts, normalised.
    divisor: of the gradients.
    apart: what gradients of `Loss.apart` are multiplied by before, as their divisor is another.
    """

    losses: dict[str, float]
    divisor: float
    apart: float


def whole(output: LossOutput) -> Tensor:
    """What is differentiated: 0-D, all of a micro-batch's loss."""
    return output.total if output.apart is None else output.total + output.apart.total


def blank(output: LossOutput) -> LossOutput:
    """The same graph and the same names without any say."""
    return LossOutput(
        total=output.total * 0.0,
        normalizer=output.normalizer * 0.0,
        parts={name: part * 0.0 for name, part in output.parts.items()},
        apart=None if output.apart is None else blank(output.apart),
    )


def add_up(sums: dict[str, Tensor], output: LossOutput) -> None:
    """Adds a micro-batch to the sums, [1] each, the normalizer first; the same names every time."""
    terms = {_NORMALIZER: output.normalizer, _LOSS: whole(output), **output.parts}
    if output.apart is not None:
        apart = output.apart
        terms |= {_APART + _NORMALIZER: apart.normalizer, _APART + _LOSS: apart.total}
        terms |= {_APART + name: part for name, part in apart.parts.items()}
    for name, value in terms.items():
        sums[name] = sums.get(name, paddle.zeros([1])) + value.detach().reshape([1])


def divided(sums: dict[str, float]) -> Divided:
    """See `Divided`; sums: of `add_up`, over all ranks."""
    divisor = max(1.0, sums[_NORMALIZER])
    losses = {
        name: value / divisor
        for name, value in sums.items()
        if name != _NORMALIZER and not name.startswith(_APART)
    }
    if _APART + _NORMALIZER not in sums:
        return Divided(losses, divisor, 1.0)
    own = max(1.0, sums[_APART + _NORMALIZER])
    total = sums[_APART + _LOSS]
    losses[_LOSS] = (sums[_LOSS] - total) / divisor + total / own
    for name, value in sums.items():
        if name.startswith(_APART) and name not in (_APART + _NORMALIZER, _APART + _LOSS):
            losses[name.removeprefix(_APART)] = value / own
    return Divided(losses, divisor, divisor / own)
