"""Evaluations during training: of the averaged weights, by a model of their own."""

import logging
import traceback
from collections.abc import Callable

from ppdist.common.logging import RunLog
from ppdist.distributed import heartbeat
from ppdist.distributed.comm import EvaluationFailed
from ppdist.engine.evaluator import ClassificationEvaluator, Evaluator
from ppdist.engine.state import copy_into
from ppdist.engine.train_step import TrainStep
from ppdist.models.base import ImageModel

_LOGGER = logging.getLogger("ppdist.engine")


class Validation:
    """Evaluates the averaged weights; every rank has one and calls each method alike.

    Attributes:
        best_metric: what makes a checkpoint the best.

    Training goes on whatever fails here: it has a model of its own, which nothing here touches.
    """

    def __init__(
        self,
        evaluator: Evaluator | ClassificationEvaluator,
        model: ImageModel,
        train_step: TrainStep,
        log: RunLog,
        metric: str | None,
    ) -> None:
        """
        Args:
            model: takes the averaged weights.
            metric: `evaluate.metric`.
        """
        self.evaluator = evaluator
        self.best_metric = metric or evaluator.headline[0]
        self._model = model
        self._train_step = train_step
        self._log = log

    def measure(self, step: int, stopped: Callable[[], bool]) -> dict[str, float] | None:
        """What an evaluation says, or the second one if the first fails; None: that failed, too.

        Args:
            step: optimizer steps done.
            stopped: whether this rank was asked to stop.
        Raises: EvaluationStopped, on every rank: one was asked to stop.
        """
        heartbeat.beat("evaluate", step)
        for consequence in ("retrying", "skipping this evaluation"):
            self._load_weights()
            try:
                return self.evaluator.evaluate(self._model, stopped, step)
            except EvaluationFailed as error:
                if error.__cause__ is not None:  # on this rank; others than rank 0 have their log
                    trace = "".join(traceback.format_exception(error.__cause__))
                    _LOGGER.warning(f"what this rank met in the evaluation:\n{trace}")
                self._log.warning(
                    f"the evaluation after step {step} failed, {consequence}: {error}"
                )
        return None

    def _load_weights(self) -> None:
        """Gives the model the averaged weights, or the live ones without EMA."""
        ema = self._train_step.ema
        weights = dict(self._train_step.model.state_dict()) if ema is None else ema.average
        copy_into(self._model.state_dict(), weights)
