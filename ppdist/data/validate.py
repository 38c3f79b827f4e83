"""Dataset check: annotations and images, before training or on request.

`validate` collects every issue of both splits, `clean_copy` writes them again without these, and
`check_before_training` checks the images alone, once for as long as no file changes.

Images are checked in child processes: a decoder that crashes or hangs takes none of ours with it,
and its file is named.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, overload

import cv2
import numpy as np
from PIL import Image, TiffImagePlugin

from ppdist.common.child import ends_with_this
from ppdist.common.errors import DataError
from ppdist.common.files import make_folder, writing
from ppdist.common.process import DETAIL
from ppdist.config.data import DataConfig
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
from ppdist.data.datasets.convert import Format, Images, convert
from ppdist.data.image import is_image_name, read_header, read_image
from ppdist.data.types import (
    DetectionSet,
    Issue,
    RawImage,
    RawObject,
    RawSet,
    Records,
    Split,
)
from ppdist.distributed import comm
from ppdist.distributed.progress import Progress
from ppdist.runtime.decoder import FORMATS, Damage, damage, is_dark
from ppdist.storage import files as storage
from ppdist.storage import stores
from ppdist.storage.files import can_be_read, open_file
from ppdist.storage.keyed_cache import Journal, KeyedCache

_LOGGER = logging.getLogger("ppdist.data")
_SPLITS: tuple[Split, ...] = ("train", "val")
_EXAMPLES = 3


class ImageFile(NamedTuple):
    """A path; size: (width, height) in pixels as annotated, None: not known."""

    path: str
    size: tuple[int, int] | None


class ImageCheck(NamedTuple):
    """What one file is.

    problem: why the image cannot be used; None: it can.
    notes: kinds of what is unusual.
    digest: equal for two files of the same content (decoded: surely; else: head, tail and length).
    passing: the problem may be gone the next time without a change to the file: no permission, no
        memory, a decoder that was killed.
    """

    problem: Damage | None = None
    notes: tuple[str, ...] = ()
    digest: str = ""
    passing: bool = False


CheckedImages = Sequence[tuple[str, ImageCheck]]  # the path of each listed image, and what it is


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
        workers: child processes that check images.
    Raises: DataError: a split as a whole cannot be read.
    """
    splits: dict[str, ValidatedSplit] = {}
    for split in _SPLITS:
        issues: list[Issue] = []
        raw = read_raw(config, split, issues.append)
        images = _checked(raw.images, decode=decode, workers=workers)
        issues += _of_images(raw, images)
        if config.task == "detect":
            issues += _of_boxes(raw)
            issues += _of_objects(raw)
        for path, first in duplicates(images).items():
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


def _checked(images: Sequence[RawImage], *, decode: bool, workers: int) -> CheckedImages:
    files = [
        ImageFile(str(image.path), (image.width, image.height) if image.width > 0 else None)
        for image in images
    ]
    progress = Progress(_LOGGER, "data check", len(files))
    checks = look_at(files, decode=decode, workers=workers, told=lambda *_: progress.add())
    return [(file.path, found) for file, found in zip(files, checks)]


def look_at(
    files: Sequence[ImageFile],
    *,
    decode: bool,
    workers: int,
    told: Callable[[int, ImageCheck], object],
) -> list[ImageCheck]:
    """As `check_images`, but images in stores are not opened for their headers.

    A header is half of the way to such an image: the store's listing has to do.
    """
    if decode or not any(storage.is_remote(file.path) for file in files):
        return check_images(files, decode=decode, workers=workers, told=told)
    near = [at for at, file in enumerate(files) if not storage.is_remote(file.path)]
    opened = check_images(
        [files[at] for at in near],
        decode=decode,
        workers=workers,
        told=lambda number, found: told(near[number], found),
    )
    checks = dict(zip(near, opened))
    for at, file in enumerate(files):
        if at not in checks:
            checks[at] = check_listed(file.path)
            told(at, checks[at])
    return [checks[at] for at in range(len(files))]


