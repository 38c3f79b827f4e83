"""The COCO API's own example: our numbers beside the published ones and those of pycocotools."""

import contextlib
import importlib.util
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ppdist.common.errors import DataError
from ppdist.data.datasets.annotations import IssueLog, to_detection_set
from ppdist.data.datasets.coco import read_coco_columns
from ppdist.data.types import DetectionSet
from ppdist.metrics.coco import METRICS, evaluate_boxes

TRUTH = "instances_val2014_100.json"
RESULTS = "instances_val2014_fakebbox100_results.json"
# cocodataset.org and the demo of github.com/cocodataset/cocoapi.
PUBLISHED = (0.505, 0.697, 0.573, 0.586, 0.519, 0.501, 0.387, 0.594, 0.595, 0.640, 0.566, 0.564)
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Row:
    """One number of an evaluation; of_pycocotools is None where that is not installed."""

    name: str
    ours: float
    of_pycocotools: float | None
    published: float

    @property
    def equal(self) -> bool:
        same = self.of_pycocotools is None or abs(self.ours - self.of_pycocotools) <= _TOLERANCE
        return same and abs(self.ours - self.published) <= 0.0005 + _TOLERANCE


def compare(folder: Path) -> list[Row]:
    """Evaluates the results in a folder.

    Args:
        folder: holds TRUTH and RESULTS of github.com/cocodataset/cocoapi, results and annotations
            of the first 100 images of val2014; no images are needed.
    Raises: DataError: a file is missing, or not what it should be.
    """
    truth, results = folder / TRUTH, folder / RESULTS
    for file in (truth, results):
        if not file.is_file():
            raise DataError(
                f"{file} does not exist; expected the example of the COCO API",
                code="file_not_found",
                where="--reference",
            )
    dataset = to_detection_set(read_coco_columns(folder, truth, IssueLog()), "clip")
    ours = evaluate_boxes(dataset, _rows(results, dataset))
    theirs = _by_pycocotools(truth, results)
    return [
        Row(name, ours[name], other, published)
        for name, other, published in zip(METRICS, theirs, PUBLISHED)
    ]


def _rows(results: Path, dataset: DetectionSet) -> np.ndarray:
    """A COCO result file as `evaluate_boxes` takes it."""
    position = {record.image_id: index for index, record in enumerate(dataset.records)}
    label = {category: index for index, category in enumerate(dataset.category_ids)}
    rows = []
    try:
        for result in json.loads(results.read_text(encoding="utf-8")):
            x, y, width, height = result["bbox"]
            place = position[result["image_id"]], label[result["category_id"]]
            rows.append([*place, result["score"], x, y, x + width, y + height])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"not a COCO result file of {dataset.source}: {error!r}",
            code="not_coco_results",
            where=str(results),
        ) from error
    return np.array(rows, np.float64).reshape(-1, 7)


def _by_pycocotools(truth: Path, results: Path) -> Sequence[float | None]:
    """COCOeval.stats of the files as they are."""
    if importlib.util.find_spec("pycocotools") is None:
        return [None] * len(METRICS)
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        objects = COCO(str(truth))
        evaluation = COCOeval(objects, objects.loadRes(str(results)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats.tolist()


def lines(rows: Sequence[Row]) -> list[str]:
    """A table, and the verdict."""
    text = [f"{'':<12}{'ours':>20}{'pycocotools':>20}{'published':>11}"]
    for row in rows:
        theirs = "-" if row.of_pycocotools is None else f"{row.of_pycocotools:.15f}"
        mark = "" if row.equal else "  DIFFERS"
        text.append(f"{row.name:<12}{row.ours:>20.15f}{theirs:>20}{row.published:>11.3f}{mark}")
    wrong = sum(not row.equal for row in rows)
    compared = "COCO" if rows[0].of_pycocotools is None else f"pycocotools to {_TOLERANCE:g}"
    equal = f"PASS: all {len(rows)} equal those of {compared}"
    return [*text, f"FAIL: {wrong} of {len(rows)} differ" if wrong else equal]
