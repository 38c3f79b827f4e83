"""An annotation format of one's own: a CSV file of boxes, registered and trained on.

    python examples/own_dataset.py -c mine.yml        # with data: {format: boxes_csv, ...}

A package of yours does the same by an entry point, and then every command knows the format:
docs/extend.md.
"""

import csv
from pathlib import Path
from typing import Literal

from pydantic import Field

from ppdist import register_dataset
from ppdist.config.data import DataConfig
from ppdist.data.types import Complain, RawImage, RawObject, RawSet, Split


class BoxesCsvConfig(DataConfig):
    """A file of lines `image,width,height,class,left,top,right,bottom` in pixels."""

    format: Literal["boxes_csv"] = Field(default="boxes_csv", description="annotation format")


def read(config: BoxesCsvConfig, split: Split, complain: Complain) -> RawSet:
    """The images of a split with their boxes; what is wrong with them is settled later."""
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


def register() -> None:
    """Also what an entry point of the group `ppdist.plugins` names."""
    register_dataset(config=BoxesCsvConfig, reader="own_dataset:read")


if __name__ == "__main__":
    from ppdist.cli.train import main
    from ppdist.common import process

    register()
    process.run(main)