def check_listed(path: str) -> ImageCheck:
    """What a store's listing says of an image, which is not opened: that it is there, not empty."""
    try:
        identity = storage.identity_of(path)
    except FileNotFoundError:
        return ImageCheck(Damage("image_missing", "does not exist"), passing=True)
    except OSError as error:
        problem = Damage("image_unreadable", error.strerror or str(error))
        return ImageCheck(problem, passing=True)
    if not identity.bytes and identity.mark:
        return ImageCheck(Damage("image_empty", "empty (0 bytes)"))
    told = identity.mark and not storage.is_in_shard(path)
    return ImageCheck(digest=f"{identity.bytes} {identity.mark}" if told else "")


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
        if not image.size_known or _good(image, Counter()):
            shown.add(path)
    for path, count in annotated.items():
        if count and path not in shown:
            what = f"none of the {count} annotated objects of {path} can be used"
            yield Issue("image_objects_lost", what, path, where[path])
    if raw.images and all(thing.crowd for image in raw.images for thing in image.objects):
        what = f"not one of its {len(raw.images)} images shows an object"
        yield Issue("objects_missing", what, where=raw.source)


def _of_boxes(raw: RawSet) -> Iterator[Issue]:
    for image in raw.images:
        path = str(image.path)
        before: dict[tuple[object, ...], str] = {}
        for entry in image.objects:
            shown = box_text(entry.box)
            problem = box_problem(entry.box, image.width, image.height)
            if problem in ("box_outside", "box_sticking_out") and not image.size_known:
                problem = None  # YOLO's fractions, of an image whose size nobody knows
            if problem is not None:
                inside = f" of {path} ({image.width}x{image.height})"
                meaning = KINDS[problem].meaning
                yield Issue(problem, f"{shown}{inside}: {meaning}", path, entry.where)
            first = before.setdefault((entry.label, entry.crowd, *entry.box), entry.where)
            if first != entry.where:
                name = raw.class_names[entry.label]
                what = f"{shown}, {name!r}, of {path} is there already ({first})"
                yield Issue("box_duplicate", what, path, entry.where)


def _leakage(train: ValidatedSplit, val: ValidatedSplit) -> Iterator[Issue]:
    """Training images that are, or duplicate, an image of the validation split."""
    if same_list(train.images, val.images):
        return
    for path, held in leaks(train.images, val.images).items():
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
    """Images in the folders of the splits that none lists, the test split neither."""
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
        folder = storage.folder_of(config.root, name)
        for path in () if storage.is_remote(folder) else files_below(folder):
            if is_image_name(os.path.basename(path)) and place(path) not in listed:
                listed.add(place(path))
                what = f"not listed by {splits[split].raw.source}"
                found[split].append(Issue("image_unlisted", what, path, path))
    return found


class Checked(NamedTuple):
    """Both splits after the check.

    train, val: with `unreadable` filled; val is None where none was given.
    lines: what to warn of, one for each kind and split; the same on every rank.
    """

    train: DetectionSet
    val: DetectionSet | None
    lines: tuple[str, ...]


def check_before_training(
    config: DataConfig, train: DetectionSet, val: DetectionSet | None, workers: int
) -> Checked:
    """Checks the images of both splits as `data.check_images` says.  Collective.

    Rank 0 checks and all ranks get its result, so all leave out the same images; however long that
    takes, they wait while it gets on.  The result is kept in $XDG_CACHE_HOME or ~/.cache: the next
    start compares only the files' times and sizes, and one that was broken off goes on.

    Args:
        workers: child processes that check images.
    Raises: DataError: a bad image where data.bad_images is `error`; no good one in a split.
    """
    if config.check_images == "none":
        return Checked(train, val, ())
    sets = {"train": train} if val is None else {"train": train, "val": val}
    decode = config.check_images == "decode"
    found = comm.run_on_main(lambda: _remembered(sets, decode=decode, workers=workers))
    checked = {}
    for name, dataset in sets.items():
        bad = found["bad"][name]
        if bad and config.bad_images == "error":
            at, why, code = bad[0]
            fix = "remove it, or set data.bad_images: skip"
            raise DataError(why, code=code, where=dataset.records[at].path, fix=fix)
        unreadable = {**dataset.unreadable, **{at: why for at, why, _ in bad}}
        if len(unreadable) == len(dataset.records):
            at, why = next(iter(unreadable.items()))
            raise DataError(
                f"not one image can be used, first {dataset.records[at].path}: {why}",
                code="no_good_image",
                where=dataset.source,
            )
        checked[name] = replace(dataset, unreadable=unreadable)
    return Checked(checked["train"], checked.get("val"), tuple(found["lines"]))


