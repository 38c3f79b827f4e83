"""Every issue of both splits: annotations and images, on request."""

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
    check_files,
    duplicates,
    leaks,
    same_list,
)
from ppdist.data.datasets.annotations import (
    KINDS,
    Kind,
    box_in_order,
    box_problem,
    box_text,
    cut_box,
    files_below,
)
from ppdist.data.datasets.build import check_same_classes, read_raw, same_sets
from ppdist.data.datasets.plausibility import first_alike
from ppdist.data.image import is_image_name
from ppdist.data.types import Issue, RawColumns, RawImage, RawObject, RawSet, Split
from ppdist.distributed.progress import Progress

_LOGGER = logging.getLogger("ppdist.data")
_SPLITS: tuple[Split, ...] = ("train", "val")
_EXAMPLES = 3


@dataclass(frozen=True)
class ValidatedSplit:
    """One split: its annotations, a check of each image, and the issues."""

    raw: RawSet
    images: CheckedImages
    issues: list[Issue]


@dataclass(frozen=True)
class Row:
    """A kind that was found: its counts by split, and first sentences."""

    name: str
    kind: Kind
    counts: Mapping[str, int]
    examples: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def what_follows(self) -> str:
        """What training and evaluation do about it, of those whose split has it."""
        training, evaluation = self.kind.training, self.kind.evaluation or self.kind.training
        if not self.counts.get("val") or training == evaluation:
            return training
        return f"{training}; {evaluation}" if self.counts.get("train") else evaluation


