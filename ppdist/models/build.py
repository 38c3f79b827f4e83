"""Builds the model of a `model:` section."""

from ppdist.common import plugin
from ppdist.config.model import DetectorConfig, ModelConfig
from ppdist.models.base import ImageModel

# Our models, by `model.name`; the Section in config/model.py defines their other settings. Models
# of other packages are named by their Section (config/plugins.py). Given as names, so that a run
# imports only its own model.
MODELS = {
    "ppyoloe": "ppdist.models.ppyoloe:PPYOLOE",
    "rtdetr": "ppdist.models.rtdetr:RTDETR",
    "yolov5": "ppdist.models.yolov5:YOLOv5",
    "yolov5_cls": "ppdist.models.yolov5:YOLOv5Classifier",
}


def build_model(config: ModelConfig | DetectorConfig) -> ImageModel:
    """Builds the model of a `model:` section, with new weights drawn from Paddle's seed.

    Raises: ConfigError: the model belongs to a plugin that cannot be imported.
    """
    target = config.model if isinstance(config, DetectorConfig) else MODELS[config.name]
    model: ImageModel = plugin.load(target)(config)
    return model
