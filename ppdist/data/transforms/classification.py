"""Samples of a classifier: a part of an image and its class.

The class is the label of one box that covers the input, so batches are those of detection:
`labels_BM[:, 0]` is the class.  Training sees a random part, mirrored and recoloured at random (of
data.augment: rotate90, crop, crop_least, flip, flip_vertical, random_interpolation, distort, hsv,
blur, grey, erase, plain_epochs); evaluation and inference see the largest centred part of the
input's shape.

Sources: the random part is that of Szegedy et al. 2014 (arXiv:1409.4842, section 6).
"""

import math
from dataclasses import replace

import cv2
import numpy as np

from ppdist.data.transforms.color import augment_pixels, random_colours
from ppdist.data.transforms.geometry import (
    GeometryParams,
    flip,
    flip_vertical,
    place_window,
    random_interpolation,
    random_turn,
    render,
    turn_image,
)
from ppdist.data.transforms.pipeline import EvalSamples, TrainSamples
from ppdist.data.types import Sample, SampleKey, keyed_generator

_AUGMENT = 3  # stream of random numbers, beside the sampler's and that of detection
_ASPECTS = (3 / 4, 4 / 3)
_TRIES = 10


class ClassifyTrainSamples(TrainSamples):
    def make(self, key: SampleKey) -> Sample:
        index, image_HW3 = self._next_readable(key.index)
        rng = keyed_generator(self._seed, _AUGMENT, *key.rng_key)
        augment = self._augment_in(key.epoch)
        image_HW3 = turn_image(image_HW3, random_turn(augment.rotate90, rng))
        height, width = image_HW3.shape[:2]
        size = key.height, key.width
        window = centred_part(width, height, size)
        if rng.random() < augment.crop:
            window = random_part(width, height, augment.crop_least, rng)
        params = GeometryParams(width, height, size, window=window)
        for step in (flip, flip_vertical):
            params = step(params, augment, rng)
        placement = params.placement("stretch")._replace(
            mirror_x=params.mirror_x, mirror_y=params.mirror_y
        )
        colours_34 = random_colours(augment.distort, rng)
        interpolation = random_interpolation(augment.random_interpolation, rng)
        input_HW3 = render(image_HW3, placement, interpolation, colours_34)
        sample = _sample(input_HW3, self._dataset.records[index].labels_M, index)
        # Hidden pixels must not change the class, so only the image is kept.
        sample = replace(sample, image_HW3=augment_pixels(sample, augment, rng).image_HW3)
        return self._with_seed(key, sample)


class ClassifyEvalSamples(EvalSamples):
    def _sample(self, key: SampleKey, input_HW3: np.ndarray) -> Sample:
        return _sample(input_HW3, self._dataset.records[key.index].labels_M, key.index)

    def _resize_input(self, image_HW3: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        return resize_centre(image_HW3, size)

    def learnable(self, key: SampleKey) -> tuple[np.ndarray, np.ndarray]:
        everything_14 = np.array([[0, 0, key.width, key.height]], np.float32)
        return everything_14, self._dataset.records[key.index].labels_M[:1]


def _sample(input_HW3: np.ndarray, labels_M: np.ndarray, index: int) -> Sample:
    height, width = input_HW3.shape[:2]
    everything_14 = np.array([[0, 0, width, height]], np.float32)
    return Sample(input_HW3, everything_14, labels_M[:1], index)


def random_part(width: int, height: int, min_scale: float, rng: np.random.Generator) -> np.ndarray:
    """Draws a part (x1, y1, x2, y2) of an image, in whole pixels.

    Its area is uniform between min_scale ** 2 and 1 times the image's, its aspect (width / height)
    log-uniform in 3/4 to 4/3.  If ten such parts do not fit, returns the largest centred part whose
    aspect is in that range.
    """
    low, high = _ASPECTS
    for _ in range(_TRIES):
        pixels = rng.uniform(min_scale**2, 1) * width * height
        aspect = math.exp(rng.uniform(math.log(low), math.log(high)))
        wide, tall = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            x1, y1 = rng.integers(width - wide + 1), rng.integers(height - tall + 1)
            return np.array([x1, y1, x1 + wide, y1 + tall], np.float64)
    aspect = min(max(width / height, low), high)
    return centred_part(width, height, (1.0, aspect))


def centred_part(width: int, height: int, shape: tuple[float, float]) -> np.ndarray:
    """Returns the largest centred part (x1, y1, x2, y2) with the aspect of `shape`.

    Args: shape: (height, width).
    """
    scale = min(height / shape[0], width / shape[1])
    tall = min(height, max(1, math.floor(shape[0] * scale + 0.5)))
    wide = min(width, max(1, math.floor(shape[1] * scale + 0.5)))
    x1, y1 = (width - wide) // 2, (height - tall) // 2
    return np.array([x1, y1, x1 + wide, y1 + tall], np.float64)


def resize_centre(image_HW3: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes the largest centred part with the aspect of `size` to `size`.

    The resize is linear.  This is what evaluation and inference see: a centre crop of the short
    side.

    Args: size: (height, width).
    """
    height, width = image_HW3.shape[:2]
    window = centred_part(width, height, size)
    return render(image_HW3, place_window(window, width, height, size), cv2.INTER_LINEAR)
