"""The `model` section: one Section for each family, told apart by `name`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from ppdist.config.section import OnResume, Section, Task

YOLOV5_LEVELS = ("P3-P5", "P3-P6")  # of those of PP-YOLOE: YOLOv5 has nothing finer than stride 8
_Side = Annotated[float, Field(gt=0)]
_Anchor = tuple[_Side, _Side]


def _to_pair(size: object) -> object:
    """Converts a single number to a square size, and a list to a tuple."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size, size
    return tuple(size) if isinstance(size, list) else size


# Keys that the model families share.
ImageSize = Annotated[
    tuple[int, int],
    BeforeValidator(_to_pair),
    # The validator accepts more than the type says, which pydantic's own schema would not show.
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer"},
                {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
            ]
        }
    ),
]
DepthMultiple = Annotated[
    float | None,
    Field(
        gt=0,
        description="blocks per stage as a multiple of size l, for a network between the sizes; "
        "null: from size",
    ),
]
WidthMultiple = Annotated[
    float | None, Field(gt=0, description="channels as a multiple of size l; null: from size")
]
Pretrained = Annotated[
    str | None,
    OnResume.FREE,  # read where a run starts; a checkpoint has weights of its own
    Field(
        description="weight file (.pdparams, .pt, .safetensors, .npz), checkpoint folder, "
        "output_dir of a run (its best, else its last), or a name of docs/model_zoo.md"
    ),
]
Activation = Annotated[
    Literal["silu", "relu", "hardswish", "leaky_relu"],
    Field(
        description="after each convolution with batch norm; silu: the published one; relu, "
        "leaky_relu (slope 0.1) and hardswish are cheaper on small devices, and start from "
        "published weights only after some training"
    ),
]


# Changes of PP-YOLOE's and YOLOv5's recipes for few images, measured in docs/dev/few_images.md.
# The recipes for COCO learn next to nothing in the few steps of such a run: SGD starts slowly,
# YOLOv5 averages over 2000 steps, and its biases and momentum warm up for as long.
_FEW_IMAGES: Mapping[str, Any] = {
    "optimizer.name": "adamw",
    "optimizer.nesterov": False,
    "optimizer.lr": 0.002,
    "optimizer.reference_batch_size": 8,
    "optimizer.lr_scaling": "sqrt",
    "optimizer.weight_decay": 0.05,
    "train.clip_norm": 10.0,
    "train.ema.decay": 0.998,
    "train.ema.ramp_steps": None,
    "schedule.name": "flat_cosine",
    "schedule.final_factor": 0.02,
    "schedule.warmup_bias_lr": None,
    "schedule.warmup_momentum": None,
}


class DetectorConfig(Section):
    """Keys that every detector has; that of another package adds its own (docs/extend.md).

    Attributes:
        model, loss: of another package's, `package.module:Class` of a `Detector` and of a `Loss`.
        loss_config: keys of its loss.
        needs_nms: predictions of one object overlap, so they need suppression.
        few_images: values by key that a recipe for many images takes where a set has few; its
            warm-up is then a part of the run.  Empty: the recipe as it is.
    """

    model: ClassVar[str] = ""
    loss: ClassVar[str] = ""
    loss_config: ClassVar[type[Section]] = Section
    task: ClassVar[Task] = "detect"
    needs_nms: ClassVar[bool] = True
    few_images: ClassVar[Mapping[str, Any]] = {}
    name: str = Field(default="", description="detector family")
    num_classes: int = Field(default=80, ge=1, description="object classes C")
    pretrained: Pretrained = None
    image_size: ImageSize = Field(
        default=(640, 640), description="input [height, width] in pixels; one number: a square"
    )


