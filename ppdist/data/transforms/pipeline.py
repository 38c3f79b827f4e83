"""Pipeline from a key to a transformed sample, in training and evaluation.

    key -> one image, or several (mosaic) -> GEOMETRY_STEPS -> one resampling each
        -> copy_paste, cutmix, mixup with others made like it -> PIXEL_STEPS

Geometry is decided first, from sizes and boxes; pixels come last.  A sample, with its partners, is
a function of (seed, epoch, index).  This runs in the loader's workers, so everything here is numpy.
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
from ppdist.data.image import DARK, choose_reduction, read_image
from ppdist.data.transforms.color import augment_pixels, random_colours
from ppdist.data.transforms.geometry import (
    GeometryParams,
    MosaicCanvas,
    ResizeParams,
    SourceImage,
    box_matrix,
    fit_image,
    map_boxes,
    random_geometry,
    random_interpolation,
    random_turn,
    render,
    resize_for_evaluation,
    sides_after_turn,
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
_MAX_REPLACEMENTS = 100
_NEAR, _PROBED = 64, 8  # records searched for others of a folder; how many of them are opened
_BOX_ROUNDING = 8  # boxes per image are padded to a multiple, so that shapes repeat


class ImageCache(Protocol):
    """Images of a set by position; `data/cache.py` has some."""

    def get(self, index: int) -> np.ndarray | None: ...
    def put(self, index: int, image_HW3: np.ndarray) -> None: ...


class Samples:
    """A maker of whole micro-batches from keys.

    reading: int64 [1], position of the record that is being read, or NOTHING; beat: float64 [1],
    when reading one last began (time.monotonic); blocklist_N: uint8, how reading a record ended two
    workers: 0, a signal, HUNG or EXITED; awaited: int64 [2], position of the record whose storage
    is waited for, or NOTHING, and the errno.  All are in memory that a worker shares with its rank,
    which thus knows why a worker died, and whether it hangs or waits.

    Every image was there at the start (`check_files`).  So an image that cannot be opened while
    others of its folder can was deleted or damaged; if none can, their storage is unavailable: it
    is waited for, and samples do not change.  pause: waits for a number of seconds.
    waits_aborted: uint8 [1], also shared: 1 once the run is to stop, so that nothing waits for
    storage any more.  waited: float64 [2], also shared: seconds waited recently, and until when
    (time.monotonic); they decrease with the time that passes without a wait.  So storage that
    comes and goes never delays a step for longer than storage that stays unavailable.
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
            bad_images: `skip` or `error`: what happens if an image cannot be read.
            reductions_N: uint8, the reduction of each image when it is read; None: 1.
            cache: of images with this reduction.
            storage_seconds: the longest wait for unavailable storage.
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
        self._unusable: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._dataset.records)

    def path(self, index: int) -> str:
        """Returns the path of the image of a record."""
        return self._dataset.records[index].path

    def _record(self, index: int) -> ImageRecord:
        """Returns the record at `index`; caches the last one, as making it costs 10 us or more."""
        if self._last is None or self._last[0] != index:
            self._last = index, self._dataset.records[index]
        return self._last[1]

    def batch(self, keys: Sequence[SampleKey], out: np.ndarray | None = None) -> WorkerBatch:
        """Builds the batch for these keys; errors are part of the result.

        Args: keys: keys of samples of one shape; out: uint8 [at least B*3*H*W], memory for the
        images.
        """
        self._problems, self._unusable = [], {}
        key = keys[0]
        try:
            samples = []
            for key in keys:
                samples.append(self.make(key) if key.index >= 0 else _make_padding(key))
            return WorkerBatch(collate(self._usable(samples), out), self._problems, self._unusable)
        except StorageError as error:
            return WorkerBatch(
                collate([_make_padding(key)], out), self._problems, self._unusable, outage=error
            )
        except DataError as error:
            return WorkerBatch(None, [], {}, user_error=error)
        # Part of the result, as an exception would end the worker and hide its cause.
        except (OSError, cv2.error, MemoryError) as error:
            unreadable = DataError(
                f"{type(error).__name__}: {error}",
                code="image_unreadable",
                where=self.path(key.index),
            )
            return WorkerBatch(None, [], {}, user_error=unreadable)
        except Exception:
            text = f"{self.path(key.index)}: loading failed\n{traceback.format_exc()}"
            return WorkerBatch(None, [], {}, our_error=text)

    def make(self, key: SampleKey) -> Sample:
        raise NotImplementedError

    def _usable(self, samples: list[Sample]) -> list[Sample]:
        """Returns the samples that the batch consists of, at least one."""
        return samples

    def _read(self, index: int, consequence: str = "") -> np.ndarray | None:
        """Reads the image, reduced; if it is unusable, records the problem and returns None.

        The image may be read-only.  The message for the user ends with `consequence`.

        Raises: DataError: it cannot be read and data.bad_images is `error`.  StorageError.
        """
        code, reason = "image_unreadable", self._dataset.unreadable.get(index, "")
        if not reason:
            code, reason = _describe_block(self.blocklist_N[index])
        if not reason:
            try:
                return self._read_when_available(index)
            except DataError as error:
                code, reason = error.code, error.what
        path = self.path(index)
        if self._bad_images == "error":
            fix = "remove it, or set data.bad_images: skip"
            raise DataError(reason, code=code, where=path, fix=fix)
        if consequence:
            self._problems.append(f"{path}: {reason}; {consequence}")
        self._unusable[index] = reason
        return None

    def _read_when_available(self, index: int) -> np.ndarray:
        """Reads the image, reduced; waits while its storage is unavailable.

        Raises: DataError: the file cannot be read.  StorageError: storage stays unavailable.
        """
        begin, earlier_seconds, waited = time.monotonic(), self._recent_wait_seconds(), False

        def pause(seconds: float, error: StorageError) -> None:
            nonlocal waited
            if self.waits_aborted[0]:
                raise error
            waited = True
            if seconds >= TOLD_SECONDS:
                self.awaited[:] = index, getattr(error.__cause__, "errno", errno.EREMOTEIO)
            self.pause(seconds)

        left = self.storage_seconds - earlier_seconds
        try:
            image_HW3 = with_retries(lambda: self._read_now(index), left, pause=pause, quiet=True)
        finally:
            self.awaited[0] = NOTHING
        if waited:
            self._record_wait(earlier_seconds + time.monotonic() - begin)
        return image_HW3

    def _read_now(self, index: int) -> np.ndarray:
        """Reads the image, reduced, without waiting.

        Raises: DataError: the file cannot be read.  StorageError: its storage is unavailable.
        """
        path = self.path(index)
        for folder_was_readable in (False, True):
            try:
                self.reading[0], self.beat[0] = index, time.monotonic()
                return self._cached_image(index)
            except DataError as error:
                failure, cause = error, error.__cause__
                # A store refuses all requests once the credentials have expired.
                refused = isinstance(cause, PermissionError) and is_remote(path)
                if folder_was_readable or not (is_outage(cause) or refused):
                    raise
            finally:
                self.reading[0] = NOTHING
            if not self._is_folder_readable(index):
                break  # otherwise storage may just be back, and this image with it
        raise unavailable(
            f"{failure.what}; nor can others of its folder be read, which were there at the start: "
            "their storage is unavailable",
            path,
            "reach the store again" if is_remote(path) else "mount it again",
        ) from cause

    def _recent_wait_seconds(self) -> float:
        """Returns the seconds waited for storage recently, minus the time since then."""
        seconds, until = self.waited.tolist()
        return max(0.0, seconds - (time.monotonic() - until))

    def _record_wait(self, seconds: float) -> None:
        """Records time spent waiting for storage.

        Args: seconds: waited recently; waits of several workers at the same time count once.
        """
        self.waited[:] = max(seconds, self._recent_wait_seconds()), time.monotonic()

    def _is_folder_readable(self, index: int) -> bool:
        """Returns True if any nearby image of the same folder can be opened.

        If the nearby images are all in other folders, any of them counts; a set of one image has
        none, so its folder counts.
        """
        folder, count = os.path.dirname(self.path(index)), len(self)
        positions = [(index + step) % count for step in range(1, min(count, _NEAR))]
        unreadable = self._dataset.unreadable
        positions = [n for n in positions if n not in unreadable and not self.blocklist_N[n]]
        paths = [self.path(position) for position in positions]
        candidates = [path for path in paths if os.path.dirname(path) == folder] or paths
        for path in candidates[:_PROBED] or [folder]:
            self.beat[0] = time.monotonic()  # each may take its time to fail
            if self._dataset.opener.can_be_read(path):
                return True
        return False

    def _cached_image(self, index: int) -> np.ndarray:
        """Returns the image from the cache, or reads it and caches it."""
        cached_HW3 = None if self._cache is None else self._cache.get(index)
        if cached_HW3 is not None:
            return cached_HW3
        record = self._record(index)
        size = (record.height, record.width) if record.height else None  # 0: not known
        reduced, opener = int(self._reductions_N[index]), self._dataset.opener
        image_HW3 = read_image(record.path, size, reduced, self._warn_dark, opener)
        if self._cache is not None:
            self._cache.put(index, image_HW3)
        return image_HW3

    def _warn_dark(self) -> None:
        """Adds a line about images that look nearly black, the same for the entire set."""
        self._problems.append(f"{self._dataset.source}: {DARK}; `ppdist data check` lists them")


