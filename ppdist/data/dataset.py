"""The `data:` section, and one entrance to every annotation format."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from ppdist.config import Section
from ppdist.data.check import check_classes, check_files
from ppdist.data.coco import read_coco
from ppdist.data.sample import DetectionSet
from ppdist.data.transforms import AugmentConfig
from ppdist.data.voc import read_voc
from ppdist.data.yolo import read_yolo
from ppdist.errors import DataError


class SplitConfig(Section):
    """Where the images and annotations of one split are."""

    images: str = Field(
        default="images", description="Folder of the images, relative to data.root."
    )
    annotations: str = Field(
        description="Relative to data.root. coco: the JSON file. voc: the list of images "
        "(ImageSets/Main/train.txt: names whose XML files are in Annotations/, or lines "
        "`IMAGE XML`). yolo: the folder of label files, or a list of image paths whose labels "
        "are in labels/ in place of images/."
    )


class DataConfig(Section):
    """Images and boxes, and how they reach the model."""

    format: Literal["coco", "voc", "yolo"] = Field(
        default="coco", description="COCO JSON, Pascal VOC XML, or YOLO text files."
    )
    root: str = Field(description="Folder that everything below is relative to.")
    train: SplitConfig = Field(description="The training split.")
    val: SplitConfig = Field(description="The validation split.")
    class_names: tuple[str, ...] = Field(
        default=(),
        description="Names of the classes in the order of their numbers (voc, yolo). Empty: from "
        "label_list.txt, classes.txt or a YAML file with `names` in data.root, else (voc) the "
        "sorted names that the training split uses.",
    )
    bad_images: Literal["skip", "error"] = Field(
        default="skip",
        description="An image that cannot be decoded. skip: training takes the next good one in "
        "its place, evaluation a blank one, and a line says so; error: stop.",
    )
    bad_boxes: Literal["clip", "drop", "error"] = Field(
        default="clip",
        description="A box that has no area or leaves the image by more than a pixel. clip: cut "
        "it at the border, drop it when no area is left; drop: drop it; error: stop.",
    )
    workers: int = Field(
        default=2,
        ge=0,
        description="Processes per rank that prepare images; 0: the rank itself, between steps.",
    )
    augment: AugmentConfig = Field(
        default=AugmentConfig(), description="Random changes of training images."
    )


def read_split(
    config: DataConfig, split: Literal["train", "val"], num_classes: int | None = None
) -> DetectionSet:
    """Reads one split; every rank reads the same files and gets the same set.

    Args:
        num_classes: what the model has; the data must have as many.  None: any.
    Raises: DataError: files missing or not of the format, boxes wrong, classes that do not fit.
    """
    chosen = config.train if split == "train" else config.val
    root = Path(config.root)
    if not root.is_dir():
        raise DataError(f"data.root: {root} is not a folder; set -o data.root=PATH")
    images, annotations = root / chosen.images, root / chosen.annotations
    if not images.is_dir():
        raise DataError(f"data.{split}.images: {images} is not a folder")
    if not annotations.exists():
        raise DataError(f"data.{split}.annotations: {annotations} does not exist")
    if annotations.is_dir() and config.format != "yolo":
        raise DataError(
            f"data.{split}.annotations: {annotations} is a folder; expected a "
            f"{'JSON file' if config.format == 'coco' else 'list of images'}"
        )
    names, bad_boxes = config.class_names, config.bad_boxes
    if config.format == "coco":
        dataset = read_coco(images, annotations, bad_boxes)
    elif config.format == "voc":
        naming = root / config.train.annotations
        dataset = read_voc(root, images, annotations, names, bad_boxes, naming_list=naming)
    else:
        dataset = read_yolo(root, images, annotations, names, bad_boxes)
    check_files(dataset)
    if num_classes is not None:
        check_classes(dataset, num_classes)
    return dataset
