"""An annotation format of your own: a CSV file of boxes, named in the configuration.

    PYTHONPATH=examples ppdist train -c mine.yml

with `data: {format: "own_dataset:BoxesCsvConfig", ...}` in mine.yml.  An installed package of yours
needs no PYTHONPATH: docs/extend.md.
"""

import csv
from pathlib import Path
from typing import ClassVar

from ppdist.config.data import DataConfig
from ppdist.data.types import Complain, RawImage, RawObject, RawSet, Split


class BoxesCsvConfig(DataConfig):
    """The keys of a file with lines `image,width,height,class,left,top,right,bottom` in pixels."""

    reader: ClassVar[str] = "own_dataset:read"


def read(config: BoxesCsvConfig, split: Split, complain: Complain) -> RawSet:
    """Reads the images of a split with their boxes; the caller deals with invalid ones."""
    part = config.train if split == "train" else config.val
    root = Path(config.root)
    (folder,), (annotations,) = part.image_folders, part.annotation_files
    file = root / annotations
    images: dict[str, RawImage] = {}
    with file.open(encoding="utf-8", newline="") as lines:
        for number, (name, width, height, label, *box) in enumerate(csv.reader(lines), 1):
            where = f"{file}:{number}"
            if name not in images:
                path = root / folder / name
                size = int(width), int(height)
                images[name] = RawImage(path, len(images) + 1, *size, objects=[], where=where)
            left, top, right, bottom = map(float, box)
            index = config.class_names.index(label)
            images[name].objects.append(RawObject((left, top, right, bottom), index, where))
    ids = tuple(range(1, len(config.class_names) + 1))
    return RawSet([*images.values()], config.class_names, ids, str(file))