def _describe_block(code: int) -> tuple[str, str]:
    """Describes why a record is on the blocklist: (code, reason); empty if it is not."""
    if not code:
        return "", ""
    if code == HUNG:
        reason = "reading it took a worker longer than data.worker_timeout_seconds, twice"
        return "image_hangs_decoder", reason
    signal_text = "" if code == EXITED else f" with {signal.Signals(code).name}"
    return "image_crashes_decoder", f"reading it ended a worker{signal_text}, twice"


def _make_padding(key: SampleKey) -> Sample:
    blank_HW3 = np.zeros((key.height, key.width, 3), np.uint8)
    return Sample(blank_HW3, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), -1)


class TrainSamples(Samples):
    """Random training samples, from one image or a mosaic.

    Images are moved, mirrored, recoloured and combined.  Geometry is decided first, as placements
    and matrices; each image is then resampled once.
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
            epochs: epochs of the whole run; needed if augmentation depends on the length of the
                run.
            reductions_N: from `reductions`.
        Raises: ValueError: epochs are needed but None.
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
        # A disabled step draws no random number, so that the other numbers stay the same.
        if augment.copy_paste and rng.random() < augment.copy_paste:
            # Drawn before the sample is known to have outlines, so that later numbers stay the
            # same.
            index = int(rng.integers(len(self._dataset.records)))
            if any(self._dataset.records[index].polygons_M):
                sample = copy_paste(sample, self._single(index, size, augment, rng), rng)
        if augment.cutmix and rng.random() < augment.cutmix:
            sample = cutmix(sample, self._random_partner(size, augment, rng), rng)
        if augment.mixup and rng.random() < augment.mixup:
            sample = mixup(sample, self._random_partner(size, augment, rng), rng)
        return self._with_seed(key, augment_pixels(sample, augment, rng))

    def _with_seed(self, key: SampleKey, sample: Sample) -> Sample:
        # A stream of its own, so that images do not depend on what a model draws.
        rng = keyed_generator(self._seed, _SEEDS, *key.rng_key)
        return replace(sample, seed=int(rng.integers(2**63)))

    def _augment_in(self, epoch: int) -> AugmentConfig:
        if epoch not in self._by_epoch:
            self._by_epoch[epoch] = self._augment.in_epoch(epoch, self._epochs)
        return self._by_epoch[epoch]

    def _random_partner(
        self, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Sample:
        return self._compose(int(rng.integers(len(self._dataset.records))), size, augment, rng)

    def _compose(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Sample:
        """Builds a sample of image `index`, or its substitute, before it is mixed with another."""
        if augment.mosaic and rng.random() < augment.mosaic:
            return self._mosaic(index, size, augment, rng)
        return self._single(index, size, augment, rng).sample

    def _single(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> PasteSource:
        """Builds a sample of one image, placed in the input by `GEOMETRY_STEPS`."""
        source = self._open(index, random_turn(augment.rotate90, rng))
        params = GeometryParams.of_image(source.boxes_M4, source.width, source.height, size)
        params = random_geometry(params, augment, rng)
        colours_34 = random_colours(augment.distort, rng)
        if params.matrix_33 is None:
            # One resize of the window, from whole pixels to whole pixels.
            interpolation = random_interpolation(augment.random_interpolation, rng)
            placement = params.placement(self._resize, source.reduced)._replace(
                mirror_x=params.mirror_x, mirror_y=params.mirror_y
            )
            boxes_M4, keep_M = map_boxes(source.boxes_M4, placement)
            image_HW3 = render(
                source.image_HW3, placement, interpolation, colours_34, source.reduced
            )
            sample = Sample(image_HW3, boxes_M4[keep_M], source.labels_M[keep_M], source.index)
            positions, matrix_33 = np.flatnonzero(keep_M), placement.matrix_33
        else:
            placement = params.placement(self._resize)
            # The window is placed as if there were no matrix, then drawn through the matrix in one
            # warp.
            placed_33 = box_matrix(placement.source, placement.target)
            boxes_M4, placed_M = map_boxes(source.boxes_M4, placement)
            canvas = MosaicCanvas(size)
            matrix_33 = canvas.draw(
                source.image_HW3, placement.source, params.view_33 @ placed_33, source.reduced
            )
            from_placed_33 = matrix_33 @ box_matrix(placement.target, placement.source)
            seen_M = canvas.add_boxes(boxes_M4[placed_M], source.labels_M[placed_M], from_placed_33)
            sample = canvas.sample(source.index, colours_34)
            positions = np.flatnonzero(placed_M)[seen_M]
        return PasteSource.of(sample, source.outlines_M, positions, placement.source, matrix_33)

    def _mosaic(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Sample:
        """Builds a sample of four images, the first of them `index`, seen through a random view."""
        partners = rng.integers(len(self._dataset.records), size=MOSAIC_IMAGES - 1)
        order = rng.permutation(MOSAIC_IMAGES)
        layout = random_layout(augment.mosaic_whole, size, rng)
        height, width = layout.canvas
        params = random_geometry(GeometryParams(width, height, size), augment, rng)
        view_33 = params.view_33
        canvas, used, cell = MosaicCanvas(size), [], layout.cell
        for place, requested in zip(order, [index, *partners.tolist()]):
            slot = layout.slots[place]
            turn = random_turn(augment.rotate90, rng)
            # Sizes from the annotation tell what is visible before anything is decoded.
            width, height = sides_after_turn(self._record(requested), turn)
            matrix_33 = view_33 @ self._tile_matrix(slot, width, height, cell)
            if not canvas.is_visible(width, height, matrix_33):
                used.append(requested)  # and is not decoded
                continue
            source = self._open(requested, turn)
            if source.index != requested:
                matrix_33 = view_33 @ self._tile_matrix(slot, source.width, source.height, cell)
            everything = (0, 0, source.width, source.height)
            matrix_33 = canvas.draw(source.image_HW3, everything, matrix_33, source.reduced)
            canvas.add_boxes(source.boxes_M4, source.labels_M, matrix_33)
            used.append(source.index)
        return canvas.sample(used[0], random_colours(augment.distort, rng))

    def _tile_matrix(
        self, slot: Slot, width: int, height: int, cell: tuple[int, int]
    ) -> np.ndarray:
        """Builds the matrix from an image to its position on the canvas of a mosaic."""
        placement = fit_image(width, height, cell, self._resize)
        left, top, right, bottom = placement.target
        return box_matrix(placement.source, slot.tile(bottom - top, right - left))

    def _open(self, index: int, turn: int) -> SourceImage:
        """Opens the image at `index`, or the next readable one, turned.

        Args: turn: quarter turns.
        """
        readable, image_HW3 = self._next_readable(index)
        reduced = int(self._reductions_N[readable])
        return SourceImage.of(readable, image_HW3, reduced, self._record(readable), turn)

    def _next_readable(self, index: int) -> tuple[int, np.ndarray]:
        """Reads the first readable image at or after `index`, reduced: a function of `index`.

        Raises: DataError: a hundred images in a row cannot be read.
        """
        count = len(self._dataset.records)
        tries = min(count, _MAX_REPLACEMENTS)
        for step in range(tries):
            candidate = (index + step) % count
            image_HW3 = self._read(candidate, "training takes the next good image in its place")
            if image_HW3 is not None:
                return candidate, image_HW3
        raise DataError(
            f"{tries} images in a row cannot be read; the first: {self.path(index)}: "
            f"{self._unusable[index]}",
            code="no_good_image",
            where=self._dataset.source,
        )


def reductions(
    dataset: DetectionSet, augment: AugmentConfig, largest: tuple[int, int], resize: Resize
) -> np.ndarray:
    """Chooses the reduction of each image when it is read, uint8 [N].

    Each is 1, 2, 4 or 8, and does not depend on what a sample draws, so that a cache can hold these
    pixels: only a view that affine enlarges has more pixels than the reduced image.  1 if the size
    is unknown.

    Args:
        largest: (height, width) of the largest input of the run.
    """
    sizes_N2 = Records.of(dataset.records).sizes_N2
    # A quarter turn exchanges the sides.
    views = [sizes_N2, sizes_N2[:, ::-1]] if augment.rotate90 else [sizes_N2]
    scales = [np.array(largest) / np.maximum(view_N2, 1) for view_N2 in views]
    reduce_sides = np.min if resize == "letterbox" else np.max
    scale_N = (
        np.max([reduce_sides(scale_N2, axis=1) for scale_N2 in scales], axis=0) * augment.most_zoom
    )
    factors = [
        choose_reduction(scale) for scale in np.where(sizes_N2.all(1), scale_N, 1.0).tolist()
    ]
    return np.array(factors, np.uint8)


def require_outlines(dataset: DetectionSet, augment: AugmentConfig) -> None:
    """Checks that a set has outlines if objects are to be pasted.

    Raises: DataError: the set was read with masks but has no outline.
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
    """Evaluation samples: the whole image in the input, and all its boxes, crowds included.

    An image that cannot be read is left out of its batch and listed in its `bad_images`; a batch
    without a readable image consists of padding.
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
            return _make_padding(key)
        return self._sample(key, self._resize_input(image_HW3, (key.height, key.width)))

    def _usable(self, samples: list[Sample]) -> list[Sample]:
        # At least one sample: with padding the rank still reaches its collectives.
        return [sample for sample in samples if sample.index >= 0] or samples[:1]

    def _sample(self, key: SampleKey, input_HW3: np.ndarray) -> Sample:
        record = self._dataset.records[key.index]
        placement = self._placement(key)
        boxes_M4, _ = map_boxes(record.boxes_M4, placement)
        left, top, _, _ = placement.target
        return Sample(input_HW3, boxes_M4, record.labels_M, key.index, placement.scale, (top, left))

    def _resize_input(self, image_HW3: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        return resize_for_evaluation(image_HW3, size, self._resize, self._within)

    def _placement(self, key: SampleKey) -> ResizeParams:
        record = self._dataset.records[key.index]
        size = key.height, key.width
        return fit_image(record.width, record.height, size, self._resize, self._within)

    def learnable(self, key: SampleKey) -> tuple[np.ndarray, np.ndarray]:
        """Returns boxes_M4 and labels_M that training would use in this input.

        These exclude crowds and boxes that are too small.  Does not read the image.
        """
        record = self._dataset.records[key.index]
        boxes_M4, keep_M = map_boxes(record.boxes_M4, self._placement(key))
        learnt_M = keep_M & ~record.crowd_M
        return boxes_M4[learnt_M], record.labels_M[learnt_M]


def collate(samples: Sequence[Sample], out: np.ndarray | None = None) -> Arrays:
    """Stacks samples, padding boxes with zeros to a multiple of 8.

    Args:
        samples: samples of one shape.
        out: uint8 [at least B*3*H*W], memory for the images; None: new memory.
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
        *pad_boxes([(sample.boxes_M4, sample.labels_M) for sample in samples]),
        np.array([sample.index for sample in samples], np.int64),
        np.array([sample.scale for sample in samples], np.float32),
        np.array([sample.offset for sample in samples], np.float32),
        np.array([sample.seed for sample in samples], np.int64),
    )


def pad_boxes(
    objects_B: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pads (boxes_M4, labels_M) of each image to the same number of boxes; see `collate`.

    Returns: boxes_BM4, labels_BM and mask_BM; see `Batch`.
    """
    largest = max(1, *(len(labels_M) for _, labels_M in objects_B))
    room = -(-largest // _BOX_ROUNDING) * _BOX_ROUNDING
    boxes_BM4 = np.zeros((len(objects_B), room, 4), np.float32)
    labels_BM = np.zeros((len(objects_B), room), np.int64)
    mask_BM = np.zeros((len(objects_B), room), np.float32)
    for position, (boxes_M4, labels_M) in enumerate(objects_B):
        boxes_BM4[position, : len(labels_M)] = boxes_M4
        labels_BM[position, : len(labels_M)] = labels_M
        mask_BM[position, : len(labels_M)] = 1.0
    return boxes_BM4, labels_BM, mask_BM
