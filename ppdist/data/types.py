"""Data types: the contract between readers, loader, trainer and evaluator.

    file -> reader(complain) -> RawSet -> (data.bad_boxes) -> DetectionSet, for training
                                       -> a file of another format, for conversion
                                       -> a report, for a check
    DetectionSet -> sampler: SampleKey -> worker: Sample, Arrays, WorkerBatch -> Batch

A reader hands everything odd to `complain` as an Issue.  Training lets that raise, so it stops at
the first; a check collects them all, and the reader continues without the faulty part.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from paddle import Tensor

from ppdist.common.errors import DataError, StorageError
from ppdist.common.opener import DISK, Opener

Split = Literal["train", "val", "test"]
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing wrong, or worth knowing.

    code: a key of `KINDS` in datasets/annotations.py, and that of the error where training stops;
    what: a sentence for the user; image: path of the image it is about, "" where there is none;
    where: file, line or annotation.
    """

    code: str
    what: str
    image: str = ""
    where: str = ""

    @property
    def text(self) -> str:
        """`where: what`."""
        return f"{self.where}: {self.what}" if self.where else self.what


Complain = Callable[[Issue], None]


@dataclass(slots=True)
class RawObject:
    """One annotated object.

    box: x1 y1 x2 y2, pixels of the upright original, float64 as the file has them: not clipped, not
    ordered, perhaps not finite.  label in [0, C).  where: file, line or number, for messages.
    area: square pixels as the file has it.  polygons: each float64 [K, 2], x y, same pixels.
    extra: what else the file says of it, for a lossless conversion.
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
    """One listed image.

    width, height: pixels, as its annotation says (YOLO: as its file is).
    size_known: False if a YOLO image is absent or unreadable; its size is then 1x1.
    lost: annotated objects that its reader complained of and left out.
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
    """A split as its files say it.

    category_ids, source, opener: as in DetectionSet.
    extra, class_extras: what else the file says of the whole set and of each class (none: empty).
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
    """A split as its files give it, in columns, without Python objects.

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
        """Columns of a raw set.

        Args: masks: whether outlines are wanted.
        """
        images = raw.images
        things = [thing for image in images for thing in image.objects]
        return cls(
            paths=[str(image.path) for image in images],
            image_ids_N=np.array([image.image_id for image in images], np.int64),
            sizes_N2=_rows([(image.height, image.width) for image in images], 2, np.int64),
            size_known_N=np.array([image.size_known for image in images], bool),
            image_O=np.repeat(np.arange(len(images)), [len(image.objects) for image in images]),
            boxes_O4=_rows([thing.box for thing in things], 4, np.float64),
            labels_O=np.array([thing.label for thing in things], np.int64),
            crowd_O=np.array([thing.crowd for thing in things], bool),
            area_O=np.array([thing.area for thing in things], np.float64),
            where=lambda number: things[number].where,
            outlines=[thing.polygons for thing in things] if masks else None,
            class_names=raw.class_names,
            category_ids=raw.category_ids,
            source=raw.source,
        )

    def of_images(self, kept: Sequence[bool]) -> "RawColumns":
        """Columns of some of the images."""
        kept_N = np.array(kept, bool)
        if kept_N.all():
            return self
        kept_O = np.flatnonzero(kept_N[self.image_O])
        place_N, numbers = np.cumsum(kept_N) - 1, kept_O.tolist()
        whole = self
        return replace(
            self,
            paths=[path for path, keep in zip(self.paths, kept) if keep],
            image_ids_N=self.image_ids_N[kept_N],
            sizes_N2=self.sizes_N2[kept_N],
            size_known_N=self.size_known_N[kept_N],
            image_O=place_N[self.image_O[kept_O]],
            boxes_O4=self.boxes_O4[kept_O],
            labels_O=self.labels_O[kept_O],
            crowd_O=self.crowd_O[kept_O],
            area_O=self.area_O[kept_O],
            where=lambda number: whole.where(numbers[number]),
            outlines=self.outlines and [self.outlines[number] for number in numbers],
        )


