"""The model as it is exported: fewer operations, the same outputs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from ppdist.config.model import PPYOLOEConfig, YOLOv5Config
from ppdist.config.runtime import RuntimeOptions
from ppdist.distributed.paddle_api import set_momentum
from ppdist.export.export import (
    RawModel,
    convert_to_onnx,
    deployment_copy,
    export_model,
    fuse_for_deployment,
    program_for_converter,
    save_graph,
)
from ppdist.export.predictor import EagerPredictor, ExportedPredictor
from ppdist.export.spec import read_spec
from ppdist.export.verify import load_onnx
from ppdist.models.base import ImageModel
from ppdist.models.model_card import normalisation_of
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.models.yolov5 import YOLOv5
from tests.unit.export.tiny import (
    NMS,
    assert_same_boxes,
    pictures,
    tiny_classifier,
    tiny_model,
    tiny_spec,
)


def alive(model: ImageModel) -> ImageModel:
    """The model with batch norms that do something and outputs that depend on the image."""
    for layer in model.sublayers():
        if isinstance(layer, nn.BatchNorm2D):
            set_momentum(layer, 0.0)  # statistics of exactly this batch; fresh ones hide the image
        if isinstance(layer, nn.Conv2D) and not layer.weight.stop_gradient:
            shape = layer.weight.shape
            layer.weight.set_value(paddle.randn(shape) * math.prod(shape[1:]) ** -0.5)
            if layer.bias is not None:
                layer.bias.set_value(paddle.zeros(layer.bias.shape))
    model.train()
    with paddle.no_grad():
        model(model.normalize(paddle.to_tensor(pictures(4, 128, 128))))
    model.eval()
    return model


SMALL = {"width_multiple": 0.125, "depth_multiple": 0.33, "num_classes": 3}
MODELS: dict[str, Callable[[], ImageModel]] = {
    "crn": lambda: alive(PPYOLOE(PPYOLOEConfig(variant="crn", **SMALL))),
    "plus": tiny_model,
    "auxiliary": lambda: alive(PPYOLOE(PPYOLOEConfig(auxiliary=True, levels="P2-P6", **SMALL))),
    "yolov5": lambda: alive(YOLOv5(YOLOv5Config(**SMALL))),
    "classifier": tiny_classifier,
}


def outputs(model: nn.Layer, images_B3HW: np.ndarray) -> list[np.ndarray]:
    model.eval()
    with paddle.no_grad():
        found = RawModel(model)(paddle.to_tensor(images_B3HW))
    return [part.numpy() for part in (found if isinstance(found, tuple) else (found,))]


def normalised(model: ImageModel, images_B3HW: np.ndarray) -> np.ndarray:
    section = normalisation_of(model)
    mean, std = (np.reshape(np.float32(x), (3, 1, 1)) for x in (section.mean, section.std))
    return (images_B3HW / np.float32(255) - mean) / std


@pytest.mark.slow
@pytest.mark.parametrize("takes", ["pixels", "normalised pixels"])
@pytest.mark.parametrize("kind", MODELS)
def test_deployed_model_without_batch_norm_is_equal(kind: str, takes: str) -> None:
    paddle.seed(0)
    model = MODELS[kind]()
    before = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    ready = fuse_for_deployment(model, normalised_input=takes != "pixels")
    assert not [layer for layer in ready.sublayers() if isinstance(layer, nn.BatchNorm2D)]
    images = pictures(2, 128, 64)
    given = images if takes == "pixels" else normalised(model, images)
    for got, true in zip(outputs(ready, given), outputs(model, images), strict=True):
        between_images = np.abs(true[0] - true[1]).max()
        assert np.abs(got - true).max() < 1e-3 * between_images
    assert all(np.array_equal(value, before[key]) for key, value in arrays(model).items())


def arrays(model: nn.Layer) -> dict[str, np.ndarray]:
    return {key: value.numpy() for key, value in model.state_dict().items()}


@pytest.mark.slow
def test_normalised_pixel_export_keeps_eager_boxes(tmp_path: Path) -> None:
    model = tiny_model(variant="crn")
    spec = tiny_spec(normalised=normalisation_of(model))
    export_model(model, tmp_path / "model", spec)
    section = read_spec(tmp_path / "model").input.normalised
    assert section is not None and section.mean == pytest.approx((0.485, 0.456, 0.406))
    exported = ExportedPredictor(tmp_path / "model", RuntimeOptions())
    eager = EagerPredictor(deployment_copy(model), NMS)
    assert_same_boxes(exported(pictures(2)), eager(pictures(2)))


class Doubles(nn.Layer):
    """Operators whose settings Paddle saves as doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, 3, epsilon=0.5)
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(0.02))

    @paddle.jit.not_to_static
    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        x = F.pad(F.leaky_relu(images * self.scale - 2, 0.3), [0, 1, 0, 1], value=0.7)
        return self.norm(x) * paddle.full([1], 0.25)


@pytest.fixture
def saved_doubles(tmp_path: Path) -> Path:
    save_graph(Doubles(), tmp_path, tiny_spec().input)
    return tmp_path


def test_settings_are_floats_where_the_converter_reads_floats(saved_doubles: Path) -> None:
    saved = (saved_doubles / "model.json").read_bytes()
    doubles: list[tuple[str, str]] = []

    def list_doubles(node: dict[str, Any]) -> dict[str, Any]:
        for attribute in node.get("A", ()):
            if isinstance(attribute, dict) and attribute["AT"]["#"] == "0.a_f64":
                doubles.append((node["#"].partition(".")[2], attribute["N"]))
        return node

    json.loads(program_for_converter(saved), object_hook=list_doubles)
    assert {*doubles} == {("full", "value")}


@pytest.mark.slow
def test_memory_of_the_converter_is_not_in_its_graph(
    saved_doubles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is filled with another byte than 0, which it mostly is."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.perturb=77")
    file = saved_doubles / "model.onnx"
    convert_to_onnx(saved_doubles, file, ("sums",))
    model, images = Doubles(), pictures(1)
    expected = model(paddle.to_tensor(images)).numpy()
    (graph,) = load_onnx(file).values()
    np.testing.assert_allclose(graph(images)[0], expected, atol=1e-5)
