"""Where several images lie that share one input: four around a point, nine in three rows, or whole.

Sources: mosaic of YOLOv4 (Bochkovskiy et al. 2020, arXiv:2004.10934, section 3.3), four images as
YOLOv5 lays them out; whole images in a grid: the mosaic of Dense O2O (DEIM, Huang et al. 2024,
arXiv:2412.04234), four images of half the input's sides.
"""

import math
from typing import NamedTuple

import numpy as np

_NINTH = 2 / 3  # of the input's sides: three of them fill the canvas


class Layout(NamedTuple):
    """How a mosaic lies on its canvas; both in canvas pixels, (height, width).

    cell: what each image is fitted to.
    slots: the places of the images, row by row; they never overlap.
    """

    canvas: tuple[int, int]
    cell: tuple[int, int]
    slots: list["Slot"]


class Slot(NamedTuple):
    """A place in a mosaic: (x, y) in canvas pixels, and the share of the image before it."""

    x: float
    y: float
    before_x: float
    before_y: float


def random_layout(
    images: int, whole: bool, size: tuple[int, int], rng: np.random.Generator
) -> Layout:
    """Of 4 or 9 images for the input `size`; whole: in a grid, for which nothing is drawn."""
    if whole:
        return in_a_grid(images, size)
    return Layout(canvas_of(size), cell_of(images, size), random_slots(images, size, rng))


def in_a_grid(images: int, size: tuple[int, int]) -> Layout:
    """Each image in the middle of a cell of its own; the cells fill a canvas like the input."""
    across = math.isqrt(images)
    slots = [
        Slot((column + 0.5) * size[1] / across, (row + 0.5) * size[0] / across, 0.5, 0.5)
        for row in range(across)
        for column in range(across)
    ]
    return Layout(size, (size[0] // across, size[1] // across), slots)


def canvas_of(size: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of the canvas of a mosaic for the input `size`."""
    return 2 * size[0], 2 * size[1]


def cell_of(images: int, size: tuple[int, int]) -> tuple[int, int]:
    """(height, width) that each of 4 or 9 images is fitted to, for the input `size`."""
    return size if images == 4 else (round(size[0] * _NINTH), round(size[1] * _NINTH))


def random_slots(images: int, size: tuple[int, int], rng: np.random.Generator) -> list[Slot]:
    """Where the 4 or 9 images of a mosaic lie, row by row; they never overlap."""
    return around_a_point(size, rng) if images == 4 else in_three_rows(size, rng)


def around_a_point(size: tuple[int, int], rng: np.random.Generator) -> list[Slot]:
    """Four images that touch a point within the inner half of the canvas."""
    y, x = rng.uniform(0.5, 1.5, 2) * size
    return [Slot(x, y, *before) for before in ((1, 1), (0, 1), (1, 0), (0, 0))]


def in_three_rows(size: tuple[int, int], rng: np.random.Generator) -> list[Slot]:
    """Nine cells, each image as near to the middle one as its cell allows.

    The middle of them lies up to half a cell beside that of the canvas, so that a view of half the
    canvas sees nothing but cells.
    """
    cell = np.array(cell_of(9, size), np.float64)
    middle = np.array(size, np.float64) + rng.uniform(-0.5, 0.5, 2) * cell
    rows, columns = (
        [(low - side / 2, 1.0), (low, 0.5), (low + side / 2, 0.0)]
        for low, side in zip(middle.tolist(), cell.tolist())
    )
    return [Slot(x, y, before_x, before_y) for y, before_y in rows for x, before_x in columns]


def tile(slot: Slot, height: int, width: int) -> tuple[float, float, float, float]:
    """Where an image of the given sides lies (x1, y1, x2, y2), in canvas pixels."""
    left, top = slot.x - slot.before_x * width, slot.y - slot.before_y * height
    return left, top, left + width, top + height
