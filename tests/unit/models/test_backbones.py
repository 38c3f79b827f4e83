"""Every row of BACKBONES keeps the contract between a backbone and its model."""

from typing import get_args

import paddle
import pytest

from ppdist.common.errors import ConfigError
from ppdist.config.model import PPYOLOEConfig
from ppdist.models.backbones import BACKBONES, build_backbone

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
    with pytest.raises(ConfigError, match=r"P2-P5: the backbone yolov5 begins at P3") as error:
        build_backbone("yolov5", depth=0.33, width=0.125, first=2, last=5)
    assert error.value.code == "backbone_without_level"


def test_the_configuration_names_every_backbone() -> None:
    """The configuration imports no models, so it cannot read the table."""
    assert {*get_args(PPYOLOEConfig.model_fields["body"].annotation)} == {*BACKBONES}
