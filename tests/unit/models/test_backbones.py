"""Every row of BACKBONES keeps the contract between a backbone and its model."""

from pathlib import Path
from typing import get_args

import numpy as np
import paddle
import pytest

from ppdist.config.model import PPYOLOEConfig
from ppdist.cpu.precision import FLOAT32, Kernels
from ppdist.cpu.switch import self_check
from ppdist.models.backbones import BACKBONES, build_backbone
from ppdist.models.layers import ConvBNLayer, set_activation
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.models.weights import load_weights, write_arrays
from tests.emulated_bfloat16 import EMULATED
from tests.errors import raises
from tests.unit.models.resnet import ResNet18

LEVELS = [
    (name, first, last)
    for name, row in BACKBONES.items()
    for last in row.coarsest
    for first in (row.finest, last)
]


@pytest.mark.parametrize(("name", "first", "last"), LEVELS)
def test_features_have_the_strides_and_channels_told(name: str, first: int, last: int) -> None:
    backbone = build_backbone(name, depth=0.33, width=0.125, first=first, last=last)
    assert backbone.strides == tuple(2**level for level in range(first, last + 1))
    features = backbone(paddle.zeros([1, 3, 64, 128]))
    shapes = zip(backbone.channels, backbone.strides, strict=True)
    assert [tuple(x.shape) for x in features] == [(1, c, 64 // s, 128 // s) for c, s in shapes]


@pytest.mark.parametrize(("name", "first", "last"), LEVELS)
def test_every_key_is_in_one_stage(name: str, first: int, last: int) -> None:
    backbone = build_backbone(name, depth=0.33, width=0.125, first=first, last=last)
    begins = [key for row in backbone.stage_keys for key in row]
    assert len(backbone.stage_keys) == last  # the stem is level 1
    seen = set()
    for key in backbone.state_dict():
        found = [begin for begin in begins if key.startswith(f"{begin}.")]
        assert len(found) == 1, key
        seen |= {*found}
    assert seen == {*begins}


def test_missing_backbone_level_is_error_with_code() -> None:
    with raises("backbone_without_level", "P2-P5", "yolov5"):
        build_backbone("yolov5", depth=0.33, width=0.125, first=2, last=5)


def test_the_configuration_names_every_backbone() -> None:
    """The configuration imports no models, so it cannot read the table."""
    assert {*get_args(PPYOLOEConfig.model_fields["body"].annotation)} == {*BACKBONES}


@pytest.fixture(scope="module")
def detector() -> PPYOLOE:
    """PP-YOLOE on a backbone of somebody else's."""
    paddle.seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "csprepresnet", ResNet18)
        return PPYOLOE(PPYOLOEConfig(num_classes=2, depth_multiple=0.33, width_multiple=0.125))


@pytest.mark.parametrize(
    "kernels",
    [FLOAT32, pytest.param(EMULATED.at("O2"), marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def test_a_backbone_of_ones_own_computes_the_same_on_onednn(
    detector: PPYOLOE, kernels: Kernels
) -> None:
    assert self_check(detector, kernels=kernels) is None


def test_a_backbone_keeps_its_own_activation(detector: PPYOLOE) -> None:
    layers = detector.named_sublayers()
    blocks = {name: layer for name, layer in layers if isinstance(layer, ConvBNLayer)}
    set_activation(detector, "hardswish")
    own = {layer.activation for name, layer in blocks.items() if name.startswith("backbone.")}
    assert own == {"relu", None}
    assert blocks["neck.fpn_routes.0"].activation == "hardswish"


def test_published_weights_of_a_backbone_fill_it_by_its_keys(
    detector: PPYOLOE, tmp_path: Path
) -> None:
    wanted = {
        key: paddle.rand(value.shape) for key, value in detector.backbone.state_dict().items()
    }
    names = detector.backbone.original_keys()
    assert names["stages.1.0.shortcut.bn._mean"] == "layer2.0.downsample.1.running_mean"
    arrays = {names[key]: value.numpy() for key, value in wanted.items()}
    arrays |= {"fc.weight": np.zeros((5, 512), "float32"), "fc.bias": np.zeros(5, "float32")}
    arrays["bn1.num_batches_tracked"] = np.array(3)
    write_arrays(tmp_path / "resnet18.pt", arrays)
    report = load_weights(detector, tmp_path / "resnet18.pt")
    assert len(report.loaded) == len(wanted) and report.ignored == ("fc.weight", "fc.bias")
    assert "a backbone" in report.reason
    for key, value in detector.backbone.state_dict().items():
        assert bool((value == wanted[key]).all()), key
