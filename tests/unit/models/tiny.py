"""Tiny models, and weights that no layer can hide behind."""

from pathlib import Path

import numpy as np
import paddle

from ppdist.config.loss import PPYOLOELossConfig
from ppdist.config.model import PPYOLOEConfig
from ppdist.losses.ppyoloe import PPYOLOELoss
from ppdist.models.build import build_model
from ppdist.models.ppyoloe import PPYOLOE
from tests.unit.models.saved_graph import Decoded, saved_graph


def shake(model: PPYOLOE) -> None:
    """Weights and statistics no layer can hide behind."""
    paddle.seed(1)
    for key, value in model.state_dict().items():
        if key.endswith("_variance"):
            value.set_value(paddle.rand(value.shape) + 0.5)
        elif not key.endswith("proj_conv.weight"):
            fan_in = max(1, value.size // value.shape[0])
            value.set_value(value + 0.3 * fan_in**-0.5 * paddle.randn(value.shape))


def tiny(**keys: object) -> PPYOLOE:
    paddle.seed(0)
    config = {"size": "t", "width_multiple": 0.125, "num_classes": 3, **keys}
    return build_model(PPYOLOEConfig.model_validate(config))


def loss_of(model: PPYOLOE, size: int = 64) -> paddle.Tensor:
    paddle.seed(2)
    criterion = PPYOLOELoss.build(PPYOLOELossConfig(static_assigner_epochs=0), model, 1)
    box = paddle.to_tensor([[[4.0, 4, 40, 50]], [[0.0, 0, 0, 0]]])
    labels, mask = paddle.to_tensor([[1], [0]]), paddle.to_tensor([[1.0], [0.0]])
    return criterion(model(paddle.randn([2, 3, size, size])), box, labels, mask, 0).total


def static_outputs(model: PPYOLOE, folder: Path, image: paddle.Tensor) -> list[np.ndarray]:
    """Decoded outputs of the saved graph, which must not hold a weight of the auxiliary head."""
    loaded = saved_graph(Decoded(model), folder)
    weights = sum(int(np.prod(p.shape)) for p in loaded.parameters())
    needed = [v for k, v in model.state_dict().items() if not k.startswith(model.training_only)]
    assert weights <= sum(int(np.prod(v.shape)) for v in needed)
    return [x.numpy() for x in loaded(image)]
