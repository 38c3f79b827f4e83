"""PP-YOLOE's head on YOLOv5's body: its layers are YOLOv5's, its outputs PP-YOLOE's."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.config.model import PPYOLOEConfig, YOLOv5Config
from ppdist.cpu.switch import self_check
from ppdist.models.build import build_model
from ppdist.models.weights import arrays_of, load_weights
from tests.unit.models.tiny import loss_of, shake, tiny


@pytest.mark.slow
@pytest.mark.parametrize(("levels", "size"), [("P3-P5", "s"), ("P3-P6", "s6")])
def test_all_before_the_head_is_that_of_yolov5(levels: str, size: str) -> None:
    paddle.seed(0)
    width = {"width_multiple": 0.125}
    model = build_model(PPYOLOEConfig(size="s", body="yolov5", levels=levels, **width))
    original = build_model(YOLOv5Config(size=size, **width))
    body = {k: v.shape for k, v in original.state_dict().items() if not k.startswith("head.")}
    assert {
        k: v.shape for k, v in model.state_dict().items() if not k.startswith("yolo_head.")
    } == body
    assert model.strides == original.strides[::-1]
    # With the same weights it gives the same features, in the other order.
    state = model.state_dict()
    for key, value in original.state_dict().items():
        if key in body:
            state[key].set_value(value)
    model.eval()
    original.eval()
    with paddle.no_grad():
        image = paddle.randn([1, 3, 128, 64])
        ours = model.neck(model.backbone(image))
        theirs = original.neck(original.backbone(image))
    for x, y in zip(ours, theirs[::-1], strict=True):
        assert np.array_equal(x.numpy(), y.numpy())


@pytest.mark.parametrize("levels", ["P3-P5", "P3-P6"])
def test_it_trains_and_gives_maps_of_its_strides(levels: str) -> None:
    model = tiny(body="yolov5", levels=levels, one_to_one=True)
    shake(model)
    total = loss_of(model, 128)
    total.backward()
    assert np.isfinite(float(total))
    outputs = model(paddle.randn([1, 3, 64, 128]))
    assert [tuple(x.shape[2:]) for x in outputs.class_logits] == [
        (64 // s, 128 // s) for s in model.strides
    ]


def test_a_backbone_of_yolov5_starts_it(tmp_path: Path) -> None:
    original = build_model(YOLOv5Config(size="n", width_multiple=0.125))
    backbone = {k: v for k, v in arrays_of(original).items() if k.startswith("backbone.")}
    np.savez(tmp_path / "backbone.npz", **backbone)
    report = load_weights(tiny(body="yolov5"), tmp_path / "backbone.npz")
    assert set(report.loaded) == set(backbone)


@pytest.mark.slow
def test_fast_cpu_convolutions_agree_with_it() -> None:
    assert self_check(tiny(body="yolov5")) is None
