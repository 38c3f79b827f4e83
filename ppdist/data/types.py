"""Data types: the contract between readers, loader, trainer and evaluator.

    file -> reader(complain) -> RawSet -> (data.bad_boxes) -> DetectionSet, for training
                                       -> a file of another format, for conversion
                                       -> a report, for a check
    DetectionSet -> sampler: SampleKey -> worker: Sample, Arrays, WorkerBatch -> Batch

A reader passes every problem to `complain` as an Issue.  In training that raises, so it stops at
the first; a check collects all of them, and the reader continues without the faulty part.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from ppdist.common.errors import DataError, StorageError
from ppdist.common.opener import DISK, Opener

if TYPE_CHECKING:  # sets are drawn, read and checked without Paddle, whose import takes seconds
    from paddle import Tensor

Split = Literal["train", "val", "test"]
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Issue:
    """A problem of a data set, or a fact worth knowing about it.

    code: a key of `KINDS` in datasets/annotations.py, and the code of the error if training stops;
    what: a sentence for the user; image: path of the image it is about, "" if there is none;
    where: file, line or annotation; fix: what to do where leaving out the faulty parts is wrong.
    """

    code: str
    what: str
    image: str = ""
    where: str = ""
    fix: str = ""

    @property
    def text(self) -> str:
        """Returns `where: what; fix`, without what is empty."""
        place, remedy = f"{self.where}: " * bool(self.where), f"; {self.fix}" * bool(self.fix)
        return f"{place}{self.what}{remedy}"


Complain = Callable[[Issue], None]


@dataclass(slots=True)
class RawObject:
    """An annotated object.

    box: x1 y1 x2 y2, pixels of the upright original, float64 as in the file: not clipped, not
    ordered, perhaps not finite.  label in [0, C).  where: file, line or number, for messages.
    area: square pixels as in the file.  polygons: each float64 [K, 2], x y, same pixels.
    extra: other fields of the annotation, for a lossless conversion.
    """

    box: Box
    label: int
    where: str
    crowd: bool = False
    area: float | None = None
    polygons: tuple[np.ndarray, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RawImage:
    """An image listed in the files of a set.

    width, height: pixels, from its annotation (YOLO: from its file).
    size_known: False if a YOLO image is absent or unreadable; its size is then 1x1.
    lost: annotated objects that the reader left out with an issue.
    """

    path: Path
    image_id: int
    width: int
    height: int
    objects: list[RawObject]
    where: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    size_known: bool = True
    lost: int = 0


@dataclass(slots=True)
class RawSet:
    """A split as its files describe it.

    category_ids, source, opener: as in DetectionSet.
    extra, class_extras: other fields of the file about the set and about each class (empty: none).
    """

    images: list[RawImage]
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    source: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    class_extras: tuple[Mapping[str, Any], ...] = ()
    opener: Opener = DISK


@dataclass(slots=True)
class RawColumns:
    """A split as its files describe it, in columns instead of Python objects.

    paths: of the N images, as RawImage has them; image_ids_N, sizes_N2 (height, width; pixels):
    int64.  size_known_N: as in RawImage.
    Of the O objects, in any order: image_O, the position of its image, boxes_O4 and area_O (NaN:
    none) float64, labels_O int64, crowd_O bool: all as in RawObject.  where: of an object, for
    messages.  outlines: the rings of each object; None: not needed.
    class_names, category_ids, source: as in DetectionSet.
    """

    paths: Sequence[str]
    image_ids_N: np.ndarray
    sizes_N2: np.ndarray
    size_known_N: np.ndarray
    image_O: np.ndarray
    boxes_O4: np.ndarray
    labels_O: np.ndarray
    crowd_O: np.ndarray
    area_O: np.ndarray
    where: Callable[[int], str]
    outlines: Sequence[tuple[np.ndarray, ...]] | None
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    source: str

    @classmethod
    def of(cls, raw: RawSet, *, masks: bool) -> "RawColumns":
        """Converts a raw set to columns.

        Args: masks: True to convert outlines, too.
        """
        images = raw.images
        objects = [annotation for image in images for annotation in image.objects]
        return cls(
            paths=[str(image.path) for image in images],
            image_ids_N=np.array([image.image_id for image in images], np.int64),
            sizes_N2=_rows([(image.height, image.width) for image in images], 2, np.int64),
            size_known_N=np.array([image.size_known for image in images], bool),
            image_O=np.repeat(np.arange(len(images)), [len(image.objects) for image in images]),
            boxes_O4=_rows([annotation.box for annotation in objects], 4, np.float64),
            labels_O=np.array([annotation.label for annotation in objects], np.int64),
            crowd_O=np.array([annotation.crowd for annotation in objects], bool),
            area_O=np.array([annotation.area for annotation in objects], np.float64),
            where=lambda number: objects[number].where,
            outlines=[annotation.polygons for annotation in objects] if masks else None,
            class_names=raw.class_names,
            category_ids=raw.category_ids,
            source=raw.source,
        )

    def select_images(self, is_kept: Sequence[bool]) -> "RawColumns":
        """Selects some of the images, with their objects."""
        kept_N = np.array(is_kept, bool)
        if kept_N.all():
            return self
        selected = self.select_objects(kept_N[self.image_O])
        place_N = np.cumsum(kept_N) - 1
        return replace(
            selected,
            paths=[path for path, keep in zip(self.paths, is_kept) if keep],
            image_ids_N=self.image_ids_N[kept_N],
            sizes_N2=self.sizes_N2[kept_N],
            size_known_N=self.size_known_N[kept_N],
            image_O=place_N[selected.image_O],
        )

    def select_objects(self, is_kept_O: np.ndarray) -> "RawColumns":
        """Selects some of the objects; all images stay."""
        kept_O = np.flatnonzero(is_kept_O)
        numbers, original = kept_O.tolist(), self
        return replace(
            self,
            image_O=self.image_O[kept_O],
            boxes_O4=self.boxes_O4[kept_O],
            labels_O=self.labels_O[kept_O],
            crowd_O=self.crowd_O[kept_O],
            area_O=self.area_O[kept_O],
            where=lambda number: original.where(numbers[number]),
            outlines=self.outlines and [self.outlines[number] for number in numbers],
        )


def _rows(rows: Sequence[Sequence[float]], width: int, kind: type) -> np.ndarray:
    return np.array(rows, kind).reshape(-1, width)


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """An annotated image.

    path is absolute.  boxes_M4 float32 xyxy in pixels of the original image, inside it; labels_M
    int64 in [0, C); crowd_M bool, a box around many objects at once; area_M float32 square pixels,
    COCO's `area` or else that of the box.
    polygons_M: the outlines of each object, float32 [K, 2] x y in the same pixels, none if it has
    no mask; an empty tuple if masks were not requested.
    """

    path: str
    image_id: int
    width: int
    height: int
    boxes_M4: np.ndarray
    labels_M: np.ndarray
    crowd_M: np.ndarray
    area_M: np.ndarray
    polygons_M: tuple[tuple[np.ndarray, ...], ...] = ()


class Records(Sequence[ImageRecord]):
    """The annotations of N images with O objects in all.

    A dozen flat arrays that look like a list; element n is made in microseconds.  Workers are
    forked from the rank and share its memory until one writes to it.  Reading a Python object
    writes its reference count, so a list of a million small arrays would be copied into every
    worker, page by page, within an epoch; twelve large ones never are.  The ranks of a host may map
    them from one file (datasets/annotation_cache.py).

        image n owns objects object_ends[n]..object_ends[n + 1], object m owns rings
        ring_ends[m]..ring_ends[m + 1] of its outline, ring r points
        point_ends[r]..point_ends[r + 1]

    Views of all images, read-only:
        sizes_N2: int64, (height, width) in pixels of the original; 0 if unknown.
        image_ids_N: int64.
        counts_N: int64, objects of each image, crowds too.
        boxes_O4, labels_O, crowd_O, area_O: as in ImageRecord, image after image.
    Attributes:
        arrays: all arrays by name, as they are written to a file.
        file: path of the file that they are mapped from, "" for memory.
    """

    file = ""

    def __init__(self, records: Iterable[ImageRecord]) -> None:
        """Builds records; prefer `Records.of`.

        Raises: OverflowError: an image id does not fit 64 bits.
        """
        paths: list[str] = []
        columns: tuple[list[np.ndarray], ...] = ([], [], [], [])
        outlines: list[tuple[tuple[np.ndarray, ...], ...]] = []
        numbers: list[tuple[int, int, int]] = []
        for record in records:
            paths.append(record.path)
            numbers.append((record.image_id, record.height, record.width))
            arrays = record.boxes_M4, record.labels_M, record.crowd_M, record.area_M
            for column, array in zip(columns, arrays):
                column.append(array)
            outlines.append(record.polygons_M)
        number_N3 = np.array(numbers, np.int64).reshape(-1, 3)
        boxes, labels, crowds, areas = columns
        counts_N = np.array([len(labels_M) for labels_M in labels], np.int64)
        of_objects = [
            # An image without outlines has an empty entry for each object.
            rings
            for count, image in zip(counts_N, outlines)
            for rings in (image or ((),) * count)
        ]
        self._set_arrays(
            {
                **pack_paths(paths),
                "image_ids_N": number_N3[:, 0],
                "sizes_N2": number_N3[:, 1:],
                "counts_N": counts_N,
                "object_ends": cumulative_ends(counts_N),
                "boxes_O4": _concatenate(boxes, np.zeros((0, 4), np.float32)),
                "labels_O": _concatenate(labels, np.zeros(0, np.int64)),
                "crowd_O": _concatenate(crowds, np.zeros(0, bool)),
                "area_O": _concatenate(areas, np.zeros(0, np.float32)),
                **(pack_outlines(of_objects) if any(outlines) else {}),
            }
        )

    def _set_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = {name: _freeze(array) for name, array in arrays.items()}
        self.image_ids_N = self.arrays["image_ids_N"]
        self.sizes_N2 = self.arrays["sizes_N2"]
        self.boxes_O4 = self.arrays["boxes_O4"]
        self.labels_O = self.arrays["labels_O"]
        self.crowd_O = self.arrays["crowd_O"]
        self.area_O = self.arrays["area_O"]
        self.counts_N, self._object_ends = self.arrays["counts_N"], self.arrays["object_ends"]
        self._paths, self._path_ends = self.arrays["paths"], self.arrays["path_ends"]
        self._has_outlines = "points_Q2" in self.arrays

    @classmethod
    def of(cls, records: Iterable[ImageRecord]) -> "Records":
        """Converts records to this class; returns an instance of it unchanged.

        Pass a generator if the records are needed in no other form.
        """
        return records if isinstance(records, cls) else cls(records)

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], file: str = "") -> "Records":
        """Creates records from their `arrays`, without copying the arrays."""
        records = cls.__new__(cls)
        records.file = file
        records._set_arrays(arrays)
        return records

    def __len__(self) -> int:
        return len(self.counts_N)

    @overload
    def __getitem__(self, index: int) -> ImageRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ImageRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> ImageRecord | tuple[ImageRecord, ...]:
        """Returns the record of an image, or a tuple of records for a slice.

        Raises: IndexError: the index is out of range.
        """
        if isinstance(index, slice):
            return tuple(self[position] for position in range(*index.indices(len(self))))
        position = range(len(self))[index]
        begin, end = self._object_ends[position : position + 2].tolist()
        height, width = self.sizes_N2[position].tolist()
        return ImageRecord(
            path=self.path(position),
            image_id=int(self.image_ids_N[position]),
            width=width,
            height=height,
            boxes_M4=self.boxes_O4[begin:end],
            labels_M=self.labels_O[begin:end],
            crowd_M=self.crowd_O[begin:end],
            area_M=self.area_O[begin:end],
            polygons_M=self._outlines(begin, end) if self._has_outlines else (),
        )

    @property
    def image_O(self) -> np.ndarray:
        """Returns the position of the image of each object, int64 [O]."""
        return np.repeat(np.arange(len(self)), self.counts_N)

    def path(self, index: int) -> str:
        """Returns the path of image `index` in [0, N), without building its record."""
        begin, end = self._path_ends[index : index + 2].tolist()
        return os.fsdecode(self._paths[begin:end].tobytes())

    def paths(self, begin: int = 0, end: int | None = None) -> list[str]:
        """Returns the paths of images [begin, end), much faster than one by one."""
        end = len(self) if end is None else min(end, len(self))
        ends_N = self._path_ends[begin : end + 1]
        content = self._paths[ends_N[0] : ends_N[-1]].tobytes()
        places = pairwise((ends_N - ends_N[0]).tolist())
        text = os.fsdecode(content)
        if len(text) == len(content):  # ASCII: byte positions are character positions
            return [text[first:last] for first, last in places]
        return [os.fsdecode(content[first:last]) for first, last in places]

    def _outlines(self, begin: int, end: int) -> tuple[tuple[np.ndarray, ...], ...]:
        """Returns the outlines of the objects [begin, end)."""
        ring_ends = self.arrays["ring_ends"][begin : end + 1].tolist()
        point_ends, points_Q2 = self.arrays["point_ends"], self.arrays["points_Q2"]
        return tuple(
            tuple(
                points_Q2[slice(*point_ends[ring : ring + 2].tolist())]
                for ring in range(first, last)
            )
            for first, last in pairwise(ring_ends)
        )


def pack_paths(paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Packs paths for `Records.arrays`: their bytes, and where each path ends."""
    encoded = [os.fsencode(path) for path in paths]
    content = np.frombuffer(b"".join(encoded), np.uint8)
    return {"paths": content, "path_ends": cumulative_ends([len(path) for path in encoded])}


