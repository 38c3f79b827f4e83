"""Synthetic detection set: textured shapes with known boxes.

For the demo, and for tests that need a set that a small detector learns in minutes.  Equal
arguments give equal annotations on every machine, and equal pixels with the same OpenCV.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np

from ppdist.common.errors import DataError
from ppdist.common.files import replace_file
from ppdist.data.boxes import box_iou
from ppdist.data.types import keyed_generator

CLASS_NAMES = ("circle", "square", "triangle")
_SPLITS = ("train", "val")
_MAX_SHAPES = 6
_SIDE_RANGE = (0.12, 0.40)  # of the image's side
_MAX_OVERLAP = 0.1  # IoU of two boxes
_PLACING_TRIES = 20
_JPEG_QUALITY = 92


def make_shapes(root: Path, *, train: int, val: int, size: int = 256, seed: int = 0) -> None:
    """Writes `images/{train,val}/NNNNN.jpg` and `annotations/instances_{train,val}.json`.

    Args:
        root: created if needed; these two folders may contain files of an earlier call with the
            same arguments, and nothing else.
        train, val: number of images.
        size: side of the square images in pixels, at least 64.
        seed: seed of all random numbers.
    Raises: DataError: there are other files, which are not changed, or root cannot be written.
    """
    files: Iterable[tuple[str, bytes]] = (
        file
        for split, count in enumerate((train, val))
        for file in _make_split_files(split, count, size, seed)
    )
    try:
        existing = {
            path.relative_to(root).as_posix()
            for folder in ("annotations", "images")
            for path in (root / folder).rglob("*")
            if not path.is_dir()
        }
        if existing:
            files = _missing_files(root, existing, list(files))
        for name, content in files:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(root / name, content)
    except OSError as error:
        raise DataError(
            f"cannot be written: {error.strerror or error}",
            code="folder_unwritable",
            where=str(root),
        ) from error


def _missing_files(
    root: Path, existing: set[str], files: list[tuple[str, bytes]]
) -> list[tuple[str, bytes]]:
    """Returns the files that do not exist yet.

    Raises: DataError: there are other files.
    """
    same = {
        name
        for name, content in files
        if (root / name).is_file() and (root / name).read_bytes() == content
    }
    unexpected = sorted(existing - same)
    if unexpected:
        raise DataError(
            f"holds {len(unexpected)} files that these arguments do not make, such as "
            f"{unexpected[0]}; expected no `annotations` and `images` in it, "
            f"or those of an earlier call with the same arguments",
            code="folder_not_empty",
            where=str(root),
            fix="remove both folders, or choose another --out",
        )
    return [(name, content) for name, content in files if name not in same]


def _make_split_files(split: int, count: int, size: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yields (name below the root, content) of each file: images, then their annotations."""
    name = _SPLITS[split]
    images: list[dict[str, object]] = []
    annotations: list[dict[str, object]] = []
    for index in range(count):
        image_HW3, boxes_M4, labels_M = scene(size, seed, split, index)
        file = f"{name}/{index:05d}.jpg"
        # OpenCV writes BGR.
        bgr_HW3 = cv2.cvtColor(image_HW3, cv2.COLOR_RGB2BGR)
        _, content = cv2.imencode(".jpg", bgr_HW3, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
        yield f"images/{file}", content.tobytes()
        height, width = image_HW3.shape[:2]
        images.append({"id": index + 1, "file_name": file, "width": width, "height": height})
        for (x1, y1, x2, y2), label in zip(boxes_M4.tolist(), labels_M.tolist()):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": index + 1,
                    "category_id": label + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": (x2 - x1) * (y2 - y1),
                    "iscrowd": 0,
                }
            )
    description = {
        "info": {"description": f"generated shapes, {name}"},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": n, "name": text} for n, text in enumerate(CLASS_NAMES, 1)],
    }
    yield f"annotations/instances_{name}.json", json.dumps(description).encode()


