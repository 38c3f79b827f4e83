"""What the steps since the last record come to, for the log: means, speeds, seconds per rank."""

import time
from dataclasses import dataclass, field
from typing import Any

import paddle

from ppdist import dist, pulse
from ppdist.engine.step import StepResult
from ppdist.log import RunLog

_RECENT = 20  # steps of the speed that the console shows


class Stopwatch:
    """Runs from when it is made until `stop`.

    Attributes, in seconds:
        wall: between the two.
        own: all of it but what this rank waits for the others in collectives.
    """

    def __init__(self) -> None:
        self._began, self._waited = time.perf_counter(), pulse.waited_seconds()
        self.wall = self.own = 0.0

    def stop(self) -> None:
        self.wall = time.perf_counter() - self._began
        self.own = self.wall - (pulse.waited_seconds() - self._waited)


@dataclass
class _Step:
    result: StepResult
    data_seconds: float  # waiting for images
    wall_seconds: float
    own_seconds: float


@dataclass
class Records:
    """Gathers what each step came to; every rank has one and calls each method like the others.

    Args: log: rank 0's writes, those of the others do nothing.
    """

    log: RunLog
    steps_per_epoch: int
    _steps: list[_Step] = field(default_factory=list)  # since the last record

    def add(self, result: StepResult, data_seconds: float, watch: Stopwatch) -> None:
        """A step that was made."""
        self._steps.append(_Step(result, data_seconds, watch.wall, watch.own))

    def forget(self) -> None:
        """The steps since the last record, because they are made again."""
        self._steps.clear()

    def images_per_second(self) -> float:
        """Of all ranks, over the last steps; the caller has added one."""
        recent = self._steps[-_RECENT:]
        return sum(each.result.images for each in recent) / sum(
            each.wall_seconds for each in recent
        )

    def write(self, step: int, lr: float) -> dict[str, float]:
        """Writes what the steps since the last record come to; every rank calls it.

        Args:
            step: optimizer steps done.
            lr: what the last of them used.
        Returns: the means of the losses, the same on every rank; nothing, where no step was made.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return {}
        count = len(steps)
        seconds = sum(each.wall_seconds for each in steps)
        losses = {
            name: sum(each.result.losses[name] for each in steps) / count
            for name in steps[0].result.losses
        }
        record: dict[str, Any] = {"step": step, "epoch": step / self.steps_per_epoch, **losses}
        record |= {
            "lr": lr,
            "gradient_norm": sum(each.result.gradient_norm for each in steps) / count,
            "images_per_second": sum(each.result.images for each in steps) / seconds,
            "data_seconds": sum(each.data_seconds for each in steps) / count,
            "step_seconds": seconds / count,
        }
        self.log.metrics(record)
        self.log.metrics({"step": step, **_per_rank(steps)})
        return losses


def _per_rank(steps: list[_Step]) -> dict[str, list[float]]:
    """Means of each rank over some steps, in seconds; every rank calls it."""
    count = len(steps)
    own_3 = [
        sum(each.wall_seconds for each in steps) / count,
        sum(each.own_seconds for each in steps) / count,
        sum(each.data_seconds for each in steps) / count,
    ]
    told_W3 = dist.all_gather(paddle.to_tensor(own_3, dtype="float32")).numpy()
    names = ("rank_step_seconds", "rank_own_seconds", "rank_data_seconds")
    # Digits beyond the float32 in which they travelled say nothing.
    return {
        name: [round(float(value), 6) for value in told_W3[:, column]]
        for column, name in enumerate(names)
    }
