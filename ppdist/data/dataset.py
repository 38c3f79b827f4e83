"""The `data:` section, and one entrance to every annotation format."""

from pathlib import Path
from typing import Literal

from ppdist.config.data import DataConfig
from ppdist.data.check.consistency import check_classes, check_files, check_names
from ppdist.data.formats.annotations import Strictly, settle
from ppdist.data.formats.coco import read_coco
from ppdist.data.formats.folder import read_csv, read_folder
from ppdist.data.formats.raw import Complain, RawImage, RawObject, RawSet
from ppdist.data.formats.voc import read_voc
from ppdist.data.formats.yolo import read_yolo
from ppdist.data.limit import limited
from ppdist.data.sample import DetectionSet
from ppdist.errors import DataError

_ANNOTATIONS = {"coco": "JSON file", "voc": "list of images", "csv": "CSV file"}


def read_split(
    config: DataConfig,
    split: Literal["train", "val"],
    num_classes: int | None = None,
    *,
    masks: bool = False,
    whole: bool = False,
) -> DetectionSet:
    """Reads one split; every rank reads the same files and gets the same set.

    Args:
        num_classes: what the model has; the data must have as many.  None: any.
        masks: keep the outlines of objects.
        whole: all images, whatever the split's `limit`.
    Raises: DataError: files missing or not of the format, boxes wrong, classes that do not fit.
    """
    _check_folder(config, split)
    limit = None if whole else (config.train if split == "train" else config.val).limit
    dataset = limited(_settled(config, split, masks), limit, f"data.{split}.limit")
    check_files(dataset)
    if num_classes is not None:
        check_classes(dataset, num_classes)
    return dataset


def read_annotations(
    config: DataConfig, split: Literal["train", "val"], num_classes: int
) -> DetectionSet:
    """As `read_split`, for who wants to know the classes: the images need not be there."""
    dataset = _settled(config, split, masks=False)
    check_classes(dataset, num_classes)
    return dataset


def read_raw(config: DataConfig, split: Literal["train", "val"], complain: Complain) -> RawSet:
    """A split as its files say it, with everything that conversion keeps.

    Of classified images every object is one without a place: box and size are 0, not known.

    Args:
        complain: gets what is wrong with parts of the files; if it returns, they are left out.
    Raises: DataError: a file is missing or as a whole not of the format.
    """
    _check_folder(config, split)
    if config.classifies:
        return _raw_of(_classified(config, split))
    return _raw(config, split, complain, everything=True)


def _check_folder(config: DataConfig, split: Literal["train", "val"]) -> None:
    _, images = _places(config, split)
    if not images.is_dir():
        raise DataError(
            f"{images} is not a folder", code="image_folder_missing", where=f"data.{split}.images"
        )


def _places(config: DataConfig, split: Literal["train", "val"]) -> tuple[Path, Path]:
    """data.root, and the folder of a split's images."""
    root = Path(config.root)
    if not root.is_dir():
        raise DataError(
            f"{root} is not a folder",
            code="data_root_missing",
            where="data.root",
            fix="set -o data.root=PATH",
        )
    return root, root / (config.train if split == "train" else config.val).images


def _settled(config: DataConfig, split: Literal["train", "val"], masks: bool) -> DetectionSet:
    if config.classifies:
        return _classified(config, split)
    strictly = Strictly()
    raw = _raw(config, split, strictly, everything=masks)
    dataset = settle(raw, config.bad_boxes, masks=masks, notes=strictly.report())
    if config.format == "coco":
        check_names(dataset, config.class_names)
    return dataset


def _raw(
    config: DataConfig, split: Literal["train", "val"], complain: Complain, *, everything: bool
) -> RawSet:
    root, images = _places(config, split)
    naming, annotations = _annotation_files(config, split)
    names = config.class_names
    if config.format == "coco":
        return read_coco(images, annotations, complain, everything=everything)
    if config.format == "yolo":
        return read_yolo(root, images, annotations, names, complain)
    return read_voc(
        root, images, annotations, names, complain, naming_list=naming, everything=everything
    )


def _classified(config: DataConfig, split: Literal["train", "val"]) -> DetectionSet:
    root, images = _places(config, split)
    if config.format == "folder":
        naming = root / config.train.images
        return read_folder(root, images, config.class_names, naming_folder=naming)
    naming, table = _annotation_files(config, split)
    return read_csv(root, images, table, config.class_names, naming_table=naming)


def _annotation_files(config: DataConfig, split: Literal["train", "val"]) -> tuple[Path, Path]:
    """Those of the training split, which may name the classes, and those of this split."""
    root = Path(config.root)
    for key, part in (("train", config.train), ("val", config.val)):
        if not part.annotations:
            raise DataError(
                f"data.{key}.annotations is missing: format {config.format} needs it",
                code="missing_key",
            )
    naming = root / config.train.annotations
    annotations = naming if split == "train" else root / config.val.annotations
    if not annotations.exists():
        raise DataError(
            f"{annotations} does not exist",
            code="annotation_file_missing",
            where=f"data.{split}.annotations",
        )
    if annotations.is_dir() and config.format != "yolo":
        raise DataError(
            f"{annotations} is a folder; expected a {_ANNOTATIONS[config.format]}",
            code="annotation_file_expected",
            where=f"data.{split}.annotations",
        )
    return naming, annotations


def _raw_of(dataset: DetectionSet) -> RawSet:
    images = [
        RawImage(
            path=Path(record.path),
            image_id=record.image_id,
            width=0,
            height=0,
            objects=[RawObject((0.0, 0.0, 0.0, 0.0), int(record.labels_M[0]), record.path)],
            where=record.path,
        )
        for record in dataset.records
    ]
    return RawSet(images, dataset.class_names, dataset.category_ids, dataset.source)
