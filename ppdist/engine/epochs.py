"""One line about each epoch: means over its steps, what an evaluation at its end found, speed."""

import resource
import time
from collections.abc import Mapping, Sequence

import paddle

from ppdist import dist
from ppdist.engine.records import Stopwatch
from ppdist.engine.step import StepResult
from ppdist.log import RunLog
from ppdist.time_left import duration

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
            self._log.info(self._line(step) + self._log.time_left(step))
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
    if dist.on_gpu():
        return f"GPU memory {paddle.device.cuda.max_memory_allocated() / _GIB:.1f} GiB"
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"memory {kibibytes * 1024 / _GIB:.1f} GiB"