def _rows(rows: Sequence[Sequence[float]], width: int, kind: type) -> np.ndarray:
    return np.array(rows, kind).reshape(-1, width)


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One annotated image.

    path is absolute.  boxes_M4 float32 xyxy in pixels of the original image, inside it; labels_M
    int64 in [0, C); crowd_M bool, a box around many objects at once; area_M float32 square pixels,
    COCO's `area` or else that of the box.
    polygons_M: the outlines of each object, float32 [K, 2] x y in the same pixels, none where there
    is no mask; empty as a whole where masks were not asked for.
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
    """Annotations of N images with O objects in all.

    A handful of flat arrays that looks like a list; item n is made in microseconds.  Workers are
    forked from the rank and see its memory until somebody writes to it.  Reading a Python object
    writes to it: its reference count.  So a list of a million small arrays is copied into every
    worker, page by page, within an epoch; twelve large ones never are.  The ranks of a host may
    have them all in one file (datasets/annotation_cache.py).

        image n owns objects object_ends[n]..object_ends[n + 1], object m owns rings
        ring_ends[m]..ring_ends[m + 1] of its outline, ring r points
        point_ends[r]..point_ends[r + 1]

    Views of all at once, to be read only:
        sizes_N2: int64, (height, width) in pixels of the original; 0 where not known.
        image_ids_N: int64.
        counts_N: int64, objects of each image, crowds too.
        boxes_O4, labels_O, crowd_O, area_O: as in ImageRecord, image after image.
    Attributes:
        arrays: all of them by name, as they are written to a file.
        file: path of the file that they are mapped from, "" for memory.
    """

    file = ""

    def __init__(self, records: Iterable[ImageRecord]) -> None:
        """Builds records; `Records.of` is better.

        Raises: OverflowError: an image id does not fit 64 bits.
        """
        paths: list[str] = []
        columns: tuple[list[np.ndarray], ...] = ([], [], [], [])
        outlines: list[tuple[tuple[np.ndarray, ...], ...]] = []
        numbers: list[tuple[int, int, int]] = []
        for one in records:
            paths.append(one.path)
            numbers.append((one.image_id, one.height, one.width))
            arrays = one.boxes_M4, one.labels_M, one.crowd_M, one.area_M
            for column, array in zip(columns, arrays):
                column.append(array)
            outlines.append(one.polygons_M)
        number_N3 = np.array(numbers, np.int64).reshape(-1, 3)
        boxes, labels, crowds, areas = columns
        counts_N = np.array([len(labels_M) for labels_M in labels], np.int64)
        of_objects = [
            rings for count, image in zip(counts_N, outlines) for rings in (image or ((),) * count)
        ]
        self._take(
            {
                **packed_paths(paths),
                "image_ids_N": number_N3[:, 0],
                "sizes_N2": number_N3[:, 1:],
                "counts_N": counts_N,
                "object_ends": ends(counts_N),
                "boxes_O4": _joined(boxes, np.zeros((0, 4), np.float32)),
                "labels_O": _joined(labels, np.zeros(0, np.int64)),
                "crowd_O": _joined(crowds, np.zeros(0, bool)),
                "area_O": _joined(areas, np.zeros(0, np.float32)),
                **(packed_outlines(of_objects) if any(outlines) else {}),
            }
        )

    def _take(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = {name: _fixed(array) for name, array in arrays.items()}
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
        """Records in this form; existing ones are returned unchanged.

        Give a generator where the records are needed in no other form.
        """
        return records if isinstance(records, cls) else cls(records)

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], file: str = "") -> "Records":
        """The records that have these `arrays`, which are not copied."""
        records = cls.__new__(cls)
        records.file = file
        records._take(arrays)
        return records

    def __len__(self) -> int:
        return len(self.counts_N)

    @overload
    def __getitem__(self, index: int) -> ImageRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ImageRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> ImageRecord | tuple[ImageRecord, ...]:
        """Record of an image, or a tuple of those of a slice.

        Raises: IndexError: there is no such image.
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
        """Position of the image that each object is in, int64 [O]."""
        return np.repeat(np.arange(len(self)), self.counts_N)

    def path(self, index: int) -> str:
        """Path of image `index` in [0, N), without the rest of it."""
        begin, end = self._path_ends[index : index + 2].tolist()
        return os.fsdecode(self._paths[begin:end].tobytes())

    def paths(self, begin: int = 0, end: int | None = None) -> list[str]:
        """Paths of images [begin, end), much faster than one by one."""
        end = len(self) if end is None else min(end, len(self))
        ends_N = self._path_ends[begin : end + 1]
        whole = self._paths[ends_N[0] : ends_N[-1]].tobytes()
        places = pairwise((ends_N - ends_N[0]).tolist())
        text = os.fsdecode(whole)
        if len(text) == len(whole):  # each byte is a character
            return [text[first:last] for first, last in places]
        return [os.fsdecode(whole[first:last]) for first, last in places]

    def _outlines(self, begin: int, end: int) -> tuple[tuple[np.ndarray, ...], ...]:
        """Outlines of the objects from `begin` to before `end`."""
        ring_ends = self.arrays["ring_ends"][begin : end + 1].tolist()
        point_ends, points_Q2 = self.arrays["point_ends"], self.arrays["points_Q2"]
        return tuple(
            tuple(points_Q2[slice(*point_ends[at : at + 2].tolist())] for at in range(first, last))
            for first, last in pairwise(ring_ends)
        )


def packed_paths(paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Path arrays for `Records.arrays`: all bytes, and where each path ends."""
    encoded = [os.fsencode(path) for path in paths]
    whole = np.frombuffer(b"".join(encoded), np.uint8)
    return {"paths": whole, "path_ends": ends([len(path) for path in encoded])}


