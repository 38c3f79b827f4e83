"""Training samples: which images share an input, where each lies in it, and what it shows.

    key -> one image, or four (mosaic) -> view (affine, flip) -> one resampling each -> mixup -> HSV

Geometry is settled first, on sizes and boxes, as placements and matrices; pixels come last.  What a
sample becomes is a function of (seed, epoch, index), its partners too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import cv2
import numpy as np

from ppdist.data.affine import between, covered, map_by_matrix, moved, paste, random_view
from ppdist.data.augment import AugmentConfig
from ppdist.data.images import reduction
from ppdist.data.mosaic import TILES, blend, canvas_of, meeting_point, tile
from ppdist.data.sample import DetectionSet, ImageRecord, SampleKey, keyed_generator
from ppdist.data.samples import Sample, Samples
from ppdist.data.transforms import (
    GREY,
    Resize,
    fitted,
    map_boxes,
    random_colours,
    random_hsv,
    random_interpolation,
    random_placement,
    recolour_hsv,
    render,
)
from ppdist.errors import DataError

_AUGMENT = 2  # stream of random numbers, beside the sampler's
_MOST_REPLACEMENTS = 100


class TrainSamples(Samples):
    """Training samples: one image or a mosaic, moved, mirrored, recoloured, blended, at random.

    Geometry is settled first, as placements and matrices; each image is then resampled once.
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
    ) -> None:
        """
        Args:
            epochs: of the whole run; only needed where the last ones go without mosaic.
        Raises: ValueError: it is needed and was not given.
        """
        super().__init__(dataset, bad_images)
        if augment.close_mosaic_epochs and epochs is None:
            raise ValueError("close_mosaic_epochs: the length of the run is needed")
        self._augment = augment
        self._late_augment = augment.model_copy(update={"mosaic": 0.0, "mixup": 0.0})
        self._late_epoch = math.inf if epochs is None else epochs - augment.close_mosaic_epochs
        self._seed = seed
        self._resize: Resize = resize

    def make(self, key: SampleKey) -> Sample:
        rng = keyed_generator(self._seed, _AUGMENT, key.epoch, key.index)
        augment = self._augment if key.epoch < self._late_epoch else self._late_augment
        size = key.height, key.width
        sample = self._compose(key.index, size, augment, rng)
        # Nothing is drawn for what is switched off: the other numbers stay as they are without it.
        if augment.mixup and rng.random() < augment.mixup:
            other = self._compose(int(rng.integers(len(self))), size, augment, rng)
            sample = Sample(
                blend(sample.image_HW3, other.image_HW3, rng),
                np.concatenate([sample.boxes_M4, other.boxes_M4]),
                np.concatenate([sample.labels_M, other.labels_M]),
                sample.index,
            )
        if any(augment.hsv):
            recoloured = recolour_hsv(sample.image_HW3, random_hsv(augment.hsv, rng))
            sample = replace(sample, image_HW3=recoloured)
        return sample

    def _compose(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Sample:
        """What stands for image `index`, before mixup and the change in HSV."""
        if augment.mosaic and rng.random() < augment.mosaic:
            return self._mosaic(index, size, augment, rng)
        if augment.affine.moves:
            return self._moved(index, size, augment, rng)
        return self._placed(index, size, augment, rng)

    def _placed(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Sample:
        """One image, its sides along those of the input: a crop and a resize."""
        index, image_HW3 = self._next_good(index)
        record = self._dataset.records[index]
        boxes_M4, labels_M = _alone(record)
        placement = random_placement(
            boxes_M4, record.width, record.height, size, augment, rng, self._resize
        )
        colours_34 = random_colours(augment.distort, rng)
        interpolation = cv2.INTER_LINEAR
        if augment.random_interpolation:
            interpolation = random_interpolation(rng)
        mapped_M4, keep_M = map_boxes(boxes_M4, placement)
        return Sample(
            render(image_HW3, placement, interpolation, colours_34),
            mapped_M4[keep_M],
            labels_M[keep_M],
            index,
        )

    def _moved(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Sample:
        """One image, placed as in `_placed` and seen through a random view."""
        zoom = 1 / augment.crop_least if augment.crop else 1.0
        index, image_HW3 = self._next_good(index, self._reduction_for(size, zoom))
        record = self._dataset.records[index]
        boxes_M4, labels_M = _alone(record)
        placement = random_placement(
            boxes_M4, record.width, record.height, size, augment, rng, self._resize
        )
        mirrored = placement.mirror_x, placement.mirror_y
        placement = placement._replace(mirror_x=False, mirror_y=False)
        view = random_view(size, size, augment.affine, mirrored, rng)
        canvas = _Canvas(size)
        boxes_M4, keep_M = map_boxes(boxes_M4, placement)
        to_canvas_33 = between(placement.source, placement.target)
        factor = self._reduction_for(size, zoom)(record)
        canvas.draw(image_HW3, placement.source, view.matrix_33 @ to_canvas_33, factor)
        canvas.note(boxes_M4[keep_M], labels_M[keep_M], view.matrix_33)
        return canvas.sample(index, random_colours(augment.distort, rng))

    def _mosaic(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Sample:
        """Four images around a point, seen through a random view; the first is `index`."""
        others = rng.integers(len(self), size=TILES - 1)
        corners = rng.permutation(TILES)
        point = meeting_point(size, rng)
        mirror_x, mirror_y = rng.random() < augment.flip, rng.random() < augment.flip_vertical
        view = random_view(canvas_of(size), size, augment.affine, (mirror_x, mirror_y), rng)
        reduction_for = self._reduction_for(size, min(1.0, view.gain))
        canvas, used = _Canvas(size), []
        for corner, wanted in zip(corners, [index, *others]):
            record = self._dataset.records[wanted]
            matrix_33 = view.matrix_33 @ self._tile(int(corner), point, record, size)
            if not canvas.shows(record, matrix_33):
                used.append(int(wanted))  # and spare the time of decoding it
                continue
            found, image_HW3 = self._next_good(int(wanted), reduction_for)
            record = self._dataset.records[found]
            matrix_33 = view.matrix_33 @ self._tile(int(corner), point, record, size)
            everything = (0, 0, record.width, record.height)
            canvas.draw(image_HW3, everything, matrix_33, reduction_for(record))
            canvas.note(*_alone(record), matrix_33)
            used.append(found)
        return canvas.sample(used[0], random_colours(augment.distort, rng))

    def _tile(
        self, corner: int, point: tuple[float, float], record: ImageRecord, size: tuple[int, int]
    ) -> np.ndarray:
        """The matrix that takes an image to its place in a mosaic's canvas."""
        placement = fitted(record.width, record.height, size, self._resize)
        left, top, right, bottom = placement.target
        return between(placement.source, tile(corner, point, bottom - top, right - left))

    def _reduction_for(self, size: tuple[int, int], zoom: float) -> Callable[[ImageRecord], int]:
        """How far an image may be reduced that is shown at most `zoom` times as it fits `size`.

        A larger view magnifies the pixels that fit, as in YOLOv5; a smaller one sees them averaged.
        """
        return lambda record: reduction(
            zoom * max(fitted(record.width, record.height, size, self._resize).scale)
        )

    def _next_good(
        self, index: int, reduction_of: Callable[[ImageRecord], int] | None = None
    ) -> tuple[int, np.ndarray]:
        """The image at `index`, or the next that can be read: a function of `index` alone.

        Args:
            reduction_of: how far each may be reduced; None: not at all.
        """
        count = len(self._dataset.records)
        for step in range(min(count, _MOST_REPLACEMENTS)):
            candidate = (index + step) % count
            factor = reduction_of(self._dataset.records[candidate]) if reduction_of else 1
            consequence = "training takes the next good image in its place"
            image_HW3 = self._read(candidate, consequence, factor)
            if image_HW3 is not None:
                return candidate, image_HW3
        raise DataError(
            f"{self._dataset.source}: {min(count, _MOST_REPLACEMENTS)} images in a row cannot be "
            f"read; the first: {self._problems[0].partition(';')[0]}"
        )


def _alone(record: ImageRecord) -> tuple[np.ndarray, np.ndarray]:
    """Boxes and labels of what is one object, not a crowd."""
    alone_M = ~record.crowd_M
    return record.boxes_M4[alone_M], record.labels_M[alone_M]


class _Canvas:
    """An input in the making: images drawn into it, and the objects they bring."""

    def __init__(self, size: tuple[int, int]) -> None:
        self._image_HW3 = np.full((*size, 3), GREY[0], np.uint8)  # one number: 30 times as fast
        self._boxes = [np.zeros((0, 4), np.float32)]
        self._labels = [np.zeros(0, np.int64)]

    def draw(
        self, image_HW3: np.ndarray, source: Sequence[float], matrix_33: np.ndarray, reduced: int
    ) -> None:
        """Args: as `paste`, in pixels of the original, of which `reduced` are one of the image."""
        part = [side / reduced for side in source]
        paste(self._image_HW3, image_HW3, part, matrix_33 @ moved(scale=(reduced, reduced)))

    def shows(self, record: ImageRecord, matrix_33: np.ndarray) -> bool:
        """Whether anything of an image would be seen."""
        source = (0, 0, record.width, record.height)
        left, top, right, bottom = covered(source, matrix_33, self._image_HW3.shape[:2])
        return left < right and top < bottom

    def note(self, boxes_M4: np.ndarray, labels_M: np.ndarray, matrix_33: np.ndarray) -> None:
        """Keeps the boxes that are seen."""
        height, width = self._image_HW3.shape[:2]
        mapped_M4, keep_M = map_by_matrix(boxes_M4, matrix_33, (height, width))
        self._boxes.append(mapped_M4[keep_M])
        self._labels.append(labels_M[keep_M])

    def sample(self, index: int, colours_34: np.ndarray | None) -> Sample:
        image_HW3 = self._image_HW3
        if colours_34 is not None:
            image_HW3 = cv2.transform(image_HW3, colours_34)
        return Sample(image_HW3, np.concatenate(self._boxes), np.concatenate(self._labels), index)
