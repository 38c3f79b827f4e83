"""The format: one file of lines, an object each."""

from pathlib import Path

from blobs.keys import BlobsSetConfig
from ppdist.data.types import Complain, RawImage, RawObject, RawSet, Split


def read(config: BlobsSetConfig, split: Split, complain: Complain) -> RawSet:
    part = config.train if split == "train" else config.val
    root = Path(config.root)
    (folder,), (name_of_file,) = part.image_folders, part.annotation_files
    file = root / name_of_file
    images: dict[str, RawImage] = {}
    names = config.class_names
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        name, width, height, label, *box = line.split(config.delimiter)
        path = root / folder / name
        where = f"{file}:{number}"
        if name not in images:
            size = int(width), int(height)
            images[name] = RawImage(path, len(images) + 1, *size, objects=[], where=where)
        x1, y1, x2, y2 = map(float, box)
        images[name].objects.append(RawObject((x1, y1, x2, y2), names.index(label), where))
    return RawSet([*images.values()], names, tuple(range(1, len(names) + 1)), str(file))
