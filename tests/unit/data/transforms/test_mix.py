"""Inputs made of two, or with parts hidden: which objects stay, and boxes follow their pixels."""

from dataclasses import replace

import cv2
import numpy as np

from ppdist.data.transforms.color import clip_to_visible, erase_rectangle
from ppdist.data.transforms.mix import PasteSource, copy_paste, cutmix
from ppdist.data.types import Sample, keyed_generator


def extent(seen_HW) -> np.ndarray | None:
    ys, xs = np.nonzero(seen_HW)
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) if len(ys) else None


def scene(seed: int, count: int = 6, height: int = 100, width: int = 140) -> Sample:
    """Blocks of one colour each, side by side; object m has the colour (m + 1, seed + 1, 50)."""
    rng = np.random.RandomState(seed)
    pixels, boxes = np.zeros((height, width, 3), np.uint8), []
    for number in range(count):
        x, y = (number % 3) * 45 + rng.randint(1, 15), (number // 3) * 50 + rng.randint(1, 15)
        w, h = rng.randint(4, 30), rng.randint(4, 33)
        pixels[y : y + h, x : x + w] = (number + 1, seed + 1, 50)
        boxes.append((x, y, x + w, y + h))
    return Sample(pixels, np.array(boxes, np.float32), np.arange(count) + seed * 6, 0)


def check_seen(sample: Sample, before: dict[tuple[int, int], np.ndarray], seeds) -> list[int]:
    """Of each scene: what is seen has a box exactly around it, or is too little."""
    kept, position = [], 0
    codes_HW = _coded(sample.image_HW3)
    for seed in seeds:
        count = 0
        for number in range(6):
            seen_HW = codes_HW == _coded(np.array([number + 1, seed + 1, 50]))
            old = before[seed, number]
            area, found = (old[2:] - old[:2]).prod(), extent(seen_HW)
            if position < len(sample.labels_M) and sample.labels_M[position] == seed * 6 + number:
                np.testing.assert_array_equal(sample.boxes_M4[position], found)
                assert seen_HW.sum() >= area / 3 - 1e-6
                position, count = position + 1, count + 1
            elif found is not None:
                assert seen_HW.sum() < area / 3 or (found[2:] - found[:2]).min() < 2
        kept.append(count)
    assert position == len(sample.labels_M)
    return kept


def _coded(colours_3: np.ndarray) -> np.ndarray:
    """One number for each colour."""
    red, green, blue = np.moveaxis(colours_3.astype(np.int32), -1, 0)
    return red << 16 | green << 8 | blue


def boxes_of(*scenes: tuple[int, Sample]) -> dict[tuple[int, int], np.ndarray]:
    return {(seed, m): box for seed, one in scenes for m, box in enumerate(one.boxes_M4)}


def test_cutmix_shows_objects_in_place_or_not_at_all():
    kept, shares = [], []
    for key in range(100):
        one, other = scene(key), scene(key + 100)
        mixed = cutmix(one, other, keyed_generator(0, key))
        seeds = (key, key + 100)
        kept.append(check_seen(mixed, boxes_of((key, one), (key + 100, other)), seeds))
        black, white = (
            replace(one, image_HW3=np.full_like(one.image_HW3, value)) for value in (0, 1)
        )
        shares.append(cutmix(black, white, keyed_generator(0, key)).image_HW3.mean())
    ones, others = np.sum(kept, 0)
    assert ones > 250 and others > 80
    assert min(shares) < 0.03 and 0.7 < max(shares) <= 1


def test_erasing_hides_rectangle_and_its_objects():
    kept, shares = [], []
    for key in range(100):
        one = scene(key)
        image_HW3, hidden_HW = erase_rectangle(one.image_HW3, keyed_generator(0, key))
        boxes_M4, keep_M = clip_to_visible(one.boxes_M4, hidden_HW)
        shown_HW3 = np.where(hidden_HW[..., None], 0, image_HW3).astype(np.uint8)
        left = replace(one, image_HW3=shown_HW3, boxes_M4=boxes_M4[keep_M],
                       labels_M=one.labels_M[keep_M])  # fmt: skip
        kept.append(check_seen(left, boxes_of((key, one)), (key,)))
        np.testing.assert_array_equal(shown_HW3[hidden_HW == 0], one.image_HW3[hidden_HW == 0])
        x1, y1, x2, y2 = extent(hidden_HW)
        assert hidden_HW.sum() == (x2 - x1) * (y2 - y1)
        shares.append(hidden_HW.mean())
        noise = image_HW3[hidden_HW != 0]
        assert 100 < noise.mean() < 155
    assert 0.01 < min(shares) < 0.05 and 0.15 < max(shares) < 0.21
    assert 480 < np.sum(kept) < 600


def test_pasted_objects_are_outlined_and_occlude():
    pasted, left = 0, 0
    for key in range(60):
        one, base = scene(key), scene(key + 100)
        donor_boxes = one.boxes_M4
        outlines = [[box[[0, 1, 2, 1, 2, 3, 0, 3]].reshape(4, 2)] for box in donor_boxes]
        outlines[0] = []  # an object without a mask is never pasted
        whole_42 = np.array([[0, 0], [140, 0], [140, 100], [0, 100]], np.float64)
        result = copy_paste(base, PasteSource(one, outlines, whole_42), keyed_generator(0, key))
        before = boxes_of((key + 100, base), (key, one))
        behind, front = check_seen(result, before, (key + 100, key))
        assert not (result.image_HW3 == (1, key + 1, 50)).all(2).any()
        pasted, left = pasted + front, left + behind
    assert 100 < pasted < 200 and 200 < left < 360


def test_pasted_object_keeps_outline_within_image():
    white = Sample(np.full((40, 40, 3), 255, np.uint8), np.array([[0, 0, 40, 40]], np.float32),
                   np.zeros(1, np.int64), 0)  # fmt: skip
    none = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)
    black = Sample(np.zeros((40, 40, 3), np.uint8), *none, 0)
    circle = cv2.ellipse2Poly((20, 20), (15, 15), 0, 0, 360, 5).astype(np.float64)
    half_42 = np.array([[0, 0], [20, 0], [20, 40], [0, 40]], np.float64)
    donor = PasteSource(white, [[circle]], half_42)
    results = [copy_paste(black, donor, keyed_generator(0, key)) for key in range(12)]
    assert {len(result.labels_M) for result in results} == {0, 1}
    for result in results:
        if len(result.labels_M):
            ys, xs = np.nonzero(result.image_HW3[..., 0])
            assert (np.hypot(xs + 0.5 - 20, ys + 0.5 - 20) < 16).all() and xs.max() <= 20
            assert abs(len(ys) - np.pi * 15**2 / 2) < 45


def test_box_shrinks_only_past_fully_hidden_side():
    box = np.array([[10.4, 10.0, 29.5, 30.0]], np.float32)
    for hidden, expected in (
        ((0, 0, 20, 40), [20, 10, 29.5, 30]),
        ((0, 0, 20, 29), [10.4, 10, 29.5, 30]),
        ((0, 25, 40, 40), [10.4, 10, 29.5, 25]),
        ((14, 0, 16, 40), [10.4, 10, 29.5, 30]),
        ((24, 0, 40, 40), [10.4, 10, 24, 30]),
    ):
        x1, y1, x2, y2 = hidden
        hidden_HW = np.zeros((40, 40), np.uint8)
        hidden_HW[y1:y2, x1:x2] = 1
        boxes_M4, keep_M = clip_to_visible(box, hidden_HW)
        np.testing.assert_allclose(boxes_M4[0], expected, atol=1e-5)
        assert keep_M.all()
    hidden_HW[:, :24] = 1
    assert not clip_to_visible(box, hidden_HW)[1].any()
    assert clip_to_visible(np.zeros((0, 4), np.float32), hidden_HW)[0].shape == (0, 4)