def pack_outlines(outlines: Sequence[tuple[np.ndarray, ...]]) -> dict[str, np.ndarray]:
    """Packs outlines for `Records.arrays`.

    Args: outlines: the rings of each of the O objects, float32 [K, 2].
    """
    rings = list(chain.from_iterable(outlines))
    return {
        "points_Q2": _concatenate(rings, np.zeros((0, 2), np.float32)),
        "point_ends": cumulative_ends([len(ring) for ring in rings]),
        "ring_ends": cumulative_ends([len(rings) for rings in outlines]),
    }


def _freeze(array: np.ndarray) -> np.ndarray:
    """Returns a read-only copy of an array: a write would only affect one worker."""
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array


def _concatenate(parts: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
    """Concatenates arrays, with the dtype of `empty`.

    Args: empty: the result if there are no arrays; determines shape and dtype.
    """
    # With `empty`, as numpy refuses to concatenate nothing.
    return np.concatenate([empty, *parts]).astype(empty.dtype, copy=False)


def cumulative_ends(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns [0, counts[0], counts[0] + counts[1], ...], int64."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


@dataclass(frozen=True)
class DetectionSet:
    """A split: its images and the names of its classes.

    category_ids: of each class in a COCO result file; source: the file or folder that messages
    about this set name; notes: one line for each kind of corrected defect; limited: a line about
    `data.*.limit`, "" if none is set; unreadable: position in records -> why a check found that
    image unreadable, so that it is never opened, without its path, which may differ between hosts;
    duplicates: position in records -> number of boxes of that image left out because they repeat
    another of its class; opener: of its images.
    """

    records: Sequence[ImageRecord]
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    source: str
    notes: tuple[str, ...] = ()
    limited: str = ""
    unreadable: Mapping[int, str] = field(default_factory=dict)
    duplicates: Mapping[int, int] = field(default_factory=dict)
    opener: Opener = DISK

    @property
    def first_readable(self) -> str:
        """Returns the path of the first image that is not known to be unreadable; "" if none."""
        indices = range(len(self.records))
        readable = (self.records[index].path for index in indices if index not in self.unreadable)
        return next(readable, "")


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Everything a worker needs to build one sample.

    index -1 stands for no image (padding).  copy: 0, 1, ... if an epoch has an image more than
    once.
    """

    epoch: int
    index: int
    height: int
    width: int
    copy: int = 0

    @property
    def rng_key(self) -> tuple[int, ...]:
        """Returns the key of the random numbers of a sample, used with the seed."""
        return (self.epoch, self.index, self.copy) if self.copy else (self.epoch, self.index)


def keyed_generator(seed: int, *key: int) -> np.random.Generator:
    """Creates a random generator that is a function of (seed, key) alone.

    It is the same on every machine.  Keys of different length never give the same stream
    (SeedSequence's spawn_key).
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


@dataclass(frozen=True)
class Sample:
    """An image at input size and its objects.

    seed: see `Batch.seeds_B`.
    """

    image_HW3: np.ndarray
    boxes_M4: np.ndarray
    labels_M: np.ndarray
    index: int
    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0.0, 0.0)
    seed: int = 0


class Arrays(NamedTuple):
    """A batch in numpy; see Batch."""

    images_B3HW: np.ndarray
    boxes_BM4: np.ndarray
    labels_BM: np.ndarray
    mask_BM: np.ndarray
    image_index_B: np.ndarray
    scale_B2: np.ndarray
    offset_B2: np.ndarray
    seeds_B: np.ndarray


NOTHING = -1  # no record is being read
HUNG = 255  # blocklist: not a signal, but none at all for too long
EXITED = 254  # blocklist: not a signal either, but an exit


class WorkerBatch(NamedTuple):
    """The result of a worker for the keys of a batch.

    arrays: None if there is an error; problems: lines to warn of; bad_images: position in the set's
    records -> why that image could not be used, without its path; user_error: a user's mistake, or
    None; our_error: a bug, as text with its traceback, or "".  outage: storage has stayed
    unavailable, and the arrays are those of one blank image.  All fields cross processes.
    """

    arrays: Arrays | None
    problems: list[str]
    bad_images: dict[int, str]
    user_error: DataError | None = None
    our_error: str = ""
    outage: StorageError | None = None


@dataclass(frozen=True)
class Batch:
    """The micro-batch of a rank, with boxes padded to the same number.

    images_B3HW: uint8 RGB.
    boxes_BM4: float32 xyxy in input pixels, zero padded; M >= 1 even without any object.
    labels_BM: int64; mask_BM: float32, 1 for a box, 0 for padding.
    image_index_B: int64 position in DetectionSet.records, -1 for padding.
    scale_B2, offset_B2: float32 (y, x): original pixels * scale + offset = input pixels; in
        evaluation only (training: ones and zeros).
    seeds_B: int64, on the host, >= 0: seeds for what a model draws at random for each image in
        training, a function of (seed, epoch, index, copy); 0 in evaluation and padding.
    real: False for a batch of one blank image, with which a rank takes part in the collectives if
        there are too few images or micro-batches for all.
    bad_images: position in DetectionSet.records -> why that image could not be used, without its
        path, which may differ between hosts.
    missing: why this rank's images are unavailable, so that it has a blank image instead; None:
        they are available, or this rank has none.
    number: number of the micro-batch in its step, the same for any number of ranks.
    share: this rank's share of the micro-batch: 1 for all of it, or for an even share.
    """

    images_B3HW: "Tensor"
    boxes_BM4: "Tensor"
    labels_BM: "Tensor"
    mask_BM: "Tensor"
    image_index_B: "Tensor"
    scale_B2: "Tensor"
    offset_B2: "Tensor"
    seeds_B: np.ndarray
    real: bool = True
    bad_images: Mapping[int, str] = field(default_factory=dict)
    missing: StorageError | None = None
    number: int = 0
    share: float = 1.0

    def positions(self) -> list[int]:
        """Returns the positions of the batch's images in DetectionSet.records, on the host."""
        return [int(index) for index in self.image_index_B.numpy().ravel() if index >= 0]


class ImagesUnavailable(StorageError):
    """The error of images whose storage has stayed unavailable.

    Attributes:
        blank: replaces a missing batch, so that a rank reaches every collective.
    """

    def __init__(self, outage: StorageError, blank: Batch) -> None:
        super().__init__(outage.what, code=outage.code, where=outage.where, fix=outage.fix)
        self.blank = blank
