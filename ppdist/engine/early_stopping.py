"""Early stopping and the warning of over-fitting.

Both follow from numbers that are the same on all ranks, so they decide the same on each.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ppdist.config.evaluate import METRIC_TEXTS
from ppdist.config.train import EarlyStoppingConfig
from ppdist.metrics.findings import over_fitting

_LOWER_IS_BETTER = ("val_loss",)


@dataclass(frozen=True)
class EarlyStoppingState:
    """The record of how long a run has not improved, as stored in checkpoints."""

    metric: str
    best: float | None = None  # None: nothing was measured yet
    best_step: int = 0
    in_vain: int = 0  # consecutive evaluations without a better value


class EarlyStopping:
    """The early-stopping rule; its state is part of `TrainState`."""

    def __init__(self, config: EarlyStoppingConfig, metric: str) -> None:
        """Args: metric: selects the best checkpoint; the default for early stopping."""
        self._metric = config.metric or metric
        self._patience = config.patience

    def updated(
        self, state: EarlyStoppingState | None, step: int, metrics: Mapping[str, float]
    ) -> EarlyStoppingState:
        """Returns the state after an evaluation.

        Args:
            state: the state before the evaluation; None: this is the first one.  A state of another
                metric is reset.
            step: optimizer steps done.
        """
        if state is None or state.metric != self._metric:
            state = EarlyStoppingState(self._metric)
        value = metrics[self._metric]
        sign = -1.0 if self._metric in _LOWER_IS_BETTER else 1.0
        # An initial NaN, or an infinity, would otherwise remain the best forever.
        better = math.isfinite(value) and (state.best is None or sign * (value - state.best) > 0)
        if better:
            return EarlyStoppingState(self._metric, value, step)
        return replace(state, in_vain=state.in_vain + 1)

    def reason(self, state: EarlyStoppingState | None) -> str:
        """Explains why the run should stop here; "": it should continue."""
        if state is None or state.metric != self._metric or state.in_vain < self._patience:
            return ""
        name = METRIC_TEXTS.get(self._metric, self._metric)
        if state.best is None:
            return f"{name} was not finite in {state.in_vain} evaluations"
        return (
            f"{name} has not improved on the {state.best:.4f} of step "
            f"{state.best_step} in {state.in_vain} evaluations (early_stopping.patience: "
            f"{self._patience})"
        )


@dataclass
class LossCurves:
    """Training and validation losses of each evaluation, as stored in checkpoints.

    Attributes:
        pairs: for each evaluation, the mean training loss since the previous evaluation and the
            validation loss.
        summed, steps: sum of the training losses since the last evaluation, and number of steps
            summed.
        warned: whether the warning was issued; it is issued only once.
    """

    pairs: tuple[tuple[float, float], ...] = ()
    summed: float = 0.0
    steps: int = 0
    warned: bool = False

    def trained(self, loss: float) -> None:
        """Adds the loss of a step that was applied."""
        self.summed += loss
        self.steps += 1

    def evaluated(self, val_loss: float) -> str:
        """Adds an evaluation; returns a warning about over-fitting, or "".

        The warning is returned only once, by the rule of `ppdist.metrics.findings.over_fitting`.
        """
        if self.steps and math.isfinite(val_loss):
            self.pairs = (*self.pairs, (self.summed / self.steps, val_loss))
        self.summed, self.steps = 0.0, 0
        finding = None if self.warned else over_fitting(self.pairs)
        if finding is None:
            return ""
        self.warned = True
        return (
            f"over-fitting: in the last {finding.ago} evaluations the validation loss rose from "
            f"{finding.val_then:.4g} to {finding.val_now:.4g} while the training loss fell from "
            f"{finding.train_then:.4g} to {finding.train_now:.4g} (medians of {finding.window}); "
            f"use more images, stronger data.augment, a smaller model or early_stopping"
        )
