"""Classified images for tests: a set in memory, and patterns on disk that a small model learns."""

from pathlib import Path

import cv2
import numpy as np

from ppdist.data.types import DetectionSet, ImageRecord

PATTERNS = ("across", "dots", "upright")

# A training on train/ and val/ below {root}, as write_patterns makes them.
CONFIG = """
data:
  format: folder
  root: {root}
  train: {{images: train}}
  val: {{images: val}}
  workers: 0
  augment: {{crop_least: 0.7, distort: 0.3, flip: 0.5, random_interpolation: false}}
model: {{name: yolov5_cls, depth_multiple: 0.33, width_multiple: 0.125, num_classes: 3,
        image_size: [64, 64]}}
train: {{epochs: 24, batch_size_per_card: 8, ema: {{decay: 0.9}}}}
optimizer: {{name: adamw, lr: 0.003, weight_decay: 0.01}}
schedule: {{warmup_epochs: 1}}
checkpoint: {{every_epochs: 100}}
log: {{visualdl: false}}
"""


def classified_set(labels: list[int], names: tuple[str, ...]) -> DetectionSet:
    """Images /images/N.jpg (not on disk) of the given classes."""
    records = tuple(
        ImageRecord(
            path=f"/images/{position}.jpg",
            image_id=position + 1,
            width=0,
            height=0,
            boxes_M4=np.zeros((1, 4), np.float32),
            labels_M=np.array([label]),
            crowd_M=np.zeros(1, bool),
            area_M=np.zeros(1, np.float32),
        )
        for position, label in enumerate(labels)
    )
    return DetectionSet(records, names, tuple(range(len(names))), "test")


def write_patterns(folder: Path, each: int, seed: int, sides: tuple[int, int] = (64, 80)) -> None:
    """`each` images of stripes across, dots and upright stripes, in a folder per class.

    Colours, period and phase are random; sides: the range of height and of width in pixels.
    """
    rng = np.random.default_rng(seed)
    for name in PATTERNS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            height, width = rng.integers(sides[0], sides[1] + 1, 2)
            y_H1, x_1W = np.mgrid[:height, :1], np.mgrid[:1, :width][1]
            period, phase = rng.uniform(8, 16), rng.uniform(0, 2 * np.pi, 2)
            across = np.sin(2 * np.pi * y_H1[0] / period + phase[0])
            upright = np.sin(2 * np.pi * x_1W / period + phase[1])
            wave_HW = {
                "across": across + 0 * upright,
                "upright": upright + 0 * across,
                "dots": 2 * across * upright,
            }[name]
            dark, light = rng.uniform(0, 100, 3), rng.uniform(140, 255, 3)
            image_HW3 = dark + (wave_HW[..., None] > 0) * (light - dark)
            image_HW3 += rng.normal(0, 12, image_HW3.shape)
            file = folder / name / f"{number:03d}.png"
            assert cv2.imwrite(str(file), image_HW3.clip(0, 255).astype(np.uint8))
