"""Validation of both splits on request: all issues of annotations and images."""

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ppdist.common.addresses import folder_of, is_remote
from ppdist.common.errors import DataError
from ppdist.config.data import DataConfig
from ppdist.data.checks.images import (
    CheckedImages,
    ImageFile,
    are_same_lists,
    check_files,
    find_duplicates,
    find_leaks,
)
from ppdist.data.datasets.annotations import (
    KINDS,
    Kind,
    box_problem,
    clip_box,
    describe_box,
    files_below,
    order_box,
)
from ppdist.data.datasets.build import check_same_classes, describe_same_sets, read_raw
from ppdist.data.datasets.plausibility import find_first_equal
from ppdist.data.image import is_image_name
from ppdist.data.types import Issue, RawColumns, RawImage, RawObject, RawSet, Split
from ppdist.distributed.progress import Progress

_LOGGER = logging.getLogger("ppdist.data")
_SPLITS: tuple[Split, ...] = ("train", "val")
_EXAMPLES = 3


@dataclass(frozen=True)
class ValidatedSplit:
    """A split: its annotations, a check of each image, and the issues."""

    raw: RawSet
    images: CheckedImages
    issues: list[Issue]


@dataclass(frozen=True)
class Row:
    """A kind of issue that occurred: its counts by split, and the first sentences."""

    name: str
    kind: Kind
    counts: Mapping[str, int]
    examples: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def what_follows(self) -> str:
        """Returns what training, evaluation or both do about it, according to its splits."""
        training, evaluation = self.kind.training, self.kind.evaluation or self.kind.training
        if not self.counts.get("val") or training == evaluation:
            return training
        return f"{training}; {evaluation}" if self.counts.get("train") else evaluation


@dataclass(frozen=True)
class Report:
    """The issues of both splits.

    splits: "train" and "val".  decoded: True if all pixels of all images were decoded.
    """

    splits: Mapping[str, ValidatedSplit]
    decoded: bool

    @property
    def errors(self) -> int:
        """Counts the issues that stop training or exclude images from it."""
        return sum(row.count for row in self.rows() if row.kind.severity == "error")

    def rows(self) -> list[Row]:
        """Returns a row for each kind of issue that occurred, errors first."""
        issues_by_kind: defaultdict[str, list[tuple[str, Issue]]] = defaultdict(list)
        for split, validated in self.splits.items():
            for issue in validated.issues:
                issues_by_kind[issue.code].append((split, issue))
        rows = [
            Row(
                name,
                kind,
                Counter(split for split, _ in issues_by_kind[name]),
                tuple(issue.text for _, issue in issues_by_kind[name][:_EXAMPLES]),
            )
            for name, kind in KINDS.items()
            if name in issues_by_kind
        ]
        order = ("error", "warning", "note")
        return sorted(rows, key=lambda row: order.index(row.kind.severity))

    def as_json(self) -> dict[str, Any]:
        """Returns the whole report for `json.dumps`."""
        return {
            "decoded": self.decoded,
            "splits": {
                split: {
                    "source": validated.raw.source,
                    "images": len(validated.raw.images),
                    "objects": sum(len(image.objects) for image in validated.raw.images),
                    "classes": list(validated.raw.class_names),
                }
                for split, validated in self.splits.items()
            },
            "kinds": [
                {"kind": row.name, "count": row.count, "counts": dict(row.counts)}
                | row.kind._asdict()
                | {"examples": list(row.examples)}
                for row in self.rows()
            ],
            "findings": [
                {"split": split, "kind": issue.code, "text": issue.text, "image": issue.image}
                for split, validated in self.splits.items()
                for issue in validated.issues
            ],
        }


def validate(config: DataConfig, *, decode: bool, workers: int) -> Report:
    """Reads both splits, checks all their images, and collects the issues.

    Args:
        decode: decodes each image (about 3 ms on one core at 640 x 480); else only reads its
            header.
        workers: child processes that decode images.
    Raises: DataError: an entire split cannot be read.
    """
    splits: dict[str, ValidatedSplit] = {}
    for split in _SPLITS:
        issues: list[Issue] = []
        raw = read_raw(config, split, issues.append)
        images = _check_images(raw, decode=decode, workers=workers)
        issues += _image_issues(raw, images)
        if config.task == "detect":
            issues += _box_issues(raw)
            issues += _object_issues(raw)
        for path, first in find_duplicates(images, raw.opener).items():
            message = f"the same content as {first}"
            issues.append(Issue("image_duplicate", message, path, path))
        splits[split] = ValidatedSplit(raw, images, issues)
    train, val = splits["train"], splits["val"]
    train.issues.extend(_class_issues(train.raw, val.raw))
    train.issues.extend(_leakage_issues(train, val))
    train.issues.extend(_unused_class_issues(train.raw))
    if same := describe_same_sets(config):
        train.issues.append(Issue("splits_same", same))
    for name, unlisted in _unlisted_issues(config, splits).items():
        splits[name].issues.extend(unlisted)
    return Report(splits, decode)


def _check_images(raw: RawSet, *, decode: bool, workers: int) -> CheckedImages:
    sizes = [(image.width, image.height) if image.width > 0 else None for image in raw.images]
    files = [ImageFile(str(image.path), size, raw.opener) for image, size in zip(raw.images, sizes)]
    progress = Progress(_LOGGER, "data check", len(files))
    checks = check_files(files, decode=decode, workers=workers, done=progress.add)
    return [(file.path, check) for file, check in zip(files, checks)]


