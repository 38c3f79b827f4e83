"""Models, their building blocks, and the weights they start from."""

from collections.abc import Callable
from typing import Any

from ppdist.config import plugins
from ppdist.config.model import DetectorConfig, ModelConfig
from ppdist.models.base import Detector, ImageModel
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.models.yolov5 import YOLOv5, YOLOv5Classifier

__all__ = ["Detector", "ImageModel", "build_model"]

# Every model of ours, by `model.name`; its Section in config/model.py says the rest.  Models of
# other packages are registered (config/plugins.py).
MODELS: dict[str, Callable[[Any], ImageModel]] = {
    "ppyoloe": PPYOLOE,
    "yolov5": YOLOv5,
    "yolov5_cls": YOLOv5Classifier,
}


def build_model(config: ModelConfig | DetectorConfig) -> ImageModel:
    """Model of a `model:` section, with fresh weights.

    Drawn from paddle's seed.

    Raises: ConfigError: it is a plugin's, whose model cannot be imported.
    """
    found = plugins.registered("detector", config.name)
    build = MODELS[config.name] if found is None else plugins.load(found.target)
    return build(config)
