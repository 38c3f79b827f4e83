"""Blocks against Paddle's own operators, and against themselves after fusion."""

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from ppdist.config.model import PPYOLOEConfig, YOLOv5ClsConfig, YOLOv5Config
from ppdist.distributed.paddle_api import running_statistics
from ppdist.models import functional
from ppdist.models.build import build_model
from ppdist.models.layers import (
    ACTIVATIONS,
    ConvBNLayer,
    EffectiveSELayer,
    RepConv,
)


def test_upsample_and_gradient_equal_nearest() -> None:
    x = paddle.randn([2, 3, 4, 5])
    twin = x.clone()
    x.stop_gradient = twin.stop_gradient = False
    ours, theirs = functional.upsample2x(x), F.interpolate(twin, scale_factor=2, mode="nearest")
    assert np.array_equal(ours.numpy(), theirs.numpy())
    weight = paddle.randn(ours.shape)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), twin.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_fused_branches_equal_single_convolution(scaled: bool) -> None:
    paddle.seed(0)
    block = RepConv(8, scaled_branch=scaled)
    for norm in (block.conv1.bn, block.conv2.bn):
        norm.weight.set_value(paddle.rand([8]) + 0.5)
        norm.bias.set_value(paddle.randn([8]))
        mean, variance = running_statistics(norm)
        mean.set_value(paddle.randn([8]))
        variance.set_value(paddle.rand([8]) + 0.5)
    if scaled:
        block.alpha.set_value(paddle.to_tensor([-0.7]))
    block.eval()
    x = paddle.randn([2, 8, 9, 7])
    before = block(x)
    block.fuse()
    assert set(block.state_dict()) == {"conv.weight", "conv.bias"}
    np.testing.assert_allclose(block(x).numpy(), before.numpy(), atol=1e-5)
    block.fuse()  # again: nothing more happens
    np.testing.assert_allclose(block(x).numpy(), before.numpy(), atol=1e-5)


def test_a_scaled_branch_at_zero_still_learns() -> None:
    block = RepConv(4, scaled_branch=True)
    block.alpha.set_value(paddle.zeros([1]))
    block(paddle.randn([2, 4, 5, 5])).sum().backward()
    assert float(block.alpha.grad.abs().sum()) > 0


def test_ese_scales_channels_by_hardsigmoid_of_mean() -> None:
    block = EffectiveSELayer(3)
    x = paddle.randn([2, 3, 4, 4])
    weight, bias = block.fc.weight.numpy()[:, :, 0, 0], block.fc.bias.numpy()
    gate = np.clip((x.numpy().mean(axis=(2, 3)) @ weight.T + bias) / 6 + 0.5, 0, 1)
    expected = x.numpy() * gate[:, :, None, None]
    np.testing.assert_allclose(block(x).numpy(), expected, atol=1e-5)


FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.1 * x),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_their_formulas(name: str) -> None:
    x = np.linspace(-6, 6, 41).astype("float32")
    got = ACTIVATIONS[name](paddle.to_tensor(x)).numpy()
    np.testing.assert_allclose(got, FORMULAS[name](x), atol=1e-6)


MODELS = {
    "ppyoloe": (PPYOLOEConfig, {"depth_multiple": 0.33, "width_multiple": 0.125}),
    "yolov5": (YOLOv5Config, {"size": "n", "width_multiple": 0.0625}),
    "yolov5_cls": (YOLOv5ClsConfig, {"size": "n", "width_multiple": 0.0625}),
}


@pytest.mark.parametrize("name", ["relu", "hardswish", "leaky_relu"])
@pytest.mark.parametrize("family", MODELS)
def test_every_layer_of_a_model_takes_its_activation(family: str, name: str) -> None:
    config, options = MODELS[family]
    paddle.seed(0)
    model = build_model(config(num_classes=3, activation=name, **options))
    found = [
        layer.activation
        for layer in model.sublayers()
        if isinstance(layer, (ConvBNLayer, RepConv)) and layer.activation
    ]
    assert len(found) > 10 and {*found} == {name}
    x = paddle.randn([2, 3, 64, 64])
    outputs = paddle.utils.flatten(model(x))
    floats = [each for each in outputs if getattr(each, "dtype", None) == paddle.float32]
    paddle.add_n([each.square().mean() for each in floats]).backward()
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert bool(paddle.isfinite(parameter.grad).all()), key
    backbone = [p for key, p in model.backbone.named_parameters() if key.endswith("conv.weight")]
    assert all(weight.grad is not None for weight in backbone)