def scene(
    size: int, seed: int, split: int, index: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws an image with its boxes and labels.

    Returns: uint8 RGB [size, size, 3], boxes_M4 float64 xyxy in pixels, labels_M; M >= 1.
    """
    rng = keyed_generator(seed, split, index)
    image_HW3 = _draw_texture(size, _draw_colour(rng), rng)
    boxes: list[np.ndarray] = []
    labels = []
    for _ in range(rng.integers(1, _MAX_SHAPES + 1)):
        box = _find_free_square(size, boxes, rng)
        if box is None:
            continue
        label = int(rng.integers(len(CLASS_NAMES)))
        outline_K2 = np.rint(_draw_outline(label, box, rng)).astype(np.int32)
        (left, top), (right, bottom) = outline_K2.min(0), outline_K2.max(0) + 1
        part = slice(top, bottom), slice(left, right)
        mask_HW = np.zeros((size, size), np.uint8)
        cv2.fillPoly(mask_HW, [outline_K2], 255)
        inside_hw, image_hw3 = mask_HW[part] > 0, image_HW3[part]
        background = image_hw3[inside_hw].mean(0)
        shape_hw3 = _draw_texture(size, _draw_colour(rng, background), rng, part)
        image_hw3[inside_hw] = shape_hw3[inside_hw]
        boxes.append(np.array([left, top, right, bottom], np.float64))
        labels.append(label)
    return image_HW3, np.stack(boxes), np.array(labels, np.int64)


def _draw_colour(rng: np.random.Generator, background: np.ndarray | None = None) -> np.ndarray:
    """Draws a colour, RGB 0..255, at least 80 away from `background`."""
    while True:
        colour = rng.uniform(20, 235, 3)
        if background is None or np.linalg.norm(colour - background) > 80:
            return colour


def _draw_texture(
    size: int,
    colour: np.ndarray,
    rng: np.random.Generator,
    part: tuple[slice, slice] = (slice(None), slice(None)),
) -> np.ndarray:
    """Draws a noisy plane of a colour: coarse clouds, stripes and fine grain.

    Args: part: rows and columns of the plane that are wanted; the random numbers are those of all.
    Returns: uint8 [h, w, 3].
    """
    clouds = cv2.resize(rng.normal(0, 14, (8, 8, 3)), (size, size), interpolation=cv2.INTER_CUBIC)
    angle, period = rng.uniform(0, np.pi), rng.uniform(5, 20)
    y_h1, x_w = np.arange(size)[part[0], None], np.arange(size)[part[1]]
    stripes_hw = np.sin((np.cos(angle) * x_w + np.sin(angle) * y_h1) * 2 * np.pi / period)
    grain = rng.normal(0, 6, (size, size, 1))[part]
    plane = colour + clouds[part]
    plane += rng.uniform(0, 18) * stripes_hw[..., None]
    plane += grain
    return plane.clip(0, 255, out=plane).astype(np.uint8)


def _find_free_square(
    size: int, boxes: list[np.ndarray], rng: np.random.Generator
) -> np.ndarray | None:
    """Draws a square [4] xyxy that hardly overlaps others; None if there is no room."""
    for _ in range(_PLACING_TRIES):
        side = rng.uniform(*_SIDE_RANGE) * size
        corner = rng.uniform(0, size - 1 - side, 2)
        box = np.concatenate([corner, corner + side])
        if not boxes or box_iou(box[None], np.stack(boxes)).max() <= _MAX_OVERLAP:
            return box
    return None


def _draw_outline(label: int, box: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws the corners [K, 2] of a shape in a square, turned and squeezed."""
    corners, turn = {
        0: (40, 0.0),
        1: (4, rng.uniform(-0.25, 0.25)),
        2: (3, rng.uniform(-0.4, 0.4)),
    }[label]
    start = np.pi / 4 if label == 1 else -np.pi / 2
    angle_K = start + turn + np.arange(corners) * 2 * np.pi / corners
    centre, radius = (box[:2] + box[2:]) / 2, (box[2] - box[0]) / 2
    squeeze = np.array([1.0, rng.uniform(0.75, 1.0)])
    return centre + radius * squeeze * np.stack([np.cos(angle_K), np.sin(angle_K)], 1)
