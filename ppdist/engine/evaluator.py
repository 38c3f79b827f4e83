"""Evaluation of detectors and classifiers over a set, sharded over the ranks.

Each image is evaluated once, by one rank, so the result does not depend on the number of ranks.
Unreadable images do not count, with all their objects and detections.  The loop contains no
collective, so ranks may have different numbers of batches; at its end they wait for each other, for
up to `distributed.timeout_seconds`.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import paddle

from ppdist.common.errors import DataError
from ppdist.config.evaluate import (
    CLASSIFICATION_METRICS,
    COCO_DETECTIONS,
    DETECTION_METRICS,
    NMSConfig,
)
from ppdist.data.types import Batch, DetectionSet, SampleKey
from ppdist.distributed import comm
from ppdist.distributed.comm import evaluate_on_all_ranks
from ppdist.distributed.progress import Progress
from ppdist.engine.parts import EvaluationStopped
from ppdist.losses.base import Loss
from ppdist.losses.nms import multiclass_nms
from ppdist.metrics.classification import BEST, Ranking, compute_accuracy, rank, write_ranking
from ppdist.metrics.coco import evaluate_boxes, fitness, metric_names, write_detections
from ppdist.metrics.scored import count_duplicates, left_out_line, scored_images
from ppdist.models.base import Detector, ImageModel

_LOGGER = logging.getLogger("ppdist")
_SEEN = -1  # instead of a class: the row only marks the image as seen
_STOPPED = -1  # instead of an image's position: the rank received a stop request


def _never() -> bool:
    return False


class Batches(Protocol):
    """Batches to evaluate: an EvalLoader, or anything with its interface."""

    def __iter__(self) -> Iterator[Batch]: ...

    def abort_waits(self) -> None: ...


class PlannedBatches(Protocol):
    """The images that a rank evaluates, and their training targets; an EvalLoader, for example."""

    @property
    def plan(self) -> Iterable[Sequence[SampleKey]]: ...

    def learnable(
        self, keys: Sequence[SampleKey]
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]: ...


class Observer(Protocol):
    """An observer of the images that this rank evaluates; for example, it draws them."""

    def begin(self) -> None:
        """Called before the first batch of each evaluation."""

    def add(self, batch: Batch, results: Any) -> None:
        """Called with each batch that contains at least one image.

        Args: results: for a detector, rows and counts as returned by `detect`; for a classifier,
            the `Ranking` of the images without padding.
        """


class ValidationLoss:
    """The training loss over a whole validation set and all ranks.

    Images are prepared as for evaluation, without augmentation; targets as for training, without
    crowds.  The auxiliary head, which exists only in training, does not count.

    Attributes:
        sums: sums over this rank's batches since `begin`, not normalised; see `normalise_losses`.
    """

    def __init__(self, loss: Loss, loader: PlannedBatches, unreadable: Collection[int]) -> None:
        """
        Args:
            loss: the training loss.
            loader: loads this rank's share of the set.
            unreadable: positions of images that were unreadable when the set was checked.
        """
        self._loss = loss
        self._loader = loader
        self._unreadable = frozenset(unreadable)
        self._global_normalizers: paddle.Tensor | None = None
        self._counted = False
        self._step = 0
        self.sums: dict[str, float] = {}

    def begin(self, step: int) -> None:
        """Called before the first batch.  Collective.

        Args: step: optimizer steps done; the loss is computed as in the last of them.
        """
        self._step, self.sums = max(0, step - 1), {}
        if not self._counted:  # only once: set, input sizes and anchors do not change
            # Ranks without images have no counts and are left out of the sum.
            counts_W = evaluate_on_all_ranks(self._count_targets, say=lambda counts: counts).said_W
            totals = [sum(counts) for counts in zip(*filter(None, counts_W))]
            if totals:
                self._global_normalizers = paddle.to_tensor(totals, dtype="float32")
            self._counted = True

    def _count_targets(self) -> list[float]:
        """Sums the loss's local normalizers over this rank's targets; []: there are none."""
        summed: paddle.Tensor | None = None
        for planned_keys in self._loader.plan:
            keys = [key for key in planned_keys if key.index not in self._unreadable]
            if not keys:
                continue
            size = keys[0].height, keys[0].width
            count = self._loss.local_normalizers(*self._loader.learnable(keys), size)
            if count is None:
                return []
            summed = count if summed is None else summed + count
        return [] if summed is None else [float(value) for value in summed.numpy()]

    @paddle.no_grad()
    def add(self, outputs: Any, batch: Batch) -> None:
        """Adds a loader batch and the model's outputs in eval mode."""
        height, width = batch.images_B3HW.shape[2:]
        indices = batch.image_index_B.numpy().tolist()
        assert min(indices) >= 0, "EvalSamples pads no batch that has an image"
        keys = [SampleKey(0, index, height, width) for index in indices]
        truth = self._loader.learnable(keys)
        output = self._loss(outputs, *truth, self._step, self._global_normalizers)
        terms = {"normalizer": output.normalizer, "loss": output.total, **output.parts}
        for name, value in terms.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)


