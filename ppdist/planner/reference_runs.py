"""Published measurements of distributed detector training, to test the model against."""

from typing import NamedTuple


class YOLOv5Row(NamedTuple):
    """One COCO epoch of YOLOv5l, 16 images a card, on A100-SXM4-40GB, DDP."""

    cards: int
    seconds: float  # of the training part


# ultralytics/ultralytics, docs/en/yolov5/tutorials/multi_gpu_training.md (commit 06cba21).
YOLOV5L_IMAGES, YOLOV5L_BATCH = 117_266, 16
YOLOV5L = (
    YOLOv5Row(1, 20 * 60 + 39),
    YOLOv5Row(2, 11 * 60 + 43),
    YOLOv5Row(4, 5 * 60 + 57),
    YOLOv5Row(8, 3 * 60 + 9),
)


class PaddleDetectionRow(NamedTuple):
    """One training on one host of 8 cards, and on several."""

    model: str
    data: str
    hours_on_one_host: float
    hosts: int
    hours: float  # on `hosts`
    images_per_second: float  # of a card, on one host: epochs * images / hours / 8


# PaddlePaddle/PaddleDetection, docs/tutorials/DistributedTraining_en.md; 8 images a card.
# Objects365: 60 epochs of 1,742,289 images (the number of epochs is an inference from its README);
# COCO: 300 epochs of 118,287.  Each card draws an image size of its own in every step
# (BatchRandomResize; numpy is seeded with 99 + trainer_id in ppdet/engine/env.py).
PADDLEDETECTION_BATCH = 8
PADDLEDETECTION_SIZES = tuple(range(320, 769, 32))
PADDLEDETECTION = (
    PaddleDetectionRow("PP-YOLOE-s", "Objects365", 301, 3, 162, 12.06),
    PaddleDetectionRow("PP-YOLOE-l", "Objects365", 401, 3, 178, 9.05),
    PaddleDetectionRow("PP-YOLOE-s", "COCO", 39, 4, 13, 31.6),
    PaddleDetectionRow("PP-YOLOE-m", "Objects365", 337, 4, 112, 10.8),
    PaddleDetectionRow("PP-YOLOE-x", "Objects365", 464, 4, 125, 7.8),
)


class RetinaNetRow(NamedTuple):
    """MLPerf Training, RetinaNet-ResNeXt50 to 34.0 mAP on H100."""

    cards: int
    total_batch: int
    images_per_second: float  # of a card, as logged
    minutes: float  # from start to target, mean of five without the best and the worst
    source: str  # mlcommons/training_results_v...: system


# OpenImages-MLPerf (mlcommons/training, single_stage_detector/README.md).
RETINANET_IMAGES, RETINANET_VALIDATION = 1_170_301, 24_781
RETINANET = (
    RetinaNetRow(4, 256, 295.8, 69.7, "v4.0 GX2560M7"),
    RetinaNetRow(8, 256, 290.0, 35.48, "v4.0 eos"),
    RetinaNetRow(16, 320, 279.1, 18.43, "v4.0 HPE n2"),
    RetinaNetRow(32, 512, 268.6, 12.09, "v4.1 4xXE9680"),
    RetinaNetRow(64, 256, 215.3, 6.00, "v4.1 eos_n8"),
    RetinaNetRow(512, 1024, 135.6, 1.91, "v3.0 n64"),
    RetinaNetRow(768, 768, 96.4, 1.51, "v3.0 n96"),
    RetinaNetRow(2528, 2528, 103.7, 0.78, "v4.0 eos_n316"),
)
# Its reference convergence points, total batch -> epochs
# (mlcommons/logging, mlperf_logging/rcp_checker/training_4.1.0/rcps_ssd.json).
RETINANET_EPOCHS = (
    (256, 4.0), (320, 4.15), (512, 5.0), (768, 5.0), (1024, 6.0), (1280, 6.65), (2048, 7.9),
    (2560, 8.6),
)  # fmt: skip
