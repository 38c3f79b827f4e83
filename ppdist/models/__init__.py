"""Models, their building blocks, and the weights they start from."""

from collections.abc import Callable
from typing import Any

from ppdist.config.model import ModelConfig
from ppdist.models.base import Detector, ImageModel
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.models.yolov5 import YOLOv5, YOLOv5Classifier

__all__ = ["Detector", "ImageModel", "build_model"]

# Every model there is, by `model.name`; its Section in config/model.py says the rest.
MODELS: dict[str, Callable[[Any], ImageModel]] = {
    "ppyoloe": PPYOLOE,
    "yolov5": YOLOv5,
    "yolov5_cls": YOLOv5Classifier,
}


def build_model(config: ModelConfig) -> ImageModel:
    """The model a `model:` section describes, with fresh weights drawn from paddle's seed."""
    return MODELS[config.name](config)
