"""Pipeline from a key to a transformed sample, in training and evaluation.

    key -> one image, or several (mosaic) -> GEOMETRY_STEPS -> one resampling each
        -> copy_paste, cutmix, mixup with others made like it -> PIXEL_STEPS

Geometry is settled first, on sizes and boxes; pixels come last.  What a sample becomes is a
function of (seed, epoch, index), its partners too.  Runs in the loader's workers, so everything
here is numpy.
"""

import errno
import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import cv2
import numpy as np

from ppdist.common.addresses import is_remote
from ppdist.common.errors import DataError, StorageError
from ppdist.common.retry import TOLD_SECONDS, is_outage, unavailable, with_retries
from ppdist.config.augment import AugmentConfig
from ppdist.config.data import Resize
from ppdist.data.image import DARK, read_image, reduction
from ppdist.data.transforms.color import augment_pixels, random_colours
from ppdist.data.transforms.geometry import (
    GeometryParams,
    MosaicCanvas,
    ResizeParams,
    SourceImage,
    between,
    fitted,
    map_boxes,
    random_geometry,
    random_interpolation,
    random_turn,
    render,
    resize_for_evaluation,
    turned_sides,
)
from ppdist.data.transforms.mix import (
    MOSAIC_IMAGES,
    PasteSource,
    Slot,
    copy_paste,
    cutmix,
    mixup,
    random_layout,
)
from ppdist.data.types import (
    EXITED,
    HUNG,
    NOTHING,
    Arrays,
    DetectionSet,
    ImageRecord,
    Records,
    Sample,
    SampleKey,
    WorkerBatch,
    keyed_generator,
)

_AUGMENT, _SEEDS = 2, 4  # streams of random numbers, beside the sampler's
_MOST_REPLACEMENTS = 100
_NEAR, _PROBED = 64, 8  # records among which others of a folder are looked for; so many are opened
_BOX_ROUNDING = 8  # boxes per image are padded to a multiple, so that shapes repeat


class ImageCache(Protocol):
    """Images of a set by position; `data/cache.py` has some."""

    def get(self, index: int) -> np.ndarray | None: ...
    def put(self, index: int, image_HW3: np.ndarray) -> None: ...


