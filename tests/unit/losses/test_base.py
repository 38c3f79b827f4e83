"""What every loss of boxes promises of padding, of images without objects and of low precision."""

from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest

from ppdist.models.outputs import RTDETROutputs, YOLOv5Outputs
from tests.unit.losses.cases import (
    ATSS,
    REAL,
    TAL,
    detr_loss,
    detr_outputs,
    mapped,
    numbers,
    ppyoloe_loss,
    random_outputs,
    replaced,
    truth,
    with_auxiliary,
    yolov5_loss,
    yolov5_outputs,
)

# The loss, outputs, boxes of each image, the step; what is there without objects, and what is not.
OF_DETR = "loss_cls", ("loss_l1", "loss_giou", "loss_denoising")
OF_PPYOLOE = "loss_cls", ("loss_iou", "loss_dfl")
CASES: dict[str, tuple] = {
    "ppyoloe, ATSS": (ppyoloe_loss, random_outputs, (5, 2), ATSS, *OF_PPYOLOE),
    "ppyoloe, TAL": (ppyoloe_loss, random_outputs, (5, 2), TAL, *OF_PPYOLOE),
    "auxiliary head, ATSS": (ppyoloe_loss, with_auxiliary, (5, 2), ATSS, *OF_PPYOLOE),
    "auxiliary head, TAL": (ppyoloe_loss, with_auxiliary, (5, 2), TAL, *OF_PPYOLOE),
    "yolov5": (yolov5_loss, yolov5_outputs, (6, 2, 0), 0, "loss_obj", ("loss_box", "loss_cls")),
    **{
        family: (partial(detr_loss, family), partial(detr_outputs, family), REAL, 0, *OF_DETR)
        for family in ("rtdetr", "dfine")
    },
}
every_loss = pytest.mark.parametrize("name", CASES)


def leaves(outputs: Any) -> list[paddle.Tensor]:
    if isinstance(outputs, paddle.Tensor):
        return [] if outputs.stop_gradient else [outputs]
    return [x for each in outputs or () for x in leaves(each)] if isinstance(outputs, tuple) else []


def learning(outputs: Any) -> tuple[list[paddle.Tensor], list[paddle.Tensor]]:
    """Outputs that learn that there is nothing, and those of boxes."""
    if isinstance(outputs, RTDETROutputs):
        scored = [*outputs.layers, outputs.encoder]
        return [x.logits_BQC for x in scored], [x.boxes_BQ4 for x in scored]
    if isinstance(outputs, YOLOv5Outputs):
        return [*outputs.logits], []
    logits, sides = outputs.class_logits, outputs.reg_dist
    return [*logits, *(outputs.aux_class_logits or ())], [*sides, *(outputs.aux_reg_dist or ())]


@every_loss
def test_what_stands_in_padding_is_never_read(name: str) -> None:
    loss, outputs, real, step, *_ = CASES[name]

    def found(*arrays: np.ndarray) -> dict[str, float]:
        return numbers(loss()(outputs(), *map(paddle.to_tensor, arrays), step))

    box, labels, mask = truth(real, max(real))
    expected = pytest.approx(found(box, labels, mask), rel=1e-5)
    longer = (np.concatenate([a, np.zeros_like(a)], 1) for a in (box, labels, mask))
    assert found(*longer) == expected
    assert found(box, np.where(mask > 0, labels, 99), mask) == expected


@every_loss
def test_images_without_objects_reach_every_output(name: str) -> None:
    loss, outputs, real, step, there, absent = CASES[name]
    outputs = outputs()
    if isinstance(outputs, RTDETROutputs):
        none = outputs.denoised.positive_BD * 0
        unused = replaced(outputs.denoised, positive_BD=none, negative_BD=none)
        outputs = replaced(outputs, denoised=unused)
    result = loss()(outputs, *(paddle.to_tensor(x * 0) for x in truth(real, max(real))), step)
    result.total.backward()
    values = numbers(result)
    assert values[there] > 0 and all(values[part] == 0 for part in absent)
    assert all(np.isfinite(x.grad.numpy()).all() for x in leaves(outputs))
    something, nothing = learning(outputs)
    assert all(float(x.grad.abs().sum()) > 0 for x in something)
    assert not any(x.grad.numpy().any() for x in nothing)


@every_loss
def test_low_precision_is_computed_in_float32(name: str) -> None:
    loss, outputs, real, step, *_ = CASES[name]
    arrays = [paddle.to_tensor(x) for x in truth(real, max(real))]

    def like(dtype: str) -> Any:
        return lambda x: x if x.stop_gradient else x.astype(dtype)

    low = mapped(outputs(), like("bfloat16"))
    with paddle.amp.auto_cast(dtype="bfloat16", level="O2"):
        found = loss()(low, *arrays, step)
    assert found.total.dtype == paddle.float32
    expected = loss()(mapped(low, like("float32")), *arrays, step)
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-6)