def normalise_losses(sums_W: list[dict[str, float]]) -> dict[str, float]:
    """Divides the sums of all ranks by the normalizer.

    Args: sums_W: the sums of each rank, by name; empty for a rank without images.
    Returns: `val_loss` and `val_loss_<part>`.
    """
    totals: dict[str, float] = {}
    for sums in sums_W:
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
    divisor = max(1.0, totals.pop("normalizer"))
    # A part that is not a loss (a classifier's train_top1) is already a metric.
    losses = {name: value / divisor for name, value in totals.items() if name.startswith("loss")}
    return {f"val_{name}": value for name, value in losses.items()}


Results = TypeVar("Results")


class _Share(NamedTuple):
    """Results of one rank's images: rows, and (position, reason) of unreadable images."""

    rows_RX: np.ndarray
    unreadable: list[tuple[int, str]]


class DatasetEvaluator(ABC, Generic[Results]):
    """Base of evaluators, which run a model over a set; subclasses define results and metrics.

    Attributes:
        headline: names of the metrics to log; by default the first selects the best checkpoint.
        metrics: names of the numbers that `measure` returns.
        images: number of images in the whole set.
        scored: the set without the images that the last evaluation could not read.
        results: results of the last `evaluate` from all ranks; on rank 0 only.
    """

    headline: tuple[str, ...]
    metrics: tuple[str, ...]
    results: Results

    def __init__(
        self,
        dataset: DetectionSet,
        loader: Batches,
        *,
        observer: Observer | None = None,
        loss: ValidationLoss | None = None,
    ) -> None:
        """
        Args:
            dataset: the whole set, the same on every rank.
            loader: iterates over this rank's share; `image_index_B` is the position in
                `dataset.records`, or -1 for padding.
            observer: called with each batch; None: no observer.
            loss: a loss that `evaluate` measures as well; None: no loss.
        """
        self.images = len(dataset.records)
        self._dataset = self.scored = dataset
        self._loader = loader
        self._reported = set(dataset.unreadable)  # already reported by the check
        self._observer = observer
        self._loss = loss

    def evaluate(
        self, model: ImageModel, stopped: Callable[[], bool] = _never, step: int = 0
    ) -> dict[str, float]:
        """Measures the metrics of a model, the same on every rank.  Collective.

        Rank 0 computes them while the others wait.  Restores the mode (train or eval) of every
        layer.

        Args:
            model: the model itself, not its data-parallel wrapper.
            stopped: returns True if this rank has received a stop request; called after each batch.
            step: optimizer steps done, on which the loss depends.
        Returns: the result of `measure`; with a loss `val_loss` and `val_loss_<part>`; and
            `eval_seconds` (rank 0's wall time).
        Raises: EvaluationStopped, on all ranks: a rank received a stop request.  EvaluationFailed.
        """
        began = time.monotonic()
        if self._loss is not None:
            self._loss.begin(step)
        results, losses = self._predict_on_all_ranks(model, stopped, self._loss)

        def measure() -> dict[str, float]:
            if not comm.is_main():
                return {}
            self.results = results
            return {**self.measure(results), **losses, "eval_seconds": time.monotonic() - began}

        return evaluate_on_all_ranks(measure, say=lambda metrics: metrics).said_W[0]

    def abort_waits(self) -> None:
        """Stops waiting for unavailable images because the run ends soon.  Local."""
        self._loader.abort_waits()

    def predict(self, model: ImageModel, stopped: Callable[[], bool] = _never) -> Results:
        """Predicts the whole set; every rank gets the results of all ranks.  Collective.

        Args: stopped: see `evaluate`.
        Raises: RuntimeError: an image was evaluated twice or not at all.  EvaluationStopped.
            EvaluationFailed.
        """
        return self._predict_on_all_ranks(model, stopped, None)[0]

    def measure(self, results: Results) -> dict[str, float]:
        """Computes the metrics of `predict`'s results.  Local.

        They include `left_out_images` if images are unreadable, and `duplicate_boxes` if some
        annotated boxes repeat others; such images and boxes are not scored.
        """
        metrics = self._measure(results)
        counts = {
            "left_out_images": len(scored_images(self.scored)["left_out"]),
            "duplicate_boxes": count_duplicates(self.scored),
        }
        return metrics | {name: count for name, count in counts.items() if count}

    @abstractmethod
    def _measure(self, results: Results) -> dict[str, float]:
        """Computes the metrics alone, without the counts that `measure` adds."""

    @abstractmethod
    def class_scores(self, metrics: dict[str, float]) -> list[float | None] | None:
        """Returns the score of each class; None: there are no scores per class.

        The score of a class without objects in the set is None.
        """

    @abstractmethod
    def save(self, path: Path, results: Results) -> None:
        """Writes the results of `predict`."""

    def _predict_on_all_ranks(
        self, model: ImageModel, stopped: Callable[[], bool], loss: ValidationLoss | None
    ) -> tuple[Results, dict[str, float]]:
        """Returns the result of `predict`, and the losses.  Collective."""
        share = evaluate_on_all_ranks(
            lambda: self._evaluate_share(model, stopped, loss),
            say=lambda share: (share.unreadable, {} if loss is None else loss.sums),
        )
        rows_RX = comm.all_gather_rows(share.value.rows_RX)
        # Sorted by position, so that the result does not depend on the number of ranks; a stable
        # sort, so that the rows of an image keep their order.
        rows_RX = rows_RX[np.argsort(rows_RX[:, 0], kind="stable")]
        if _STOPPED in rows_RX[:1, 0]:  # it is negative, so it comes first
            raise EvaluationStopped
        self._leave_out([image for unreadable, _ in share.said_W for image in unreadable])
        sums_W = [sums for _, sums in share.said_W]
        return self._parse_rows(rows_RX), {} if loss is None else normalise_losses(sums_W)

    def _leave_out(self, unreadable: list[tuple[int, str]]) -> None:
        """Excludes these images from scoring from now on.

        Raises: DataError: no image is left.
        """
        self.scored = replace(
            self._dataset, unreadable={position: reason for position, reason in unreadable}
        )
        warning = left_out_line(scored_images(self.scored))
        if unreadable and len(unreadable) == len(self._dataset.records):
            raise DataError(
                warning,
                code="no_good_image",
                where=self._dataset.source,
                fix="check these images, or choose another split",
            )
        if warning and self.scored.unreadable.keys() != self._reported and comm.is_main():
            _LOGGER.warning(warning)
        self._reported = set(self.scored.unreadable)

    def _evaluate_share(
        self, model: ImageModel, stopped: Callable[[], bool], loss: ValidationLoss | None
    ) -> "_Share":
        """Runs the model over this rank's images.

        After a stop request, the last row has position _STOPPED, so that all ranks learn of the
        request in the next exchange.
        """
        nothing = self._make_empty_rows()
        rows, unreadable = [nothing], dict[int, str]()
        if self._observer is not None:
            self._observer.begin()
        share = len(self._dataset.records) / comm.world_size()
        progress = Progress(_LOGGER, "evaluation", share)
        with in_eval_mode(model):
            for batch in self._loader:
                unreadable |= batch.bad_images
                images = int((batch.image_index_B.numpy() >= 0).sum())
                if images:
                    outputs, rows_RX, results = self._predict_rows(model, batch)
                    rows.append(rows_RX)
                    if self._observer is not None:
                        self._observer.add(batch, results)
                    if loss is not None:
                        loss.add(outputs, batch)
                progress.add(images + len(batch.bad_images))
                if stopped():
                    rows.append(np.full((1, nothing.shape[1]), _STOPPED, nothing.dtype))
                    break
        return _Share(np.concatenate(rows), list(unreadable.items()))

    @abstractmethod
    def _make_empty_rows(self) -> np.ndarray:
        """Returns empty rows [0, X] with the dtype of the rows from `_predict_rows`."""

    @abstractmethod
    def _predict_rows(self, model: ImageModel, batch: Batch) -> tuple[Any, np.ndarray, Any]:
        """Predicts one batch.

        Returns: raw outputs in eval mode; rows [R, X], excluding padding images, with the position
            in dataset.records as first column; results for an observer.
        """

    @abstractmethod
    def _parse_rows(self, rows_RX: np.ndarray) -> Results:
        """Converts the rows of all ranks, ordered by position, to the result of `predict`."""

    def _check_completeness(self, seen_S: np.ndarray) -> None:
        """Checks that every image occurs exactly once.

        Raises: RuntimeError: an image is missing or repeated.
        """
        seen_S = np.append(seen_S, [*self.scored.unreadable]).astype(np.int64)
        counts_N = np.bincount(seen_S, minlength=len(self._dataset.records))
        wrong_N = np.flatnonzero(counts_N != 1)
        if wrong_N.size:
            first = self._dataset.records[wrong_N[0]].path
            raise RuntimeError(
                f"evaluation must see each of the {len(counts_N)} images once; {wrong_N.size} were "
                f"not, first {first} ({counts_N[wrong_N[0]]} times)"
            )


