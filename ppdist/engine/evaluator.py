"""Detection quality of a model over a whole set, sharded over the ranks."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist import dist, pulse
from ppdist.config.evaluate import DETECTION_METRICS, NMSConfig
from ppdist.data.sample import Batch, DetectionSet
from ppdist.drawing import draw_boxes, side_by_side
from ppdist.engine.agreement import agreed
from ppdist.engine.step import Clock
from ppdist.engine.validation_loss import ValidationLoss, normalised
from ppdist.log import duration
from ppdist.metrics.analysis import analyse
from ppdist.metrics.coco import evaluate_boxes, metric_names, write_detections
from ppdist.models.detector import Detector
from ppdist.postprocess import multiclass_nms

_LOGGER = logging.getLogger("ppdist")
_REPORT_SECONDS = 30.0
_DRAWN_SCORE = 0.3
SEEN = -1  # in place of a class: the row says only that the image was looked at
CUT_SHORT = -1  # in place of an image's position: the rank was asked to stop


class EvaluationStopped(Exception):
    """A rank was asked to stop; raised on all of them, and there are no metrics."""


def go_on() -> bool:
    """Nobody asks to stop."""
    return False


class Evaluator:
    """Runs a detector over a set; every image is seen once, by one rank.

    The result does not depend on the number of ranks.  The loop holds no collective, so ranks may
    have different numbers of batches; they meet once, at its end, and wait there as long as
    `distributed.timeout_seconds` allows.

    Attributes:
        headline: names of metrics for the log; the first says by default what is best.
        metrics: names of what `measure` gives.
        images: in the whole set.
        pictures: after an evaluation, the first images of this rank's share with true and
            predicted boxes, for `RunLog.images`.
        clock: after an evaluation, this rank's seconds by part: `images` (waiting for them),
            `forward`, `boxes` (decoding, NMS), `loss`, `rows` (boxes to pixels of the original,
            pictures), `ranks` (waiting for the others), `metrics`.
    """

    headline = DETECTION_METRICS

    def __init__(
        self,
        dataset: DetectionSet,
        loader: Iterable[Batch],
        nms: NMSConfig,
        *,
        max_pictures: int = 0,
        loss: ValidationLoss | None = None,
    ) -> None:
        """
        Args:
            dataset: the whole set, the same on every rank.
            loader: gives this rank's share of it anew at each iteration; `image_index_B` is the
                position in `dataset.records`, or -1 for padding.
            nms: bounds the time of an untrained model too: `candidates` and `keep` boxes at most.
            max_pictures: how many images to draw.
            loss: `evaluate` gives that, too.
        """
        self.metrics = (*metric_names(dataset.class_names), "fitness")
        self.images = len(dataset.records)
        self.pictures: list[np.ndarray] = []
        self.clock = Clock()
        self._last_R7 = np.zeros((0, 7), np.float32)
        self._dataset = dataset
        self._sizes_wh_N2 = np.array([(r.width, r.height) for r in dataset.records], np.float32)
        self._loader = loader
        self._nms = nms
        self._max_pictures = max_pictures
        self._loss = loss

    def evaluate(
        self, model: Detector, stopped: Callable[[], bool] = go_on, step: int = 0
    ) -> dict[str, float]:
        """COCO metrics of the model; every rank calls it and every rank gets the same result.

        Rank 0 computes them while the others wait.  The mode (train or eval) of every layer is
        as before when it returns.

        Args:
            model: the detector itself, not its data-parallel wrapper.
            stopped: whether this rank was asked to stop; looked at after each batch.
            step: optimizer steps done, on which the loss depends.
        Returns: what `measure` does; with a loss `val_loss` and `val_loss_<part>`; and
            `eval_seconds` (rank 0's wall time).
        Raises: EvaluationStopped, on all ranks: one was asked to stop.
        """
        began, self.clock = time.monotonic(), Clock()
        if self._loss is not None:
            self._loss.begin(step)
        found_R7, losses = self._found(model, stopped, self._loss)

        def measure() -> dict[str, float]:
            if not dist.is_main():
                return {}
            self._last_R7 = found_R7
            metrics = self.measure(found_R7)
            self.clock.lap("metrics")
            return {**metrics, **losses, "eval_seconds": time.monotonic() - began}

        metrics = agreed(measure, say=lambda metrics: metrics).said_W[0]
        self.clock.lap("ranks")
        return metrics

    def measure(self, found_R7: np.ndarray) -> dict[str, float]:
        """Metrics of what `predict` found, on this rank alone.

        Returns: see `ppdist.metrics.coco.evaluate_boxes`; and `fitness` = 0.1 mAP50 + 0.9 mAP.
        """
        metrics = evaluate_boxes(self._dataset, found_R7)
        return {**metrics, "fitness": 0.1 * metrics["mAP50"] + 0.9 * metrics["mAP"]}

    def analyse(self, found_R7: np.ndarray, step: int | None = None) -> dict[str, Any]:
        """See `ppdist.metrics.analysis.analyse`; on this rank alone."""
        return analyse(self._dataset, found_R7, step)

    def analyse_last(self, step: int) -> dict[str, Any]:
        """`analyse` of what `evaluate` measured last; on rank 0 alone."""
        return self.analyse(self._last_R7, step)

    def class_scores(self, metrics: dict[str, float]) -> list[float | None]:
        """AP of each class of what `measure` gave; None where the set has no object of it."""
        scores = [metrics[f"AP/{name}"] for name in self._dataset.class_names]
        return [score if score >= 0 else None for score in scores]

    def save(self, path: Path, found_R7: np.ndarray) -> None:
        """Writes what `predict` found; see `ppdist.metrics.coco.write_detections`."""
        write_detections(path, self._dataset, found_R7)

    def predict(self, model: Detector, stopped: Callable[[], bool] = go_on) -> np.ndarray:
        """Detections of the whole set; every rank calls it and every rank gets all rows.

        Args: stopped: see `evaluate`.
        Returns: float32 [R, 7], (position in dataset.records, class, score, x1, y1, x2, y2) in
            pixels of the original image, ordered by position.
        Raises: RuntimeError: an image was seen twice or not at all.  EvaluationStopped.
            EvaluationFailed.
        """
        return self._found(model, stopped, None)[0]

    def _found(
        self, model: Detector, stopped: Callable[[], bool], loss: ValidationLoss | None
    ) -> tuple[np.ndarray, dict[str, float]]:
        """What `predict` does, and the losses; ranks meet twice, each meeting takes some time."""
        share = agreed(
            lambda: self._detect_share(model, stopped, loss),
            say=lambda _: None if loss is None else loss.sums,
        )
        rows_R7 = dist.all_gather_rows(share.value)
        self.clock.lap("ranks")
        seen_R = rows_R7[:, 1] == SEEN
        check_each_once(self._dataset, rows_R7[seen_R, 0].astype(np.int64))
        rows_R7 = rows_R7[~seen_R]
        losses = {} if loss is None else normalised(share.said_W)
        return rows_R7[np.argsort(rows_R7[:, 0], kind="stable")], losses

    def _detect_share(
        self, model: Detector, stopped: Callable[[], bool], loss: ValidationLoss | None
    ) -> np.ndarray:
        """Rows [R, 7] of this rank's images, one of them of class SEEN for each image, and one at
        position CUT_SHORT if it was asked to stop."""
        rows = [np.zeros((0, 7), np.float32)]
        self.pictures = []
        progress = ShareProgress(len(self._dataset.records))
        with in_eval_mode(model):
            for batch in self._loader:
                self.clock.lap("images")
                outputs, rows_R6, count_B = detect(model, batch.images_B3HW, self._nms, self.clock)
                if loss is not None:
                    loss.add(outputs, batch)
                    self.clock.lap("loss")
                rows.append(self._in_original_pixels(batch, rows_R6, count_B))
                indices_B = batch.image_index_B.numpy()
                rows.append(_seen(indices_B[indices_B >= 0]))
                wanted = self._max_pictures - len(self.pictures)
                names = self._dataset.class_names
                self.pictures += draw_batch(batch, rows_R6, count_B, names, wanted)
                self.clock.lap("rows")
                progress.add(len(rows[-1]))
                if stopped():
                    rows.append(_seen(np.array([CUT_SHORT])))
                    break
        return np.concatenate(rows)

    def _in_original_pixels(
        self, batch: Batch, rows_R6: np.ndarray, count_B: np.ndarray
    ) -> np.ndarray:
        """Rows [R, 7] with the image's position in front; those of padding images are dropped."""
        position_R = np.repeat(np.arange(len(count_B)), count_B)
        index_R = batch.image_index_B.numpy()[position_R]
        scale_yx_R2 = batch.scale_B2.numpy()[position_R]
        offset_yx_R2 = batch.offset_B2.numpy()[position_R]
        axes = [1, 0, 1, 0]
        boxes_R4 = (rows_R6[:, 2:] - offset_yx_R2[:, axes]) / scale_yx_R2[:, axes]
        boxes_R4 = np.clip(boxes_R4, 0, np.tile(self._sizes_wh_N2[index_R], 2))
        rows_R7 = np.concatenate([index_R[:, None], rows_R6[:, :2], boxes_R4], axis=1)
        return rows_R7[index_R >= 0].astype(np.float32)  # positions below 2**24 stay exact


def _seen(indices_S: np.ndarray) -> np.ndarray:
    rows_S7 = np.zeros((len(indices_S), 7), np.float32)
    rows_S7[:, 0], rows_S7[:, 1] = indices_S, SEEN
    return rows_S7


class ShareProgress:
    """Says now and then how much of its share of the images a rank has evaluated."""

    def __init__(self, images: int) -> None:
        """Args: images: of the whole set, over all ranks."""
        self._share = images / dist.world_size()
        self._done = 0
        self._began = self._reported = time.monotonic()

    def add(self, images: int) -> None:
        pulse.alive()
        self._done += images
        now = time.monotonic()
        if now - self._reported > _REPORT_SECONDS:
            self._reported = now
            left = (now - self._began) / max(1, self._done) * max(0.0, self._share - self._done)
            _LOGGER.info(f"evaluated {self._done}/{self._share:.0f} images, ETA {duration(left)}")


def check_each_once(dataset: DetectionSet, seen_N: np.ndarray) -> None:
    """Raises: RuntimeError: the positions seen by all ranks are not each image exactly once;
    EvaluationStopped: CUT_SHORT is among them."""
    if CUT_SHORT in seen_N:
        raise EvaluationStopped
    counts_N = np.bincount(seen_N, minlength=len(dataset.records))
    wrong = np.flatnonzero(counts_N != 1)
    if wrong.size:
        first = dataset.records[wrong[0]].path
        raise RuntimeError(
            f"evaluation must see each of the {len(counts_N)} images once; {wrong.size} were "
            f"not, first {first} ({counts_N[wrong[0]]} times)"
        )


def detect(
    model: Detector, images_B3HW: paddle.Tensor, nms: NMSConfig, clock: Clock
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Detections of one batch; the caller has set the model's mode.

    Args:
        images_B3HW: uint8 RGB.
        clock: gets `forward` and `boxes`.
    Returns: raw outputs of the model; float32 [R, 6] rows (class, score, x1, y1, x2, y2) in input
        pixels, image after image; and int64 [B], how many rows each image has.
    """
    with paddle.no_grad():
        outputs = model(model.normalize(images_B3HW))
        clock.lap("forward")
        scores_BNC, boxes_BN4 = model.decode(outputs)
        rows_R6, count_B = multiclass_nms(scores_BNC, boxes_BN4, nms)
        found = outputs, rows_R6.numpy(), count_B.numpy().astype(np.int64)
        clock.lap("boxes")
    return found


@contextmanager
def in_eval_mode(model: paddle.nn.Layer) -> Iterator[None]:
    """Inside, every layer is in eval mode; afterwards each is again in the mode it was in."""
    modes = [(layer, layer.training) for layer in model.sublayers(include_self=True)]
    model.eval()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training


def draw_batch(
    batch: Batch,
    rows_R6: np.ndarray,
    count_B: np.ndarray,
    class_names: tuple[str, ...],
    limit: int,
) -> list[np.ndarray]:
    """Pictures of a batch: the true boxes on the left, the predicted ones on the right.

    Args:
        rows_R6, count_B: what `detect` returned for the batch; predictions whose score is below
            0.3 are not drawn.
        limit: how many images at most; padding is left out.
    Returns: uint8 RGB [H, 2W + 4, 3] each, at input size.
    """
    pictures: list[np.ndarray] = []
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
        found = draw_boxes(image_HW3, sure_P6[:, 2:], sure_P6[:, 0], class_names, sure_P6[:, 1])
        pictures.append(side_by_side(truth, found))
    return pictures
