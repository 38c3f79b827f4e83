"""Accuracy of a classifier over a whole set, sharded over the ranks."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist import dist
from ppdist.config.evaluate import CLASSIFICATION_METRICS
from ppdist.data.sample import Batch, DetectionSet
from ppdist.drawing import draw_classes, side_by_side
from ppdist.engine.agreement import agreed
from ppdist.engine.evaluator import (
    CUT_SHORT,
    ShareProgress,
    check_each_once,
    go_on,
    in_eval_mode,
)
from ppdist.engine.validation_loss import ValidationLoss, normalised
from ppdist.metrics.classification import (
    Ranking,
    accuracy,
    analyse_classes,
    rank,
    write_ranking,
)
from ppdist.models.detector import ImageModel


class ClassificationEvaluator:
    """Runs a classifier over a set; every image is seen once, by one rank.

    As `Evaluator`: the result does not depend on the number of ranks, and the loop holds no
    collective, so ranks may have different numbers of batches; they meet once, at its end.

    Attributes:
        headline: names of metrics for the log; the first says by default what is best.
        metrics: names of what `measure` gives.
        images: in the whole set.
        pictures: after an evaluation, the first images of this rank's share: true class on the
            left, the surest ones on the right, for `RunLog.images`.
    """

    headline = metrics = CLASSIFICATION_METRICS

    def __init__(
        self,
        dataset: DetectionSet,
        loader: Iterable[Batch],
        *,
        max_pictures: int = 0,
        loss: ValidationLoss | None = None,
    ) -> None:
        """
        Args:
            dataset: the whole set, the same on every rank.
            loader: gives this rank's share of it anew at each iteration; `labels_BM[:, 0]` is the
                class and `image_index_B` the position in `dataset.records`, -1 for padding.
            max_pictures: how many images to draw.
            loss: `evaluate` gives that, too.
        """
        self.images = len(dataset.records)
        self.pictures: list[np.ndarray] = []
        self._dataset = dataset
        self._loader = loader
        self._max_pictures = max_pictures
        self._loss = loss

    def evaluate(
        self, model: ImageModel, stopped: Callable[[], bool] = go_on, step: int = 0
    ) -> dict[str, float]:
        """Accuracy of the model; every rank calls it and every rank gets the same result.

        The mode (train or eval) of every layer is as before when it returns.

        Args:
            model: the classifier itself, not its data-parallel wrapper.
            stopped: whether this rank was asked to stop; looked at after each batch.
            step: optimizer steps done.
        Returns: what `measure` does; with a loss `val_loss`; and `eval_seconds` (rank 0's).
        Raises: EvaluationStopped, on all ranks: one was asked to stop.
        """
        began = time.monotonic()
        if self._loss is not None:
            self._loss.begin(step)
        self._last, losses = self._found(model, stopped, self._loss)
        seconds = dist.on_main(lambda: time.monotonic() - began)
        return {**self.measure(self._last), **losses, "eval_seconds": seconds}

    def measure(self, found: Ranking) -> dict[str, float]:
        """See `ppdist.metrics.classification.accuracy`."""
        return accuracy(found)

    def analyse(self, found: Ranking, step: int | None = None) -> dict[str, Any]:
        """See `ppdist.metrics.classification.analyse_classes`."""
        return analyse_classes(self._dataset, found, step)

    def analyse_last(self, step: int) -> dict[str, Any]:
        """`analyse` of what `evaluate` measured last."""
        return self.analyse(self._last, step)

    def class_scores(self, metrics: dict[str, float]) -> None:
        """Nothing: accuracy is of all classes together."""

    def save(self, path: Path, found: Ranking) -> None:
        """See `ppdist.metrics.classification.write_ranking`."""
        write_ranking(path, self._dataset, found)

    def predict(self, model: ImageModel, stopped: Callable[[], bool] = go_on) -> Ranking:
        """The surest classes of the whole set, in its order; every rank calls it and gets all.

        Args: stopped: see `evaluate`.
        Raises: RuntimeError: an image was seen twice or not at all.  EvaluationStopped.
        """
        return self._found(model, stopped, None)[0]

    def _found(
        self, model: ImageModel, stopped: Callable[[], bool], loss: ValidationLoss | None
    ) -> tuple[Ranking, dict[str, float]]:
        share = agreed(
            lambda: self._predict_share(model, stopped, loss),
            say=lambda _: None if loss is None else loss.sums,
        )
        ours, losses = share.value, {} if loss is None else normalised(share.said_W)
        columns = [ours.index_N[:, None], ours.place_N[:, None], ours.labels_NK, ours.scores_NK]
        rows_NX = dist.all_gather_rows(np.concatenate(columns, axis=1).astype(np.float64))
        rows_NX = rows_NX[np.argsort(rows_NX[:, 0], kind="stable")]
        check_each_once(self._dataset, rows_NX[:, 0].astype(np.int64))
        index_N, place_N = rows_NX[:, :2].astype(np.int64).T
        labels_NK, scores_NK = np.split(rows_NX[:, 2:], 2, axis=1)
        labels_NK, scores_NK = labels_NK.astype(np.int64), scores_NK.astype(np.float32)
        return Ranking(index_N, place_N, labels_NK, scores_NK), losses

    def _predict_share(
        self, model: ImageModel, stopped: Callable[[], bool], loss: ValidationLoss | None
    ) -> Ranking:
        nothing = np.zeros(0, np.int64)
        parts = [rank(np.zeros((0, model.num_classes), np.float32), nothing, nothing)]
        self.pictures = []
        progress = ShareProgress(len(self._dataset.records))
        with in_eval_mode(model):
            for batch in self._loader:
                outputs, probabilities_BC = classify(model, batch.images_B3HW)
                if loss is not None:
                    loss.add(outputs, batch)
                index_B, label_B = batch.image_index_B.numpy(), batch.labels_BM[:, 0].numpy()
                real_B = index_B >= 0
                ranking = rank(probabilities_BC[real_B], label_B[real_B], index_B[real_B])
                parts.append(ranking)
                wanted = self._max_pictures - len(self.pictures)
                if wanted > 0:
                    images_BHW3 = batch.images_B3HW.numpy()[real_B][:wanted].transpose(0, 2, 3, 1)
                    self.pictures += self._draw(images_BHW3, label_B[real_B], ranking)
                progress.add(len(ranking.index_N))
                if stopped():
                    nobody = np.zeros((1, model.num_classes), np.float32)
                    parts.append(rank(nobody, np.zeros(1, np.int64), np.array([CUT_SHORT])))
                    break
        return Ranking(*(np.concatenate(values) for values in zip(*parts)))

    def _draw(
        self, images_BHW3: np.ndarray, label_B: np.ndarray, ranking: Ranking
    ) -> list[np.ndarray]:
        """Pictures uint8 RGB [H, 2W + 4, 3] at input size."""
        names = self._dataset.class_names
        return [
            side_by_side(
                draw_classes(image_HW3, label_B[row : row + 1], names),
                draw_classes(image_HW3, ranking.labels_NK[row], names, ranking.scores_NK[row]),
            )
            for row, image_HW3 in enumerate(images_BHW3)
        ]


@paddle.no_grad()
def classify(model: ImageModel, images_B3HW: paddle.Tensor) -> tuple[Any, np.ndarray]:
    """Raw outputs, and probabilities_BC, of uint8 or float RGB images 0..255; the caller has set
    the model's mode."""
    outputs = model(model.normalize(images_B3HW))
    return outputs, model.decode(outputs).numpy()