def packed_outlines(outlines: Sequence[tuple[np.ndarray, ...]]) -> dict[str, np.ndarray]:
    """Outline arrays for `Records.arrays`.

    Args: outlines: the rings of each of the O objects, float32 [K, 2].
    """
    rings = list(chain.from_iterable(outlines))
    return {
        "points_Q2": _joined(rings, np.zeros((0, 2), np.float32)),
        "point_ends": ends([len(ring) for ring in rings]),
        "ring_ends": ends([len(rings) for rings in outlines]),
    }


def _fixed(array: np.ndarray) -> np.ndarray:
    """Read-only copy of an array: a write would stay in one worker."""
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array


def _joined(parts: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
    """Parts joined in the type of `empty`.

    Args: empty: what comes of no parts; it says shape and type.
    """
    return np.concatenate([empty, *parts]).astype(empty.dtype, copy=False)


def ends(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """[0, counts[0], counts[0] + counts[1], ...], int64."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


@dataclass(frozen=True)
class DetectionSet:
    """A split: its images and what its classes are called.

    category_ids: what a COCO result file calls each class; source: the file or folder that a
    message about this set names; notes: one line for each kind of defect corrected;
    limited: a line about `data.*.limit`, empty where none is set; unreadable: position in records
    -> why that image is never to be opened (a check found it), without its path, which may be
    another on another host; duplicates: position in records -> how many boxes of that image were
    left out because they repeat another of its class; opener: of its images.
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


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Everything a worker needs to make one sample.

    index -1 stands for no image (padding).  copy: 0, 1, ... where an epoch has an image more than
    once.
    """

    epoch: int
    index: int
    height: int
    width: int
    copy: int = 0

    @property
    def rng_key(self) -> tuple[int, ...]:
        """What a sample's random numbers depend on, besides the seed."""
        return (self.epoch, self.index, self.copy) if self.copy else (self.epoch, self.index)


def keyed_generator(seed: int, *key: int) -> np.random.Generator:
    """A random generator that is a function of (seed, key) alone.

    It is the same on every machine.  Keys of different length never give the same stream
    (SeedSequence's spawn_key).
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


@dataclass(frozen=True)
class Sample:
    """One image at input size and its objects.

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
    """What came of the keys of a batch.

    arrays: None if an error is given; problems: lines to warn of; bad_images: position in the set's
    records -> why, without the path, of those that could not be used; user_error: a user's mistake,
    or None; our_error: our own as text with its traceback, or "".  outage: why the arrays are those
    of one blank image: storage has stayed away.  All of it crosses processes.
    """

    arrays: Arrays | None
    problems: list[str]
    bad_images: dict[int, str]
    user_error: DataError | None = None
    our_error: str = ""
    outage: StorageError | None = None


@dataclass(frozen=True)
class Batch:
    """One rank's micro-batch, boxes padded to the same number.

    images_B3HW: uint8 RGB.
    boxes_BM4: float32 xyxy in input pixels, zero padded; M >= 1 even without any object.
    labels_BM: int64; mask_BM: float32, 1 for a box, 0 for padding.
    image_index_B: int64 position in DetectionSet.records, -1 for padding.
    scale_B2, offset_B2: float32 (y, x): original pixels * scale + offset = input pixels; in
        evaluation only (training: ones and zeros).
    seeds_B: int64, on the host, >= 0: of what a model draws at random for each image in training, a
        function of (seed, epoch, index, copy) as the image is (evaluation and padding: 0).
    real: False for a batch of one blank image, which only keeps a rank in step with the others
        where there are too few images or micro-batches for all.
    bad_images: position in DetectionSet.records -> why, of the images met here that could not be
        used; the path, which may differ between hosts, is not part of why.
    missing: why the images of this rank stay away, which the blank one stands for; None: they are
        here, or there is none for it.
    number: of the micro-batch in its step, the same on any number of ranks.
    share: of the micro-batch that is this rank's: 1 for all of it, or for an even share.
    """

    images_B3HW: Tensor
    boxes_BM4: Tensor
    labels_BM: Tensor
    mask_BM: Tensor
    image_index_B: Tensor
    scale_B2: Tensor
    offset_B2: Tensor
    seeds_B: np.ndarray
    real: bool = True
    bad_images: Mapping[int, str] = field(default_factory=dict)
    missing: StorageError | None = None
    number: int = 0
    share: float = 1.0

    def positions(self) -> list[int]:
        """Positions of its images in DetectionSet.records, on the host."""
        return [int(index) for index in self.image_index_B.numpy().ravel() if index >= 0]


class ImagesUnavailable(StorageError):
    """The storage of images has stayed away.

    Attributes:
        blank: replaces a missing batch, so that a rank reaches every collective.
    """

    def __init__(self, why: StorageError, blank: Batch) -> None:
        super().__init__(why.what, code=why.code, where=why.where, fix=why.fix)
        self.blank = blank
