"""Detectors on oneDNN: ours keep maps in its layout; one of a plug-in may use any operator."""

import copy

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import Tensor, nn

from ppdist.config.loss import YOLOv5LossConfig
from ppdist.config.model import PPYOLOEConfig, RTDETRConfig, YOLOv5Config
from ppdist.cpu import onednn
from ppdist.cpu.layers import OneDNNConvBNLayer, OneDNNRepConv
from ppdist.cpu.precision import FLOAT32, Kernels, compute_in
from ppdist.cpu.switch import measure_cost, self_check, use_onednn
from ppdist.losses.yolov5 import YOLOv5Loss
from ppdist.models.build import build_model
from ppdist.models.layers import C3, ConvBNLayer, RepConv
from ppdist.models.yolov5 import YOLOv5
from tests.emulated_bfloat16 import EMULATED

try:
    onednn.library()
except (OSError, onednn.OneDNNError) as error:
    pytest.skip(f"no oneDNN in this Paddle: {error}", allow_module_level=True)

SIZE = 64  # pixels


class JoiningNeck(nn.Layer):
    """A neck as somebody would write it who knows Paddle alone."""

    def __init__(self, fine: int, middle: int, coarse: int) -> None:
        super().__init__()
        self.lateral = ConvBNLayer(coarse, middle, 1)
        self.fuse = C3(2 * middle, middle, 1, residual=True)
        self.down = ConvBNLayer(middle, coarse, 3, stride=2)
        self.rep = RepConv(coarse)

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        fine, middle, coarse = features
        enlarged = F.interpolate(self.lateral(coarse), scale_factor=2)
        middle = self.fuse(paddle.concat([enlarged, middle], axis=1))
        first, second = middle.split(2, axis=1)
        middle = middle + paddle.concat([F.relu(second), first], axis=1)
        coarse = coarse + 0.5 * self.rep(self.down(middle))
        return [fine, middle, coarse + coarse.mean(axis=[2, 3], keepdim=True)]


class JoiningDetector(YOLOv5):
    """A plug-in's, built of our blocks."""

    def __init__(self, config: YOLOv5Config) -> None:
        super().__init__(config)
        self.neck = JoiningNeck(*self.backbone.channels)


def loss_and_gradient(model: YOLOv5, kernels: Kernels) -> tuple[float, np.ndarray]:
    """Loss of two images with an object each, and the gradient of all parameters."""
    loss = YOLOv5Loss.build(YOLOv5LossConfig(), model, 10)
    rng = np.random.default_rng(0)
    images = paddle.to_tensor(rng.uniform(0, 255, (2, 3, SIZE, SIZE)).astype("float32"))
    boxes = paddle.to_tensor([[[8.0, 8.0, 40.0, 56.0]], [[20.0, 4.0, 60.0, 30.0]]])
    objects = boxes, paddle.zeros([2, 1], "int64"), paddle.ones([2, 1])
    with compute_in(kernels):
        outputs = model(model.normalize(images))
    total = loss(outputs, *objects, 0, loss.local_normalizers(*objects, (SIZE, SIZE))).total
    total.backward()
    weights = [weight for weight in model.parameters() if not weight.stop_gradient]
    return total.item(), np.concatenate([weight.grad.numpy().ravel() for weight in weights])


@pytest.mark.parametrize(
    ("kernels", "rounding"), [(FLOAT32, 1e-5), (EMULATED.at("O2"), 0.02)], ids=["float32", "O2"]
)
def test_a_detector_of_paddles_operators_alone_learns_the_same(
    kernels: Kernels, rounding: float
) -> None:
    paddle.seed(0)
    plain = JoiningDetector(YOLOv5Config(size="n", num_classes=2))
    fast = copy.deepcopy(plain)
    assert use_onednn(fast) > 0
    expected, expected_gradient = loss_and_gradient(plain, FLOAT32)
    found, gradient = loss_and_gradient(fast, kernels)
    assert found == pytest.approx(expected, rel=rounding)
    off = np.linalg.norm(gradient - expected_gradient) / np.linalg.norm(expected_gradient)
    assert off < 100 * rounding, off


@pytest.mark.parametrize(
    "config",
    [
        YOLOv5Config(size="n"),
        PPYOLOEConfig(depth_multiple=0.33, width_multiple=0.125),
        RTDETRConfig(size="r18"),
        RTDETRConfig(variant="dfine", size="n"),
    ],
    ids=["yolov5", "ppyoloe", "rtdetr", "dfine"],
)
def test_our_detectors_keep_maps_in_the_layout_of_onednn(config: object) -> None:
    model = build_model(config)
    use_onednn(model)
    branches = {
        id(branch)
        for layer in model.sublayers()
        if isinstance(layer, OneDNNRepConv)
        for branch in (layer.conv1, layer.conv2)
    }
    for name, layer in model.named_sublayers():
        if isinstance(layer, OneDNNConvBNLayer | OneDNNRepConv) and id(layer) not in branches:
            assert layer.keeps_layout, name


def test_the_check_passes_a_net_of_relu_and_leaves_it_so() -> None:
    """One rounding at ReLU's zero changes this net's gradient by 0.04 of its norm."""
    paddle.seed(0)
    model = build_model(YOLOv5Config(size="n", activation="relu"))
    assert self_check(model) is None
    activations = {
        layer.activation for layer in model.sublayers() if isinstance(layer, ConvBNLayer)
    }
    assert activations == {"relu"}


@pytest.mark.parametrize(("kernels", "most"), [(FLOAT32, 5), (EMULATED.at("O2"), 100)])
def test_precisions_are_timed_beside_float32(kernels, most):
    assert 0.2 < measure_cost(kernels) < most