class PPYOLOEConfig(Section):
    """Size and parts of a PP-YOLOE."""

    task: ClassVar[Task] = "detect"
    few_images: ClassVar[Mapping[str, Any]] = _FEW_IMAGES
    name: Literal["ppyoloe"] = Field(default="ppyoloe", description="detector family")
    variant: Literal["crn", "plus"] = Field(
        default="plus",
        description="plus: PP-YOLOE+, learned scale on the backbone's 1x1 branches, pixels / 255; "
        "crn: the first PP-YOLOE, ImageNet mean and deviation",
    )
    size: Literal["t", "s", "m", "l", "x"] = Field(
        default="s", description="depth and width multiples; t is published with auxiliary: true"
    )
    depth_multiple: DepthMultiple = None
    width_multiple: WidthMultiple = None
    levels: Literal["P3-P5", "P2-P5", "P3-P6", "P2-P6"] = Field(
        default="P3-P5",
        description="output levels, strides 2^level: P2 adds stride 4 for small objects, P6 "
        "stride 64 for large images (no published weights)",
    )
    auxiliary: bool = Field(
        default=False,
        description="the published design of PP-YOLOE+ t: equal neck channels, heads with RepVGG "
        "branches, and a second neck and head that assign objects in training and vanish after it",
    )
    body: Literal["csprepresnet", "yolov5"] = Field(
        default="csprepresnet",
        description="backbone and neck; yolov5: those of YOLOv5 at the same depth and width under "
        "PP-YOLOE's head (levels P3-P5 and P3-P6)",
    )
    one_to_one: bool = Field(
        default=False,
        description="a second head learns one prediction for each object, from features that it "
        "does not change; it alone predicts after training, without suppression: of `nms` only "
        "score_threshold, keep and multi_label count (YOLOv10). For devices where suppression is "
        "slow or missing",
    )
    activation: Activation = "silu"
    num_classes: int = Field(default=80, ge=1, description="object classes C")
    pretrained: Pretrained = None
    image_size: ImageSize = Field(
        default=(640, 640),
        description="input [height, width] in pixels, multiples of the largest stride; one number: "
        "a square",
    )

    @property
    def needs_nms(self) -> bool:
        """Returns True if predictions of one object overlap, so that they need suppression."""
        return not self.one_to_one

    @field_validator("body")
    @classmethod
    def _check_body(cls, body: str, info: ValidationInfo) -> str:
        """Refuses parts that the body of YOLOv5 does not have."""
        if body == "yolov5" and info.data.get("levels", "P3-P5") not in YOLOV5_LEVELS:
            raise ValueError(
                f"yolov5 has the levels {' or '.join(YOLOV5_LEVELS)}, levels is "
                f"{info.data['levels']}; choose other levels or the other body"
            )
        if body == "yolov5" and info.data.get("auxiliary"):
            raise ValueError(
                "yolov5 has no neck of equal channels, which auxiliary: true needs; "
                "set auxiliary: false or take the other body"
            )
        return body


class YOLOv5Config(Section):
    """Size and parts of a YOLOv5."""

    task: ClassVar[Task] = "detect"
    needs_nms: ClassVar[bool] = True
    few_images: ClassVar[Mapping[str, Any]] = _FEW_IMAGES
    name: Literal["yolov5"] = Field(default="yolov5", description="detector family")
    size: Literal["n", "s", "m", "l", "x", "n6", "s6", "m6", "l6", "x6"] = Field(
        default="s",
        description="depth and width multiples; with 6: a fourth level of stride 64, for large "
        "images",
    )
    depth_multiple: DepthMultiple = None
    width_multiple: WidthMultiple = None
    activation: Activation = "silu"
    num_classes: int = Field(default=80, ge=1, description="object classes C")
    pretrained: Pretrained = None
    image_size: ImageSize = Field(
        default=(640, 640),
        description="input [height, width] in pixels, multiples of 32 (of 64 with four levels); "
        "one number: a square",
    )
    anchors: tuple[tuple[_Anchor, _Anchor, _Anchor], ...] | None = Field(
        default=None,
        description="three [width, height] per level, fine to coarse, in input pixels; these stay, "
        "such as those of an earlier run to compare with. null: the published ones, or, where "
        "fewer than 98 % of the boxes of the training set could be matched by them (best possible "
        "recall), "
        "new ones fitted to the set before training",
    )

    @field_validator("anchors")
    @classmethod
    def _check_anchor_levels(cls, anchors: tuple | None, info: ValidationInfo) -> tuple | None:
        """Refuses anchors whose number of levels is not that of the model size."""
        levels = 4 if str(info.data.get("size", "")).endswith("6") else 3
        if anchors is not None and "size" in info.data and len(anchors) != levels:
            raise ValueError(
                f"anchors of {len(anchors)} levels, size {info.data['size']} has {levels}"
            )
        return anchors


