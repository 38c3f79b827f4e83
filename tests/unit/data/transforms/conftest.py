"""Images that several tests of transforms look at."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.transforms.blocks import COLOURS, SIZES


@pytest.fixture(scope="module", params=["png", "jpg"])
def blocks(request, tmp_path_factory) -> Path:
    """Black images of several shapes, in each a block of a colour per class."""
    root = tmp_path_factory.mktemp("blocks")
    (root / "images").mkdir()
    images, annotations = [], []
    for index, (width, height) in enumerate(SIZES * 3):
        rng, pixels = np.random.RandomState(index), np.zeros((height, width, 3), np.uint8)
        for label in range(3):
            w, h = rng.randint(20, width // 4), rng.randint(20, height // 2)
            x, y = label * width // 3 + rng.randint(0, width // 3 - w + 1), rng.randint(0, h)
            pixels[y : y + h, x : x + w] = COLOURS[label]
            annotations.append(
                {"image_id": index + 1, "category_id": label + 1, "bbox": [x, y, w, h]}
            )
        name = f"{index}.{request.param}"
        Image.fromarray(pixels).save(root / "images" / name, quality=98, subsampling=0)
        images.append({"id": index + 1, "file_name": name, "width": width, "height": height})
    categories = [{"id": label + 1, "name": f"{label}"} for label in range(3)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "set.json").write_text(json.dumps(content), encoding="utf-8")
    return root
