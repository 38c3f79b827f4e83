"""What VisualDL and TensorBoard get of a run: the same tags, steps and pictures, or a warning."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ppdist.points import CurveFile, histogram, pr_curves, scalar_points


class Curves:
    """Hands everything to each file; what fails with one costs a warning and no exception."""

    def __init__(self, warn: Callable[[str, Exception], None]) -> None:
        """Args: warn: told which program's file cannot be written and why, each time."""
        self._warn = warn
        self._files: dict[str, CurveFile] = {}

    def open(self, program: str, make: Callable[[], CurveFile]) -> None:
        """Adds a file; the program's name goes into warnings."""
        try:
            self._files[program] = make()
        except Exception as error:  # curves are not worth a run, whatever fails in making them
            self._warn(program, error)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """The numbers of one record of metrics.jsonl; see `scalar_points`."""
        self._each(lambda file: file.add_scalars(int(record["step"]), scalar_points(record)))

    def images(self, tag: str, step: int, images_HW3: list[np.ndarray]) -> None:
        """uint8 RGB images under `tag/0`, `tag/1`, ...; sizes may differ."""
        self._each(lambda file: file.add_images(step, tag, images_HW3))

    def pr_curves(self, step: int, analysis: Mapping[str, Any]) -> None:
        """The precision-recall curves of the classes in an evaluation.json."""
        self._each(lambda file: file.add_pr_curves(step, pr_curves(analysis)))

    def histograms(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """How the values of arrays are spread, by tag; what is not finite is left out."""

        def add(file: CurveFile) -> None:
            found = {tag: histogram(array) for tag, array in arrays.items()}
            values = {tag: each for tag, each in found.items() if each is not None}
            file.add_histograms(step, values)

        self._each(add)

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        """What run this is: a row of the page that compares runs, and its configuration.

        Args:
            hyper_parameters: numbers and texts.
            metrics: keys of evaluation records, whose last values stand beside them.
            texts: settings by section.
        """
        probe = dict.fromkeys(metrics, 0.0) | {"eval_seconds": 0.0}
        tags = [tag for tag in scalar_points(probe) if not tag.startswith("speed/")]
        tags.append("train/loss")
        self._each(lambda file: file.describe(hyper_parameters, tags, texts))

    def go_back(self, step: int) -> None:
        """Drops the points after a step, because they are made again."""
        self._each(lambda file: file.go_back(step))

    def close(self) -> None:
        """The second call does nothing."""
        self._each(lambda file: file.close())
        self._files = {}

    def _each(self, write: Callable[[CurveFile], None]) -> None:
        for program, file in self._files.items():
            try:
                write(file)
            except Exception as error:  # curves are not worth a run, whatever fails in making them
                self._warn(program, error)
