"""Calibration: how many epochs of each variant take equal time.

Each setting runs `calibration_epochs` first, as many copies at once as trials will run, so that it
is measured under the conditions of the trials:

    seconds(E) = overhead + E * steps an epoch * seconds a step + evaluations * seconds of one

The seconds of a step are means after the first epoch, in which kernels are prepared and caches
filled, those of an evaluation are the last one's; overhead is all of a run's wall time that is
neither: imports, reading the set, what the first epoch took longer, saving, plots.  A set so small
that there would be few steps runs longer.  `train.phases_for_epochs` scales what a configuration
counts in epochs with the length, in the calibration as in the trial: a calibration is the run in
miniature, and a trial has about as many evaluations and saves as the experiment that it comes from
(with ten images an epoch is two steps: an evaluation every five epochs would be all that it does).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ppdist.common.errors import ConfigError
from ppdist.common.logging import MetricRecords, read_metrics
from ppdist.config import load_config
from ppdist.config.study import StudyConfig, item_of

_LEAST_STEPS = 25  # of a calibration, after its first epoch
_TENTHS_BELOW = 20  # shorter runs are given to a tenth of an epoch, longer ones to whole ones


class Timed(NamedTuple):
    """A calibration that ran: its folder, and how long it took from its start to its end."""

    folder: Path
    wall_seconds: float


@dataclass(frozen=True)
class Calibration:
    """What a setting costs here, and how long it may be for that.

    Attributes: epochs: of a trial; evaluations: of a trial; the rest in seconds, of this machine
    with so many trials at once.
    """

    epochs: float
    evaluations: int
    steps_per_epoch: int
    step_seconds: float
    evaluation_seconds: float
    overhead_seconds: float

    @property
    def minutes(self) -> float:
        """What a trial is expected to take."""
        steps = self.epochs * self.steps_per_epoch * self.step_seconds
        return (self.overhead_seconds + steps + self.evaluations * self.evaluation_seconds) / 60

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"minutes": self.minutes}


def calibrated(runs: Sequence[Timed], minutes: float, wanted: int) -> Calibration:
    """The greatest length at which a setting takes no more than so many minutes, from runs that
    were copies of it.

    Args: wanted: how many evaluations a trial should have.
    Raises: ConfigError: not even its overhead fits into the minutes.
    """
    measured = [_measured(*run) for run in runs]
    step, evaluation, overhead = (sum(column) / len(measured) for column in zip(*measured))
    per_epoch = _steps_per_epoch(runs[0].folder)
    # Evaluations come in jumps, so lengths are tried from where there would be none.
    tenths = max(0, math.floor((minutes * 60 - overhead) / (per_epoch * step) * 10))
    while tenths > 0:
        if tenths > _TENTHS_BELOW * 10:
            tenths -= tenths % 10
        count = evaluations_in(tenths / 10, per_epoch, every_epochs(tenths / 10, wanted))
        found = Calibration(tenths / 10, count, per_epoch, step, evaluation, overhead)
        if found.minutes <= minutes and round(tenths / 10 * per_epoch) >= 1:
            return found
        tenths -= 1
    raise ConfigError(
        f"{minutes:g}: start and end of a run take {overhead:.0f} s and an evaluation "
        f"{evaluation:.1f} s, which leaves less than a tenth of an epoch",
        code="minutes_too_few",
        where="minutes_per_trial",
        fix="give it more",
    )


def _measured(folder: Path, wall_seconds: float) -> tuple[float, float, float]:
    """Seconds of a step, of an evaluation, and of everything else in a run."""
    found = MetricRecords.of(read_metrics(folder / "metrics.jsonl"))
    first = _steps_per_epoch(folder)
    steady = [each["step_seconds"] for each in found.steps if each["step"] > first]
    evaluations = [each["eval_seconds"] for each in found.evaluations]
    step, evaluation = sum(steady) / len(steady), evaluations[-1]
    return step, evaluation, max(0.0, wall_seconds - len(found.steps) * step - sum(evaluations))


def _steps_per_epoch(folder: Path) -> int:
    found = MetricRecords.of(read_metrics(folder / "metrics.jsonl"))
    return int(found.starts[-1]["derived"]["steps_per_epoch"]["value"])


def epochs_for_calibration(folder: Path) -> int:
    """How long a calibration has to be at least, from one that may have been too short."""
    return 1 + math.ceil(_LEAST_STEPS / _steps_per_epoch(folder))


def evaluations_of(study: StudyConfig, overrides: Sequence[str]) -> int:
    """How many evaluations the experiment has as it is written."""
    config = load_config(study.config, overrides)
    return math.ceil(config.train.epochs / config.evaluate.every_epochs)


def every_epochs(epochs: float, wanted: int) -> int:
    """Whole epochs between evaluations, of which there are to be about so many."""
    return max(1, round(epochs / wanted))


def evaluations_in(epochs: float, steps_per_epoch: int, every: int) -> int:
    """How many a training makes: one after each so many epochs, and one at its end."""
    return math.ceil(round(epochs * steps_per_epoch) / (every * steps_per_epoch))


def lengthened(study: StudyConfig, overrides: Sequence[str], epochs: float) -> list[str]:
    """Overrides that make the experiment so long, with everything in it where it was."""
    config = load_config(study.config, overrides)
    written = config.train.phases_for_epochs or config.train.epochs
    every = every_epochs(epochs, evaluations_of(study, overrides))
    saved = config.checkpoint.every_epochs * epochs / config.train.epochs
    return [
        item_of("train.epochs", epochs),
        item_of("train.phases_for_epochs", written),
        item_of("evaluate.every_epochs", every),
        item_of("checkpoint.every_epochs", float(f"{saved:.4g}")),
    ]


def for_calibration(study: StudyConfig, overrides: Sequence[str], epochs: int) -> list[str]:
    """Overrides of the run in miniature: two evaluations, as the first is slow; each step in the
    log."""
    items = lengthened(study, overrides, epochs)
    every = item_of("evaluate.every_epochs", max(1, epochs // 2))
    return [*items, every, "log.every_steps=1"]


def expected(calibrations: Mapping[str, Any], setting: str) -> Calibration | None:
    """What calibration.json says of a setting."""
    found = calibrations.get(setting)
    if found is None:
        return None
    return Calibration(**{key: value for key, value in found.items() if key != "minutes"})