def _image_issues(raw: RawSet, images: CheckedImages) -> Iterator[Issue]:
    for image, (path, check) in zip(raw.images, images):
        if check.problem is not None:
            yield Issue(check.problem.code, f"{path}: {check.problem.text}", path)
        for kind in check.notes:
            yield Issue(kind, KINDS[kind].meaning, path, path)
        if not image.objects and not image.lost:
            yield Issue("image_no_boxes", f"{path} shows no object", path, image.where)


def _object_issues(raw: RawSet) -> Iterator[Issue]:
    """Yields issues: annotated images without a usable object; a split without a usable object.

    If an image is listed several times, its listings count together.
    """
    annotated: Counter[str] = Counter()
    shown: set[str] = set()
    where: dict[str, str] = {}
    for image in raw.images:
        path = str(image.path)
        annotated[path] += len(image.objects) + image.lost
        where.setdefault(path, image.where)
        if not image.size_known or good_objects(image, Counter()):
            shown.add(path)
    for path, count in annotated.items():
        if count and path not in shown:
            message = f"none of the {count} annotated objects of {path} can be used"
            yield Issue("image_objects_lost", message, path, where[path])
    if raw.images and all(annotation.crowd for image in raw.images for annotation in image.objects):
        message = f"not one of its {len(raw.images)} images shows an object"
        yield Issue("objects_missing", message, where=raw.source)


def _box_issues(raw: RawSet) -> Iterator[Issue]:
    first_O = find_first_equal(RawColumns.of(raw, masks=False)).tolist()
    objects = [entry for image in raw.images for entry in image.objects]
    number = 0
    for image in raw.images:
        path = str(image.path)
        for entry in image.objects:
            shown = describe_box(entry.box)
            problem = box_problem(entry.box, image.width, image.height)
            if problem in ("box_outside", "box_sticking_out") and not image.size_known:
                problem = None  # YOLO's fractions, of an image of unknown size
            if problem is not None:
                inside = f" of {path} ({image.width}x{image.height})"
                meaning = KINDS[problem].meaning
                yield Issue(problem, f"{shown}{inside}: {meaning}", path, entry.where)
            if first_O[number] != number:
                name, first = raw.class_names[entry.label], objects[first_O[number]].where
                message = f"{shown}, {name!r}, of {path} is a duplicate of {first}"
                yield Issue("box_duplicate", message, path, entry.where)
            number += 1


def _leakage_issues(train: ValidatedSplit, val: ValidatedSplit) -> Iterator[Issue]:
    """Yields the training images that are, or duplicate, an image of the validation split."""
    if are_same_lists(train.images, val.images):
        return
    for path, held in find_leaks(train.images, val.images, train.raw.opener).items():
        message = (
            "in the training and the validation split"
            if path == held
            else f"the same content as {held} of the validation split"
        )
        yield Issue("leakage", message, path, path)


def _class_issues(train: RawSet, val: RawSet) -> Iterator[Issue]:
    try:
        check_same_classes(train, val)
    except DataError as error:
        yield Issue("classes_differ", str(error))


def _unused_class_issues(raw: RawSet) -> Iterator[Issue]:
    used = {entry.label for image in raw.images for entry in image.objects if not entry.crowd}
    for label, name in enumerate(raw.class_names):
        if label not in used:
            yield Issue("class_unused", f"no object of class {name!r}", where=raw.source)


def _unlisted_issues(
    config: DataConfig, splits: Mapping[str, ValidatedSplit]
) -> dict[str, list[Issue]]:
    """Finds images in the folders of the splits that no split lists, not even the test split."""
    real_folder = cache(os.path.realpath)  # of a folder, which may have several names by links

    def real_path(path: str) -> str:
        folder, name = os.path.split(os.path.abspath(path))
        return os.path.join(real_folder(folder), name)

    listed = {real_path(path) for validated in splits.values() for path, _ in validated.images}
    if config.test is not None:
        with suppress(DataError):  # the evaluation that reads it reports the error
            test = read_raw(config, "test", lambda issue: None)
            listed.update(real_path(str(image.path)) for image in test.images)
    folders = {"train": config.train.image_folders, "val": config.val.image_folders}
    issues: dict[str, list[Issue]] = {"train": [], "val": []}
    for split, name in ((split, name) for split, names in folders.items() for name in names):
        folder = folder_of(config.root, name)
        for path in () if is_remote(folder) else files_below(folder):
            if is_image_name(os.path.basename(path)) and real_path(path) not in listed:
                listed.add(real_path(path))
                message = f"not listed by {splits[split].raw.source}"
                issues[split].append(Issue("image_unlisted", message, path, path))
    return issues


def good_objects(image: RawImage, repairs: Counter[str]) -> list[RawObject]:
    """Returns the usable objects of an image, repaired where possible.

    Args: repairs: receives the counts, by kind, of what was repaired or left out.
    """
    result: dict[tuple[object, ...], RawObject] = {}
    for annotation in image.objects:
        box, size = annotation.box, (image.width, image.height)
        if box_problem(box, *size) == "box_swapped":
            repairs["box_swapped"] += 1
            box = order_box(box)
        problem = box_problem(box, *size)
        if problem is not None:
            repairs[problem] += 1
        if problem == "box_sticking_out":
            x1, y1, x2, y2 = clip_box(box, *size)
            box = (float(x1), float(y1), float(x2), float(y2))  # corners at a border are whole
        elif problem is not None:
            continue
        key = (annotation.label, annotation.crowd, *box)
        if key in result:
            repairs["box_duplicate"] += 1
            continue
        result[key] = annotation if box == annotation.box else replace(annotation, box=box)
    return [*result.values()]
