"""Draws a set of many small objects: `python -m benchmarks.small_objects OUT`.

It is for measuring recipes.  Each image is a grid of the demo's scenes, so its objects are a fourth
as large and sixteen times as
many: about 50 of 8 to 25 pixels in 256 x 256, of three classes.
"""

import json
import sys
from pathlib import Path

import cv2
import numpy as np

from ppdist.data.datasets.synthetic import CLASS_NAMES, scene

_GRID, _SCENE = 4, 64  # scenes along a side; pixels of each
_IMAGES = {"train": 200, "val": 60}


def draw_small_objects(root: Path, seed: int = 0) -> None:
    """Writes `images/{train,val}/NNNNN.jpg` and COCO's `annotations/instances_*.json`."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for split, (name, count) in enumerate(_IMAGES.items()):
        (root / "images" / name).mkdir(parents=True, exist_ok=True)
        images, annotations = [], []
        side = _GRID * _SCENE
        for index in range(count):
            image_HW3 = np.zeros((side, side, 3), np.uint8)
            for cell in range(_GRID**2):
                top, left = (_SCENE * cell_index for cell_index in divmod(cell, _GRID))
                part_HW3, boxes_M4, labels_M = scene(_SCENE, seed, split, index * _GRID**2 + cell)
                image_HW3[top : top + _SCENE, left : left + _SCENE] = part_HW3
                for (x1, y1, x2, y2), label in zip(boxes_M4.tolist(), labels_M.tolist()):
                    box = [x1 + left, y1 + top, x2 - x1, y2 - y1]
                    annotations.append(
                        {
                            "id": len(annotations) + 1,
                            "image_id": index + 1,
                            "category_id": label + 1,
                            "bbox": box,
                            "area": box[2] * box[3],
                            "iscrowd": 0,
                        }
                    )
            file = f"{index:05d}.jpg"
            cv2.imwrite(str(root / "images" / name / file), image_HW3[..., ::-1])
            images.append({"id": index + 1, "file_name": file, "width": side, "height": side})
        content = {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": n, "name": text} for n, text in enumerate(CLASS_NAMES, 1)],
        }
        (root / f"annotations/instances_{name}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    draw_small_objects(Path(sys.argv[1]))