class Samples:
    """Makes whole micro-batches of keys.

    reading: int64 [1], position of the record that is being read, or NOTHING; beat: float64 [1],
    when reading one last began (time.monotonic); blocklist_N: uint8, what twice came of reading a
    record: 0, a signal, HUNG or EXITED; awaited: int64 [2], position of the record whose storage is
    waited for, or NOTHING, and the errno.  A worker has all in memory that it shares with its rank,
    which thus knows what a worker died of, that it hangs or waits.

    Every image was there at the start (`check_files`).  So one that cannot be opened, with others
    of its folder that can, was deleted or damaged; where none can, their storage is away: it is
    waited for, and samples are what they would have been.  pause: waits so many seconds.
    waits_aborted: uint8 [1], shared too: 1 once the run is to stop, so that nothing waits for
    storage any more.  waited: float64 [2], shared too: seconds waited of late, and until when
    (time.monotonic); time without a wait takes off as much.  So storage that comes and goes
    never holds a step up for longer than storage that stays away.
    """

    def __init__(
        self,
        dataset: DetectionSet,
        bad_images: str,
        *,
        reductions_N: np.ndarray | None = None,
        cache: ImageCache | None = None,
        storage_seconds: float = 0.0,
    ) -> None:
        """
        Args:
            bad_images: what to do about an image that cannot be read: `skip` or `error`.
            reductions_N: uint8, how far each image is reduced when it is read; None: not at all.
            cache: of images reduced like this.
            storage_seconds: how long storage that is away is waited for.
        """
        self.reading = np.full(1, NOTHING, np.int64)
        self.awaited = np.full(2, NOTHING, np.int64)
        self.pause: Callable[[float], None] = time.sleep
        self.waits_aborted = np.zeros(1, np.uint8)
        self.waited = np.zeros(2)
        self.storage_seconds = storage_seconds
        self.beat = np.zeros(1)
        self.blocklist_N = np.zeros(len(dataset.records), np.uint8)
        self._dataset = dataset
        self._bad_images = bad_images
        self._reductions_N = (
            np.ones(len(dataset.records), np.uint8) if reductions_N is None else reductions_N
        )
        self._cache = cache
        self._last: tuple[int, ImageRecord] | None = None
        self._problems: list[str] = []  # of this batch
        self._bad: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._dataset.records)

    def path(self, index: int) -> str:
        """Path of the image of a record."""
        return self._dataset.records[index].path

    def _record(self, index: int) -> ImageRecord:
        """Record at `index`, cached: making one costs 10 us or more."""
        if self._last is None or self._last[0] != index:
            self._last = index, self._dataset.records[index]
        return self._last[1]

    def batch(self, keys: Sequence[SampleKey], out: np.ndarray | None = None) -> WorkerBatch:
        """Batch of the samples of these keys.

        Args: keys: all of one shape; out: uint8 [at least B*3*H*W], where the images go.
        """
        self._problems, self._bad = [], {}
        key = keys[0]
        try:
            samples = []
            for key in keys:
                samples.append(self.make(key) if key.index >= 0 else _padding(key))
            return WorkerBatch(collate(self._used(samples), out), self._problems, self._bad)
        except StorageError as error:
            return WorkerBatch(
                collate([_padding(key)], out), self._problems, self._bad, outage=error
            )
        except DataError as error:
            return WorkerBatch(None, [], {}, user_error=error)
        except (OSError, cv2.error, MemoryError) as error:
            why = DataError(
                f"{type(error).__name__}: {error}",
                code="image_unreadable",
                where=self.path(key.index),
            )
            return WorkerBatch(None, [], {}, user_error=why)
        except Exception:
            text = f"{self.path(key.index)}: loading failed\n{traceback.format_exc()}"
            return WorkerBatch(None, [], {}, our_error=text)

    def make(self, key: SampleKey) -> Sample:
        raise NotImplementedError

    def _used(self, samples: list[Sample]) -> list[Sample]:
        """Samples that the batch consists of, at least one."""
        return samples

    def _read(self, index: int, consequence: str = "") -> np.ndarray | None:
        """Reads the image, reduced; None: it is not usable, and noted.

        It may be read-only.  The note says what that entails (`consequence`).

        Raises: DataError: it cannot be read and data.bad_images is `error`.  StorageError.
        """
        code, why = "image_unreadable", self._dataset.unreadable.get(index, "")
        if not why:
            code, why = _blocked(self.blocklist_N[index])
        if not why:
            try:
                return self._pixels_once_there(index)
            except DataError as error:
                code, why = error.code, error.what
        path = self.path(index)
        if self._bad_images == "error":
            fix = "remove it, or set data.bad_images: skip"
            raise DataError(why, code=code, where=path, fix=fix)
        if consequence:
            self._problems.append(f"{path}: {why}; {consequence}")
        self._bad[index] = why
        return None

    def _pixels_once_there(self, index: int) -> np.ndarray:
        """The image, reduced; where storage is away, once it is back.

        Raises: DataError: the file cannot be read.  StorageError: storage stays away.
        """
        began, owed, waited = time.monotonic(), self._waited_of_late(), False

        def pause(seconds: float, away: StorageError) -> None:
            nonlocal waited
            if self.waits_aborted[0]:
                raise away
            waited = True
            if seconds >= TOLD_SECONDS:
                self.awaited[:] = index, getattr(away.__cause__, "errno", errno.EREMOTEIO)
            self.pause(seconds)

        left = self.storage_seconds - owed
        try:
            image_HW3 = with_retries(lambda: self._pixels_now(index), left, pause=pause, quiet=True)
        finally:
            self.awaited[0] = NOTHING
        if waited:
            self._note_wait(owed + time.monotonic() - began)
        return image_HW3

    def _pixels_now(self, index: int) -> np.ndarray:
        """The image, reduced.

        Raises: DataError: the file cannot be read.  StorageError: its storage is away.
        """
        path = self.path(index)
        for others_seen in (False, True):
            try:
                self.reading[0], self.beat[0] = index, time.monotonic()
                return self._pixels(index)
            except DataError as error:
                why, cause = error, error.__cause__
                # A store refuses everything once credentials have ended.
                refused = isinstance(cause, PermissionError) and is_remote(path)
                if others_seen or not (is_outage(cause) or refused):
                    raise
            finally:
                self.reading[0] = NOTHING
            if not self._others_are_there(index):
                break  # else it may be back just now, and this image with it
        raise unavailable(
            f"{why.what}; nor can others of its folder be read, which were there at the start: "
            "their storage is unavailable",
            path,
            "reach the store again" if is_remote(path) else "mount it again",
        ) from cause

    def _waited_of_late(self) -> float:
        seconds, until = self.waited.tolist()
        return max(0.0, seconds - (time.monotonic() - until))

    def _note_wait(self, seconds: float) -> None:
        """Records time spent waiting for storage.

        Args: seconds: waited of late; workers that wait at the same time count once.
        """
        self.waited[:] = max(seconds, self._waited_of_late()), time.monotonic()

    def _others_are_there(self, index: int) -> bool:
        """Whether any nearby image of the same folder can be opened.

        Where the next ones are all in other folders, any of them; a set of one image has none.
        """
        folder, count = os.path.dirname(self.path(index)), len(self)
        near = [(index + step) % count for step in range(1, min(count, _NEAR))]
        unreadable = self._dataset.unreadable
        near = [at for at in near if at not in unreadable and not self.blocklist_N[at]]
        paths = [self.path(other) for other in near]
        beside = [path for path in paths if os.path.dirname(path) == folder] or paths
        for path in beside[:_PROBED] or [folder]:
            self.beat[0] = time.monotonic()  # each may take its time to fail
            if self._dataset.opener.can_be_read(path):
                return True
        return False

    def _pixels(self, index: int) -> np.ndarray:
        cached_HW3 = None if self._cache is None else self._cache.get(index)
        if cached_HW3 is not None:
            return cached_HW3
        record = self._record(index)
        size = (record.height, record.width) if record.height else None  # 0: not known
        reduced, opener = int(self._reductions_N[index]), self._dataset.opener
        image_HW3 = read_image(record.path, size, reduced, self._note_dark, opener)
        if self._cache is not None:
            self._cache.put(index, image_HW3)
        return image_HW3

    def _note_dark(self) -> None:
        """Adds a line about images that look nearly black, the same for all of the set."""
        self._problems.append(f"{self._dataset.source}: {DARK}; `ppdist data check` lists them")


