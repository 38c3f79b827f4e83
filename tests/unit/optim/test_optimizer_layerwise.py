"""Rates that fall towards the image: the factors, and what one step makes of them."""

import pytest
from paddle import nn

from ppdist.config.model import YOLOv5ClsConfig
from ppdist.models.yolov5 import YOLOv5Classifier
from ppdist.optim.optimizer import (
    layerwise_lr_decay,
    layerwise_lr_factors,
)

DECAY = 0.5


class Net(nn.Layer):
    """Three stages of a backbone, a neck and a head, one linear layer each."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Layer()
        self.backbone.stem = nn.Linear(3, 3)
        self.backbone.stages = nn.LayerList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.neck = nn.Linear(3, 3)
        self.yolo_head = nn.Linear(3, 1)

    @property
    def stages(self):
        names = ("backbone.stem", "backbone.stages.0", "backbone.stages.1", "neck", "yolo_head")
        return {name.replace("yolo_", ""): [f"{name}.weight", f"{name}.bias"] for name in names}

    def forward(self, x):
        for stage in (self.backbone.stem, *self.backbone.stages, self.neck):
            x = nn.functional.sigmoid(stage(x))
        return self.yolo_head(x)


POWERS = {"backbone.stem": 4, "backbone.stages.0": 3, "backbone.stages.1": 2, "neck": 1,
          "yolo_head": 0}  # fmt: skip


def factor(key):
    return DECAY ** POWERS[key.rpartition(".")[0]]


def test_factors_are_powers_by_distance_from_head():
    keys = list(Net().state_dict())
    assert layerwise_lr_factors(Net().stages, DECAY) == {key: factor(key) for key in keys}


def test_a_classifier_has_no_neck_to_count():
    config = YOLOv5ClsConfig(size="n", width_multiple=0.0625, num_classes=2)
    model = YOLOv5Classifier(config)
    factors = layerwise_lr_factors(model.stages, 0.9)
    assert set(factors) == set(model.state_dict())
    assert factors["head.linear.weight"] == 1.0
    assert factors["backbone.stage5.conv1.conv.weight"] == pytest.approx(0.9)
    assert factors["backbone.stem.conv.weight"] == pytest.approx(0.9**5)


def test_the_log_says_the_rate_of_each_stage():
    (line,) = layerwise_lr_decay(Net(), DECAY)
    stages = ("backbone.stem x 0.0625", "backbone.stages.0 x 0.125", "backbone.stages.1 x 0.25")
    assert all(stage in line for stage in (*stages, "neck x 0.5", "head x 1"))
