"""Pictures and videos that tests make, and the result files that they read."""

from pathlib import Path

import cv2
import numpy as np
from pycocotools.coco import COCO


def picture(height: int, width: int, seed: int = 7) -> np.ndarray:
    """uint8 RGB, in coloured blocks."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    return np.ascontiguousarray(small.repeat(8, 0).repeat(8, 1)[:height, :width])


def write_video(file: Path, frames: int) -> None:
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 10, (64, 48))
    for index in range(frames):
        image = np.full((48, 64, 3), 60, np.uint8)
        cv2.rectangle(image, (5 + index, 10), (30 + index, 40), (200, 40, 30), -1)
        writer.write(image)
    writer.release()


def assert_usable_by_pycocotools(file: Path) -> None:
    found = COCO(str(file))
    for image in found.dataset["images"]:
        for one in found.loadAnns(found.getAnnIds(imgIds=[image["id"]])):
            left, top, width, height = one["bbox"]
            assert left >= 0 and left + width <= image["width"] + 0.02
            assert top >= 0 and top + height <= image["height"] + 0.02
    results = found.loadRes(found.dataset["annotations"])
    assert len(results.anns) == len(found.anns)
