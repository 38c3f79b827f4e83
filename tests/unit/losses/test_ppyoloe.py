"""The PP-YOLOE loss against numpy, and its laws: order, padding, batches, empty images, no sync."""

import numpy as np
import paddle
import pytest

from ppdist.config.loss import PPYOLOELossConfig
from ppdist.losses.ppyoloe import PPYOLOELoss, distribution_focal_loss
from ppdist.models.outputs import PPYOLOEOutputs
from tests.unit.losses.cases import ATSS, CLASSES, STATIC, TAL, random_outputs, truth


def loss_of(outputs: PPYOLOEOutputs, arrays: list[np.ndarray], step: int) -> tuple:
    criterion = PPYOLOELoss(PPYOLOELossConfig(), num_classes=CLASSES, static_steps=STATIC)
    return criterion(outputs, *[paddle.to_tensor(a) for a in arrays], step)


@pytest.mark.parametrize("step", [ATSS, TAL])
def test_images_without_objects_still_reach_every_output(step: int) -> None:
    outputs = random_outputs()
    result = loss_of(outputs, truth((0, 0), boxes=1), step)
    result.total.backward()
    assert float(result.normalizer) == 0
    assert float(result.parts["loss_iou"]) == float(result.parts["loss_dfl"]) == 0
    assert float(result.parts["loss_cls"]) > 0
    for x in outputs.class_logits:
        assert np.isfinite(x.grad.numpy()).all() and float(x.grad.abs().sum()) > 0
    for x in outputs.reg_dist:  # connected, and with nothing to learn
        assert x.grad is not None and not x.grad.numpy().any()


@pytest.mark.parametrize("step", [ATSS, TAL])
def test_box_order_and_padding_do_not_matter(step: int) -> None:
    box, labels, mask = truth()
    want = loss_of(random_outputs(), [box, labels, mask], step)
    order = np.array([3, 0, 4, 1, 2])
    for arrays in (
        [a[:, order] for a in (box, labels, mask)],
        [np.concatenate([a, np.zeros_like(a)], 1) for a in (box, labels, mask)],
        [box, np.where(mask > 0, labels, 99), mask],  # what stands in padding is never read
    ):
        got = loss_of(random_outputs(), arrays, step)
        np.testing.assert_allclose(float(got.total), float(want.total), rtol=1e-5)
        np.testing.assert_allclose(float(got.normalizer), float(want.normalizer), rtol=1e-5)


def test_the_phase_follows_the_optimizer_step() -> None:
    arrays, outputs = truth(), random_outputs()
    before, last, first, later = (
        float(loss_of(outputs, arrays, step).normalizer) for step in (0, STATIC - 1, STATIC, 99)
    )
    assert before == last and first == later and abs(before - first) > 1e-3


def test_the_total_is_the_weighted_sum_of_its_parts() -> None:
    result = loss_of(random_outputs(), truth(), TAL)
    parts = {name: float(value) for name, value in result.parts.items()}
    want = parts["loss_cls"] + 2.5 * parts["loss_iou"] + 0.5 * parts["loss_dfl"]
    np.testing.assert_allclose(float(result.total), want, rtol=1e-6)
    assert result.total.shape == result.normalizer.shape == []
    assert result.normalizer.stop_gradient
    assert all(part.stop_gradient for part in result.parts.values())


def test_half_precision_outputs_are_scored_in_float32() -> None:
    outputs = random_outputs()
    halves = PPYOLOEOutputs(*[tuple(x.detach().astype("float16") for x in m) for m in outputs])
    result = loss_of(halves, truth(), TAL)
    assert result.total.dtype == paddle.float32
    want = float(loss_of(outputs, truth(), TAL).total)
    np.testing.assert_allclose(float(result.total), want, rtol=2e-2)


def test_dfl_equals_definition_and_clips_long_sides() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (1, 3, 4, 17)).astype("float32")
    target = rng.uniform(-2, 20, (1, 3, 4)).astype("float32")
    got = distribution_focal_loss(paddle.to_tensor(logits), paddle.to_tensor(target)).numpy()
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = np.zeros((1, 3))
    for s in range(3):
        for side in range(4):
            y = min(max(float(target[0, s, side]), 0.0), 15.99)
            low = int(y)
            row = log_p[0, s, side]
            want[0, s] -= ((low + 1 - y) * row[low] + (y - low) * row[low + 1]) / 4
    np.testing.assert_allclose(got, want, rtol=1e-4)
