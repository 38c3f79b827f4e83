"""COCO detection JSON (cocodataset.org/#format-data)."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from ppdist.data.annotations import BoxPolicy, inside_folder, read_text, record
from ppdist.data.sample import DetectionSet
from ppdist.errors import DataError

_NEEDED = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}


def read_coco(images: Path, annotations: Path, bad_boxes: str) -> DetectionSet:
    """Records of a COCO file, images in the file's order; class numbers follow category ids.

    Args:
        images: folder that `file_name` is relative to.
        annotations: the JSON file.
        bad_boxes: see BoxPolicy.
    Raises: DataError: not COCO; an annotation of an unknown image or category; a bad box.
    """
    content = _load(annotations)
    categories = sorted(content["categories"], key=lambda category: category["id"])
    label_of = {category["id"]: label for label, category in enumerate(categories)}
    image_of = {image["id"]: image for image in content["images"]}
    for part, unique in (("images", image_of), ("categories", label_of)):
        if len(unique) != len(content[part]):
            raise DataError(f"{annotations}: two entries of {part!r} have the same id")
    policy = BoxPolicy(bad_boxes, annotations)
    rows = defaultdict(list)
    for number, entry in enumerate(content["annotations"]):
        where = f"{annotations}: annotation {entry.get('id', f'number {number}')}"
        image = image_of.get(entry["image_id"])
        if image is None:
            raise DataError(f"{where}: image_id {entry['image_id']} is not among the file's images")
        if entry["category_id"] not in label_of:
            known = ", ".join(f"{c['id']} {c['name']}" for c in categories[:10])
            more = ", ..." if len(categories) > 10 else ""
            raise DataError(
                f"{where}: category_id {entry['category_id']} is not among the file's categories "
                f"({known}{more})"
            )
        where = f"{where} of image {image['file_name']!r}"
        x, y, width, height = _four_numbers(entry["bbox"], where)
        box = policy.apply((x, y, x + width, y + height), image["width"], image["height"], where)
        if box is not None:
            area = float(entry.get("area") or (box[2] - box[0]) * (box[3] - box[1]))
            crowd = bool(entry.get("iscrowd", 0))
            rows[image["id"]].append((box, label_of[entry["category_id"]], crowd, area))
    records = []
    for image in content["images"]:
        boxes, labels, crowds, areas = [*zip(*rows[image["id"]])] or [(), (), (), ()]
        path = inside_folder(images, image["file_name"], str(annotations))
        size = image["width"], image["height"]
        records.append(record(path, image["id"], size, boxes, labels, crowds, areas))
    return DetectionSet(
        records=tuple(records),
        class_names=tuple(category["name"] for category in categories),
        category_ids=tuple(label_of),
        source=str(annotations),
        notes=policy.report(),
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise DataError(f"{path}: not COCO detection JSON: expected an object, found a {kind}")
    for part, keys in _NEEDED.items():
        if not isinstance(content.get(part), list):
            found = ", ".join(list(content)[:8]) or "nothing"
            raise DataError(
                f"{path}: not COCO detection JSON: it has no list {part!r} (it has: {found})"
            )
        for number, entry in enumerate(content[part]):
            missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise DataError(
                    f"{path}: not COCO detection JSON: {part}[{number}] has no {missing[0]!r}: "
                    f"{str(entry)[:120]}"
                )
    for number, image in enumerate(content["images"]):
        sides = image["width"], image["height"]
        if not all(isinstance(side, int) and side > 0 for side in sides):
            raise DataError(
                f"{path}: images[{number}]: width {sides[0]!r}, height {sides[1]!r}: expected "
                f"whole pixels"
            )
    return content


def _four_numbers(bbox: Any, where: str) -> list[float]:
    if not isinstance(bbox, list) or len(bbox) != 4:
        raise DataError(f"{where}: bbox {bbox!r}: expected [x, y, width, height]")
    try:
        return [float(value) for value in bbox]
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: bbox {bbox!r}: expected four numbers") from error