def _blocked(ended: int) -> tuple[str, str]:
    """Why a record is never opened again, code and text, or ""."""
    if not ended:
        return "", ""
    if ended == HUNG:
        why = "reading it took a worker longer than data.worker_timeout_seconds, twice"
        return "image_hangs_decoder", why
    how = "" if ended == EXITED else f" with {signal.Signals(ended).name}"
    return "image_crashes_decoder", f"reading it ended a worker{how}, twice"


def _padding(key: SampleKey) -> Sample:
    blank_HW3 = np.zeros((key.height, key.width, 3), np.uint8)
    return Sample(blank_HW3, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), -1)


class TrainSamples(Samples):
    """Random training samples, from one image or a mosaic.

    They are moved, mirrored, recoloured and combined.  Geometry is settled first, as placements and
    matrices; each image is then resampled once.
    """

    def __init__(
        self,
        dataset: DetectionSet,
        bad_images: str,
        augment: AugmentConfig,
        seed: int,
        *,
        resize: Resize = "stretch",
        epochs: int | None = None,
        reductions_N: np.ndarray | None = None,
        cache: ImageCache | None = None,
        storage_seconds: float = 0.0,
    ) -> None:
        """
        Args:
            epochs: of the whole run; needed where augmentation goes by its end or its length.
            reductions_N: what `reductions` gave.
        Raises: ValueError: epochs are needed and were not given.
        """
        super().__init__(
            dataset,
            bad_images,
            reductions_N=reductions_N,
            cache=cache,
            storage_seconds=storage_seconds,
        )
        if augment.needs_length and epochs is None:
            raise ValueError(
                "close_mosaic_epochs, plain_epochs: the length of the run is needed, and for "
                "shares of it in combine_epochs"
            )
        self._augment = augment
        self._epochs = epochs
        self._by_epoch: dict[int, AugmentConfig] = {}
        self._seed = seed
        self._resize: Resize = resize

    def make(self, key: SampleKey) -> Sample:
        rng = keyed_generator(self._seed, _AUGMENT, *key.rng_key)
        augment = self._augment_in(key.epoch)
        size = key.height, key.width
        sample = self._compose(key.index, size, augment, rng)
        # Nothing is drawn for what is switched off: the other numbers stay as they are without it.
        if augment.copy_paste and rng.random() < augment.copy_paste:
            index = int(rng.integers(len(self._dataset.records)))
            if any(self._dataset.records[index].polygons_M):
                sample = copy_paste(sample, self._single(index, size, augment, rng), rng)
        if augment.cutmix and rng.random() < augment.cutmix:
            sample = cutmix(sample, self._other(size, augment, rng), rng)
        if augment.mixup and rng.random() < augment.mixup:
            sample = mixup(sample, self._other(size, augment, rng), rng)
        return self._with_seed(key, augment_pixels(sample, augment, rng))

    def _with_seed(self, key: SampleKey, sample: Sample) -> Sample:
        rng = keyed_generator(self._seed, _SEEDS, *key.rng_key)
        return replace(sample, seed=int(rng.integers(2**63)))

    def _augment_in(self, epoch: int) -> AugmentConfig:
        if epoch not in self._by_epoch:
            self._by_epoch[epoch] = self._augment.in_epoch(epoch, self._epochs)
        return self._by_epoch[epoch]

    def _other(
        self, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Sample:
        return self._compose(int(rng.integers(len(self._dataset.records))), size, augment, rng)

    def _compose(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Sample:
        """Image `index`, or its substitute, before it is combined with another."""
        if augment.mosaic and rng.random() < augment.mosaic:
            return self._mosaic(index, size, augment, rng)
        return self._single(index, size, augment, rng).sample

    def _single(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> PasteSource:
        """One image, placed in the input by `GEOMETRY_STEPS`."""
        one = self._open(index, random_turn(augment.rotate90, rng))
        params = GeometryParams.of_image(one.boxes_M4, one.width, one.height, size)
        params = random_geometry(params, augment, rng)
        colours_34 = random_colours(augment.distort, rng)
        if params.matrix_33 is None:
            interpolation = random_interpolation(augment.random_interpolation, rng)
            placement = params.placement(self._resize, one.reduced)._replace(
                mirror_x=params.mirror_x, mirror_y=params.mirror_y
            )
            boxes_M4, keep_M = map_boxes(one.boxes_M4, placement)
            image_HW3 = render(one.image_HW3, placement, interpolation, colours_34, one.reduced)
            sample = Sample(image_HW3, boxes_M4[keep_M], one.labels_M[keep_M], one.index)
            kept, matrix_33 = np.flatnonzero(keep_M), placement.matrix_33
        else:
            placement = params.placement(self._resize)
            placed_33 = between(placement.source, placement.target)
            boxes_M4, placed_M = map_boxes(one.boxes_M4, placement)
            canvas = MosaicCanvas(size)
            matrix_33 = canvas.draw(
                one.image_HW3, placement.source, params.view_33 @ placed_33, one.reduced
            )
            from_placed_33 = matrix_33 @ between(placement.target, placement.source)
            seen_M = canvas.note(boxes_M4[placed_M], one.labels_M[placed_M], from_placed_33)
            sample = canvas.sample(one.index, colours_34)
            kept = np.flatnonzero(placed_M)[seen_M]
        return PasteSource.of(sample, one.outlines_M, kept, placement.source, matrix_33)

    def _mosaic(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Sample:
        """Four images, seen through a random view; the first is `index`."""
        others = rng.integers(len(self._dataset.records), size=MOSAIC_IMAGES - 1)
        order = rng.permutation(MOSAIC_IMAGES)
        layout = random_layout(augment.mosaic_whole, size, rng)
        height, width = layout.canvas
        params = random_geometry(GeometryParams(width, height, size), augment, rng)
        view_33 = params.view_33
        canvas, used, cell = MosaicCanvas(size), [], layout.cell
        for place, wanted in zip(order, [index, *others.tolist()]):
            slot = layout.slots[place]
            turn = random_turn(augment.rotate90, rng)
            width, height = turned_sides(self._record(wanted), turn)
            matrix_33 = view_33 @ self._tile(slot, width, height, cell)
            if not canvas.shows(width, height, matrix_33):
                used.append(wanted)  # and spare the time of decoding it
                continue
            one = self._open(wanted, turn)
            if one.index != wanted:
                matrix_33 = view_33 @ self._tile(slot, one.width, one.height, cell)
            everything = (0, 0, one.width, one.height)
            matrix_33 = canvas.draw(one.image_HW3, everything, matrix_33, one.reduced)
            canvas.note(one.boxes_M4, one.labels_M, matrix_33)
            used.append(one.index)
        return canvas.sample(used[0], random_colours(augment.distort, rng))

    def _tile(self, slot: Slot, width: int, height: int, cell: tuple[int, int]) -> np.ndarray:
        """Matrix from an image to its place on a mosaic's canvas."""
        placement = fitted(width, height, cell, self._resize)
        left, top, right, bottom = placement.target
        return between(placement.source, slot.tile(bottom - top, right - left))

    def _open(self, index: int, turn: int) -> SourceImage:
        """Opens the image at `index`, or the next good one, turned.

        Args: turn: quarter turns.
        """
        found, image_HW3 = self._next_good(index)
        reduced = int(self._reductions_N[found])
        return SourceImage.of(found, image_HW3, reduced, self._record(found), turn)

    def _next_good(self, index: int) -> tuple[int, np.ndarray]:
        """First readable image from `index` on, reduced: a function of `index`.

        Raises: DataError: a hundred in a row cannot.
        """
        count = len(self._dataset.records)
        tries = min(count, _MOST_REPLACEMENTS)
        for step in range(tries):
            candidate = (index + step) % count
            image_HW3 = self._read(candidate, "training takes the next good image in its place")
            if image_HW3 is not None:
                return candidate, image_HW3
        raise DataError(
            f"{tries} images in a row cannot be read; the first: {self.path(index)}: "
            f"{self._bad[index]}",
            code="no_good_image",
            where=self._dataset.source,
        )


def reductions(
    dataset: DetectionSet, augment: AugmentConfig, largest: tuple[int, int], resize: Resize
) -> np.ndarray:
    """Reduction of each image when it is read, uint8 [N].

    Each is 1, 2, 4 or 8, and valid whatever a sample draws, so that a cache can hold these very
    pixels: no view of an image but one that affine enlarges has more pixels than are left of it.
    1 where the size is not known.

    Args:
        largest: (height, width) of the largest input of the run.
    """
    sizes_N2 = Records.of(dataset.records).sizes_N2
    views = [sizes_N2, sizes_N2[:, ::-1]] if augment.rotate90 else [sizes_N2]
    shown = [np.array(largest) / np.maximum(view_N2, 1) for view_N2 in views]
    least = np.min if resize == "letterbox" else np.max
    scale_N = np.max([least(scale_N2, axis=1) for scale_N2 in shown], axis=0) * augment.most_zoom
    factors = [reduction(scale) for scale in np.where(sizes_N2.all(1), scale_N, 1.0).tolist()]
    return np.array(factors, np.uint8)


def require_outlines(dataset: DetectionSet, augment: AugmentConfig) -> None:
    """Checks that a set has outlines if objects are to be pasted.

    Raises: DataError: the set, read with masks, has no outline.
    """
    if augment.needs_outlines and not any(any(record.polygons_M) for record in dataset.records):
        raise DataError(
            f"data.augment.copy_paste: {augment.copy_paste:g} needs object outlines, but the "
            f"annotations have none",
            code="outlines_missing",
            where=dataset.source,
            fix="set it to 0",
        )


class EvalSamples(Samples):
    """The whole image in the input, and all its boxes, crowds too.

    An image that cannot be read is in no batch, but among its `bad_images`; a batch without any
    other consists of padding.
    """

    def __init__(
        self,
        dataset: DetectionSet,
        bad_images: str,
        *,
        resize: Resize = "stretch",
        within: tuple[int, int] | None = None,
        storage_seconds: float = 0.0,
    ) -> None:
        """Args: within: of a letterbox in larger inputs; see `geometry.letterbox`."""
        super().__init__(dataset, bad_images, storage_seconds=storage_seconds)
        self._resize: Resize = resize
        self._within = within

    def make(self, key: SampleKey) -> Sample:
        image_HW3 = self._read(key.index)
        if image_HW3 is None:
            return _padding(key)
        return self._sample(key, self._seen(image_HW3, (key.height, key.width)))

    def _used(self, samples: list[Sample]) -> list[Sample]:
        return [sample for sample in samples if sample.index >= 0] or samples[:1]

    def _sample(self, key: SampleKey, input_HW3: np.ndarray) -> Sample:
        record = self._dataset.records[key.index]
        placement = self._placement(key)
        boxes_M4, _ = map_boxes(record.boxes_M4, placement)
        left, top, _, _ = placement.target
        return Sample(input_HW3, boxes_M4, record.labels_M, key.index, placement.scale, (top, left))

    def _seen(self, image_HW3: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        return resize_for_evaluation(image_HW3, size, self._resize, self._within)

    def _placement(self, key: SampleKey) -> ResizeParams:
        record = self._dataset.records[key.index]
        size = key.height, key.width
        return fitted(record.width, record.height, size, self._resize, self._within)

    def learnable(self, key: SampleKey) -> tuple[np.ndarray, np.ndarray]:
        """boxes_M4 and labels_M that training would learn from this input.

        That leaves out crowds and what is too small.  The image is not read.
        """
        record = self._dataset.records[key.index]
        boxes_M4, keep_M = map_boxes(record.boxes_M4, self._placement(key))
        learnt_M = keep_M & ~record.crowd_M
        return boxes_M4[learnt_M], record.labels_M[learnt_M]


def collate(samples: Sequence[Sample], out: np.ndarray | None = None) -> Arrays:
    """Stacks samples, padding boxes with zeros to a multiple of 8.

    Args:
        samples: all of one shape.
        out: uint8 [at least B*3*H*W], where the images go; None: into memory of their own.
    """
    shape = samples[0].image_HW3.shape
    assert all(sample.image_HW3.shape == shape for sample in samples), "one shape a batch"
    count, size = len(samples), math.prod(shape)
    pixels = np.empty(count * size, np.uint8) if out is None else out[: count * size]
    images_B3HW = pixels.reshape(count, 3, *shape[:2])
    for position, sample in enumerate(samples):
        cv2.split(sample.image_HW3, [*images_B3HW[position]])  # 10 times as fast as a transpose
    return Arrays(
        images_B3HW,
        *padded([(sample.boxes_M4, sample.labels_M) for sample in samples]),
        np.array([sample.index for sample in samples], np.int64),
        np.array([sample.scale for sample in samples], np.float32),
        np.array([sample.offset for sample in samples], np.float32),
        np.array([sample.seed for sample in samples], np.int64),
    )


def padded(
    objects_B: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """boxes_BM4, labels_BM and mask_BM of (boxes_M4, labels_M) of each image; see `collate`."""
    most = max(1, *(len(labels_M) for _, labels_M in objects_B))
    room = -(-most // _BOX_ROUNDING) * _BOX_ROUNDING
    boxes_BM4 = np.zeros((len(objects_B), room, 4), np.float32)
    labels_BM = np.zeros((len(objects_B), room), np.int64)
    mask_BM = np.zeros((len(objects_B), room), np.float32)
    for position, (boxes_M4, labels_M) in enumerate(objects_B):
        boxes_BM4[position, : len(labels_M)] = boxes_M4
        labels_BM[position, : len(labels_M)] = labels_M
        mask_BM[position, : len(labels_M)] = 1.0
    return boxes_BM4, labels_BM, mask_BM
