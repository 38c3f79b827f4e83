"""Everything that is wrong with both splits, found before training finds it."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ppdist.config.data import DataConfig
from ppdist.data.check.consistency import check_same_classes
from ppdist.data.check.copies import duplicates, leaks, same_list
from ppdist.data.check.findings import KINDS, Kind
from ppdist.data.check.look import Look
from ppdist.data.check.scan import ImageFile, scan
from ppdist.data.dataset import read_raw
from ppdist.data.formats.annotations import box_problem
from ppdist.data.formats.raw import Finding, RawImage, RawSet
from ppdist.data.formats.walk import files_below
from ppdist.data.images import is_image_name
from ppdist.errors import DataError

_SPLITS: tuple[Literal["train", "val"], ...] = ("train", "val")


@dataclass(frozen=True)
class Audited:
    """One split: what its files say, a look at each of its images, and what was found."""

    raw: RawSet
    looks: list[Look]
    findings: list[Finding]

    @property
    def looked(self) -> list[tuple[str, Look]]:
        """The path of each listed image, and what it is."""
        return [*zip((str(image.path) for image in self.raw.images), self.looks)]


@dataclass(frozen=True)
class Row:
    """A kind that was found: how often in each split, and the sentences of the first."""

    name: str
    kind: Kind
    counts: Mapping[str, int]
    examples: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True)
class Report:
    """What an audit found.

    splits: "train" and "val".  decoded: whether all pixels of all images were looked at.
    """

    splits: Mapping[str, Audited]
    decoded: bool

    @property
    def errors(self) -> int:
        """How many findings stop training or lose it images."""
        return sum(row.count for row in self.rows() if row.kind.severity == "error")

    def rows(self, examples: int = 3) -> list[Row]:
        """A row for each kind that was found, errors first."""
        found: defaultdict[str, list[tuple[str, Finding]]] = defaultdict(list)
        for split, audited in self.splits.items():
            for finding in audited.findings:
                found[finding.code].append((split, finding))
        rows = [
            Row(
                name,
                kind,
                Counter(split for split, _ in found[name]),
                tuple(finding.text for _, finding in found[name][:examples]),
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
                    "source": audited.raw.source,
                    "images": len(audited.raw.images),
                    "objects": sum(len(image.objects) for image in audited.raw.images),
                    "classes": list(audited.raw.class_names),
                }
                for split, audited in self.splits.items()
            },
            "kinds": [
                {"kind": row.name, "count": row.count, "counts": dict(row.counts)}
                | row.kind._asdict()
                | {"examples": list(row.examples)}
                for row in self.rows()
            ],
            "findings": [
                {"split": split, "kind": finding.code, "text": finding.text, "image": finding.image}
                for split, audited in self.splits.items()
                for finding in audited.findings
            ],
        }


def audit(config: DataConfig, *, decode: bool, workers: int) -> Report:
    """Reads both splits, looks at all their images, and collects what is wrong.

    Args:
        decode: all pixels of each image (some 3 ms of a core at 640 x 480), else its header.
        workers: child processes that look at images.
    Raises: DataError: a split as a whole cannot be read.
    """
    splits: dict[str, Audited] = {}
    for split in _SPLITS:
        findings: list[Finding] = []
        raw = read_raw(config, split, findings.append)
        files = [image_file(image) for image in raw.images]
        looks = scan(files, decode=decode, workers=workers)
        findings += _of_images(raw, looks)
        if not config.classifies:
            findings += _of_boxes(raw)
        splits[split] = Audited(raw, looks, findings)
        for path, first in duplicates(splits[split].looked).items():
            what = f"the same content as {first}"
            findings.append(Finding("image_duplicate", what, path, path))
    train, val = splits["train"], splits["val"]
    train.findings.extend(_classes(train.raw, val.raw))
    train.findings.extend(_leakage(train, val))
    train.findings.extend(_unused(train.raw))
    for name, unlisted in _unlisted(config, splits).items():
        splits[name].findings.extend(unlisted)
    return Report(splits, decode)


def image_file(image: RawImage) -> ImageFile:
    """What to look at, and the size that training will expect (none of classified images)."""
    return ImageFile(str(image.path), (image.width, image.height) if image.width > 0 else None)


def _of_images(raw: RawSet, looks: list[Look]) -> Iterator[Finding]:
    for image, found in zip(raw.images, looks):
        path = str(image.path)
        if found.problem[0]:
            yield Finding(*found.problem, path)
        for kind in found.notes:
            yield Finding(kind, KINDS[kind].meaning, path, path)
        if not image.objects:
            yield Finding("image_no_boxes", f"{path} shows no object", path, image.where)


def _of_boxes(raw: RawSet) -> Iterator[Finding]:
    for image in raw.images:
        path = str(image.path)
        before: dict[tuple[object, ...], str] = {}
        for entry in image.objects:
            x1, y1, x2, y2 = entry.box
            shown = f"box (x={x1:g}, y={y1:g}, w={x2 - x1:g}, h={y2 - y1:g})"
            problem = box_problem(entry.box, image.width, image.height)
            if problem in ("box_outside", "box_sticking_out") and not image.size_known:
                problem = None  # YOLO's fractions, of an image whose size nobody knows
            if problem is not None:
                inside = f" of {path} ({image.width}x{image.height})"
                meaning = KINDS[problem].meaning
                yield Finding(problem, f"{shown}{inside}: {meaning}", path, entry.where)
            first = before.setdefault((entry.label, entry.crowd, *entry.box), entry.where)
            if first != entry.where:
                name = raw.class_names[entry.label]
                what = f"{shown}, {name!r}, of {path} is there already ({first})"
                yield Finding("box_duplicate", what, path, entry.where)


def _leakage(train: Audited, val: Audited) -> Iterator[Finding]:
    """Of training images: the file itself is also in the validation split, or a copy of it."""
    if same_list(train.looked, val.looked):
        return
    for path, held in leaks(train.looked, val.looked).items():
        what = (
            "in the training and the validation split"
            if path == held
            else f"the same content as {held} of the validation split"
        )
        yield Finding("leakage", what, path, path)


def _classes(train: RawSet, val: RawSet) -> Iterator[Finding]:
    try:
        check_same_classes(train, val)
    except DataError as error:
        yield Finding("classes_differ", str(error))


def _unused(raw: RawSet) -> Iterator[Finding]:
    used = {entry.label for image in raw.images for entry in image.objects if not entry.crowd}
    for label, name in enumerate(raw.class_names):
        if label not in used:
            yield Finding("class_unused", f"no object of class {name!r}", where=raw.source)


def _unlisted(config: DataConfig, splits: Mapping[str, Audited]) -> dict[str, list[Finding]]:
    """Images in the folders of the splits that neither lists."""
    real = cache(os.path.realpath)  # of a folder, which links may give several names

    def place(path: str) -> str:
        folder, name = os.path.split(os.path.abspath(path))
        return os.path.join(real(folder), name)

    listed = {place(path) for audited in splits.values() for path, _ in audited.looked}
    folders = {"train": config.train.images, "val": config.val.images}
    found: dict[str, list[Finding]] = {"train": [], "val": []}
    for split, name in folders.items():
        for path in files_below(Path(config.root) / name):
            if is_image_name(os.path.basename(path)) and place(path) not in listed:
                listed.add(place(path))
                what = f"not listed by {splits[split].raw.source}"
                found[split].append(Finding("image_unlisted", what, path, path))
    return found
