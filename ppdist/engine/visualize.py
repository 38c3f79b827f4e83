"""Pictures of what the model sees, in `plots`."""

import logging
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from ppdist.config.data import DataConfig
from ppdist.data.types import Batch
from ppdist.engine.schedule_setup import ScheduleSetup
from ppdist.viz.dataset import drawn_samples
from ppdist.viz.draw import grid, within, write_jpeg

_LOGGER = logging.getLogger("ppdist.engine")
_BATCHES = 3  # of each kind of augmentation
_MOST_IMAGES = 9  # of a training batch
_PAIRS = 4  # of truth and prediction in one file


class BatchPictures:
    """Draws the first training batches of a run, and again where augmentation changes.

    For rank 0 alone.  Trouble with a picture costs one warning and all further ones.
    """

    def __init__(
        self, folder: Path, class_names: tuple[str, ...], config: DataConfig, derived: ScheduleSetup
    ) -> None:
        """
        Args:
            folder: gets train_batch_0.jpg, ...; train_batch_epoch_E_0.jpg, ... of batches from
                epoch E on, if others begin there.
            config: of the samples that are drawn.
        """
        self._folder = folder
        self._class_names = class_names
        self._task = config.task
        self._steps_per_epoch = derived.steps_per_epoch
        epochs = math.ceil(derived.schedule_steps / derived.steps_per_epoch)
        kinds = [config.augment.in_epoch(epoch, epochs) for epoch in range(epochs)]
        self._begins = [at for at in range(epochs) if at == 0 or kinds[at] != kinds[at - 1]]
        self._drawn = dict.fromkeys(self._begins, 0)
        self._begun_at: int | None = None  # step of this process

    def watching(self, batches: Iterator[Batch], first_step: int, per_step: int) -> Iterator[Batch]:
        """The same batches; some are drawn on their way.

        Args:
            first_step: to which the first of them belongs.
            per_step: micro-batches of an optimizer step.
        """
        if self._begun_at is None:
            self._begun_at = first_step
        for number, batch in enumerate(batches):
            self._look(batch, first_step + number // per_step)
            yield batch

    def _look(self, batch: Batch, step: int) -> None:
        epoch = step // self._steps_per_epoch
        begin = max((at for at in self._begins if at <= epoch), default=0)
        number = self._drawn.get(begin, _BATCHES)
        if number >= _BATCHES or not batch.real:
            return
        self._drawn[begin] += 1
        kind = f"_epoch_{begin}" if begin else ""
        path = self._folder / f"train_batch{kind}_{number}.jpg"
        amid = begin * self._steps_per_epoch < (self._begun_at or 0)
        if amid and path.exists():  # drawn where these batches began, before this run was resumed
            return
        try:
            pictures = drawn_samples(batch, self._class_names, self._task)
            write_jpeg(path, within(grid(list(islice(pictures, _MOST_IMAGES)))))
        except Exception as error:  # no picture is worth a run
            self._drawn = dict.fromkeys(self._begins, _BATCHES)
            _LOGGER.warning(f"{path} cannot be drawn, training goes on without: {error}")


def write_validation(folder: Path, pictures: Sequence[np.ndarray]) -> None:
    """Writes val_batch_0.jpg, ... of pictures that show truth and prediction.  May raise."""
    for number, first in enumerate(range(0, len(pictures), _PAIRS)):
        picture = grid(pictures[first : first + _PAIRS], across=2)
        write_jpeg(folder / f"val_batch_{number}.jpg", within(picture))
