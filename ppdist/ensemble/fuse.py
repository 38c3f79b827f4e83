"""Boxes of several models, views and files fused into one set.

read_all -> members_of_model, member_of_file -> fuse_members -> write_fused
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppdist.common.class_names import match_classes, require_same_classes
from ppdist.common.errors import ConfigError, DataError
from ppdist.common.files import write_json
from ppdist.config import ExperimentConfig
from ppdist.config.evaluate import COCO_DETECTIONS
from ppdist.data.datasets.build import read_split
from ppdist.data.types import DetectionSet, ImageRecord
from ppdist.distributed import comm, heartbeat
from ppdist.distributed.comm import evaluate_on_all_ranks
from ppdist.ensemble.tta import look
from ppdist.ensemble.wbf import FuseClass
from ppdist.metrics.coco import evaluate_boxes, write_detections
from ppdist.models.base import Detector, ImageModel

_EXPECTED = (
    'expected {"image_id": 1, "category_id": 1, "bbox": [x, y, width, height], "score": 0.5}'
)


# Saved detections: COCO result lists, sets of ppdist predict.


@dataclass(frozen=True)
class Saved:
    """What a file says.

    image_R, category_R: int64 ids.  box_R4: float32 xyxy pixels.  score_R: float32.
    names: image id -> file name, classes: category id -> name, where the file says so.
    """

    path: Path
    image_R: np.ndarray
    category_R: np.ndarray
    box_R4: np.ndarray
    score_R: np.ndarray
    names: dict[int, str]
    classes: dict[int, str]


def read_saved(path: Path) -> Saved:
    """Reads a COCO result list, or a dataset whose `annotations` have scores.

    Raises: DataError: it is neither; the message names the entry.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot be read as JSON: {error}", code="not_json", where=str(path)
        ) from error
    entries, names, classes = content, {}, {}
    if isinstance(content, dict):
        entries = content.get("annotations")
        names, classes = (
            {
                each["id"]: str(each.get(name))
                for each in content.get(part) or ()
                if isinstance(each, dict) and isinstance(each.get("id"), int)
            }
            for part, name in (("images", "file_name"), ("categories", "name"))
        )
    if not isinstance(entries, list):
        raise DataError(
            "expected a list of detections as ppdist eval --save-detections and "
            "ppdist predict write it",
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
        classes,
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
    """Images and classes in files, by id, as a set without objects.

    Raises: DataError: an id means different images in two files, or in one without names for
        a class that cannot be identified.
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
    categories = _classes_of(files)
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
        class_names=tuple(categories.values()),
        category_ids=tuple(categories),
        source=", ".join(str(each.path) for each in files),
    )


def _classes_of(files: Sequence[Saved]) -> dict[int, str]:
    """Class names by id; the first file that names an id wins.

    Raises: DataError: two files name an id differently, and a third names none.
    """
    named, others = [each for each in files if each.classes], [f for f in files if not f.classes]
    found: dict[int, str] = {}
    for each in named:
        for identity, name in each.classes.items():
            if name not in found.values():
                taken = identity in found
                found[max(found) + 1 if taken else identity] = name
    differing = next((each for each in named if each.classes.items() - found.items()), None)
    if differing is not None and others:
        raise DataError(
            f"has no class names, and {named[0].path} and {differing.path} number theirs "
            "differently",
            code="detections_of_other_classes",
            where=str(others[0].path),
            fix="use files of `ppdist predict`, which name their classes, or give the set with -c",
        )
    for each in others:
        for identity in np.unique(each.category_R).tolist():
            found.setdefault(identity, str(identity))
    return dict(sorted(found.items()))


def rows_of(saved: Saved, dataset: DetectionSet) -> np.ndarray:
    """Its detections as `Evaluator.predict` gives those of a model, ordered by image.

    Its classes are those of the set of the same name, or where it names none of the same id.

    Raises: DataError: it has images or classes that the set lacks.
    """
    position_R = _places(saved.image_R, [record.image_id for record in dataset.records])
    label_of = {identity: label for label, identity in enumerate(dataset.category_ids)}
    if saved.classes:
        places = match_classes([*saved.classes.values()], dataset.class_names)
        label_of = {id: at for id, at in zip(saved.classes, places) if at is not None}
    label_R = np.array([label_of.get(each, -1) for each in saved.category_R.tolist()], np.int64)
    fix = "use detections of this set ({} are not)"
    unknown = np.flatnonzero(position_R < 0)
    if len(unknown):
        first = int(unknown[0])
        raise DataError(
            f"image {saved.image_R[first]} is not in {dataset.source}",
            code="detections_of_other_images",
            where=f"{saved.path}: detection {first}",
            fix=fix.format(len(unknown)),
        )
    unknown = np.flatnonzero(label_R < 0)
    if len(unknown):
        first = int(unknown[0])
        category = int(saved.category_R[first])
        name = f" {saved.classes[category]}" if category in saved.classes else ""
        raise DataError(
            f"category {category}{name} is not in {dataset.source}",
            code="detections_of_other_classes",
            where=f"{saved.path}: detection {first}",
            fix=fix.format(len(unknown)),
        )
    columns = [position_R, label_R, saved.score_R]
    rows_R7 = np.concatenate([np.stack(columns, axis=1), saved.box_R4], axis=1).astype(np.float32)
    return rows_R7[np.argsort(position_R, kind="stable")]


def _places(id_R: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Index of each id in `ids`, int64; -1 where absent."""
    place = {each: position for position, each in enumerate(ids)}
    return np.array([place.get(each, -1) for each in id_R.tolist()], np.int64)


# The set that all members are of.


def read_all(
    files: Sequence[str], configs: Sequence[ExperimentConfig], detections: Sequence[Path]
) -> tuple[DetectionSet, list[Saved]]:
    """The common validation set of all configurations, and the saved detections.

    Without configurations the set has the images that occur in saved detections.

    Args: files: the names of the configurations.
    Raises: ConfigError: one is of a classifier.  DataError: a file is damaged, or the sets differ.
    """
    saved = [read_saved(path) for path in detections]
    sets: list[DetectionSet] = []
    for file, config in zip(files, configs):
        if config.model.task == "classify":
            raise ConfigError(
                "a classifier has no boxes",
                code="needs_detector",
                where=str(file),
                fix="give detectors",
            )
        if config.data != configs[0].data or not sets:  # of the same data: read once
            sets.append(read_split(config.data, "val", config.model.num_classes))
            require_same_images(files[0], sets[0], file, sets[-1])
    return (sets[0] if sets else set_of(saved)), saved


def require_same_images(first: str, one: DetectionSet, second: str, other: DetectionSet) -> None:
    """Checks that two configurations have the same validation images and classes.

    Args: first, second: the configuration files.
    Raises: DataError: the images or their order differ.  ConfigError: the classes do.
    """
    fix = "give models of the same classes; their order does not matter"
    require_same_classes(one.class_names, other.class_names, where=second, owner=first, fix=fix)
    names = [[_mark(record) for record in dataset.records] for dataset in (one, other)]
    if names[0] != names[1]:
        counts = " and ".join(f"{len(each)} images" for each in names)
        raise DataError(
            f"the validation sets differ ({one.source} and {other.source}, {counts})",
            code="validation_sets_differ",
            where=f"{first} and {second}",
            fix="give both the same with -o data.root=... data.val.annotations=...",
        )


def _mark(record: ImageRecord) -> tuple[str, int, int]:
    return Path(record.path).name, record.width, record.height


# Members, and their fusion.


@dataclass(frozen=True)
class Member:
    """One view of a model, or one detections file; see `member_of`.

    rows_R7: float32 (index of the image, class, score, x1, y1, x2, y2), pixels of the original
    image, of this rank's images.  weight: relative to the other members, above 0.  boxes: number
    found in all images.  scores: its metrics, if ground truth is known.
    """

    name: str
    rows_R7: np.ndarray
    weight: float
    boxes: int
    scores: dict[str, float] | None


def member_of(
    name: str,
    rows_R7: np.ndarray,
    weight: float,
    truth: DetectionSet | None = None,
    most: int = COCO_DETECTIONS,
) -> Member:
    """Scores a member and keeps the rows of this rank's images.  Collective.

    Args:
        rows_R7: as `Member.rows_R7`, of all images, the same on every rank.
        truth: the set, if it has true boxes to score the member by.
        most: see `evaluate_boxes`.
    """

    def score() -> dict[str, float]:
        assert truth is not None
        found = evaluate_boxes(truth, rows_R7, most)
        return {name: found[name] for name in ("mAP", "mAP50")}

    scores = None if truth is None else comm.run_on_main(score)
    mine_R = rows_R7[:, 0].astype(np.int64) % comm.world_size() == comm.rank()
    mine_R &= np.isfinite(rows_R7).all(1)  # a model that diverged
    return Member(name, rows_R7[mine_R], weight, len(rows_R7), scores)


def members_of_model(
    config: ExperimentConfig,
    model: ImageModel,
    name: str,
    weight: float,
    dataset: DetectionSet,
    *,
    scales: Sequence[float],
    flip: bool,
    suppression_iou: float | None,
) -> Iterator[Member]:
    """Yields a member for each view of a model.

    Collective: iterate to its end.

    Args:
        dataset: has ground-truth boxes.
        weight: of each view.
        scales, flip: see `ppdist.ensemble.tta.look`; suppression_iou: its `view_iou`.
    """
    assert isinstance(model, Detector)  # `read_all` refuses classifiers
    for view, rows_R7 in look(config, model, dataset, scales, flip, suppression_iou):
        most = config.evaluate.max_detections
        yield member_of(f"{name} {view}", rows_R7, weight, dataset, most)


def member_of_file(
    saved: Saved, weight: float, dataset: DetectionSet, truth: bool, most: int = COCO_DETECTIONS
) -> Member:
    """Saved detections as a member.  Collective.

    Args: truth: the set has true boxes.  most: see `evaluate_boxes`.
    """
    rows_R7 = comm.run_on_all_ranks(lambda: rows_of(saved, dataset))
    return member_of(str(saved.path), rows_R7, weight, dataset if truth else None, most)


def fuse_members(members: Sequence[Member], fuse: FuseClass, keep: int) -> np.ndarray:
    """Fuses the members' detections; the result is equal on every rank.

    Collective: each has its rows of the same members; images are fused one by one, so the number of
    ranks plays no part.

    Args: keep: maximum number of boxes per image, highest scores first.
    Returns: as `Member.rows_R7`, of all images, ordered by image, best first.
    Raises: EvaluationFailed, on every rank: some rank could not fuse its images.
    """
    share_R7 = evaluate_on_all_ranks(lambda: _fuse_share(members, fuse, keep)).value
    all_R7 = comm.all_gather_rows(share_R7)
    return all_R7[np.argsort(all_R7[:, 0], kind="stable")]


def _fuse_share(members: Sequence[Member], fuse: FuseClass, keep: int) -> np.ndarray:
    """Of this rank's images."""
    largest = max(member.weight for member in members)
    weights_M = np.array([member.weight / largest for member in members])
    rows_R7 = np.concatenate([member.rows_R7 for member in members])
    weight_R = np.repeat(weights_M, [len(member.rows_R7) for member in members])
    order_R = np.argsort(rows_R7[:, 0], kind="stable")
    rows_R7, weight_R = rows_R7[order_R], weight_R[order_R]
    first_R = np.flatnonzero(np.diff(rows_R7[:, 0], prepend=-1))
    fused = [np.zeros((0, 7), np.float32)]
    for begin, end in zip(first_R, [*first_R[1:], len(rows_R7)]):
        heartbeat.alive()
        part = slice(begin, end)
        fused.append(fuse_image(rows_R7[part], weight_R[part], float(weights_M.sum()), fuse)[:keep])
    return np.concatenate(fused)


def fuse_image(
    rows_R7: np.ndarray, weight_R: np.ndarray, total: float, fuse: FuseClass
) -> np.ndarray:
    """Fuses the rows of one image class by class, best first.

    On ties the lower class is first.

    Args: weight_R: of the member of each row, at most 1; total: sum of those of all members.
    """
    found = []
    for label in np.unique(rows_R7[:, 1]):
        of_class = rows_R7[:, 1] == label
        rows_S7 = rows_R7[of_class].astype(np.float64)
        boxes_K4, scores_K = fuse(rows_S7[:, 3:], rows_S7[:, 2], weight_R[of_class], total)
        same_K2 = np.broadcast_to([rows_R7[0, 0], label], (len(scores_K), 2))
        found.append(np.concatenate([same_K2, scores_K[:, None], boxes_K4], axis=1))
    rows_K7 = np.concatenate(found).astype(np.float32)
    return rows_K7[np.argsort(-rows_K7[:, 2], kind="stable")]


def write_fused(
    out: Path,
    dataset: DetectionSet,
    members: Sequence[Member],
    fused_R7: np.ndarray,
    most: int = COCO_DETECTIONS,
) -> dict[str, Any] | None:
    """Writes detections.json and scores.json; rank 0 only.

    scores.json is written only if the members have scores.

    Returns: what is in scores.json.
    """
    write_detections(out / "detections.json", dataset, fused_R7)
    if any(member.scores is None for member in members):
        return None
    of_members = [{"name": member.name, **(member.scores or {})} for member in members]
    scores = {"fused": evaluate_boxes(dataset, fused_R7, most), "members": of_members}
    write_json(out / "scores.json", scores, indent=1)
    return scores
