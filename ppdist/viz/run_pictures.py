"""Draws pictures of a run in training: augmented batches, validation images with predictions."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ppdist.common.run_log import RunLog
from ppdist.config.data import DataConfig
from ppdist.data.loading.sampler import TrainSampler
from ppdist.data.types import Batch
from ppdist.metrics.classification import Ranking
from ppdist.viz.dataset import drawn_samples
from ppdist.viz.draw import draw_boxes, draw_classes, grid, side_by_side, within, write_jpeg

_LOGGER = logging.getLogger("ppdist.engine")
_BATCHES = 3  # of each kind of augmentation
_MAX_IMAGES = 9  # of a training batch
_PAIRS = 4  # of truth and prediction in one file
_DRAWN_SCORE = 0.3  # predictions with a lower score are not drawn

Put = Callable[[str, Callable[[], object], int], object]


class BatchPictures:
    """The pictures of the first training batches, and of those after each change of augmentation.

    Only rank 0 draws them.  After the first failure there is one warning and no more pictures.
    """

    def __init__(
        self,
        folder: Path,
        class_names: tuple[str, ...],
        config: DataConfig,
        steps_per_epoch: int,
        epochs: int,
        put: Put = lambda name, write, size: write(),
    ) -> None:
        """Plans the pictures of a run.
        Args:
            folder: gets train_batch_0.jpg, ...; train_batch_epoch_E_0.jpg, ... for batches from
                epoch E on, if augmentation changes there.
            config: the configuration of the samples that are drawn.
            epochs: number of epochs of the whole run.
            put: writes a file, see `RunLog.put`.
        """
        self._folder, self._put = folder, put
        self._class_names = class_names
        self._task = config.task
        self._steps_per_epoch = steps_per_epoch
        kinds = [config.augment.in_epoch(epoch, epochs) for epoch in range(epochs)]
        self._starts = [at for at in range(epochs) if at == 0 or kinds[at] != kinds[at - 1]]
        self._drawn = dict.fromkeys(self._starts, 0)
        self._started_at: int | None = None  # step at which this process started

    def watching(self, batches: Iterator[Batch], plan: TrainSampler) -> Iterator[Batch]:
        """Yields the batches of a plan unchanged, and draws some of them."""
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


class EvaluationPictures:
    """The pictures of the first images of an evaluation: truth on the left, predictions on the
    right.

    Attributes:
        drawn: pictures of the last evaluation, uint8 RGB [H, 2W + 4, 3].
    """

    def __init__(self, class_names: tuple[str, ...], max_images: int) -> None:
        """Starts without pictures.

        Args: max_images: number of images of this rank to draw.
        """
        self.drawn: list[np.ndarray] = []
        self._class_names, self._max_images = class_names, max_images

    def begin(self) -> None:
        """Drops the pictures of the previous evaluation."""
        self.drawn = []

    def add(self, batch: Batch, results: Any) -> None:
        """Draws images of a batch until `max_images` are drawn.

        Args: results: see `ppdist.engine.evaluator.Observer`.
        """
        missing = self._max_images - len(self.drawn)
        if missing <= 0:
            return
        if isinstance(results, Ranking):
            self.drawn += draw_ranking(batch, results, self._class_names, missing)
        else:
            rows_R6, count_B = results
            self.drawn += draw_detections(batch, rows_R6, count_B, self._class_names, missing)

    def show(self, log: RunLog, folder: Path, step: int) -> None:
        """Gives the pictures to the writers of a run, and writes val_batch_0.jpg, ... into a
        folder.
        """
        log.images("validation", step, self.drawn)
        write = partial(write_validation, folder, self.drawn)
        name = f"{folder.name}/val_batch_*.jpg"
        log.put(name, write, sum(picture.nbytes for picture in self.drawn))


def draw_detections(
    batch: Batch,
    rows_R6: np.ndarray,
    count_B: np.ndarray,
    class_names: tuple[str, ...],
    limit: int,
) -> list[np.ndarray]:
    """Draws images of a batch: ground truth on the left, predictions on the right.

    Args:
        rows_R6, count_B: result of `ppdist.engine.evaluator.detect` for it; predictions whose score
            is below 0.3 are not drawn.
        limit: maximum number of images; padding is left out.
    Returns: pictures, uint8 RGB [H, 2W + 4, 3], at input size.
    """
    pictures = list[np.ndarray]()
    rows_by_image = np.split(rows_R6, np.cumsum(count_B)[:-1])
    for position, index in enumerate(batch.image_index_B.numpy()):
        if index < 0 or len(pictures) >= limit:
            continue
        image_HW3 = batch.images_B3HW[position].numpy().transpose(1, 2, 0)
        true_M = batch.mask_BM[position].numpy() > 0
        true_boxes_M4 = batch.boxes_BM4[position].numpy()[true_M]
        true_labels_M = batch.labels_BM[position].numpy()[true_M]
        rows_P6 = rows_by_image[position]
        sure_P6 = rows_P6[rows_P6[:, 1] >= _DRAWN_SCORE]
        truth = draw_boxes(image_HW3, true_boxes_M4, true_labels_M, class_names)
        predictions = draw_boxes(
            image_HW3, sure_P6[:, 2:], sure_P6[:, 0], class_names, sure_P6[:, 1]
        )
        pictures.append(side_by_side(truth, predictions))
    return pictures


def draw_ranking(
    batch: Batch, ranking: Ranking, class_names: tuple[str, ...], limit: int
) -> list[np.ndarray]:
    """Draws images of a batch: true class on the left, most probable classes on the right.

    Args:
        ranking: the ranking of the images that are not padding.
        limit: maximum number of images.
    Returns: pictures, uint8 RGB [H, 2W + 4, 3], at input size.
    """
    real_B = batch.image_index_B.numpy() >= 0
    images_BHW3 = batch.images_B3HW.numpy()[real_B][:limit].transpose(0, 2, 3, 1)
    label_B = batch.labels_BM[:, 0].numpy()[real_B]
    return [
        side_by_side(
            draw_classes(image_HW3, label_B[row : row + 1], class_names),
            draw_classes(image_HW3, ranking.labels_NK[row], class_names, ranking.scores_NK[row]),
        )
        for row, image_HW3 in enumerate(images_BHW3)
    ]


def write_validation(folder: Path, pictures: Sequence[np.ndarray]) -> None:
    """Writes val_batch_0.jpg, ...: pictures of truth and prediction.  May raise."""
    for number, first in enumerate(range(0, len(pictures), _PAIRS)):
        picture = grid(pictures[first : first + _PAIRS], across=2)
        write_jpeg(folder / f"val_batch_{number}.jpg", within(picture))
