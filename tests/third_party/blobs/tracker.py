"""The tracker: a text file of points."""

from collections.abc import Mapping

from ppdist.common.trackers import TrackedRun
from ppdist.common.writers import MetricWriter


class Lines(MetricWriter):
    def __init__(self, run: TrackedRun) -> None:
        self.shown_digits = run.config.digits
        self.file = (run.folder / "points.txt").open("a", encoding="utf-8")

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            print(step, tag, f"{value:.{self.shown_digits}g}", file=self.file)

    def close(self) -> None:
        self.file.close()
