"""When it is time to end a training that gets no better, and when to warn that it only memorises.

Both judge by numbers that all ranks hold alike, so they say the same on each.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from ppdist.config.train import EarlyStoppingConfig

LOWER_IS_BETTER = ("val_loss",)
# So many evaluations, and a fifth of those so far, have a median that counts as one value.
_FEWEST, _SHARE = 5, 5
_APART = 0.2  # above its lowest


@dataclass(frozen=True)
class Standing:
    """What a run that may end early has come to; goes into checkpoints."""

    metric: str
    best: float | None = None  # None: nothing was measured yet
    best_step: int = 0
    in_vain: int = 0  # evaluations in a row without a better value


class EarlyStopping:
    """The rule; where a run stands by it is in `Progress`."""

    def __init__(self, config: EarlyStoppingConfig, metric: str) -> None:
        """Args: metric: by which the best checkpoint is chosen."""
        self._metric = config.metric or metric
        self._patience = config.patience
        self._min_delta = config.min_delta

    def judged(
        self, standing: Standing | None, step: int, metrics: Mapping[str, float]
    ) -> Standing:
        """Where the run stands after an evaluation.

        Args:
            standing: before it; None: this is the first.  One by another metric counts for nothing.
            step: optimizer steps done.
        """
        if standing is None or standing.metric != self._metric:
            standing = Standing(self._metric)
        value = metrics[self._metric]
        sign = -1.0 if self._metric in LOWER_IS_BETTER else 1.0
        better = math.isfinite(value) and (
            standing.best is None or sign * (value - standing.best) > self._min_delta
        )
        if better:
            return Standing(self._metric, value, step)
        in_vain = standing.in_vain + 1
        return Standing(self._metric, standing.best, standing.best_step, in_vain)

    def reason(self, standing: Standing | None) -> str:
        """Why to end here, in words; "": there is none."""
        if standing is None or standing.metric != self._metric or standing.in_vain < self._patience:
            return ""
        by = f" by more than {self._min_delta:g}" if self._min_delta else ""
        if standing.best is None:
            return f"{self._metric} was not a number in {standing.in_vain} evaluations"
        return (
            f"{self._metric} has not been better{by} than {standing.best:.4f}, that of step "
            f"{standing.best_step}, in {standing.in_vain} evaluations (early_stopping.patience: "
            f"{self._patience})"
        )


@dataclass
class LossCurves:
    """Training loss beside validation loss; goes into checkpoints.

    pairs: of each evaluation the mean training loss of the steps since the one before it, and the
    validation loss.  summed, steps: of the training loss since the last evaluation.
    """

    pairs: tuple[tuple[float, float], ...] = ()
    summed: float = 0.0
    steps: int = 0
    warned: bool = False

    def trained(self, loss: float) -> None:
        """A step that was applied."""
        self.summed += loss
        self.steps += 1

    def evaluated(self, val_loss: float) -> str:
        """Returns: a warning, once, when the model has long been getting worse on images that it
        does not train on, while it gets better on those that it does; most times nothing.

        Both losses are smoothed by the median of the last fifth of the evaluations, of five at
        least.  The warning comes when the validation loss is 20 % above its lowest, and the
        training loss below what it was then.
        """
        if self.steps and math.isfinite(val_loss):
            self.pairs = (*self.pairs, (self.summed / self.steps, val_loss))
        self.summed, self.steps = 0.0, 0
        size = max(_FEWEST, len(self.pairs) // _SHARE)
        if self.warned or len(self.pairs) <= size:
            return ""
        windows = [self.pairs[n : n + size] for n in range(len(self.pairs) - size + 1)]
        smooth = [tuple(median(each) for each in zip(*window)) for window in windows]
        lowest = min(smooth, key=lambda pair: pair[1])
        now = smooth[-1]
        if now[1] <= (1 + _APART) * lowest[1] or now[0] >= lowest[0]:
            return ""
        self.warned = True
        ago = len(smooth) - 1 - smooth.index(lowest)
        return (
            f"over-fitting: in the last {ago} evaluations the validation loss has risen from "
            f"{lowest[1]:.4g} to {now[1]:.4g} while the training loss fell from {lowest[0]:.4g} "
            f"to {now[0]:.4g} (medians of {size}): the model learns its training images by "
            f"heart; more images, stronger data.augment, a smaller model or early_stopping help"
        )
