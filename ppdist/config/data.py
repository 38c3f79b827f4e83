"""The `data` section: images and annotations, and how they reach the model."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ppdist.common.addresses import holds_credentials
from ppdist.config.augment import AugmentConfig
from ppdist.config.section import OnResume, Section, Task

Resize = Literal["stretch", "stretch_antialiased", "letterbox"]  # `data.resize`


class SplitConfig(Section):
    """Images and annotations of one split."""

    images: str | tuple[str, ...] = Field(
        default="images",
        description="Folder of the images, relative to data.root, or in an object store (as "
        "data.root); tar shards are folders in it. folder: it holds one folder per class. yolo: "
        "also a list of folders.",
    )
    annotations: str | tuple[str, ...] = Field(
        default="",
        description="Relative to data.root. coco: the JSON file. voc: the list of images "
        "(ImageSets/Main/train.txt: names whose XML files are in Annotations/, or lines "
        "`IMAGE XML`), or a folder: every XML file in it or below is an image; empty: they lie "
        "among the images. yolo: the folder of label files, or a file of image paths, or several "
        "such files; empty: the labels of the images in `images`. Labels of a file or of `images` "
        "are in labels/ in place of images/, else beside the image. csv: a file of lines "
        "`path,label`, paths relative to images. folder: not used.",
    )
    limit: int | None = Field(
        default=None,
        gt=0,
        description="Use so many of the images instead of all (checking, converting and splitting "
        "the files still see all): the same ones whatever `seed` is, those of a smaller limit "
        "among those of a larger one, and with an object of every class where so few suffice for "
        "that. For a first try, or a learning curve, on a large set. null: all.",
    )

    @property
    def image_folders(self) -> tuple[str, ...]:
        """Returns the folders of the images, relative to data.root."""
        return (self.images,) if isinstance(self.images, str) else self.images

    @property
    def annotation_files(self) -> tuple[str, ...]:
        """Returns files or folders, relative to data.root; empty if they are beside the images."""
        if isinstance(self.annotations, str):
            return (self.annotations,) if self.annotations else ()
        return self.annotations


class SamplingConfig(Section):
    """Sampling of training images: how often each comes in an epoch."""

    name: Literal["shuffle", "balanced", "difficulty"] = Field(
        default="shuffle",
        description="shuffle: each once, in random order. balanced: images of rare classes more "
        "often. difficulty: images of classes that are rare or score low more often; needs "
        "--eval. For sets whose rare classes "
        "are missed.",
    )
    balance_threshold: float = Field(
        default=0.001,
        gt=0,
        le=1,
        description="balanced: a class that fewer than this share of images show counts as rare; "
        "its images come sqrt(threshold / share) times (LVIS: 0.001). Raise it where rare classes "
        "of a small set stay missed.",
    )


class DataConfig(Section):
    """Images and boxes, and how they reach the model.

    Attributes:
        reader: of another package's format, `package.module:function` (docs/extend.md).
    """

    reader: ClassVar[str] = ""
    format: Literal["coco", "voc", "yolo", "folder", "csv"] = Field(
        default="coco",
        description="Boxes: COCO JSON, Pascal VOC XML, YOLO text files. Classes of whole images, "
        "for a classifier: a folder per class, a CSV file.",
    )
    # FREE: the data set itself is compared.
    root: Annotated[str, OnResume.FREE] = Field(
        description="Folder that everything below is relative to; format coco or csv: also in an "
        "object store (s3://bucket/folder, gs://, hf://, http://).",
    )
    train: SplitConfig = Field(description="The training split.")
    val: Annotated[SplitConfig, OnResume.SCORES] = Field(description="The validation split.")
    test: Annotated[SplitConfig | None, OnResume.FREE] = Field(
        default=None,
        description="A split used neither for training nor for validation; evaluate it with "
        "`ppdist eval -w RUN --split test`, for a last score of what was chosen by data.val. "
        "null: none.",
    )
    val_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="For a set without a validation split: this share of the images of data.train "
        "is used for validation instead of training, and the files of data.val are ignored. The "
        "choice depends only on file names below data.root, not on `seed`. null: use data.val.",
    )
    class_names: tuple[str, ...] = Field(
        default=(),
        description="Class names, ordered by class number; files that number classes otherwise are "
        "mapped by name. Empty: the categories of the training split's file (coco); "
        "label_list.txt, classes.txt or a YAML file with `names` in data.root, else the sorted "
        "names of the training split's objects (voc, csv) or folders (folder). Export and "
        "prediction read these files again; names written here do not depend on the data.",
    )
    classes: tuple[str | int, ...] = Field(
        default=(),
        description="Train and score only these classes, by name or by number from 0; the model "
        "has them alone, in the order of their numbers. Images without them stay, as background "
        "(classes of whole images: are left out). `-o data.classes=[car,bus] "
        "model.num_classes=2`; "
        "`ppdist train DATA --model NAME --classes car bus`. Empty: all.",
    )
    single_class: bool = Field(
        default=False,
        description="Every object is of one class, `object` (a set, or data.classes, of one class "
        "keeps its name): where is something, whatever it is. Boxes only; needs "
        "model.num_classes: 1.",
    )
    fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Train on this share of the training images, drawn as by data.train.limit: "
        "the same ones whatever `seed` is, and those of a smaller share among those of a larger "
        "one. Validation keeps all.",
    )
    bad_images: Annotated[Literal["skip", "error"], OnResume.FREE] = Field(
        default="skip",
        description="What to do with an image that cannot be decoded. skip: training uses the next "
        "good one instead, evaluation leaves it out of the score, and a warning names it. error: "
        "stop, for a set that must be whole.",
    )
    bad_boxes: Literal["clip", "drop", "error"] = Field(
        default="clip",
        description="A box that has no area or leaves the image by more than a pixel. clip: cut "
        "it at the border, drop it when no area is left; drop: drop it; error: stop. For labels "
        "whose "
        "tool leaves such boxes on purpose, or must not.",
    )
    duplicate_boxes: Literal["once", "all"] = Field(
        default="once",
        description="Boxes of one image and class whose four numbers are equal as written, as an "
        "export that was merged or appended has them. once: only the first is trained and scored, "
        "and a line counts the others; all: as the files have them.",
    )
    resize: Resize = Field(
        default="stretch",
        description="How an image becomes the input, in training, evaluation and inference. "
        "stretch: height and width each to the input's, cubic in evaluation (PP-YOLOE); "
        "stretch_antialiased: the same, in evaluation as Pillow's bilinear (torch's RT-DETRv2, "
        "D-FINE); "
        "letterbox: the shape kept, grey beside it, linear (YOLOv5).",
    )
    check_images: Annotated[Literal["none", "header", "decode"], OnResume.FREE] = Field(
        default="header",
        description="What is looked at in every image before training. header: that it is there, "
        "not empty, not cut short, as large as annotated; decode: all of its pixels, in processes "
        "of their own (minutes), where training met damaged ones; none: nothing, where even the "
        "headers of a set take minutes. The result is kept for as long as no file changes.",
    )
    workers: Annotated[int | Literal["auto"], OnResume.FREE] = Field(
        default="auto",
        description="Processes per rank that prepare images. 0: the rank itself, between steps; "
        "auto: from the cores of this machine and the ranks on it.",
    )
    worker_timeout_seconds: Annotated[float, OnResume.FREE] = Field(
        default=60.0,
        gt=0,
        description="A worker that is busy with one image for longer counts as hung: it is "
        "replaced, and its batches are rebuilt. Raise it for huge images, or storage that stalls "
        "for longer.",
    )
    cache: Annotated[Literal["none", "ram", "disk"], OnResume.FREE] = Field(
        default="none",
        description="Where decoded training images are kept after the first time, uint8, reduced "
        "to what the input size needs; shared by the workers and ranks of a host. disk: in "
        "$XDG_CACHE_HOME/ppdist/images (~/.cache/ppdist/images), also for later runs.",
    )
    store_cache_gib: float = Field(
        default=20.0,
        ge=0,
        description="Where images lie in an object store: so many GiB of them are kept in "
        "$XDG_CACHE_HOME/ppdist/stores (~/.cache/ppdist/stores) as they came, the least recently "
        "used go first; shared by the workers and ranks of a host. Raise it where a set is larger "
        "and later epochs wait for images. 0: none are kept.",
    )
    sampling: SamplingConfig = Field(
        default=SamplingConfig(), description="How often each training image comes in an epoch."
    )
    augment: AugmentConfig = Field(
        default=AugmentConfig(), description="Random changes of training images."
    )

    @model_validator(mode="after")
    def _check_parts(self) -> "DataConfig":
        """Refuses credentials in addresses, and splits that contradict format or val_fraction."""
        for key, address in (
            ("root", self.root),
            *((f"{key}.images", path) for key, part in self.splits for path in part.image_folders),
            *(
                (f"{key}.annotations", path)
                for key, part in self.splits
                for path in part.annotation_files
            ),
        ):
            if holds_credentials(address):
                raise ValueError(
                    f"{key}: the address contains a password or a signature, which logs and saved "
                    f"configurations would show; pass credentials through the environment "
                    f"(docs/data.md)"
                )
        for key, part in self.splits:
            several = len(part.image_folders) > 1 or len(part.annotation_files) > 1
            if several and self.format != "yolo":
                raise ValueError(f"{key}: only format: yolo takes a list of folders or files")
            if not part.image_folders:
                raise ValueError(f"{key}.images: an empty list, expected a folder or several")
        places = [(part.images, part.annotations) for part in (self.train, self.val)]
        if self.val_fraction is not None and places[0] != places[1]:
            raise ValueError("val_fraction divides the images of train; leave val out")
        if self.fraction < 1 and self.train.limit is not None:
            raise ValueError("fraction and the limit of train both say how many; leave one out")
        if self.single_class and self.task == "classify":
            raise ValueError("single_class is for boxes; classifying needs two classes or more")
        return self

    @property
    def splits(self) -> tuple[tuple[str, SplitConfig], ...]:
        """Returns the configured splits with their names."""
        named = (("train", self.train), ("val", self.val), ("test", self.test))
        return tuple((name, part) for name, part in named if part is not None)

    def describe_selection(self) -> str:
        """Describes the keys that select a part of the data set; "" if all of it is used."""
        parts = [f"classes {', '.join(map(str, self.classes))}"] if self.classes else []
        parts += ["objects as one class"] if self.single_class else []
        parts += [f"{self.fraction:g} of the training images"] if self.fraction < 1 else []
        return ", ".join(parts)

    @property
    def task(self) -> Task:
        """Returns the task that the annotations teach: boxes or image classes."""
        return "classify" if self.format in ("folder", "csv") else "detect"
