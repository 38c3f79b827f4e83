"""All annotations of a split in a handful of flat arrays, which look like a list of records.

Workers are forked from the rank and see its memory until somebody writes to it.  Reading a Python
object writes to it: its reference count.  So a list of a million small arrays is copied into every
worker, page by page, within an epoch; twelve large ones never are.

    image n owns objects object_ends[n]..object_ends[n + 1], object m owns rings
    ring_ends[m]..ring_ends[m + 1] of its outline, ring r points point_ends[r]..point_ends[r + 1]
"""

import os
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import overload

import numpy as np

from ppdist.data.sample import ImageRecord


class Records(Sequence[ImageRecord]):
    """Annotations of N images with O objects in all; item n is made on the fly, in microseconds.

    Views of all at once, to be read only:
        sizes_N2: int64, (height, width) in pixels of the original; 0 where not known.
        image_ids_N: int64.
        counts_N: int64, objects of each image, crowds too.
        boxes_O4, labels_O, crowd_O, area_O: as in ImageRecord, image after image.
    """

    def __init__(self, records: Iterable[ImageRecord]) -> None:
        """Better `Records.of`.  Raises: OverflowError: an image id does not fit 64 bits."""
        paths: list[bytes] = []
        columns: tuple[list[np.ndarray], ...] = ([], [], [], [])
        outlines: list[tuple[tuple[np.ndarray, ...], ...]] = []
        numbers: list[tuple[int, int, int]] = []
        for one in records:
            paths.append(os.fsencode(one.path))
            numbers.append((one.image_id, one.height, one.width))
            arrays = one.boxes_M4, one.labels_M, one.crowd_M, one.area_M
            for column, array in zip(columns, arrays):
                column.append(array)
            outlines.append(one.polygons_M)
        number_N3 = np.array(numbers, np.int64).reshape(-1, 3)
        self.image_ids_N = _fixed(number_N3[:, 0])
        self.sizes_N2 = _fixed(number_N3[:, 1:])
        boxes, labels, crowds, areas = columns
        self.counts_N = _fixed(np.array([len(labels_M) for labels_M in labels], np.int64))
        self.boxes_O4 = _joined(boxes, np.zeros((0, 4), np.float32))
        self.labels_O = _joined(labels, np.zeros(0, np.int64))
        self.crowd_O = _joined(crowds, np.zeros(0, bool))
        self.area_O = _joined(areas, np.zeros(0, np.float32))
        self._object_ends = _ends(self.counts_N)
        self._paths = b"".join(paths)
        self._path_ends = _ends([len(path) for path in paths])
        self._keep_outlines(outlines)

    def _keep_outlines(self, outlines: list[tuple[tuple[np.ndarray, ...], ...]]) -> None:
        """Args: outlines: of each image; as a whole empty where it has no masks."""
        self._has_outlines = any(outlines)
        if self._has_outlines:
            of_objects = [
                rings
                for count, image in zip(self.counts_N, outlines)
                for rings in (image or ((),) * count)
            ]
        else:
            of_objects = []
        rings = list(chain.from_iterable(of_objects))
        self._points_Q2 = _joined(rings, np.zeros((0, 2), np.float32))
        self._point_ends = _ends([len(ring) for ring in rings])
        self._ring_ends = _ends([len(rings) for rings in of_objects])

    @classmethod
    def of(cls, records: Iterable[ImageRecord]) -> "Records":
        """The records in this form; what has it already is returned as it is.

        Give a generator where the records are needed in no other form.
        """
        return records if isinstance(records, cls) else cls(records)

    def __len__(self) -> int:
        return len(self.counts_N)

    @overload
    def __getitem__(self, index: int) -> ImageRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ImageRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> ImageRecord | tuple[ImageRecord, ...]:
        """Raises: IndexError: there is no such image."""
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

    def path(self, index: int) -> str:
        """The path of image `index` in [0, N), without the rest of its record."""
        begin, end = self._path_ends[index : index + 2].tolist()
        return os.fsdecode(self._paths[begin:end])

    def _outlines(self, begin: int, end: int) -> tuple[tuple[np.ndarray, ...], ...]:
        """Of the objects from `begin` to before `end`."""
        ring_ends = self._ring_ends[begin : end + 1].tolist()
        return tuple(
            tuple(self._ring(number) for number in range(first, last))
            for first, last in pairwise(ring_ends)
        )

    def _ring(self, number: int) -> np.ndarray:
        begin, end = self._point_ends[number : number + 2].tolist()
        return self._points_Q2[begin:end]


def _fixed(array: np.ndarray) -> np.ndarray:
    """The array on its own and not to be written to: a write in a worker would stay there alone."""
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array


def _joined(parts: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
    """Args: empty: what comes of no parts; it says shape and type."""
    return _fixed(np.concatenate([empty, *parts]).astype(empty.dtype, copy=False))


def _ends(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """[0, counts[0], counts[0] + counts[1], ...], int64."""
    return _fixed(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64))
