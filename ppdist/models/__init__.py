"""Models, their building blocks, and the weights they start from."""

from collections.abc import Callable
from typing import Any

from ppdist.models.detector import Detector, ImageModel
from ppdist.models.ppyoloe import PPYOLOE, PPYOLOEConfig
from ppdist.models.yolov5 import YOLOv5, YOLOv5Config
from ppdist.models.yolov5_cls import YOLOv5Classifier, YOLOv5ClsConfig

__all__ = ["Detector", "ImageModel", "ModelConfig", "build_model"]

# Every model there is, by `model.name`; its section below says the rest.
MODELS: dict[str, Callable[[Any], ImageModel]] = {
    "ppyoloe": PPYOLOE,
    "yolov5": YOLOv5,
    "yolov5_cls": YOLOv5Classifier,
}
ModelConfig = PPYOLOEConfig | YOLOv5Config | YOLOv5ClsConfig


def build_model(config: ModelConfig) -> ImageModel:
    """The model a `model:` section describes, with fresh weights drawn from paddle's seed."""
    return MODELS[config.name](config)