def _remembered(sets: Mapping[str, DetectionSet], *, decode: bool, workers: int) -> dict[str, Any]:
    """The outcome of a check, from the last time where no file changed since.

    Returns: {"bad": split -> [position, why, kind] each, "lines": for the log}.
    """
    started = time.monotonic()
    records = {split: Records.of(dataset.records) for split, dataset in sets.items()}
    keys = {split: _keys(each, decode) for split, each in records.items()}
    kept = KeyedCache.of_user("checks", _MOST_BYTES, _say_unkept)
    certain = kept is not None and all((keys_N != _UNKNOWN).all() for keys_N in keys.values())
    name = "\n".join(os.path.abspath(dataset.source) for dataset in sets.values())
    key = f"{name}\n{_fingerprint(keys)}"
    stored = kept.get(key) if kept is not None and certain else None
    known = None if stored is None else json.loads(stored)
    again = " (unchanged since the last check)" if known else ""
    if known is None:
        journal = None if kept is None else kept.journal(name)
        earlier = _read_journal(journal)
        checks = {
            split: _Check(each, keys[split], earlier, journal, decode=decode, workers=workers)
            for split, each in records.items()
        }
        if done := sum(check.known for check in checks.values()):
            again = f" ({done} of them known from a check that was broken off)"
        try:
            checked = {split: check.run() for split, check in checks.items()}
            if comm.was_restarted():
                checked = {split: check.once_there() for split, check in checks.items()}
        finally:
            if journal is not None:
                journal.write()
        known = _outcome(sets, checked)
        passing = any(found.passing for images in checked.values() for _, found in images)
        if kept is not None and journal is not None and certain and not passing:
            kept.put(key, json.dumps(known).encode())
            journal.remove()
    count = sum(map(len, records.values()))
    seconds, what = time.monotonic() - started, "pixels" if decode else "headers"
    if not decode and any(storage.is_remote(d.records[0].path) for d in sets.values() if d.records):
        what = "headers (in an object store: only the listing)"
    said = "data check: %s of %d images in %.1f s%s"
    _LOGGER.info(said, what, count, seconds, again, extra=DETAIL)
    return known


def _say_unkept(why: str) -> None:
    _LOGGER.info("data check: not kept for the next time: %s", why)


class _Check:
    """Of the images of one split, before training.

    Attributes: known: how many were checked at an earlier start.
    """

    def __init__(
        self,
        records: Records,
        keys_N: np.ndarray,
        earlier: Mapping[int, ImageCheck],
        journal: Journal | None,
        *,
        decode: bool,
        workers: int,
    ) -> None:
        self._records, self._keys_N, self._journal = records, keys_N, journal
        self._decode, self._workers = decode, workers
        self._checks_N = [earlier.get(key) for key in keys_N.tolist()]
        self.known = sum(found is not None for found in self._checks_N)

    def run(self) -> CheckedImages:
        """All images but those that are known."""
        left = [at for at, found in enumerate(self._checks_N) if found is None]
        progress = Progress(_LOGGER, "data check", len(left))

        def told(number: int, found: ImageCheck) -> None:
            progress.add()
            key = int(self._keys_N[left[number]])
            if self._journal is not None and key != _UNKNOWN and not found.passing:
                problem = found.problem or ()
                self._journal.add(json.dumps([key, found.digest, found.notes, *problem]))

        files = _Files(self._records, left)
        checks = look_at(files, decode=self._decode, workers=self._workers, told=told)
        for at, found in zip(left, checks):
            self._checks_N[at] = found
        return [
            (self._records.path(at), found)
            for at, found in enumerate(self._checks_N)
            if found is not None
        ]

    def once_there(self) -> CheckedImages:
        """Checks anew what could not be opened; where storage is away, once it is back.

        For a job that was started anew: its images were there before.
        Raises: StorageError: it stays away.
        """
        failed = [at for at, found in enumerate(self._checks_N) if found and found.passing]
        path = self._records.path
        folder_of = [os.path.dirname(path(at)) for at in range(len(self._records))]

        def away() -> str:
            """A file is away with its storage where none of the first of its folder can be read."""
            for folder in dict.fromkeys(folder_of[at] for at in failed):
                inside = [path(at) for at, place in enumerate(folder_of) if place == folder]
                if not inside[1:]:  # it is alone there: any others of the set, or the folder
                    others = [path(at) for at in range(min(len(folder_of), _PROBED))]
                    inside = others if others[1:] else [folder]
                if not any(map(can_be_read, inside[:_PROBED])):
                    return f"{inside[0]}: cannot be read, though an earlier attempt of this job has"
            return ""

        if failed:
            comm.require_storage(away)
            for at in failed:
                self._checks_N[at] = None
        return self.run()


