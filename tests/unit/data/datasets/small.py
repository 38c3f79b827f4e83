"""Data sets of two or three images, in the formats of others."""

from pathlib import Path

from ppdist.config.data import DataConfig, SplitConfig
from tests.unit.data.sets import voc_xml, write_images


def voc_set(root: Path, splits: dict[str, str], objects: dict[str, list[str]]) -> DataConfig:
    """Images by stem with their split, and the class names in each."""
    (root / "Annotations").mkdir()
    names = write_images(root / "images", len(splits))
    for (stem, _), name in zip(splits.items(), names):
        (root / "images" / name).rename(root / "images" / f"{stem}.jpg")
        text = voc_xml("stale.jpg", [(thing, (1, 2, 30, 40)) for thing in objects[stem]])
        (root / "Annotations" / f"{stem}.xml").write_text(text)
    for split in ("train", "val"):
        stems = [stem for stem, of in splits.items() if of == split]
        (root / f"{split}.txt").write_text("\n".join(stems) + "\n")
    train, val = (SplitConfig(annotations=f"{split}.txt") for split in ("train", "val"))
    return DataConfig(format="voc", root=str(root), train=train, val=val)


def yolo_set(root: Path, line: str, names: str | None = "cat\ndog\n") -> DataConfig:
    write_images(root / "images", 2)
    (root / "labels").mkdir(exist_ok=True)
    (root / "labels" / "000.txt").write_text(f"1 0.5 0.5 0.25 0.5\n{line}\n")
    (root / "labels" / "001.txt").touch()
    if names is not None:
        (root / "classes.txt").write_text(names)
    split = SplitConfig(annotations="labels")
    return DataConfig(format="yolo", root=str(root), train=split, val=split)
