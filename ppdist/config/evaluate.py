"""The `evaluate` and `nms` sections: when and how a model is scored."""

from typing import Annotated, Literal

from pydantic import Field

from ppdist.config.section import OnResume, Section

# Names of metrics for the log, by task; the first says by default what is best.
DETECTION_METRICS = ("mAP", "mAP50", "fitness")
CLASSIFICATION_METRICS = ("top1", "top5")
METRIC_TEXTS = {"fitness": "0.1 mAP50 + 0.9 mAP"}  # where the name does not say it
COCO_DETECTIONS = 100  # of a class in an image that COCO's mAP counts


class EvaluateConfig(Section):
    """Evaluation on the validation set during training."""

    every_epochs: Annotated[int, OnResume.EVALUATIONS] = Field(
        default=1,
        ge=1,
        description="Epochs between two evaluations (`--eval`); the last epoch always ends in one.",
    )
    every_steps: Annotated[int | None, OnResume.EVALUATIONS] = Field(
        default=None,
        ge=1,
        description="Evaluate every N optimizer steps instead, also amid epochs; for epochs of "
        "hours, and runs whose length is train.steps. The last step always ends in one.",
    )
    metric: Annotated[
        Literal["mAP", "mAP50", "fitness", "top1", "top5"] | None, OnResume.SCORES
    ] = Field(
        default=None,
        description="What makes a checkpoint the best. null: mAP, of classifiers top1; fitness: "
        "0.1 mAP50 + 0.9 mAP, as YOLOv5 chooses.",
    )
    batch_size_per_card: Annotated[int, OnResume.FREE] = Field(
        default=8,
        ge=1,
        description="Images per rank in one forward pass of an evaluation.",
    )
    max_detections: int = Field(
        default=COCO_DETECTIONS,
        ge=COCO_DETECTIONS,
        description="Number of detections that count per class and image, highest scores first. "
        "Raise it above COCO's 100 for images with more objects: mAP is then not comparable with "
        "published figures, but AR100 is, and nms.keep and nms.candidates are at least as large.",
    )
    rectangular: Annotated[bool, OnResume.SCORES] = Field(
        default=False,
        description="With data.resize: letterbox, make each input no larger than its image needs "
        "(sides in multiples of the largest stride), images of one shape together; faster, and how "
        "ultralytics evaluates.",
    )
    rectangular_pad: Annotated[float, OnResume.SCORES] = Field(
        default=0.0,
        ge=0,
        le=2,
        description="With rectangular: grey beside each image, in largest strides before its sides "
        "are rounded up. 0.5: as ultralytics evaluates YOLOv5, whose published AP a square input "
        "misses by about one point.",
    )


class NMSConfig(Section):
    """Selection of predictions: non-maximum suppression, or simply the best scores."""

    score_threshold: float = Field(
        default=0.01, ge=0, le=1, description="predictions below this score are dropped"
    )
    iou_threshold: float | None = Field(
        default=0.7,
        ge=0,
        le=1,
        description="of two boxes of one class that overlap more than this, the better stays; "
        "null: no suppression, the best boxes stay (as of a model that needs none)",
    )
    candidates: int = Field(
        default=1000, ge=1, description="best boxes per class and image that enter the suppression"
    )
    keep: int = Field(default=300, ge=1, description="best boxes per image that stay")
    multi_label: bool = Field(
        default=True,
        description="true: a prediction counts for every class that scores; false: for its best "
        "class only",
    )
    class_agnostic: bool = Field(
        default=False,
        description="true: boxes suppress those of other classes, too, in evaluation, predictions "
        "and exports alike; a prediction then counts for its best class only, and candidates are "
        "those of an image. Without iou_threshold it has no effect",
    )
