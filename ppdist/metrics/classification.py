"""Computes top-1 and top-5 accuracy of a classifier."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppdist.common.files import write_json
from ppdist.config.evaluate import CLASSIFICATION_METRICS
from ppdist.data.types import DetectionSet

BEST = 5  # classes kept for each image


class Ranking(NamedTuple):
    """The top classes of some images.

    index_N: int64 position in DetectionSet.records.
    place_N: int64 number of classes ranked above the true class; 0 means correct.
    labels_NK: int64 the K = min(5, C) most probable classes, best first; scores_NK: float32, 0..1.
    """

    index_N: np.ndarray
    place_N: np.ndarray
    labels_NK: np.ndarray
    scores_NK: np.ndarray


def rank(probabilities_NC: np.ndarray, labels_N: np.ndarray, index_N: np.ndarray) -> Ranking:
    """Ranks the classes of each image.

    An image with a probability that is not finite has its true class in no place.

    Args:
        labels_N: the true classes.
        index_N: positions in DetectionSet.records.
    """
    order_NC = np.argsort(-probabilities_NC, axis=1, kind="stable")
    place_N = (order_NC == labels_N[:, None]).argmax(axis=1)
    place_N[~np.isfinite(probabilities_NC).all(axis=1)] = max(probabilities_NC.shape[1], BEST)
    best_NK = order_NC[:, :BEST]
    scores_NK = np.take_along_axis(probabilities_NC, best_NK, axis=1).astype(np.float32)
    return Ranking(index_N.astype(np.int64), place_N.astype(np.int64), best_NK, scores_NK)


def compute_accuracy(ranking: Ranking) -> dict[str, float]:
    """Computes top-1 and top-5 accuracy, 0..1."""
    within = {"top1": 1, "top5": 5}
    return {name: float((ranking.place_N < within[name]).mean()) for name in CLASSIFICATION_METRICS}


def write_ranking(path: Path, dataset: DetectionSet, ranking: Ranking) -> None:
    """Writes each image's file, true class and most probable classes.

    The file appears whole or not at all.

    Raises: UserError: the file cannot be written.
    """
    entries = []
    for index, labels_K, scores_K in zip(ranking.index_N, ranking.labels_NK, ranking.scores_NK):
        record = dataset.records[int(index)]
        entries.append(
            {
                "image_id": record.image_id,
                "file_name": record.path,
                "true": dataset.class_names[int(record.labels_M[0])],
                "best": best_classes(labels_K, scores_K, dataset.class_names),
            }
        )
    write_json(path, entries)


def best_classes(
    labels_K: np.ndarray, scores_K: np.ndarray, class_names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Lists the most probable classes of one image in their JSON form, best first."""
    return [
        {"class": label, "name": class_names[label], "score": round(score, 5)}
        for label, score in zip(labels_K.tolist(), scores_K.tolist())
    ]
