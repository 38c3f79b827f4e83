"""The `data:` section, and one entrance to every annotation format."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from ppdist.config import Section
from ppdist.data.augment import AugmentConfig
from ppdist.data.check import check_classes, check_files, check_names
from ppdist.data.coco import read_coco
from ppdist.data.folder import read_csv, read_folder
from ppdist.data.sample import DetectionSet
from ppdist.data.transforms import Resize
from ppdist.data.voc import read_voc
from ppdist.data.yolo import read_yolo
from ppdist.errors import DataError

_ANNOTATIONS = {"coco": "JSON file", "voc": "list of images", "csv": "CSV file"}


class SplitConfig(Section):
    """Where the images and annotations of one split are."""

    images: str = Field(
        default="images",
        description="Folder of the images, relative to data.root; folder: it holds one folder "
        "per class.",
    )
    annotations: str = Field(
        default="",
        description="Relative to data.root. coco: the JSON file. voc: the list of images "
        "(ImageSets/Main/train.txt: names whose XML files are in Annotations/, or lines "
        "`IMAGE XML`). yolo: the folder of label files, or a list of image paths whose labels "
        "are in labels/ in place of images/. csv: a file of lines `path,label`, paths relative "
        "to images. folder: not used.",
    )


class DataConfig(Section):
    """Images and boxes, and how they reach the model."""

    format: Literal["coco", "voc", "yolo", "folder", "csv"] = Field(
        default="coco",
        description="Boxes: COCO JSON, Pascal VOC XML, YOLO text files. Classes of whole images, "
        "for a classifier: a folder per class, a CSV file.",
    )
    root: str = Field(description="Folder that everything below is relative to.")
    train: SplitConfig = Field(description="The training split.")
    val: SplitConfig = Field(description="The validation split.")
    class_names: tuple[str, ...] = Field(
        default=(),
        description="Names of the classes in the order of their numbers; coco: as the file has "
        "them, or empty. Empty: from label_list.txt, classes.txt or a YAML file with `names` in "
        "data.root, else the sorted names that the training split uses (voc, csv) or its folders "
        "have (folder). These files are read again when a model is exported or predicts: names "
        "written here stay what they are wherever the data are.",
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
    resize: Resize = Field(
        default="stretch",
        description="How an image becomes the input, in training, evaluation and inference. "
        "stretch: height and width each to the input's, cubic in evaluation (PP-YOLOE); "
        "letterbox: the shape kept, grey beside it, linear (YOLOv5).",
    )
    workers: int = Field(
        default=2,
        ge=0,
        description="Processes per rank that prepare images; 0: the rank itself, between steps.",
    )
    augment: AugmentConfig = Field(
        default=AugmentConfig(), description="Random changes of training images."
    )

    @property
    def classifies(self) -> bool:
        """Whether images have one class each, for a classifier, instead of boxes."""
        return self.format in ("folder", "csv")


def read_split(
    config: DataConfig, split: Literal["train", "val"], num_classes: int | None = None
) -> DetectionSet:
    """Reads one split; every rank reads the same files and gets the same set.

    Args:
        num_classes: what the model has; the data must have as many.  None: any.
    Raises: DataError: files missing or not of the format, boxes wrong, classes that do not fit.
    """
    root, images = _places(config, split)
    if not images.is_dir():
        raise DataError(f"data.{split}.images: {images} is not a folder")
    dataset = _read(config, split, root, images)
    check_files(dataset)
    if num_classes is not None:
        check_classes(dataset, num_classes)
    return dataset


def read_annotations(
    config: DataConfig, split: Literal["train", "val"], num_classes: int
) -> DetectionSet:
    """As `read_split`, for who wants to know the classes: the images need not be there."""
    dataset = _read(config, split, *_places(config, split))
    check_classes(dataset, num_classes)
    return dataset


def _places(config: DataConfig, split: Literal["train", "val"]) -> tuple[Path, Path]:
    """data.root, and the folder of a split's images."""
    root = Path(config.root)
    if not root.is_dir():
        raise DataError(f"data.root: {root} is not a folder; set -o data.root=PATH")
    return root, root / (config.train if split == "train" else config.val).images


def _read(
    config: DataConfig, split: Literal["train", "val"], root: Path, images: Path
) -> DetectionSet:
    if config.format == "folder":
        naming = root / config.train.images
        return read_folder(root, images, config.class_names, naming_folder=naming)
    for key, part in (("train", config.train), ("val", config.val)):
        if not part.annotations:
            raise DataError(f"data.{key}.annotations is missing: format {config.format} needs it")
    naming = root / config.train.annotations
    annotations = naming if split == "train" else root / config.val.annotations
    if not annotations.exists():
        raise DataError(f"data.{split}.annotations: {annotations} does not exist")
    if annotations.is_dir() and config.format != "yolo":
        raise DataError(
            f"data.{split}.annotations: {annotations} is a folder; expected a "
            f"{_ANNOTATIONS[config.format]}"
        )
    names, bad_boxes = config.class_names, config.bad_boxes
    if config.format == "coco":
        dataset = read_coco(images, annotations, bad_boxes)
        check_names(dataset, names)
        return dataset
    if config.format == "voc":
        return read_voc(root, images, annotations, names, bad_boxes, naming_list=naming)
    if config.format == "csv":
        return read_csv(root, images, annotations, names, naming_table=naming)
    return read_yolo(root, images, annotations, names, bad_boxes)