class _Files(Sequence[ImageFile]):
    """Some images of a set, each made when it is asked for: a list of a million takes 0.5 GB."""

    def __init__(self, records: Records, positions: Sequence[int]) -> None:
        self._records, self._positions = records, positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> ImageFile: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ImageFile]: ...
    def __getitem__(self, index: int | slice) -> ImageFile | Sequence[ImageFile]:
        if isinstance(index, slice):
            return _Files(self._records, self._positions[index])
        at = self._positions[index]
        height, width = self._records.sizes_N2[at].tolist()
        return ImageFile(self._records.path(at), (width, height) if width > 0 else None)


def _outcome(
    sets: Mapping[str, DetectionSet], checked: Mapping[str, CheckedImages]
) -> dict[str, Any]:
    bad, lines = {}, []
    for split, images in checked.items():
        problems = [
            (position, path, found.problem)
            for position, (path, found) in enumerate(images)
            if found.problem is not None
        ]
        bad[split] = [(position, problem.text, problem.code) for position, _, problem in problems]
        for kind, count in Counter(problem.code for _, _, problem in problems).items():
            first = [f"{path}: {of.text}" for _, path, of in problems if of.code == kind]
            what = KINDS[kind]
            follows = f"training: {what.training}"
            if split != "train" and what.evaluation:
                follows = what.evaluation
            lines.append(
                f"{sets[split].source}: {kind}: {count} of {len(images)} images: {what.meaning}; "
                f"{follows}; first: {'; '.join(first[:_EXAMPLES])}"
            )
    if "val" in checked and not same_list(checked["train"], checked["val"]):
        leaking = [*leaks(checked["train"], checked["val"])]
        if leaking:
            lines.append(
                f"leakage: {len(leaking)} of {len(checked['train'])} training images are in the "
                f"validation split too, by content: scores will be too good; "
                f"first: {', '.join(leaking[:_EXAMPLES])}"
            )
    return {"bad": bad, "lines": lines}


_PROBED = 8  # images of a folder that are opened to see whether its storage is there
_VERSION = 5  # of the kept result: raise it when a check of an image finds more
_STAT_THREADS = 16  # a network disk answers each request late, but many at once
_STATS_AT_ONCE = 64  # of a thread


