"""The `loss` section: one Section for each family, by `name`."""

from typing import Literal

from pydantic import Field

from ppdist.config.section import Section


class PPYOLOELossConfig(Section):
    """Assignment and weights of PP-YOLOE's loss."""

    name: Literal["ppyoloe"] = Field(default="ppyoloe", description="that of the model")
    static_assigner_epochs: float = Field(
        default=30.0,
        ge=0,
        description="epochs with ATSS before TAL takes over (published: 30 of 80, 100 of 300)",
    )
    class_gain: float = Field(
        default=1.0,
        ge=0,
        description="weight of the varifocal loss; 3 helped on few images, where boxes are right "
        "and scores low (docs/dev/few_images.md)",
    )
    box_gain: float = Field(
        default=2.5,
        ge=0,
        description="weight of the GIoU loss; raise it where mAP50 is good and mAP low: "
        "boxes are loose",
    )
    dfl_gain: float = Field(
        default=0.5,
        ge=0,
        description="weight of the distribution loss; change it with box_gain",
    )
    tal_topk: int = Field(
        default=13,
        ge=1,
        description="TAL: predictions named per object; lower it where close objects take each "
        "other's",
    )
    tal_radius: float | None = Field(
        default=None,
        gt=0,
        description="TAL: an object names cells nearer to its centre than this many of their "
        "strides (published for t: 2); null: cells inside it",
    )
    auxiliary_attached_epochs: float = Field(
        default=5.0,
        ge=0,
        description="epochs in which the auxiliary head's gradient reaches backbone and neck",
    )


class YOLOv5LossConfig(Section):
    """Matching and weights of YOLOv5's loss."""

    name: Literal["yolov5"] = Field(default="yolov5", description="that of the model")
    box_gain: float = Field(
        default=0.05,
        ge=0,
        description="weight of 1 - CIoU, for 3 levels; raise it where mAP50 is good and mAP low",
    )
    object_gain: float = Field(
        default=1.0,
        ge=0,
        description="weight of the objectness, at 640 pixels and for 3 levels; raise it where "
        "objects are missed though their boxes would fit",
    )
    class_gain: float = Field(
        default=0.5,
        ge=0,
        description="weight of the classes, for 80 of them and 3 levels; raise it where boxes are "
        "right "
        "and classes are not",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="part of a class label spread over yes and no alike"
    )


class RTDETRLossConfig(Section):
    """Hungarian matching and weights of RT-DETR's loss."""

    name: Literal["rtdetr"] = Field(default="rtdetr", description="that of the model")
    classification: Literal["varifocal", "mal"] = Field(
        default="varifocal",
        description="class loss; mal: DEIM's matchability-aware loss (arXiv:2412.04234), which "
        "takes matched boxes of low quality more seriously",
    )
    class_gain: float = Field(
        default=1.0,
        ge=0,
        description="weight of the class loss; raise it where boxes are right and scores low",
    )


class ClassificationLossConfig(Section):
    """Cross entropy of image classes."""

    name: Literal["yolov5_cls"] = Field(
        default="yolov5_cls", description="cross entropy of one class per image"
    )
    label_smoothing: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="part of the target that is spread over all classes alike, 0..1",
    )


LossConfig = PPYOLOELossConfig | YOLOv5LossConfig | RTDETRLossConfig | ClassificationLossConfig
