"""Training samples: which images share an input, where each lies in it, and what it shows.

    key -> one image, or several (mosaic) -> view (affine, flip) -> one resampling each
        -> copy_paste, cutmix, mixup with others made like it -> colours, blur, erase

Geometry is settled first, on sizes and boxes, as placements and matrices; pixels come last.  What a
sample becomes is a function of (seed, epoch, index), its partners too.
"""

from dataclasses import replace

import cv2
import numpy as np

from ppdist.config.augment import AugmentConfig
from ppdist.config.data import Resize
from ppdist.data.augment.affine import between, moved, random_view
from ppdist.data.augment.canvas import Canvas
from ppdist.data.augment.combine import Donor, behind, copy_paste, cutmix, donor_of, mixup
from ppdist.data.augment.effects import blurred, erased, without_colours
from ppdist.data.augment.mosaic import Slot, random_layout, tile
from ppdist.data.augment.original import Original, original_of, random_turn, turned_sides
from ppdist.data.augment.transforms import (
    Placement,
    fitted,
    map_boxes,
    random_colours,
    random_hsv,
    random_interpolation,
    random_placement,
    recolour_hsv,
    render,
)
from ppdist.data.cache import ImageCache
from ppdist.data.images import reduction
from ppdist.data.records import Records
from ppdist.data.sample import DetectionSet, SampleKey, keyed_generator
from ppdist.data.samples import Sample, Samples
from ppdist.errors import DataError

_AUGMENT = 2  # stream of random numbers, beside the sampler's
_MOST_REPLACEMENTS = 100
_CONSEQUENCE = "training takes the next good image in its place"


