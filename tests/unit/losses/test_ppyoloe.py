"""The PP-YOLOE loss against numpy, and its laws: order, padding, batches, empty images, no sync."""

import numpy as np
import paddle
import pytest

from ppdist.losses.ppyoloe import distribution_focal_loss
from ppdist.models.outputs import PPYOLOEOutputs
from tests.unit.losses.cases import (
    ATSS,
    STATIC,
    TAL,
    numbers,
    ppyoloe_loss,
    random_outputs,
    truth,
)


def loss_of(outputs: PPYOLOEOutputs, arrays: list[np.ndarray], step: int) -> tuple:
    return ppyoloe_loss()(outputs, *[paddle.to_tensor(a) for a in arrays], step)


@pytest.mark.parametrize("step", [ATSS, TAL])
def test_the_order_of_boxes_does_not_matter(step: int) -> None:
    arrays, order = truth(), np.array([3, 0, 4, 1, 2])
    want = numbers(loss_of(random_outputs(), arrays, step))
    got = loss_of(random_outputs(), [a[:, order] for a in arrays], step)
    assert numbers(got) == pytest.approx(want, rel=1e-5)


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
