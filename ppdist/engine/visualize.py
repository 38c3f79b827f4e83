"""Pictures in `plots`: augmented training batches, validation images with predictions."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from ppdist.config.data import DataConfig
from ppdist.data.loading.sampler import TrainSampler
from ppdist.data.types import Batch
from ppdist.engine.schedule_setup import ScheduleSetup
from ppdist.viz.dataset import drawn_samples
from ppdist.viz.draw import grid, within, write_jpeg

_LOGGER = logging.getLogger("ppdist.engine")
_BATCHES = 3  # of each kind of augmentation
_MAX_IMAGES = 9  # of a training batch
_PAIRS = 4  # of truth and prediction in one file


Put = Callable[[str, Callable[[], object], int], object]


class BatchPictures:
    """Draws the first training batches, and again when augmentation changes.

    Only rank 0 has one.  The first picture that fails is the last: one warning, no more pictures.
    """

    def __init__(
        self,
        folder: Path,
        class_names: tuple[str, ...],
        config: DataConfig,
        schedule: ScheduleSetup,
        put: Put = lambda name, write, size: write(),
    ) -> None:
        """
        Args:
            folder: gets train_batch_0.jpg, ...; train_batch_epoch_E_0.jpg, ... of batches from
                epoch E on, where augmentation changes there.
            config: of the samples that are drawn.
            put: writes a file, see `RunLog.put`.
        """
        self._folder, self._put = folder, put
        self._class_names = class_names
        self._task = config.task
        self._steps_per_epoch = schedule.steps_per_epoch
        epochs = math.ceil(schedule.schedule_steps / schedule.steps_per_epoch)
        kinds = [config.augment.in_epoch(epoch, epochs) for epoch in range(epochs)]
        self._starts = [at for at in range(epochs) if at == 0 or kinds[at] != kinds[at - 1]]
        self._drawn = dict.fromkeys(self._starts, 0)
        self._started_at: int | None = None  # step at which this process started

    def watching(self, batches: Iterator[Batch], plan: TrainSampler) -> Iterator[Batch]:
        """Passes the batches of a plan on, and draws some of them."""
        if self._started_at is None:
            self._started_at = plan.start_step
        for step in range(plan.start_step, plan.end_step):
            for batch in islice(batches, plan.count(step)):
                self._draw(batch, step)
                yield batch

    def _draw(self, batch: Batch, step: int) -> None:
        epoch = step // self._steps_per_epoch
        start = max((at for at in self._starts if at <= epoch), default=0)
        number = self._drawn.get(start, _BATCHES)
        if number >= _BATCHES or not batch.real:
            return
        self._drawn[start] += 1
        kind = f"_epoch_{start}" if start else ""
        path = self._folder / f"train_batch{kind}_{number}.jpg"
        resumed_later = start * self._steps_per_epoch < (self._started_at or 0)
        if resumed_later and path.exists():  # drawn before this run was resumed
            return
        try:
            pictures = drawn_samples(batch, self._class_names, self._task)
            picture = within(grid(list(islice(pictures, _MAX_IMAGES))))
            name = f"{self._folder.name}/train_batch*.jpg"
            self._put(name, partial(write_jpeg, path, picture), picture.nbytes)
        except Exception as error:  # no picture is worth a run
            self._drawn = dict.fromkeys(self._starts, _BATCHES)
            _LOGGER.warning(f"failed to draw {path}, continuing without pictures: {error}")


def write_validation(folder: Path, pictures: Sequence[np.ndarray]) -> None:
    """Writes val_batch_0.jpg, ... of pictures of truth and prediction.  May raise."""
    for number, first in enumerate(range(0, len(pictures), _PAIRS)):
        picture = grid(pictures[first : first + _PAIRS], across=2)
        write_jpeg(folder / f"val_batch_{number}.jpg", within(picture))
