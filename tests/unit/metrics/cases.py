"""Small sets of objects and detections for the tests of metrics."""

import numpy as np

from ppdist.data.types import DetectionSet, ImageRecord

NAMES = ("cat", "dog", "bird")


def record(image_id, boxes, labels, crowd=None, area=None) -> ImageRecord:
    boxes_M4 = np.array(boxes, np.float32).reshape(-1, 4)
    sides_M2 = boxes_M4[:, 2:] - boxes_M4[:, :2]
    return ImageRecord(
        path=f"/images/{image_id}.jpg",
        image_id=image_id,
        width=640,
        height=480,
        boxes_M4=boxes_M4,
        labels_M=np.array(labels, np.int64).reshape(-1),
        crowd_M=np.zeros(len(boxes_M4), bool) if crowd is None else np.array(crowd, bool),
        area_M=sides_M2.prod(axis=1) if area is None else np.array(area, np.float32),
    )


def detection_set(*records, names=NAMES, category_ids=(1, 5, 9)) -> DetectionSet:
    return DetectionSet(
        records=tuple(records), class_names=names, category_ids=category_ids, source="test"
    )


def random_case(seed, images=40, objects=12, detections=40, tied_scores=False):
    """Objects of all sizes, some crowds, areas below the boxes'; detections near and far."""
    rng = np.random.default_rng(seed)
    records, rows = [], []
    for index in range(images):
        count = int(rng.integers(0, 2 * objects))
        corner, sides = rng.uniform(0, 400, (count, 2)), rng.uniform(4, 200, (count, 2))
        boxes = np.concatenate([corner, corner + sides], axis=1).round(2).astype(np.float32)
        labels = rng.integers(0, 2, count)  # no object of class 2
        area = sides.prod(axis=1) * rng.uniform(0.4, 1, count)
        records.append(record(index, boxes, labels, rng.random(count) < 0.1, area))
        for _ in range(detections):
            near = count and rng.random() < 0.6
            pick = int(rng.integers(count)) if near else 0
            box = boxes[pick] + rng.normal(0, 4, 4) if near else rng.uniform([0] * 4, 300)
            x1, y1, x2, y2 = box
            box = min(x1, x2), min(y1, y2), max(x1, x2) + 1, max(y1, y2) + 1
            label = labels[pick] if near and rng.random() < 0.9 else rng.integers(3)
            score = round(rng.random(), 1) if tied_scores else rng.random()
            rows.append([index, label, score, *np.round(box, 2)])
    return detection_set(*records), np.array(rows)


def odd_case(seed):
    """Few images in no order of ids, some empty, boxes on a grid so that overlaps tie, boxes
    without a side, crowds, up to 160 detections of an image; whichever the seed brings.

    Returns: the set, rows, and how many classes it has.
    """
    rng = np.random.default_rng(seed)
    classes, images = int(rng.integers(1, 7)), int(rng.integers(1, 12))
    tied, on_grid, flat = rng.random(3) < (0.5, 0.3, 0.3)
    records, rows = [], []
    for index, image_id in enumerate(rng.permutation(1000)[:images]):
        count = int(rng.integers(0, 10)) if rng.random() < 0.8 else 0
        corner = rng.uniform(0, 100, (count, 2))
        sides = rng.uniform(0 if flat else 2, 150, (count, 2))
        if on_grid:
            corner, sides = corner.round(-1), sides.round(-1) + 10
        if flat and count:
            sides[0] = 0
        boxes = np.concatenate([corner, corner + sides], axis=1).round(2).astype(np.float32)
        labels, crowd = rng.integers(0, classes, count), rng.random(count) < 0.2
        area = sides.prod(axis=1) * rng.uniform(0.2, 2, count)
        records.append(record(int(image_id), boxes, labels, crowd, area))
        for _ in range(int(rng.integers(0, 160 if rng.random() < 0.1 else 30))):
            label = rng.integers(classes)
            box = np.concatenate([rng.uniform(0, 100, 2), rng.uniform(101, 250, 2)])
            if count and rng.random() < 0.6:
                pick = rng.integers(count)
                box = boxes[pick] + (0 if rng.random() < 0.3 else rng.normal(0, 1, 4))
                label = labels[pick] if rng.random() < 0.8 else label
            score = round(rng.random(), 1) if tied else rng.random()
            rows.append([index, label, score, *np.round(box, -1 if on_grid else 2)])
    names = tuple(f"class {label}" for label in range(classes))
    dataset = detection_set(*records, names=names, category_ids=tuple(range(classes)))
    return dataset, np.array(rows, np.float32).reshape(-1, 7), classes
