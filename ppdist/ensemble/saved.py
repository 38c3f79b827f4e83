"""Saved detections: COCO result lists, sets of tools/infer.py."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppdist.common.errors import DataError
from ppdist.data.types import DetectionSet, ImageRecord

_EXPECTED = (
    'expected {"image_id": 1, "category_id": 1, "bbox": [x, y, width, height], "score": 0.5}'
)


@dataclass(frozen=True)
class Saved:
    """What a file says.

    image_R, category_R: int64 ids.  box_R4: float32 xyxy pixels.  score_R: float32.
    names: image id -> file name, where the file says so.
    """

    path: Path
    image_R: np.ndarray
    category_R: np.ndarray
    box_R4: np.ndarray
    score_R: np.ndarray
    names: dict[int, str]


def read_saved(path: Path) -> Saved:
    """Reads a COCO result list, or a data set whose `annotations` have scores.

    Raises: DataError: it is none; the message names the entry.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot be read as JSON: {error}", code="not_json", where=str(path)
        ) from error
    entries, names = content, {}
    if isinstance(content, dict):
        entries = content.get("annotations")
        names = {
            image["id"]: str(image.get("file_name"))
            for image in content.get("images") or ()
            if isinstance(image, dict) and isinstance(image.get("id"), int)
        }
    if not isinstance(entries, list):
        raise DataError(
            "expected a list of detections as tools/eval.py --save-detections and "
            "tools/infer.py write it",
            code="not_detections",
            where=str(path),
        )
    for place, entry in enumerate(entries):
        _require_detection(path, place, entry)
    box_R4 = np.array([entry["bbox"] for entry in entries], np.float64).reshape(-1, 4)
    box_R4[:, 2:] += box_R4[:, :2]
    return Saved(
        path,
        np.array([entry["image_id"] for entry in entries], np.int64),
        np.array([entry["category_id"] for entry in entries], np.int64),
        box_R4.astype(np.float32),
        np.array([entry["score"] for entry in entries], np.float32),
        names,
    )


def _require_detection(path: Path, place: int, entry: Any) -> None:
    numbers = None
    if isinstance(entry, dict):
        ids = entry.get("image_id"), entry.get("category_id")
        box, score = entry.get("bbox"), entry.get("score")
        if all(isinstance(each, int) for each in ids) and isinstance(box, list) and len(box) == 4:
            numbers = [*box, score]
    good = numbers is not None and all(
        isinstance(each, int | float) and math.isfinite(each) for each in numbers
    )
    if not good or not 0 <= entry["score"] <= 1:
        raise DataError(
            f"found {str(entry)[:150]}; {_EXPECTED}",
            code="not_detections",
            where=f"{path}: detection {place}",
        )


def set_of(files: Sequence[Saved]) -> DetectionSet:
    """The images and classes that occur in files, as a set without objects, ordered by id.

    Raises: DataError: an id stands for different images in two files.
    """
    names: dict[int, str] = {}
    for each in files:
        for image, name in each.names.items():
            if names.setdefault(image, name) != name:
                raise DataError(
                    f"image {image} is {name!r} here and {names[image]!r} in another file",
                    code="detections_of_other_images",
                    where=str(each.path),
                    fix="give detections of the same images",
                )
    images = np.unique(np.concatenate([each.image_R for each in files]))
    categories = np.unique(np.concatenate([each.category_R for each in files]))
    nothing = np.zeros(0, np.float32)
    records = [
        ImageRecord(
            path=names.get(image, ""),
            image_id=image,
            width=0,
            height=0,
            boxes_M4=nothing.reshape(0, 4),
            labels_M=nothing.astype(np.int64),
            crowd_M=nothing.astype(bool),
            area_M=nothing,
        )
        for image in images.tolist()
    ]
    return DetectionSet(
        records=records,
        class_names=tuple(str(category) for category in categories.tolist()),
        category_ids=tuple(categories.tolist()),
        source=", ".join(str(each.path) for each in files),
    )


def rows_of(saved: Saved, dataset: DetectionSet) -> np.ndarray:
    """Its detections as `Evaluator.predict` gives those of a model, ordered by image.

    Raises: DataError: it knows images or classes that the set does not.
    """
    position_R = _places(saved.image_R, [record.image_id for record in dataset.records])
    label_R = _places(saved.category_R, dataset.category_ids)
    checks = (("image", position_R, saved.image_R), ("category", label_R, saved.category_R))
    for what, place_R, id_R in checks:
        unknown = np.flatnonzero(place_R < 0)
        if len(unknown):
            first = int(unknown[0])
            raise DataError(
                f"{what} {id_R[first]} is not in {dataset.source}",
                code="detections_of_other_images",
                where=f"{saved.path}: detection {first}",
                fix=f"give detections of this set ({len(unknown)} are not)",
            )
    columns = [position_R, label_R, saved.score_R]
    rows_R7 = np.concatenate([np.stack(columns, axis=1), saved.box_R4], axis=1).astype(np.float32)
    return rows_R7[np.argsort(position_R, kind="stable")]


def _places(id_R: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Position of each id in `ids`, int64; -1 where it is not there."""
    ids_N = np.array(ids, np.int64)
    order_N = np.argsort(ids_N)
    at_R = np.searchsorted(ids_N[order_N], id_R)
    found_R = order_N[np.minimum(at_R, len(ids_N) - 1)] if len(ids_N) else at_R
    same_R = ids_N[found_R] == id_R if len(ids_N) else np.zeros(len(id_R), bool)
    return np.where(same_R, found_R, -1)
