"""Outputs and objects of two small images for the PP-YOLOE loss."""

import numpy as np
import paddle

from ppdist.models.outputs import PPYOLOEOutputs

CLASSES, STATIC = 3, 10
ATSS, TAL = 0, STATIC  # a step of each phase


def random_outputs(images: int = 2, seed: int = 0) -> PPYOLOEOutputs:
    paddle.seed(seed)
    shapes = [(2, 3), (4, 6), (8, 12)]  # a 64 x 96 image
    maps = [tuple(paddle.randn([images, c, h, w]) for h, w in shapes) for c in (CLASSES, 68)]
    for x in sum(maps, ()):
        x.stop_gradient = False
    return PPYOLOEOutputs(*maps)


def truth(real: tuple[int, ...] = (5, 2), boxes: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    size = rng.uniform(10, 50, (len(real), boxes, 2))
    low = rng.uniform(0, np.array([96, 64]) - size)
    mask = (np.arange(boxes) < np.array(real)[:, None]).astype("float32")
    box = np.concatenate([low, low + size], -1) * mask[..., None]
    labels = rng.integers(0, CLASSES, mask.shape) * mask
    return [box.astype("float32"), labels.astype("int64"), mask]
