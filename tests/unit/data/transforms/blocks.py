"""Images whose boxes can be checked by their colours."""

from pathlib import Path

import numpy as np

from ppdist.data.datasets.build import read_split
from ppdist.data.transforms.pipeline import TrainSamples, reductions
from ppdist.data.types import Sample
from tests.unit.data.sets import coco_config

STILL = {"distort": 0, "expand": 0, "crop": 0, "flip": 0, "random_interpolation": False}


COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255))


SIZES = ((200, 160), (161, 241), (120, 90), (330, 247))  # width, height


def check_blocks(sample: Sample, turned: bool) -> int:
    """Every box is around the block of its class, and every block has a box."""
    pixels, checked = sample.image_HW3.astype(int), 0
    height, width = pixels.shape[:2]
    left_over = {label: pixels[..., label] - pixels.sum(2) / 3 > 100 for label in range(3)}
    for label, (x1, y1, x2, y2) in zip(sample.labels_M, sample.boxes_M4):
        assert 0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height
        rows, columns = (
            slice(max(0, int(y1) - 2), int(y2) + 3),
            slice(max(0, int(x1) - 2), int(x2) + 3),
        )
        ys, xs = np.nonzero(left_over[label][rows, columns])
        assert len(ys), "a box without its block"
        found = [xs.min() + columns.start, ys.min() + rows.start]
        found += [xs.max() + 1 + columns.start, ys.max() + 1 + rows.start]
        np.testing.assert_allclose([x1, y1, x2, y2], found, atol=3 if turned else 1.6)
        checked += 1
        left_over[label][rows, columns] = False
    for label, mask in left_over.items():  # what is left are slivers, each less than a tenth
        assert mask.sum() < 200, f"a block of class {label} without a box"
    return checked


def samples(root: Path, augment: dict, resize="letterbox", epochs=None, seed=0) -> TrainSamples:
    config = coco_config(root, augment=augment, resize=resize)
    dataset = read_split(config, "train")
    return TrainSamples(
        dataset,
        "skip",
        config.augment,
        seed,
        resize=resize,
        epochs=epochs,
        reductions_N=reductions(dataset, config.augment, (128, 128), resize),
    )