def look_at_all(look: Callable[[int], int], count: int, progress: Progress) -> np.ndarray:
    """look(0), look(1), ..., each int64, by threads: for requests that a disk answers late."""
    found_N = np.zeros(count, np.int64)
    at_once = min(max(count // (8 * _STAT_THREADS), 1), _STATS_AT_ONCE)

    def look_at_some(begin: int) -> int:
        some = range(begin, min(count, begin + at_once))
        found_N[begin : some.stop] = [*map(look, some)]
        return len(some)

    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        for done in pool.map(look_at_some, range(0, count, at_once)):
            progress.add(done)
    return found_N


_UNKNOWN = 0  # key of an image of which nobody tells whether it changes
_MOST_BYTES = 1 << 30


def _keys(records: Records, decode: bool) -> np.ndarray:
    """Int64 [N]: of all that the check of each image depends on; _UNKNOWN: that cannot be told.

    That is its path, its annotated size, and its content identity (ctime: new permissions, too).
    """
    start = hashlib.blake2b(f"{_VERSION} {decode}".encode(), digest_size=8)

    def key(at: int) -> int:
        path = records.path(at)
        try:
            identity = storage.identity_of(path)
            if not identity.mark:
                return _UNKNOWN
            seen = " ".join(map(str, identity))
        except OSError:
            seen = "absent"
        height, width = records.sizes_N2[at].tolist()
        content = start.copy()
        content.update(os.fsencode(f"{path}\0{width} {height} {seen}"))
        return int.from_bytes(content.digest(), "little", signed=True)

    progress = Progress(_LOGGER, "data check: what has changed", len(records))
    return look_at_all(key, len(records), progress)


def _fingerprint(keys: Mapping[str, np.ndarray]) -> str:
    """Of everything that the outcome depends on."""
    summary = hashlib.blake2b(digest_size=16)
    for split, keys_N in keys.items():
        summary.update(f"\n{split}".encode() + keys_N.tobytes())
    return summary.hexdigest()


def _read_journal(journal: Journal | None) -> dict[int, ImageCheck]:
    """Checks of images by key, of an earlier start that was broken off."""
    found = {}
    for line in () if journal is None else journal.lines():
        key, digest, notes, *problem = json.loads(line)
        found[key] = ImageCheck(Damage(*problem) if problem else None, tuple(notes), digest)
    return found


_LEAVES_OUT = (  # the image
    "annotation_unreadable",
    "image_missing",
    "image_empty",
    "image_unreadable",
    "image_truncated",
    "pixel_kind",
    "image_crashes_decoder",
    "image_hangs_decoder",
    "size_mismatch",
    "image_objects_lost",  # last: whatever else keeps it out is the reason
)
_BY_WRITING = (  # done already: readers leave out what they cannot use, writers do it right
    "annotation_missing",
    "annotation_line",
    "encoding",
    "line_ends",
    "class_unknown",
    "outline_malformed",
    "area_invalid",
    "label_without_image",
    "label_shared",
    "image_unknown",
    "image_id_duplicate",
    "annotation_id_duplicate",
    "class_count_differs",
    "class_group",
    "class_names_same",
    "image_kind_unread",
    "size_missing",
    "path_outside",
    "image_unlisted",
)


class Cleaned(NamedTuple):
    """What `clean_copy` did.

    lines: one for each kind and split.  raws: split -> what was written of it.
    """

    lines: list[str]
    raws: dict[str, RawSet]


def clean_copy(report: Report, form: Format, out: Path, *, images: Images) -> Cleaned:
    """Writes both splits to a new folder, fixed as annotations.KINDS says.

    In the result `validate` finds only notes, and warnings of what the owner of the set alone can
    decide: classes of nearly one name, and one set for both splits.  The folder gets all of it, or
    nothing.

    Args:
        form: format to write, that of the data or another.
        out: a folder that is empty or not there yet.
        images: see `convert`.
    Raises: DataError: no good image or no object is left in a split, the classes of the splits
        differ, the format cannot hold them.  UserError: something cannot be written.
    """
    check_same_classes(report.splits["train"].raw, report.splits["val"].raw)
    lines, raws = [], {}
    for split, left_out in _left_out(report).items():
        validated = report.splits[split]
        done = Counter(left_out.values())
        raws[split] = _clean(validated.raw, left_out, done)
        if not raws[split].images:
            raise DataError(
                "not one image is good; nothing was written",
                code="no_good_image",
                where=validated.raw.source,
            )
        if not any(image.objects for image in raws[split].images):
            raise DataError(
                "not one object is good; nothing was written",
                code="objects_missing",
                where=validated.raw.source,
            )
        done.update(f.code for f in validated.issues if f.code in _BY_WRITING)
        done.update(  # where the reader left the image out
            issue.code
            for issue in validated.issues
            if issue.code == "annotation_unreadable" and issue.image not in left_out
        )
        lines += [
            f"{split}: {count} {kind}: {KINDS[kind].fix}"
            for kind, count in sorted(done.items(), key=lambda entry: [*KINDS].index(entry[0]))
        ]
    return Cleaned(lines + _write(raws, form, out, images), raws)


def _left_out(report: Report) -> dict[str, dict[str, str]]:
    """Split -> path -> kind of each image that does not go into the copy.

    First what cannot be used; of what stays, images of training that validation has; of what stays
    then, all but the first of equal ones: so one of them always stays.
    """
    train, val = report.splits["train"], report.splits["val"]
    result = {split: _bad(validated) for split, validated in report.splits.items()}

    def stays(split: str) -> list[tuple[str, ImageCheck]]:
        return [entry for entry in report.splits[split].images if entry[0] not in result[split]]

    if not same_list(train.images, val.images):
        result["train"] |= dict.fromkeys(leaks(stays("train"), stays("val")), "leakage")
    for split in result:
        result[split] |= dict.fromkeys(duplicates(stays(split)), "image_duplicate")
    return result


def _bad(validated: ValidatedSplit) -> dict[str, str]:
    listed = {path for path, _ in validated.images}
    return {
        issue.image: issue.code
        for issue in reversed(validated.issues)  # so that the first kind of each image counts
        if issue.code in _LEAVES_OUT and issue.image in listed
    }


def _clean(raw: RawSet, left_out: Mapping[str, str], done: Counter[str]) -> RawSet:
    kept: dict[str, RawImage] = {}
    for image in raw.images:
        path = str(image.path)
        if path in left_out:
            continue
        if path in kept:
            done["image_listed_twice"] += 1
            kept[path] = replace(kept[path], objects=kept[path].objects + image.objects)
        else:
            kept[path] = image
    images = [replace(image, objects=_good(image, done)) for image in kept.values()]
    return replace(raw, images=images)


def _good(image: RawImage, done: Counter[str]) -> list[RawObject]:
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


def _write(raws: Mapping[str, RawSet], form: Format, out: Path, images: Images) -> list[str]:
    """Under another name first: whatever fails, no half of it stays there."""
    make_folder(out)
    if any(out.iterdir()):
        raise DataError(
            "is not empty", code="folder_not_empty", where=str(out), fix="choose a new folder"
        )
    with writing(out):
        draft = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out))
    lines = []
    try:
        for split, raw in raws.items():
            done = convert(raw, form, draft, images=images, split=split)
            lines += [f"{split}: {line}" for line in done]
        with writing(out):
            for entry in sorted(draft.iterdir()):
                entry.rename(out / entry.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return lines


def duplicates(images: CheckedImages) -> dict[str, str]:
    """Path -> an earlier path with the same content."""
    result = {}
    for group in _same_content(images):
        first, *others = dict.fromkeys(images[position][0] for position in group)
        result.update(dict.fromkeys(others, first))
    return result


def leaks(train: CheckedImages, val: CheckedImages) -> dict[str, str]:
    """Path of a training image -> path of the same content in validation."""
    held = {path for path, _ in val}
    result = {path: path for path, _ in train if path in held}
    both = [*train, *val]
    for group in _same_content(both):
        held_there = [both[position][0] for position in group if position >= len(train)]
        if held_there:
            for position in group:
                if position < len(train):
                    result.setdefault(both[position][0], held_there[0])
    return result


def same_list(train: CheckedImages, val: CheckedImages) -> bool:
    """Whether both splits list the same files, or duplicates of them.

    Then somebody over-fits on purpose, and nothing leaks.
    """
    return len(train) == len(val) and all(
        path == other or (found.digest != "" and found.digest == duplicate.digest)
        for (path, found), (other, duplicate) in zip(train, val)
    )


def _same_content(images: CheckedImages) -> list[list[int]]:
    """Groups of positions whose files have equal content; each group has two paths or more."""
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for position, (_, found) in enumerate(images):
        if found.digest and not (found.problem and found.problem.code == "image_empty"):
            alike[found.digest].append(position)
    groups: defaultdict[tuple[str, bytes], list[int]] = defaultdict(list)
    for digest, positions in alike.items():
        if len({images[position][0] for position in positions}) > 1:
            for position in positions:
                groups[digest, _hash(images[position][0])].append(position)
    return [group for group in groups.values() if len({images[p][0] for p in group}) > 1]


def _hash(path: str) -> bytes:
    try:
        with open_file(path) as file:
            summary = hashlib.blake2b(digest_size=16)
            while block := file.read(1 << 20):
                summary.update(block)
            return summary.digest()
    except OSError:  # gone since it was checked
        return os.fsencode(path)


_AT_ONCE = 32  # files that a child is given at a time
_TRIES = 2  # a child that dies once may have been another's victim (out of memory)


def check_images(
    files: Sequence[ImageFile],
    *,
    decode: bool,
    workers: int,
    timeout: float = 60.0,
    told: Callable[[int, ImageCheck], object] = lambda at, found: None,
) -> list[ImageCheck]:
    """An ImageCheck of each file, in their order.

    It comes however many children crash or hang over it.

    Args:
        decode: see `check_image`.
        workers: child processes, at least 1.
        timeout: seconds after which a child that is at one file counts as hung.
        told: hears of each file that a child has checked; not of those that it was given up at.
    """
    checks: list[ImageCheck | None] = [None] * len(files)
    waiting = deque(range(len(files)))
    crashes: Counter[int] = Counter()
    children = [_Child(files, decode) for _ in range(min(max(workers, 1), -(-len(files) // 8)))]
    try:
        while any(child.busy for child in children) or waiting:
            for child in children:
                child.give(waiting)
            for position, found in _answers(children, timeout):
                checks[position] = found
                told(position, found)
            for number, child in enumerate(children):
                if child.ended is None:
                    continue
                position, *rest = child.busy
                waiting.extendleft(reversed(rest))
                crashes[position] += 1
                if child.ended.code == "image_hangs_decoder" or crashes[position] == _TRIES:
                    checks[position] = ImageCheck(child.ended, passing=True)
                else:
                    waiting.appendleft(position)
                child.stop()
                children[number] = _Child(files, decode)
    finally:
        for child in children:
            child.stop()
    return [found for found in checks if found is not None]


class _Child:
    """A process that checks files, and gives an answer for each."""

    def __init__(self, files: Sequence[ImageFile], decode: bool) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.busy: deque[int] = deque()
        self.since = time.monotonic()
        self.ended: Damage | None = None
        self._process = context.Process(
            target=_serve,
            args=(theirs, files, decode, os.getpid(), ends_with_this(signal.SIGKILL)),
            daemon=True,
        )
        with warnings.catch_warnings():  # Python 3.12 warns of forking beside threads of Paddle's,
            warnings.simplefilter("ignore", DeprecationWarning)  # which a child never touches
            self._process.start()
        theirs.close()

    def give(self, waiting: deque[int]) -> None:
        """Hands it work from the front when it has none."""
        if self.busy or self.ended or not waiting:
            return
        self.busy.extend(waiting.popleft() for _ in range(min(_AT_ONCE, len(waiting))))
        self.since = time.monotonic()
        try:
            self.pipe.send(list(self.busy))
        except OSError:  # it ended while it waited; take() will find out
            return

    def take(self) -> tuple[int, ImageCheck] | None:
        """An answer; None, and `ended`, when the process is no more."""
        try:
            position, found = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            self.ended = Damage("image_crashes_decoder", _how(self._process.exitcode))
            return None
        self.busy.popleft()
        self.since = time.monotonic()
        return position, found

    def stop(self) -> None:
        self._process.kill()
        self._process.join(1)  # one that waits for its disk for ever is left alone
        self.pipe.close()


def _answers(children: list[_Child], timeout: float) -> Iterator[tuple[int, ImageCheck]]:
    """Takes what the children have to say, or notes that one has been silent for too long."""
    ready = wait([child.pipe for child in children if child.busy], min(timeout, 1.0))
    for child in children:
        if child.pipe in ready:
            answer = child.take()
            if answer is not None:
                yield answer
        elif child.busy and time.monotonic() - child.since > timeout:
            child.ended = Damage("image_hangs_decoder", f"not decoded after {timeout:g} s")


def _how(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"decoding it ends the process with code {exitcode}"
    return f"decoding it kills the process ({signal.Signals(-exitcode).name})"


_FATAL = (
    signal.SIGTERM,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
)


def _serve(
    pipe: "Connection[Any, Any]",
    files: Sequence[ImageFile],
    decode: bool,
    parent: int,
    end_with_parent: Callable[[], None],
) -> None:
    """What a child does, until its parent is gone; amid an image, too, which may have no end."""
    end_with_parent()
    for fatal in _FATAL:  # no stack trace of Paddle's or Python's, and no core file
        signal.signal(fatal, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its children
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what decoders print of damaged files
    warnings.simplefilter("ignore")
    cv2.setNumThreads(0)
    Image.MAX_IMAGE_PIXELS = None
    while os.getppid() == parent:
        if not pipe.poll(1.0):
            continue
        for position in pipe.recv():
            pipe.send(
                (position, check_image(files[position].path, files[position].size, decode=decode))
            )


_HEAD, _TAIL = 64 * 1024, 8 * 1024  # bytes that a check of the header reads of a large file
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND"}  # of a JPEG, of a PNG


def check_image(path: str, size: tuple[int, int] | None, *, decode: bool) -> ImageCheck:
    """Checks one image file; never raises because of it.

    A decoder may crash or hang on it: `check_images` calls this in a child process.

    Args:
        size: (width, height) that the annotation says; None: not known.
        decode: all of its pixels; else its header and its end (0.1 to 0.4 ms), and
            all of it where these say that it cannot be used: the decoder has the last word.
    """
    try:
        with stores.patiently(lambda: open_file(path)) as file:
            return _check_content(file, path, size, decode)
    except FileNotFoundError:
        problem = Damage("image_missing", "does not exist")
    except OSError as error:
        problem = Damage("image_unreadable", error.strerror or str(error))
    except MemoryError:
        problem = Damage("image_unreadable", "not enough memory to decode it")
    return ImageCheck(problem, passing=True)


def _check_content(
    file: BinaryIO, path: str, size: tuple[int, int] | None, decode: bool
) -> ImageCheck:
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    whole = decode or length <= _HEAD + _TAIL
    head = file.read() if whole else file.read(_HEAD)
    tail = b""
    if not whole:
        file.seek(length - _TAIL)
        tail = file.read()
        if _ENDS.get(head[:2], b"") not in tail:  # no end, or further from the file's than usual
            file.seek(0)
            whole, head, tail = True, file.read(), b""
    digest = hashlib.blake2b(b"%d " % length + head + tail, digest_size=16)
    found = damage(head, length) if whole or head[:2] not in _ENDS else None
    if found is not None:
        return ImageCheck(found, digest=digest.hexdigest())
    header = _header(file, path, length)
    doubtful = header is None or header.cut_short or (size and size not in header.sizes)
    notes = header.notes if header else ()
    deep = "sixteen_bit" in notes  # what they use of it, only pixels tell
    if decode or doubtful or deep:
        found, image_HW3 = _decoded(path, size)
        if deep and image_HW3 is not None and is_dark(image_HW3):
            notes = (*notes, "dark_sixteen_bit")
    return ImageCheck(found, notes, digest.hexdigest())


# Of formats, by their names in Pillow; an MPO is a JPEG with more pictures behind it.
_SUFFIXES = {**FORMATS, "MPO": FORMATS["JPEG"]}
# Tags of TIFF: bits of each channel; where strips and tiles of pixels begin, and their bytes.
_BITS_PER_SAMPLE, _BEGINNINGS, _BYTES = 258, (273, 324), (279, 325)


class _Header(NamedTuple):
    """What is said of an image without decoding it.

    sizes: each (width, height) for which training surely takes the image, if it can decode it.
    cut_short: pixels should lie beyond the end of the file.
    """

    sizes: tuple[tuple[int, int], ...]
    cut_short: bool
    notes: tuple[str, ...]


def _header(file: BinaryIO, path: str, length: int) -> _Header | None:
    """None: it cannot be understood so (OpenCV may)."""
    frame = read_header(path)
    try:
        file.seek(0)
        first = file.read(26)
        file.seek(0)
        with Image.open(file) as image:
            tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
            bits = tags.get(_BITS_PER_SAMPLE, ())
            sixteen = first.startswith(b"\x89PNG") and first[24] == 16
            mode, suffix = image.mode, Path(path).suffix.lower()
            notes = {
                "wrong_extension": suffix not in _SUFFIXES.get(image.format or "", (suffix,)),
                "exif_orientation": frame is not None and frame.orientation != 1,
                "grey": mode in ("1", "L", "LA") or mode.startswith("I"),
                "alpha": mode in ("LA", "PA", "RGBA") or "transparency" in image.info,
                "sixteen_bit": sixteen or 16 in bits or mode.startswith("I;16"),
                "cmyk": mode == "CMYK",
            }
            cut_short = any(
                begin + count > length
                for begins, counts in zip(_BEGINNINGS, _BYTES)
                for begin, count in zip(tags.get(begins, ()), tags.get(counts, ()))
            )
    except Exception:  # Pillow's own bugs on damaged files are of many types
        return None
    if frame is None:
        return None
    # OpenCV turns a TIFF even when asked not to.
    sizes = (frame.upright,) if tags else (frame.upright, frame.stored)
    return _Header(sizes, cut_short, tuple(kind for kind, found in notes.items() if found))


# What libjpeg and libtiff print when they make up pixels; "extraneous bytes" does no harm.
_INVENTED = (b"premature end", b"bad Huffman", b"RST", b"Inconsistent progression", b"not yet in")


def _decoded(path: str, size: tuple[int, int] | None) -> tuple[Damage | None, np.ndarray | None]:
    """What makes an image unusable; else its pixels.

    Raises: OSError, MemoryError: it cannot be said.
    """
    with _stderr() as said:
        try:
            image_HW3 = read_image(path, None if size is None else size[::-1])
        except DataError as error:
            cause = error.__cause__
            if isinstance(cause, OSError):
                raise cause from None
            if isinstance(cause, cv2.error) and cause.code == cv2.Error.StsNoMem:
                raise MemoryError from error
            known = error.code in ("size_mismatch", "pixel_kind")
            return Damage(error.code if known else "image_unreadable", error.what), None
        said.seek(0)
        heard = said.read()
    if any(sign in heard for sign in _INVENTED):
        height, width = image_HW3.shape[:2]
        made_up = (
            f"pixel data of the {width}x{height} image is damaged; the decoder filled in a part"
        )
        return Damage("image_unreadable", made_up), None
    return None, image_HW3


@contextmanager
def _stderr() -> Iterator[BinaryIO]:
    """What native libraries print inside goes to the file that is given."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)
