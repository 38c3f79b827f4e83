"""Weights, images and targets that follow from formulas: nothing is trained, nothing is stored.

The functions and cases have the names that `tests.reference.parity` expects of a folder's
parity_weights.py, so a copy of this file makes such a folder.  Values are hashes of a key and a
position (splitmix64), the same on every machine and in every version of numpy.
"""

import re
import zlib

import numpy as np

EVAL_CASE = (1, 64, 128, 1)  # images, height, width, seed
TRAIN_CASE = (2, 64, 128, 2)
CLS_CASE = (1, 64, 64, 3)
CLASSES = 5  # labels of the targets are below
CONSTANT = re.compile(r"(proj_conv\.weight|anchors)$")  # the model's own values stay

# What is added to its input: small, or deep models overflow.
RESIDUAL = re.compile(r"\.m\.\d+\.cv2\.|\.blocks\.\d+\.conv2\.")


def uniform(seed: int, *shape: int) -> np.ndarray:
    """Numbers in [-1, 1), float64."""
    x = np.arange(1, int(np.prod(shape)) + 1, dtype="uint64")
    with np.errstate(over="ignore"):
        x = (x + np.uint64(seed) * np.uint64(0x632BE59BD9B4E019)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x >> np.uint64(11)) * 2.0**-52 - 1).reshape(shape)


def parity_value(key: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """The value of an entry of the original's name and shape, float32; None: its own stays."""
    if CONSTANT.search(key):
        return None
    noise = uniform(zlib.crc32(key.encode()), *shape)
    if len(shape) > 1:
        gain = 0.5 if RESIDUAL.search(key) else 2.4  # 2.4: deviation 1.4 / sqrt(fan in)
        return (gain * np.prod(shape[1:]) ** -0.5 * noise).astype("float32")
    if key.endswith((".weight", "._variance", ".running_var", ".alpha")):
        return (1 + 0.2 * noise).astype("float32")
    return (0.4 * noise + _shift(key, len(noise))).astype("float32")


def _shift(key: str, size: int) -> np.ndarray | float:
    """Scores on both sides of the usual thresholds, short sides."""
    index = np.arange(size)
    if "pred_cls." in key:
        return -1.0
    if "pred_reg." in key:
        return -0.3 * (index % 17)
    if re.search(r"^model\.\d+\.m\.\d+\.bias$", key):
        return np.where(index % (size // 3) < 4, 0.0, 0.3)
    return 0.0


def parity_image(kind: str, batch: int, height: int, width: int, seed: int) -> np.ndarray:
    """[batch, 3, height, width] float32: 8-pixel blocks and noise, "unit" 0..1, "normal" -2..2."""
    blocks = uniform(seed, batch, 3, height // 8, width // 8).repeat(8, 2).repeat(8, 3)
    image = 0.5 * (blocks + uniform(seed + 1000, batch, 3, height, width))
    return (image / 2 + 0.5 if kind == "unit" else 2 * image).astype("float32")


def parity_targets(empty_second: bool = False) -> dict[str, np.ndarray]:
    """Five and two boxes (or none) of the training images, xyxy pixels, padded to five."""
    batch, height, width, seed = TRAIN_CASE
    size = 32 + 22 * uniform(seed + 1, batch, 5, 2)
    size[0, :2] = [[9, 12], [100, 50]]
    centre = size / 2 + (np.array([width, height]) - size) * (uniform(seed, batch, 5, 2) / 2 + 0.5)
    label = ((uniform(seed + 2, batch, 5) + 1) / 2 * CLASSES).astype("int32")
    mask = np.arange(5) < np.array([[5], [0 if empty_second else 2]])
    boxes = np.concatenate([centre - size / 2, centre + size / 2], -1) * mask[..., None]
    return {
        "gt_bbox": boxes.astype("float32"),
        "gt_class": (label * mask)[..., None].astype("int32"),
        "pad_gt_mask": mask[..., None].astype("float32"),
    }
