"""Images whose boxes can be checked by their colours."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ppdist.data.datasets.build import read_split
from ppdist.data.transforms.pipeline import TrainSamples
from ppdist.data.types import Sample
from tests.unit.data.sets import coco_config

STILL = {"distort": 0, "expand": 0, "crop": 0, "flip": 0, "random_interpolation": False}


COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255))


SIZES = ((200, 160), (161, 241), (120, 90), (330, 247))  # width, height


@pytest.fixture(scope="module", params=["png", "jpg"])
def blocks(request, tmp_path_factory) -> Path:
    """Black images of several shapes, in each a block of a colour per class."""
    root = tmp_path_factory.mktemp("blocks")
    (root / "images").mkdir()
    images, annotations = [], []
    for index, (width, height) in enumerate(SIZES * 3):
        rng, pixels = np.random.RandomState(index), np.zeros((height, width, 3), np.uint8)
        for label in range(3):
            w, h = rng.randint(20, width // 4), rng.randint(20, height // 2)
            x, y = label * width // 3 + rng.randint(0, width // 3 - w + 1), rng.randint(0, h)
            pixels[y : y + h, x : x + w] = COLOURS[label]
            annotations.append(
                {"image_id": index + 1, "category_id": label + 1, "bbox": [x, y, w, h]}
            )
        name = f"{index}.{request.param}"
        Image.fromarray(pixels).save(root / "images" / name, quality=98, subsampling=0)
        images.append({"id": index + 1, "file_name": name, "width": width, "height": height})
    categories = [{"id": label + 1, "name": f"{label}"} for label in range(3)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "set.json").write_text(json.dumps(content), encoding="utf-8")
    return root


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
    dataset = read_split(config, "train", 3)
    return TrainSamples(
        dataset, "skip", config.augment, seed, largest=(128, 128), resize=resize, epochs=epochs
    )