def reductions(
    dataset: DetectionSet, augment: AugmentConfig, largest: tuple[int, int], resize: Resize
) -> np.ndarray:
    """How far each image is reduced when it is read, uint8 [N] of 1, 2, 4, 8.

    Whatever a sample draws, so that a cache can hold these very pixels: no view of an image but one
    that affine enlarges has more pixels than are left of it.  1 where the size is not known.

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
    """Raises: DataError: objects are to be pasted, and the set, read with masks, has no outline."""
    if augment.copy_paste and not any(any(record.polygons_M) for record in dataset.records):
        raise DataError(
            f"data.augment.copy_paste: {augment.copy_paste:g} needs outlines of objects, and there "
            f"is none",
            code="outlines_missing",
            where=dataset.source,
            fix="set it to 0",
        )


class TrainSamples(Samples):
    """Training samples: one image or a mosaic, moved, mirrored, recoloured, combined, at random.

    Geometry is settled first, as placements and matrices; each image is then resampled once.
    """

    def __init__(
        self,
        dataset: DetectionSet,
        bad_images: str,
        augment: AugmentConfig,
        seed: int,
        *,
        largest: tuple[int, int],
        resize: Resize = "stretch",
        epochs: int | None = None,
        cache: ImageCache | None = None,
    ) -> None:
        """
        Args:
            largest: (height, width) of the largest input of the run.
            epochs: of the whole run; needed where augmentation goes by its end or its length.
            cache: of the images as `reductions` says.
        Raises: ValueError: it is needed and was not given.
        """
        super().__init__(
            dataset,
            bad_images,
            reductions_N=reductions(dataset, augment, largest, resize),
            cache=cache,
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
        rng = keyed_generator(self._seed, _AUGMENT, *key.stream)
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
        image_HW3, hidden_HW = finished(sample.image_HW3, augment, rng)
        sample = replace(sample, image_HW3=image_HW3)
        return sample if hidden_HW is None else behind(sample, hidden_HW)

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
        """What stands for image `index`, before it is combined with another."""
        if augment.mosaic and rng.random() < augment.mosaic:
            return self._mosaic(index, size, augment, rng)
        return self._single(index, size, augment, rng).sample

    def _single(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Donor:
        """One image."""
        original = self._open(index, random_turn(augment.rotate90, rng))
        return (self._moved if augment.affine.moves else self._placed)(original, size, augment, rng)

    def _placement(
        self,
        original: Original,
        size: tuple[int, int],
        augment: AugmentConfig,
        rng: np.random.Generator,
        reduced: int = 1,
    ) -> Placement:
        """See random_placement."""
        boxes_M4, width, height = original.boxes_M4, original.width, original.height
        return random_placement(boxes_M4, width, height, size, augment, rng, self._resize, reduced)

    def _placed(
        self,
        original: Original,
        size: tuple[int, int],
        augment: AugmentConfig,
        rng: np.random.Generator,
    ) -> Donor:
        """One image, its sides along those of the input: a crop and a resize."""
        placement = self._placement(original, size, augment, rng, original.reduced)
        colours_34 = random_colours(augment.distort, rng)
        interpolation = cv2.INTER_LINEAR
        if augment.random_interpolation:
            interpolation = random_interpolation(rng)
        mapped_M4, keep_M = map_boxes(original.boxes_M4, placement)
        sample = Sample(
            render(original.image_HW3, placement, interpolation, colours_34, original.reduced),
            mapped_M4[keep_M],
            original.labels_M[keep_M],
            original.index,
        )
        kept = np.flatnonzero(keep_M)
        matrix_33 = _matrix_of(placement)
        return donor_of(sample, original.outlines_M, kept, placement.source, matrix_33)

    def _moved(
        self,
        original: Original,
        size: tuple[int, int],
        augment: AugmentConfig,
        rng: np.random.Generator,
    ) -> Donor:
        """One image, placed as in `_placed` and seen through a random view."""
        placement = self._placement(original, size, augment, rng)
        mirrored = placement.mirror_x, placement.mirror_y
        placement = placement._replace(mirror_x=False, mirror_y=False)
        view = random_view(size, size, augment.affine, mirrored, rng)
        canvas = Canvas(size)
        boxes_M4, placed_M = map_boxes(original.boxes_M4, placement)
        placed_33 = between(placement.source, placement.target)
        matrix_33 = canvas.draw(
            original.image_HW3, placement.source, view.matrix_33 @ placed_33, original.reduced
        )
        from_canvas_33 = matrix_33 @ between(placement.target, placement.source)
        labels_M = original.labels_M[placed_M]
        seen_M = canvas.note(boxes_M4[placed_M], labels_M, from_canvas_33)
        sample = canvas.sample(original.index, random_colours(augment.distort, rng))
        keep_M = np.flatnonzero(placed_M)[seen_M]
        return donor_of(sample, original.outlines_M, keep_M, placement.source, matrix_33)

    def _mosaic(
        self, index: int, size: tuple[int, int], augment: AugmentConfig, rng: np.random.Generator
    ) -> Sample:
        """Several images, seen through a random view; the first is `index`."""
        images = augment.mosaic_images
        others = rng.integers(len(self._dataset.records), size=images - 1)
        order = rng.permutation(images)
        layout = random_layout(images, augment.mosaic_whole, size, rng)
        mirror_x, mirror_y = rng.random() < augment.flip, rng.random() < augment.flip_vertical
        view = random_view(layout.canvas, size, augment.affine, (mirror_x, mirror_y), rng)
        canvas, used, cell = Canvas(size), [], layout.cell
        for place, wanted in zip(order, [index, *others.tolist()]):
            slot = layout.slots[place]
            turn = random_turn(augment.rotate90, rng)
            width, height = turned_sides(self._dataset.records[wanted], turn)
            matrix_33 = view.matrix_33 @ self._tile(slot, width, height, cell)
            if not canvas.shows(width, height, matrix_33):
                used.append(wanted)  # and spare the time of decoding it
                continue
            one = self._open(wanted, turn)
            matrix_33 = view.matrix_33 @ self._tile(slot, one.width, one.height, cell)
            everything = (0, 0, one.width, one.height)
            matrix_33 = canvas.draw(one.image_HW3, everything, matrix_33, one.reduced)
            canvas.note(one.boxes_M4, one.labels_M, matrix_33)
            used.append(one.index)
        return canvas.sample(used[0], random_colours(augment.distort, rng))

    def _tile(self, slot: Slot, width: int, height: int, cell: tuple[int, int]) -> np.ndarray:
        """The matrix that takes an image to its place in a mosaic's canvas."""
        placement = fitted(width, height, cell, self._resize)
        left, top, right, bottom = placement.target
        return between(placement.source, tile(slot, bottom - top, right - left))

    def _open(self, index: int, turn: int) -> Original:
        """The image at `index`, or the next good one, after so many quarter turns."""
        found, image_HW3 = self._next_good(index)
        reduced = int(self._reductions_N[found])
        return original_of(found, image_HW3, reduced, self._dataset.records[found], turn)

    def _next_good(self, index: int) -> tuple[int, np.ndarray]:
        """The image at `index`, reduced, or the next that can be read: a function of `index` alone.

        Raises: DataError: a hundred in a row cannot.
        """
        count = len(self._dataset.records)
        tries = min(count, _MOST_REPLACEMENTS)
        for step in range(tries):
            candidate = (index + step) % count
            image_HW3 = self._read(candidate, _CONSEQUENCE)
            if image_HW3 is not None:
                return candidate, image_HW3
        raise DataError(
            f"{tries} images in a row cannot be read; the first: {self.path(index)}: "
            f"{self._bad[index]}",
            code="no_good_image",
            where=self._dataset.source,
        )


def _matrix_of(placement: Placement) -> np.ndarray:
    """Pixels of the original -> pixels of the input, mirrored as the placement says."""
    scale = -1 if placement.mirror_x else 1, -1 if placement.mirror_y else 1
    start = placement.width * placement.mirror_x, placement.height * placement.mirror_y
    return moved(scale=scale, to=start) @ between(placement.source, placement.target)


def finished(
    image_HW3: np.ndarray, augment: AugmentConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray | None]:
    """What becomes of an input's pixels at last, and hidden_HW as of `erased`; None: nothing is."""
    if any(augment.hsv):
        image_HW3 = recolour_hsv(image_HW3, random_hsv(augment.hsv, rng))
    if augment.blur and rng.random() < augment.blur:
        image_HW3 = blurred(image_HW3, rng)
    if augment.grey and rng.random() < augment.grey:
        image_HW3 = without_colours(image_HW3)
    if augment.erase and rng.random() < augment.erase:
        return erased(image_HW3, rng)
    return image_HW3, None
