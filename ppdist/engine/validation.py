"""The evaluations of a training run: of its averaged weights, by a model of their own."""

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddle import nn

from ppdist.common.files import write_json
from ppdist.common.logging import RunLog
from ppdist.distributed import comm, heartbeat
from ppdist.distributed.comm import EvaluationFailed
from ppdist.engine.evaluator import ClassificationEvaluator, Evaluator
from ppdist.engine.state import copy_into
from ppdist.engine.train_step import TrainStep
from ppdist.engine.visualize import write_validation
from ppdist.models.base import ImageModel

_LOGGER = logging.getLogger("ppdist.engine")


class Validation:
    """Evaluates and shows what came of it; every rank has one and calls each method alike.

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
        output_dir: Path,
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
        self._output_dir = output_dir

    def measure(self, step: int, stopped: Callable[[], bool]) -> dict[str, float] | None:
        """What an evaluation says, or the second one if the first fails; None: that failed, too.

        Args:
            step: optimizer steps done.
            stopped: whether this rank was asked to stop.
        Raises: EvaluationStopped, on every rank: one was asked to stop.
        """
        heartbeat.beat("evaluate", step)
        for consequence in ("it is tried once more", "TRAINING GOES ON WITHOUT THIS EVALUATION"):
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

    def show(self, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """To metrics.jsonl, pages of curves, and pictures."""
        self._log.metrics({"step": step, "epoch": epoch, **metrics})
        self._log.images("validation", step, self.evaluator.pictures)
        if self._log.histograms_wanted:
            self._log.writers.histograms(step, _values(self._train_step.model))
        try:
            write_validation(self._output_dir / "plots", self.evaluator.pictures)
        except Exception as error:  # no picture is worth a run
            self._log.warn_once("plots/val_batch_*.jpg", error)

    def analyse(self, step: int) -> None:
        """Writes evaluation.json about the evaluation that `measure` made last; rank 0 does it
        while the others wait."""

        def write() -> None:
            try:
                analysis = self.evaluator.analyse_last(step)
                self._log.writers.pr_curves(step, analysis)
                write_json(self._output_dir / "evaluation.json", analysis)
            except Exception as error:  # an account of the numbers is not worth a run
                _LOGGER.debug("evaluation.json", exc_info=True)
                self._log.warn_once("evaluation.json", error)

        comm.run_on_main(write)

    def _load_weights(self) -> None:
        """Gives the model the averaged weights, or the live ones without EMA."""
        ema = self._train_step.ema
        weights = dict(self._train_step.model.state_dict()) if ema is None else ema.average
        copy_into(self._model.state_dict(), weights)


def _values(model: nn.Layer) -> dict[str, Any]:
    """Weights and gradients by tag; these of the last step, averaged over the ranks and clipped."""
    found = {}
    for key, parameter in model.named_parameters():
        found[f"weights/{key}"] = parameter.astype("float32").numpy()
        if parameter.grad is not None:
            found[f"gradients/{key}"] = parameter.grad.astype("float32").numpy()
    return found
