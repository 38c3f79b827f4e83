"""Builds the model of a `model:` section."""

from ppdist.common import plugin
from ppdist.config.model import DetectorConfig, ModelConfig
from ppdist.models.base import ImageModel

# Our models, by `model.name`; its Section in config/model.py says the rest.  Those of other
# packages are named by their Section (config/plugins.py).  By name, so that a run imports its own
# alone.
MODELS = {
    "ppyoloe": "ppdist.models.ppyoloe:PPYOLOE",
    "rtdetr": "ppdist.models.rtdetr:RTDETR",
    "yolov5": "ppdist.models.yolov5:YOLOv5",
    "yolov5_cls": "ppdist.models.yolov5:YOLOv5Classifier",
}


def build_model(config: ModelConfig | DetectorConfig) -> ImageModel:
    """Builds the model of a `model:` section, with new weights drawn from Paddle's seed.

    Raises: ConfigError: it is a plugin's and cannot be imported.
    """
    target = config.model if isinstance(config, DetectorConfig) else MODELS[config.name]
    model: ImageModel = plugin.load(target)(config)
    return model
