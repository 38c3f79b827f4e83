"""Interfaces that a trainer needs: its data, its evaluator and its log."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ppdist.common.eta import ETA
from ppdist.data.types import Batch
from ppdist.models.base import ImageModel

ClassScores = Sequence[float | None]  # AP of each class; None if the set has no object of it


class TrainData(Protocol):
    """Micro-batches of this rank; `ppdist.engine.data.BatchSource` is one.

    Attributes:
        follows_scores: the order of images depends on the scores of the last evaluation.
    """

    follows_scores: bool

    def steps(self, first_step: int, scores: ClassScores | None) -> Iterator[Iterator[Batch]]:
        """Yields the micro-batches of each step, from the start step to the end of the run.

        Args: scores: of the last evaluation; None: none yet.
        """

    def abort_waits(self) -> None:
        """Stops waiting for unavailable images because the run ends soon."""


class TrainEvaluator(Protocol):
    """Evaluates this rank's share of a split; `ppdist.engine.evaluator` has two."""

    @property
    def headline(self) -> Sequence[str]:
        """Names of metrics for the log; the first selects the best checkpoint."""

    def evaluate(
        self, model: ImageModel, stopped: Callable[[], bool], step: int
    ) -> dict[str, float]:
        """Evaluates a model.  Collective.

        Raises: EvaluationStopped, on all ranks: one was asked to stop.  EvaluationFailed.
        """

    def class_scores(self, metrics: dict[str, float]) -> list[float | None] | None:
        """Returns the score of each class; None: classes have no scores."""

    def abort_waits(self) -> None:
        """Stops waiting for unavailable images because the run ends soon."""


class EvaluationStopped(Exception):
    """A rank was asked to stop; raised on all ranks."""


class TrainLog(Protocol):
    """Lines and records of a run; `ppdist.common.run_log.RunLog` is one.

    Attributes:
        eta: the estimate of the remaining time, which starts with the first step.
    """

    eta: ETA

    def info(self, message: str) -> None: ...

    def warning(self, message: str) -> None: ...

    def metrics(self, record: dict[str, Any]) -> None: ...

    def spending(self, part: str, step: int) -> AbstractContextManager[None]: ...

    def limit_close(self, seconds: float = 0.0) -> None: ...


class Sums(Protocol):
    """Sums over steps that are stored in checkpoints, such as the sums of `MetricsLogger`."""

    def restore(self, saved: Any, step: int) -> None: ...

    def sums(self) -> Any: ...
