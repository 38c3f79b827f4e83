"""Small sets on disk for the tests of this folder."""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.annotations import ignore_issue
from ppdist.data.datasets.build import read_raw
from ppdist.data.datasets.convert import convert
from ppdist.data.types import RawSet

NAMES = ("RBC", "WBC", "Platelets")


def write_images(folder: Path, count: int, size: tuple[int, int] = (64, 48)) -> list[str]:
    """JPEGs of noise, each with its own mean; size is (width, height)."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{index:03d}.jpg" for index in range(count)]
    for index, name in enumerate(names):
        rng = np.random.RandomState(index)
        shade = rng.randint(0, 60, (size[1], size[0], 3)) + (index * 12) % 190
        Image.fromarray(shade.astype(np.uint8)).save(folder / name, quality=95)
    return names


def coco_content(names: list[str], size: tuple[int, int] = (64, 48), boxes: int = 2) -> dict:
    """COCO JSON with `boxes` boxes an image (image i has i % (boxes + 1))."""
    rng = np.random.RandomState(0)
    annotations = []
    for index in range(len(names)):
        for _ in range(index % (boxes + 1)):
            x, y = rng.randint(0, 30, 2).tolist()
            box = [x, y, *rng.randint(8, 17, 2).tolist()]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": index + 1,
                    "category_id": len(annotations) % 3 + 1,
                    "bbox": box,
                }
            )
    return {
        "images": [
            {"id": index + 1, "file_name": name, "width": size[0], "height": size[1]}
            for index, name in enumerate(names)
        ],
        "annotations": annotations,
        "categories": [{"id": n, "name": name} for n, name in enumerate(NAMES, 1)],
    }


def write_coco(root: Path, count: int = 4, **changes: object) -> DataConfig:
    """A set whose train and val splits are the same; `changes` replace parts of the JSON."""
    content = coco_content(write_images(root / "images", count)) | changes
    write_json(root, content)
    return coco_config(root)


def write_json(root: Path, content: object) -> Path:
    file = root / "set.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def coco_config(root: Path, **changes: object) -> DataConfig:
    split = SplitConfig(annotations="set.json")
    return DataConfig(root=str(root), train=split, val=split, **changes)


def sharded(root: Path, out: Path, shard_bytes: int = 12_000) -> DataConfig:
    """The set of `write_coco` in shards of a few images, at the places it has there."""
    raw = read_raw(coco_config(root), "train", ignore_issue)
    assert convert(raw, "coco", out, images="copy", split="train", shard_bytes=shard_bytes) == []
    (out / "annotations" / "instances_train.json").rename(out / "set.json")
    (out / "images" / "train").rename(out / "shards")
    (out / "images").rmdir()
    (out / "shards").rename(out / "images")
    return coco_config(out)


def voc_xml(
    name: str, things: Iterable[tuple[str, Sequence[float]]], size: tuple[int, int] = (64, 48)
) -> str:
    """An image's annotation in Pascal VOC; things: class names and corners in pixels."""
    objects = "".join(
        f"<object><name>{kind}</name><bndbox><xmin>{x1!r}</xmin><ymin>{y1!r}</ymin>"
        f"<xmax>{x2!r}</xmax><ymax>{y2!r}</ymax></bndbox></object>"
        for kind, (x1, y1, x2, y2) in things
    )
    sides = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
    return f"<annotation><filename>{name}</filename>{sides}{objects}</annotation>"


def write_voc(raw: RawSet, root: Path, split: str) -> None:
    """A split as Pascal VOC has it: images/, Annotations/, ImageSets/Main/SPLIT.txt, names."""
    for folder in ("images", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for image in raw.images:
        shutil.copyfile(image.path, root / "images" / image.path.name)
        things = [(raw.class_names[thing.label], thing.box) for thing in image.objects]
        text = voc_xml(image.path.name, things, (image.width, image.height))
        (root / "Annotations" / f"{image.path.stem}.xml").write_text(text)
    stems = [f"{image.path.stem}\n" for image in raw.images]
    (root / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(stems))
    (root / "label_list.txt").write_text("\n".join(raw.class_names))


def bccd(shared: Path, form: str = "coco", **changes: object) -> DataConfig:
    """The real set of blood cells that stands beside the checkout, in one of its three formats."""
    lists = {
        "coco": "annotations/instances_{}.json",
        "voc": "ImageSets/Main/{}.txt",
        "yolo": "{}.txt",
    }
    train, val = (SplitConfig(annotations=lists[form].format(name)) for name in ("train", "val"))
    root = str(shared / "data" / "bccd")
    return DataConfig(format=form, root=root, train=train, val=val, **changes)
