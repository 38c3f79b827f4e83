"""What train.freeze means, and that it stays as it is."""

import numpy as np
import paddle
import pytest

from ppdist.common.errors import ConfigError
from ppdist.config.model import PPYOLOEConfig, YOLOv5ClsConfig, YOLOv5Config
from ppdist.cpu.switch import use_onednn
from ppdist.models import functional
from ppdist.models.base import freeze, freezing, frozen_keys
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.models.yolov5 import YOLOv5, YOLOv5Classifier


def ppyoloe(auxiliary: bool = False) -> PPYOLOE:
    config = PPYOLOEConfig(
        size="t" if auxiliary else "s",
        depth_multiple=0.33,
        width_multiple=0.125,
        num_classes=3,
        auxiliary=auxiliary,
        image_size=(64, 64),
    )
    return PPYOLOE(config)


def yolov5(size: str = "n") -> YOLOv5:
    return YOLOv5(YOLOv5Config(size=size, width_multiple=0.0625, num_classes=3))


def classifier() -> YOLOv5Classifier:
    return YOLOv5Classifier(YOLOv5ClsConfig(size="n", width_multiple=0.0625, num_classes=3))


@pytest.mark.parametrize(
    ("build", "backbone", "after"),
    [
        (ppyoloe, ["stem", "stages.0", "stages.1", "stages.2", "stages.3"], ["neck", "head"]),
        (yolov5, ["stem", "down2", "down3", "down4", "down5"], ["neck", "head"]),
        (
            lambda: yolov5("n6"),
            ["stem", "down2", "down3", "down4", "down5", "down6"],
            ["neck", "head"],
        ),
        (classifier, ["stem", "down2", "down3", "down4", "down5"], ["head"]),
    ],
)
def test_each_entry_in_one_stage_in_forward_order(build, backbone, after):
    model = build()
    keys, stages = list(model.state_dict()), model.stages
    assert [*stages] == [f"backbone.{name}" for name in backbone] + after
    assert sorted(key for inside in stages.values() for key in inside) == sorted(keys)
    last = stages[f"backbone.{backbone[-1]}"]
    assert all(key in last for key in keys if key.startswith("backbone.sppf."))
    if "backbone.down3" in stages:
        assert all(
            key.startswith(("backbone.down3.", "backbone.stage3."))
            for key in stages["backbone.down3"]
        )


def test_stages_of_model_with_aux_head_include_it():
    stages = ppyoloe(auxiliary=True).stages
    assert {key.split(".")[0] for key in stages["neck"]} == {"neck", "aux_neck"}
    assert {key.split(".")[0] for key in stages["head"]} == {"yolo_head", "aux_head"}


def test_stages_are_counted_from_the_image():
    model = ppyoloe()
    keys = frozen_keys(model, 2)
    assert {key.split(".")[1] for key in keys} == {"stem", "stages"}
    assert all(key.startswith(("backbone.stem.", "backbone.stages.0.")) for key in keys)
    assert frozen_keys(model, None) == frozenset()
    everything = {key for key in model.state_dict() if key.startswith("backbone.")}
    assert frozen_keys(model, 5) == everything == frozen_keys(model, ["backbone"])


def test_names_are_whole_and_a_dot_at_the_end_is_allowed():
    model = ppyoloe()
    for key in (["neck.fpn_stages.0"], ["neck.fpn_stages.0."]):
        found = frozen_keys(model, key)
        assert found and all(each.startswith("neck.fpn_stages.0.") for each in found)
    one = frozen_keys(model, ["backbone.stem.conv1.conv.weight"])
    assert one == {"backbone.stem.conv1.conv.weight"}


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        (6, "freeze_too_many_stages",
            r"train\.freeze: 6: the backbone of this model has 5 stages \(backbone\.stem, .*"
            r"\[backbone, neck\]"),
        (["bakbone"], "freeze_unknown_key",
            r"begins with 'bakbone'; expected one of backbone, neck, yolo_head"),
        (["backbone.stage"], "freeze_unknown_key",
            r"begins with 'backbone\.stage'; expected backbone\.\{stem, stages\}"),
        (["neck", "backbone.stem.conv7"], "freeze_unknown_key",
            r"expected backbone\.stem\.\{conv1, conv2, conv3\}"),
        ([""], "freeze_unknown_key", "begins with ''; expected one of backbone, neck, yolo_head"),
        (["backbone", "neck", "yolo_head"], "freeze_leaves_nothing",
            "nothing is left to train; freeze less"),
    ],
)  # fmt: skip
def test_unfreezable_part_is_error_naming_choices(what, code, message):
    with pytest.raises(ConfigError, match=message) as error:
        frozen_keys(ppyoloe(), what)
    assert error.value.code == code


def test_what_is_frozen_is_told_in_weights():
    model = ppyoloe()
    frozen = sum(
        each.size
        for key, each in model.named_parameters()
        if key.startswith(("backbone.stem", "yolo_head.pred_cls")) and "._" not in key
    )
    (line,) = freezing(model, ["backbone.stem", "yolo_head.pred_cls"])
    total = model.parameter_count()
    assert line.startswith(f"frozen: {frozen} of {total} weights (backbone.stem); ")
    assert freezing(model, None) == []


def images(count: int = 4) -> paddle.Tensor:
    rng = np.random.RandomState(0)
    return paddle.to_tensor(rng.uniform(0, 255, (count, 3, 64, 64)).astype("float32"))


def scalar(outputs) -> paddle.Tensor:
    flat = [each for part in outputs for each in (part if isinstance(part, tuple) else (part,))]
    return paddle.add_n([each.square().mean() for each in flat])


def test_frozen_onednn_layers_equal_plain_ones():
    """They take the way of evaluation there, where no gradient is wanted."""
    found = {}
    for fast in (False, True):
        paddle.seed(3)
        model = ppyoloe()
        model.train()
        model(model.normalize(images()))  # so that running statistics say something
        freeze(model, 4)
        if fast:
            use_onednn(model)
        features = model.backbone(model.normalize(images()))
        assert [each.stop_gradient for each in features] == [True, True, False]
        value = scalar(model(model.normalize(images())))
        value.backward()
        trained = {key: p for key, p in model.named_parameters() if not p.stop_gradient}
        gradients = [p.grad.flatten() for p in trained.values() if p.grad is not None]
        found[fast] = (
            functional.plain(features[0]).numpy(),
            value.item(),
            paddle.concat(gradients).numpy(),
        )
    np.testing.assert_allclose(found[True][0], found[False][0], rtol=1e-4, atol=1e-5)
    assert found[True][1] == pytest.approx(found[False][1], rel=1e-4)
    off = np.linalg.norm(found[True][2] - found[False][2]) / np.linalg.norm(found[False][2])
    assert off < 2e-3