class YOLOv5ClsConfig(Section):
    """Size and parts of a YOLOv5 classifier."""

    task: ClassVar[Task] = "classify"
    few_images: ClassVar[Mapping[str, Any]] = {}
    needs_nms: ClassVar[bool] = False
    name: Literal["yolov5_cls"] = Field(default="yolov5_cls", description="classifier family")
    size: Literal["n", "s", "m", "l", "x"] = Field(
        default="s", description="depth and width multiples"
    )
    depth_multiple: DepthMultiple = None
    width_multiple: WidthMultiple = None
    activation: Activation = "silu"
    num_classes: int = Field(default=1000, ge=1, description="image classes C")
    pretrained: Pretrained = None
    image_size: ImageSize = Field(
        default=(224, 224),
        description="input [height, width] in pixels, multiples of 32; one number: a square",
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="chance to drop a feature before the last layer, 0..1; for few images, whose "
        "validation loss rises while the training loss falls",
    )


RTDETR_SIZES = {
    "rtdetr": ("r18", "r34", "r50", "r101", "l", "x"),
    "rtdetrv2": ("r18", "r34", "r50", "r101"),
    "dfine": ("n", "s", "m", "l", "x"),
}


class RTDETRConfig(Section):
    """Size and parts of an RT-DETR, RT-DETRv2 or D-FINE."""

    task: ClassVar[Task] = "detect"
    needs_nms: ClassVar[bool] = False
    few_images: ClassVar[Mapping[str, Any]] = {}
    name: Literal["rtdetr"] = Field(default="rtdetr", description="detector family")
    variant: Literal["rtdetr", "rtdetrv2", "dfine"] = Field(
        default="rtdetr",
        description="rtdetr: arXiv:2304.08069; rtdetrv2: arXiv:2407.17140, the same network for "
        "other recipes; dfine: D-FINE, arXiv:2410.13842, boxes refined as distributions",
    )
    size: Literal["n", "s", "m", "l", "x", "r18", "r34", "r50", "r101"] = Field(
        default="r18",
        description="rtdetr: r18, r34, r50, r101 (ResNet-vd), l, x (HGNetv2); rtdetrv2: r18, r34, "
        "r50, r101; dfine: n, s, m, l, x",
    )
    num_classes: int = Field(default=80, ge=1, description="object classes C")
    pretrained: Pretrained = None
    image_size: ImageSize = Field(
        default=(640, 640),
        description="input [height, width] in pixels, multiples of 32; one number: a square",
    )
    queries: int = Field(
        default=300,
        ge=1,
        description="boxes that the decoder refines: the most objects it finds. Raise it for "
        "images "
        "with more than 300 objects",
    )
    denoising: int = Field(
        default=100,
        ge=0,
        description="training: about so many noisy copies of an image's boxes are queries as well, "
        "and as many that must find nothing; 0: none. Lower it where training runs out of memory "
        "on "
        "images with many boxes",
    )
    activation: Literal["relu", "silu"] = Field(
        default="relu",
        description="between the linear layers of the decoder and its heads; silu: DEIM's "
        "(arXiv:2412.04234), which its published weights need",
    )

    @property
    def network(self) -> tuple[str, ...]:
        """Names the network that weights belong to: rtdetr and rtdetrv2 share one."""
        return self.name, "dfine" if self.variant == "dfine" else "rtdetr", self.size

    @field_validator("size")
    @classmethod
    def _check_size(cls, size: str, info: ValidationInfo) -> str:
        """Refuses sizes that the variant does not have."""
        variant = info.data.get("variant")
        if variant is not None and size not in RTDETR_SIZES[variant]:
            raise ValueError(f"{variant} has the sizes {', '.join(RTDETR_SIZES[variant])}")
        return size


ModelConfig = PPYOLOEConfig | YOLOv5Config | RTDETRConfig | YOLOv5ClsConfig
