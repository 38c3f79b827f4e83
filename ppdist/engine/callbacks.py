"""Callbacks, which observe a training at given moments."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from paddle import nn

from ppdist.common.errors import ConfigError
from ppdist.engine.clock import StepSeconds
from ppdist.engine.step_policy import StepResult
from ppdist.engine.train_step import TrainStep


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a run that a callback can access when training begins.

    Attributes:
        evaluated_model: takes the averaged weights for evaluation: a second model, or, where
            nothing is evaluated, the trained one.
        output_dir: the output folder of the run.
        done_steps: optimizer steps done before this start: 0, or those of the resumed checkpoint.
        total_steps: optimizer steps of the whole run.
    """

    train_step: TrainStep
    evaluated_model: nn.Layer
    output_dir: Path
    done_steps: int
    total_steps: int


class Callback:
    """Observes a training run without changing its numbers.

    Override the methods you need.  Every rank has its own and calls it at the same moments, so a
    callback may use collectives.  Steps are optimizer steps, counted from 1.  An exception in a
    callback ends the run.

        class Report(Callback):
            def on_evaluate_end(self, step, metrics, is_best):
                print(step, metrics["mAP"], "best" if is_best else "")

        train("pets/data.yaml", model="yolov5n", callbacks=[Report()])
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Checks that the base calls each `on_...` method of a subclass.

        Raises: ConfigError: nothing would ever call a method of this name.
        """
        super().__init_subclass__(**options)
        moments = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Callback, name):
                close_names = get_close_matches(name, moments, n=1)
                raise ConfigError(
                    f"Callback has no method {name}"
                    + (f"; did you mean {close_names[0]}?" if close_names else ""),
                    code="callback_unknown",
                    where=f"{cls.__module__}.{cls.__qualname__}",
                    fix=f"expected {', '.join(moments)}; do not name other methods on_...",
                )

    def on_train_begin(self, run: TrainingRun) -> None:
        """Called once, before anything is evaluated or trained.

        Args: run: has `output_dir`, `total_steps` and `done_steps`, those of a resumed checkpoint.
        """

    def on_step_begin(self, step: int) -> None:
        """Called before the first batch of a step is fetched.

        Also called where the step is then skipped.  A step that is repeated, after a rollback or
        with smaller micro-batches, begins again.
        """

    def on_step_end(self, step: int, result: StepResult, lr: float, seconds: StepSeconds) -> None:
        """Called after each computed step, even if no rank applied it.

        Args:
            result: the same `losses`, `gradient_norm` and decision on every rank.
            lr: the learning rate that the step used.
            seconds: `wall`, `compute` and `data` (waiting for images), of this rank.
        """

    def on_rollback(self, step: int) -> None:
        """Called after a rollback to the weights of this step.

        All later steps are undone.
        """

    def on_evaluate_end(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        """Called after an evaluation that did not fail.

        Args:
            step: the step after which the evaluation ran.
            metrics: the same on every rank.
            is_best: True if no evaluation of this run scored higher; its snapshot is taken next.
        """

    def on_epoch_end(self, epoch: int, step: int, numbers: Mapping[str, float]) -> None:
        """Called after the last step of an epoch and any due evaluation.

        Args:
            epoch: number of the epoch, from 1.
            step: the last step of the epoch.
            numbers: a row of `Run.history()`: the means of `loss` and its parts over the steps of
                the epoch, `lr`, `images_per_second`, `seconds`, and results of an evaluation at the
                end of the epoch, such as `mAP` and `val_loss`.  Times differ between ranks.
                A resumed run has the means of the whole epoch, or `partial` if its checkpoint has
                no sums.
        """

    def on_save(self, step: int) -> None:
        """Called when the snapshot of this step is taken.

        Rank 0 has not written it yet.
        """

    def on_train_end(self, step: int, reason: str) -> None:
        """Called once the last checkpoint is on disk; not after an error.

        Args:
            step: the last step done.
            reason: "total", "early_stopping", "hours" (train.hours) or "signal".
        """
