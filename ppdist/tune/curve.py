"""Curve of a training so far, from its metrics.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppdist.common.errors import ConfigError
from ppdist.common.logging import MetricRecords, Record, read_metrics


@dataclass(frozen=True)
class Curve:
    """Its evaluations in their order.  Args: metric: what the study goes by."""

    metric: str
    evaluations: Sequence[Record]

    @classmethod
    def of(cls, folder: Path, metric: str) -> "Curve":
        """Of the run in a folder; of none, where it has not written anything.

        Raises: ConfigError: its evaluations have no such number.
        """
        try:
            found = MetricRecords.of(read_metrics(folder / "metrics.jsonl")).evaluations
        except FileNotFoundError:
            found = []
        for each in found:
            if metric not in each:
                have = sorted(key for key in _numbers(each) if not key.endswith("_seconds"))
                raise ConfigError(
                    f"{metric}: evaluations of {folder} have no such number, but {', '.join(have)}",
                    code="unknown_metric",
                    where="metric",
                )
        # One that could not be measured (null) stands for nothing.
        return cls(metric, [each for each in found if isinstance(each[metric], int | float)])

    def values(self) -> dict[int, float]:
        """By whole epochs, from 1; of two in one epoch the first."""
        found: dict[int, float] = {}
        for each in self.evaluations:
            found.setdefault(max(1, round(each["epoch"])), float(each[self.metric]))
        return found

    def points(self) -> list[list[float]]:
        """[epoch, value] of each."""
        return [[round(each["epoch"], 3), each[self.metric]] for each in self.evaluations]

    def final(self) -> dict[str, float]:
        """The numbers of the last evaluation; empty without one."""
        return _numbers(self.evaluations[-1]) if self.evaluations else {}

    def best(self, lower_is_better: bool) -> dict[str, float]:
        """The numbers of the evaluation with the best value of the metric."""
        if not self.evaluations:
            return {}
        sign = -1 if lower_is_better else 1
        return _numbers(max(self.evaluations, key=lambda each: sign * each[self.metric]))


def _numbers(record: Record) -> dict[str, Any]:
    """Without classes (`AP/name`) and what is said of every record."""
    return {
        key: round(value, 6) if isinstance(value, float) else value
        for key, value in record.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and "/" not in key
        and key != "time"
    }