class Evaluator(DatasetEvaluator[np.ndarray]):
    """An evaluator of detectors.

    Results are float32 [R, 7], (position in dataset.records, class, score, x1, y1, x2, y2) in
    pixels of the original image, ordered by position.
    """

    headline = DETECTION_METRICS

    def __init__(
        self,
        dataset: DetectionSet,
        loader: Batches,
        nms: NMSConfig,
        *,
        max_detections: int = COCO_DETECTIONS,
        observer: Observer | None = None,
        loss: ValidationLoss | None = None,
    ) -> None:
        """
        Args:
            nms: NMS settings; `candidates` and `keep` limit the time that an untrained model takes,
                too.
            max_detections: number of detections scored per class and image.
        """
        super().__init__(dataset, loader, observer=observer, loss=loss)
        self.metrics = (*metric_names(dataset.class_names), "fitness")
        self._sizes_wh_N2 = np.array([(r.width, r.height) for r in dataset.records], np.float32)
        self._nms, self._max_detections = nms, max_detections

    def _measure(self, results: np.ndarray) -> dict[str, float]:
        """Computes the metrics of `ppdist.metrics.coco.evaluate_boxes`, and `fitness`."""
        metrics = evaluate_boxes(self.scored, results, self._max_detections)
        return {**metrics, "fitness": fitness(metrics)}

    def class_scores(self, metrics: dict[str, float]) -> list[float | None]:
        """Returns the AP of each class; None for a class without objects in the set."""
        scores = [metrics[f"AP/{name}"] for name in self._dataset.class_names]
        return [score if score >= 0 else None for score in scores]

    def save(self, path: Path, results: np.ndarray) -> None:
        """Writes detections as COCO results; see `ppdist.metrics.coco.write_detections`."""
        write_detections(path, self._dataset, results)

    def _make_empty_rows(self) -> np.ndarray:
        return np.zeros((0, 7), np.float32)

    def _predict_rows(self, model: Detector, batch: Batch) -> tuple[Any, np.ndarray, Any]:
        """Predicts one batch, and adds a row of class _SEEN for each image.

        Without these rows, images without detections would be missing.
        """
        outputs, rows_R6, count_B = detect(model, batch.images_B3HW, self._nms)
        indices_B = batch.image_index_B.numpy()
        seen_S = indices_B[indices_B >= 0]
        seen_S7 = np.zeros((len(seen_S), 7), np.float32)
        seen_S7[:, 0], seen_S7[:, 1] = seen_S, _SEEN
        boxes_R7 = self._to_original_pixels(batch, rows_R6, count_B)
        return outputs, np.concatenate([boxes_R7, seen_S7]), (rows_R6, count_B)

    def _to_original_pixels(
        self, batch: Batch, rows_R6: np.ndarray, count_B: np.ndarray
    ) -> np.ndarray:
        """Scales boxes to pixels of the original images and drops padding images.

        Args: rows_R6, count_B: see `detect`.
        Returns: [R, 7], with the image's position as first column.
        """
        position_R = np.repeat(np.arange(len(count_B)), count_B)
        index_R = batch.image_index_B.numpy()[position_R]
        scale_yx_R2 = batch.scale_B2.numpy()[position_R]
        offset_yx_R2 = batch.offset_B2.numpy()[position_R]
        axes = [1, 0, 1, 0]
        boxes_R4 = (rows_R6[:, 2:] - offset_yx_R2[:, axes]) / scale_yx_R2[:, axes]
        boxes_R4 = np.clip(boxes_R4, 0, np.tile(self._sizes_wh_N2[index_R], 2))
        rows_R7 = np.concatenate([index_R[:, None], rows_R6[:, :2], boxes_R4], axis=1)
        return rows_R7[index_R >= 0].astype(np.float32)  # positions below 2**24 stay exact

    def _parse_rows(self, rows_RX: np.ndarray) -> np.ndarray:
        seen_R = rows_RX[:, 1] == _SEEN
        self._check_completeness(rows_RX[seen_R, 0])
        return rows_RX[~seen_R]


