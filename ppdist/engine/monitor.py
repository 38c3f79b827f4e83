"""What the steps since the last record come to, for the log: means, speeds, seconds per rank.

One line about each epoch: means over its steps, what an evaluation at its end found, speed.

Which ranks keep the others waiting: how long each takes for its own part of a step.
"""

import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any

import paddle

from ppdist.common.logging import RunLog, duration
from ppdist.distributed import comm, heartbeat
from ppdist.engine.train_step import StepResult

_RECENT = 20  # steps of the speed that the console shows


class Stopwatch:
    """Runs from when it is made until `stop`.

    Attributes, in seconds:
        wall: between the two.
        own: all of it but what this rank waits for the others in collectives.
    """

    def __init__(self) -> None:
        self._began, self._waited = time.perf_counter(), heartbeat.waited_seconds()
        self.wall = self.own = 0.0

    def stop(self) -> None:
        self.wall = time.perf_counter() - self._began
        self.own = self.wall - (heartbeat.waited_seconds() - self._waited)


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
    told_W3 = comm.all_gather(paddle.to_tensor(own_3, dtype="float32")).numpy()
    names = ("rank_step_seconds", "rank_own_seconds", "rank_data_seconds")
    # Digits beyond the float32 in which they travelled say nothing.
    return {
        name: [round(float(value), 6) for value in told_W3[:, column]]
        for column, name in enumerate(names)
    }


_GIB = 1 << 30


class Epochs:
    """Gathers what the steps of an epoch came to; every rank has one, rank 0's log writes."""

    def __init__(self, log: RunLog, steps_per_epoch: int, total_steps: int) -> None:
        self._log = log
        self._steps_per_epoch = steps_per_epoch
        self._total_steps = total_steps
        self._begin()

    def add(self, result: StepResult, data_seconds: float, watch: Stopwatch, lr: float) -> None:
        """A step that was made.

        Args:
            data_seconds: of it, waiting for images.
            lr: what it used.
        """
        self._images += result.images
        self._data_seconds += data_seconds
        self._wall_seconds += watch.wall
        self._lr = lr
        if not result.applied:  # its losses need not be finite
            return
        self._count += 1
        for name, value in result.losses.items():
            self._losses[name] = self._losses.get(name, 0.0) + value

    def evaluated(self, metrics: Mapping[str, float], names: Sequence[str]) -> None:
        """What an evaluation found; the line shows these names and the validation loss."""
        names = [*(["val_loss"] if "val_loss" in metrics else []), *names]
        self._scores = "".join(f"  {name} {metrics[name]:.4f}" for name in names)

    def tell(self, step: int) -> None:
        """Writes the line where an epoch, or the run, ends after this step; elsewhere only what an
        evaluation found, which may have come later than it was due."""
        ends = step % self._steps_per_epoch == 0 or step == self._total_steps
        if ends and self._count:
            self._log.info(self._line(step) + self._log.eta(step))
        elif self._scores:
            self._log.info(f"after step {step}:{self._scores}")
            self._scores = ""
        if ends:
            self._begin()

    def forget(self) -> None:
        """The steps since the last line, because they are made again."""
        self._begin()

    def _begin(self) -> None:
        self._images = 0
        self._data_seconds = 0.0
        self._wall_seconds = 0.0
        self._lr = 0.0
        self._losses: dict[str, float] = {}  # sums over this many steps:
        self._count = 0
        self._scores = ""
        self._began = time.monotonic()

    def _line(self, step: int) -> str:
        epochs = -(-self._total_steps // self._steps_per_epoch)
        means = {name: value / self._count for name, value in self._losses.items()}
        parts = ", ".join(
            f"{name.removeprefix('loss_')} {value:.3g}"
            for name, value in means.items()
            if name != "loss"
        )
        waited = self._data_seconds / max(self._wall_seconds, 1e-9)
        return (
            f"epoch {-(-step // self._steps_per_epoch)}/{epochs} done in "
            f"{duration(time.monotonic() - self._began)}  loss {means['loss']:.4g}"
            f"{f' ({parts})' if parts else ''}{self._scores}  lr {self._lr:.2e}  "
            f"img/s {self._images / max(self._wall_seconds, 1e-9):.1f}  "
            f"waiting for images {waited:.0%}  {_memory()}"
        )


def _memory() -> str:
    """The most that this process has held at once."""
    if comm.on_gpu():
        return f"GPU memory {paddle.device.cuda.max_memory_allocated() / _GIB:.1f} GiB"
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"memory {kibibytes * 1024 / _GIB:.1f} GiB"


_WINDOW = 15  # steps of one comparison
_SLOW = 1.43  # times what others take: a score of 0.7


class StragglerMonitor:
    """Compares the ranks every 15 steps and names those that are slow in two comparisons in a row.

    A rank's own part of a step is all of it but the time that it waits in collectives.  On a GPU it
    is that of the host alone (images, launching kernels): a slow card is not seen.
    """

    def __init__(self) -> None:
        self._own: list[float] = []  # seconds of each step since the last comparison
        self._slow, self._named = set[int](), set[int]()

    def add(self, result: StepResult, data_seconds: float, watch: Stopwatch) -> str:
        """A step that was made; every rank calls it.  Tells fleetrun, too, what it came to.

        Args: data_seconds: of the step, waiting for images.
        Returns: a warning, the same on every rank, each rank once; most times nothing.
        """
        heartbeat.made(
            loss=result.losses["loss"],
            images=result.images,
            bad=not result.applied and not result.searching,
            step_seconds=watch.wall,
            own_seconds=watch.own,
            data_seconds=data_seconds,
        )
        self._own.append(watch.own)
        if len(self._own) < _WINDOW or comm.world_size() == 1:
            return ""
        usual, self._own = median(self._own), []
        seconds_W = comm.all_gather(paddle.to_tensor([usual], dtype="float32")).numpy().ravel()
        return self._judge([float(each) for each in seconds_W])

    def _judge(self, seconds_W: list[float]) -> str:
        usual = max(median_low(seconds_W), 1e-9)
        before = self._slow
        self._slow = {rank for rank, own in enumerate(seconds_W) if own / usual > _SLOW}
        found = sorted((self._slow & before) - self._named)
        if not found:
            return ""
        self._named |= set(found)
        longest = max(seconds_W[rank] for rank in found)
        return (
            f"slow: {comm.ranks_named(found, comm.addresses())}, whose own part of a step takes "
            f"{longest:.3g} s, {longest / usual:.1f} times that of the others ({usual:.3g} s), "
            f"which wait for it; look for another program on its processors, heat, or slow storage"
        )
