"""The `data:` section, and one entrance to every annotation format."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from ppdist.config import Section
from ppdist.data.augment.config import AugmentConfig
from ppdist.data.augment.transforms import Resize
from ppdist.data.check.consistency import check_classes, check_files, check_names
from ppdist.data.formats.annotations import Strictly, settle
from ppdist.data.formats.coco import read_coco
from ppdist.data.formats.folder import read_csv, read_folder
from ppdist.data.formats.raw import Complain, RawImage, RawObject, RawSet
from ppdist.data.formats.voc import read_voc
from ppdist.data.formats.yolo import read_yolo
from ppdist.data.limit import limited
from ppdist.data.sample import DetectionSet
from ppdist.data.sampling import SamplingConfig
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
    limit: int | None = Field(
        default=None,
        gt=0,
        description="Use so many of the images instead of all (checking, converting and splitting "
        "the files still see all): the same ones whatever `seed` is, those of a smaller limit "
        "among those of a larger one, and with an object of every class where so few suffice for "
        "that. null: all.",
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
    bad_images_limit: float = Field(
        default=0.001,
        ge=0,
        le=1,
        description="Share of the training images that may turn out bad (one may always) before "
        "the run stops on all ranks with their list.",
    )
    check_images: Literal["none", "header", "decode"] = Field(
        default="header",
        description="What is looked at in every image before training. header: that it is there, "
        "not empty, not cut short, as large as annotated; decode: all of its pixels, in processes "
        "of their own (minutes); none: nothing. The result is kept for as long as no file changes.",
    )
    workers: int | Literal["auto"] = Field(
        default="auto",
        description="Processes per rank that prepare images. 0: the rank itself, between steps; "
        "auto: from the cores of this machine and the ranks on it.",
    )
    worker_timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        description="A worker that is busy with one image for longer counts as hung: it is "
        "replaced, and its batches are made anew.",
    )
    cache: Literal["none", "ram", "disk"] = Field(
        default="none",
        description="Where decoded training images are kept after the first time, uint8, reduced "
        "to what the input size needs; shared by the workers and ranks of a host. disk: in "
        "data.cache_dir, also for later runs.",
    )
    cache_dir: str | None = Field(
        default=None,
        description="Folder of data.cache: disk. null: ppdist in $XDG_CACHE_HOME or ~/.cache.",
    )
    sampling: SamplingConfig = Field(
        default=SamplingConfig(), description="How often each training image comes in an epoch."
    )
    augment: AugmentConfig = Field(
        default=AugmentConfig(), description="Random changes of training images."
    )

    @property
    def classifies(self) -> bool:
        """Whether images have one class each, for a classifier, instead of boxes."""
        return self.format in ("folder", "csv")


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