def detect(
    model: Detector, images_B3HW: paddle.Tensor, nms: NMSConfig
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Detects the objects of one batch with a model in eval mode.

    Args: images_B3HW: uint8 RGB.
    Returns: raw outputs of the model; float32 [R, 6] rows (class, score, x1, y1, x2, y2) in input
        pixels, image after image; and int64 [B], the number of rows of each image.
    """
    with paddle.no_grad():
        outputs = model(model.normalize(images_B3HW))
        scores_BNC, boxes_BN4 = model.decode(outputs)
        rows_R6, count_B = multiclass_nms(scores_BNC, boxes_BN4, nms)
        return outputs, rows_R6.numpy(), count_B.numpy().astype(np.int64)


class ClassificationEvaluator(DatasetEvaluator[Ranking]):
    """An evaluator of classifiers, which finds the most probable classes of each image.

    Results are in the set's order.  `labels_BM[:, 0]` of the loader's batches is the true class.
    """

    headline = metrics = CLASSIFICATION_METRICS

    def _measure(self, results: Ranking) -> dict[str, float]:
        """Computes the metrics of `ppdist.metrics.classification.compute_accuracy`."""
        return compute_accuracy(results)

    def class_scores(self, metrics: dict[str, float]) -> None:
        """Returns None, because accuracy is measured over all classes together."""

    def save(self, path: Path, results: Ranking) -> None:
        """Writes the ranking; see `ppdist.metrics.classification.write_ranking`."""
        write_ranking(path, self._dataset, results)

    def _make_empty_rows(self) -> np.ndarray:
        columns = min(BEST, len(self._dataset.class_names))
        return np.zeros((0, 2 + 2 * columns), np.float64)

    def _predict_rows(self, model: ImageModel, batch: Batch) -> tuple[Any, np.ndarray, Ranking]:
        """Classifies one batch; columns: position, rank of the true class, top classes, scores."""
        outputs, probabilities_BC = classify(model, batch.images_B3HW)
        index_B, label_B = batch.image_index_B.numpy(), batch.labels_BM[:, 0].numpy()
        real_B = index_B >= 0
        ranking = rank(probabilities_BC[real_B], label_B[real_B], index_B[real_B])
        columns = [
            ranking.index_N[:, None],
            ranking.place_N[:, None],
            ranking.labels_NK,
            ranking.scores_NK,
        ]
        return outputs, np.concatenate(columns, axis=1).astype(np.float64), ranking

    def _parse_rows(self, rows_RX: np.ndarray) -> Ranking:
        self._check_completeness(rows_RX[:, 0])
        index_N, place_N = rows_RX[:, :2].astype(np.int64).T
        labels_NK, scores_NK = np.split(rows_RX[:, 2:], 2, axis=1)
        return Ranking(index_N, place_N, labels_NK.astype(np.int64), scores_NK.astype(np.float32))


@paddle.no_grad()
def classify(model: ImageModel, images_B3HW: paddle.Tensor) -> tuple[Any, np.ndarray]:
    """Classifies images with a model in eval mode.

    Args: images_B3HW: RGB, 0..255.
    Returns: raw outputs; probabilities_BC.
    """
    outputs = model(model.normalize(images_B3HW))
    return outputs, model.decode(outputs).numpy()


@contextmanager
def in_eval_mode(model: paddle.nn.Layer) -> Iterator[None]:
    """Sets every layer to eval mode within the context, and restores the modes afterwards."""
    modes = [(layer, layer.training) for layer in model.sublayers(include_self=True)]
    model.eval()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training