@dataclass(frozen=True)
class Report:
    """Issues of both splits.

    splits: "train" and "val".  decoded: whether all pixels of all images were decoded.
    """

    splits: Mapping[str, ValidatedSplit]
    decoded: bool

    @property
    def errors(self) -> int:
        """How many issues stop training or lose it images."""
        return sum(row.count for row in self.rows() if row.kind.severity == "error")

    def rows(self) -> list[Row]:
        """A row for each kind that was found, errors first."""
        found: defaultdict[str, list[tuple[str, Issue]]] = defaultdict(list)
        for split, validated in self.splits.items():
            for issue in validated.issues:
                found[issue.code].append((split, issue))
        rows = [
            Row(
                name,
                kind,
                Counter(split for split, _ in found[name]),
                tuple(issue.text for _, issue in found[name][:_EXAMPLES]),
            )
            for name, kind in KINDS.items()
            if name in found
        ]
        order = ("error", "warning", "note")
        return sorted(rows, key=lambda row: order.index(row.kind.severity))

    def as_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`."""
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
    """Reads both splits, checks all their images, and collects what is wrong.

    Args:
        decode: all pixels of each image (some 3 ms of a core at 640 x 480), else its header.
        workers: child processes that decode images.
    Raises: DataError: a split as a whole cannot be read.
    """
    splits: dict[str, ValidatedSplit] = {}
    for split in _SPLITS:
        issues: list[Issue] = []
        raw = read_raw(config, split, issues.append)
        images = _checked(raw, decode=decode, workers=workers)
        issues += _of_images(raw, images)
        if config.task == "detect":
            issues += _of_boxes(raw)
            issues += _of_objects(raw)
        for path, first in duplicates(images, raw.opener).items():
            what = f"the same content as {first}"
            issues.append(Issue("image_duplicate", what, path, path))
        splits[split] = ValidatedSplit(raw, images, issues)
    train, val = splits["train"], splits["val"]
    train.issues.extend(_classes(train.raw, val.raw))
    train.issues.extend(_leakage(train, val))
    train.issues.extend(_unused(train.raw))
    if same := same_sets(config):
        train.issues.append(Issue("splits_same", same))
    for name, unlisted in _unlisted(config, splits).items():
        splits[name].issues.extend(unlisted)
    return Report(splits, decode)


def _checked(raw: RawSet, *, decode: bool, workers: int) -> CheckedImages:
    sizes = [(image.width, image.height) if image.width > 0 else None for image in raw.images]
    files = [ImageFile(str(image.path), size, raw.opener) for image, size in zip(raw.images, sizes)]
    progress = Progress(_LOGGER, "data check", len(files))
    checks = check_files(files, decode=decode, workers=workers, done=progress.add)
    return [(file.path, found) for file, found in zip(files, checks)]


def _of_images(raw: RawSet, images: CheckedImages) -> Iterator[Issue]:
    for image, (path, found) in zip(raw.images, images):
        if found.problem is not None:
            yield Issue(found.problem.code, f"{path}: {found.problem.text}", path)
        for kind in found.notes:
            yield Issue(kind, KINDS[kind].meaning, path, path)
        if not image.objects and not image.lost:
            yield Issue("image_no_boxes", f"{path} shows no object", path, image.where)


def _of_objects(raw: RawSet) -> Iterator[Issue]:
    """Images without a usable object, though annotated; a split without one.

    An image is judged by all of its listings.
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
            what = f"none of the {count} annotated objects of {path} can be used"
            yield Issue("image_objects_lost", what, path, where[path])
    if raw.images and all(thing.crowd for image in raw.images for thing in image.objects):
        what = f"not one of its {len(raw.images)} images shows an object"
        yield Issue("objects_missing", what, where=raw.source)


def _of_boxes(raw: RawSet) -> Iterator[Issue]:
    first_O = first_alike(RawColumns.of(raw, masks=False)).tolist()
    objects = [entry for image in raw.images for entry in image.objects]
    number = 0
    for image in raw.images:
        path = str(image.path)
        for entry in image.objects:
            shown = box_text(entry.box)
            problem = box_problem(entry.box, image.width, image.height)
            if problem in ("box_outside", "box_sticking_out") and not image.size_known:
                problem = None  # YOLO's fractions, of an image of unknown size
            if problem is not None:
                inside = f" of {path} ({image.width}x{image.height})"
                meaning = KINDS[problem].meaning
                yield Issue(problem, f"{shown}{inside}: {meaning}", path, entry.where)
            if first_O[number] != number:
                name, first = raw.class_names[entry.label], objects[first_O[number]].where
                what = f"{shown}, {name!r}, of {path} is a duplicate of {first}"
                yield Issue("box_duplicate", what, path, entry.where)
            number += 1


def _leakage(train: ValidatedSplit, val: ValidatedSplit) -> Iterator[Issue]:
    """Training images that are, or duplicate, an image of the validation split."""
    if same_list(train.images, val.images):
        return
    for path, held in leaks(train.images, val.images, train.raw.opener).items():
        what = (
            "in the training and the validation split"
            if path == held
            else f"the same content as {held} of the validation split"
        )
        yield Issue("leakage", what, path, path)


def _classes(train: RawSet, val: RawSet) -> Iterator[Issue]:
    try:
        check_same_classes(train, val)
    except DataError as error:
        yield Issue("classes_differ", str(error))


def _unused(raw: RawSet) -> Iterator[Issue]:
    used = {entry.label for image in raw.images for entry in image.objects if not entry.crowd}
    for label, name in enumerate(raw.class_names):
        if label not in used:
            yield Issue("class_unused", f"no object of class {name!r}", where=raw.source)


def _unlisted(config: DataConfig, splits: Mapping[str, ValidatedSplit]) -> dict[str, list[Issue]]:
    """Images in the splits' folders that no split lists.

    The test split counts, too.
    """
    real = cache(os.path.realpath)  # of a folder, which links may give several names

    def place(path: str) -> str:
        folder, name = os.path.split(os.path.abspath(path))
        return os.path.join(real(folder), name)

    listed = {place(path) for validated in splits.values() for path, _ in validated.images}
    if config.test is not None:
        with suppress(DataError):  # it is read where it is evaluated, and told there
            test = read_raw(config, "test", lambda issue: None)
            listed.update(place(str(image.path)) for image in test.images)
    folders = {"train": config.train.image_folders, "val": config.val.image_folders}
    found: dict[str, list[Issue]] = {"train": [], "val": []}
    for split, name in ((split, name) for split, names in folders.items() for name in names):
        folder = folder_of(config.root, name)
        for path in () if is_remote(folder) else files_below(folder):
            if is_image_name(os.path.basename(path)) and place(path) not in listed:
                listed.add(place(path))
                what = f"not listed by {splits[split].raw.source}"
                found[split].append(Issue("image_unlisted", what, path, path))
    return found


def good_objects(image: RawImage, done: Counter[str]) -> list[RawObject]:
    """Good and repaired objects of an image.

    `done` counts what was repaired or left out.
    """
    result: dict[tuple[object, ...], RawObject] = {}
    for thing in image.objects:
        box, size = thing.box, (image.width, image.height)
        if box_problem(box, *size) == "box_swapped":
            done["box_swapped"] += 1
            box = box_in_order(box)
        problem = box_problem(box, *size)
        if problem is not None:
            done[problem] += 1
        if problem == "box_sticking_out":
            x1, y1, x2, y2 = cut_box(box, *size)
            box = (float(x1), float(y1), float(x2), float(y2))  # corners at a border are whole
        elif problem is not None:
            continue
        key = (thing.label, thing.crowd, *box)
        if key in result:
            done["box_duplicate"] += 1
            continue
        result[key] = thing if box == thing.box else replace(thing, box=box)
    return [*result.values()]
