"""Evaluations of a run, measured on averaged weights, and their consequences."""

import logging
import math
import traceback
from pathlib import Path

from ppdist.config.evaluate import METRIC_TEXTS
from ppdist.config.train import EarlyStoppingConfig
from ppdist.distributed import comm, heartbeat
from ppdist.engine.early_stopping import EarlyStopping
from ppdist.engine.parts import TrainEvaluator, TrainLog
from ppdist.engine.state import TrainState, copy_into
from ppdist.engine.step_policy import weights_to_evaluate
from ppdist.engine.stopping import StopRequest
from ppdist.engine.train_step import TrainStep
from ppdist.models.base import ImageModel

_LOGGER = logging.getLogger("ppdist.engine")


class Evaluations:
    """The evaluations of a run: their interval, model and consequences.

    Attributes:
        evaluator: evaluates this rank's share of the validation set; None: the run is not
            evaluated.
        model: a second model, which takes the averaged weights; without an evaluator, any model.
        every: steps from one evaluation to the next.
        early_stopping: the early-stopping rule; None: the run continues to its last step.
    """

    def __init__(
        self,
        evaluator: TrainEvaluator | None,
        model: ImageModel,
        metric: str | None,
        every: int,
        stopping: EarlyStoppingConfig | None,
        log: TrainLog,
    ) -> None:
        """Args: metric: its highest value marks the best checkpoint; None: evaluator's first."""
        self.evaluator = evaluator
        self.model = model
        self.every = every
        self._log = log
        self.early_stopping = None
        if evaluator is not None:
            self._metric = metric or evaluator.headline[0]
            self.early_stopping = EarlyStopping(stopping, self._metric) if stopping else None

    def is_due(self, step: int) -> bool:
        """Returns True if an evaluation is due after this step; the trainer adds the last step."""
        return step % self.every == 0

    def abort_waits(self) -> None:
        """Stops waiting for unavailable images because the run ends soon."""
        if self.evaluator is not None:
            self.evaluator.abort_waits()

    def reason_to_end(self, state: TrainState) -> str:
        """Explains why the run should end early, the same on every rank; "": it should continue."""
        rule = self.early_stopping
        return "" if rule is None else rule.reason(state.early_stopping)

    def log_best(self, state: TrainState, best: Path) -> None:
        """Logs which checkpoint is the best, if there is one."""
        if self.evaluator is not None and best.exists():
            score = f"{METRIC_TEXTS.get(self._metric, self._metric)} {state.best:.4f}"
            self._log.info(f"best: {best}, step {state.best_step}, {score}")

    def measure(
        self, train_step: TrainStep, step: int, stop: StopRequest
    ) -> dict[str, float] | None:
        """Evaluates the averaged weights, and retries once after a failure.  Collective.

        Training can continue whatever fails here, because evaluation has its own model.

        Returns: the metrics; None: both attempts failed.
        Raises: EvaluationStopped, on every rank: a rank received a stop request.
        """
        assert self.evaluator is not None, "there is nothing to measure"
        heartbeat.beat("evaluate", step)
        for consequence in ("retrying", "skipping this evaluation"):
            weights = weights_to_evaluate(train_step.model, train_step.policies)
            copy_into(self.model.state_dict(), weights)
            try:
                return self.evaluator.evaluate(self.model, lambda: stop.made, step)
            except comm.EvaluationFailed as error:
                if error.__cause__ is not None:  # on this rank; others than rank 0 have their log
                    trace = "".join(traceback.format_exception(error.__cause__))
                    _LOGGER.warning(f"the evaluation failed on this rank:\n{trace}")
                self._log.warning(
                    f"the evaluation after step {step} failed, {consequence}: {error}"
                )
        return None

    def learn(self, state: TrainState, metrics: dict[str, float]) -> bool:
        """Records the results of an evaluation in `state`; returns True if it is the best so far.

        Args: metrics: the same on every rank.
        """
        assert self.evaluator is not None, "there is nothing to learn from"
        state.evaluated_step = state.step
        # Without a single match, the F1 is 0 at every threshold; a classifier has no F1.
        has_threshold = metrics.get("f1", 0.0) > 0
        state.best_f1_threshold = metrics["best_f1_threshold"] if has_threshold else None
        if self.is_due(state.step):
            # Not if the run ends mid-epoch: a longer run would not evaluate at that step, so this
            # evaluation must not affect the early stopping or the image sampling of an extended
            # run.
            state.class_scores = self.evaluator.class_scores(metrics)
            if self.early_stopping:
                state.early_stopping = self.early_stopping.updated(
                    state.early_stopping, state.step, metrics
                )
            if warning := state.losses.evaluated(metrics.get("val_loss", math.nan)):
                self._log.warning(warning)
        score = metrics[self._metric]
        is_best = score > state.best
        if is_best:
            state.best, state.best_step = score, state.step
        return is_best
