"""PP-YOLOE's loss with an auxiliary head: who assigns, what is added, and what may not change."""

import numpy as np
import paddle
import pytest

from ppdist.config.loss import PPYOLOELossConfig
from ppdist.config.model import PPYOLOEConfig
from ppdist.losses.ppyoloe import PPYOLOELoss
from ppdist.models.outputs import PPYOLOEOutputs
from ppdist.models.ppyoloe import PPYOLOE
from tests.unit.losses.cases import (
    ATSS,
    TAL,
    ppyoloe_loss,
    random_outputs,
    truth,
    with_auxiliary,
)

CLASSES = 3
CONFIG = PPYOLOELossConfig(tal_radius=2.0)


def main_part(outputs: PPYOLOEOutputs) -> PPYOLOEOutputs:
    return PPYOLOEOutputs(outputs.class_logits, outputs.reg_dist)


def auxiliary_part(outputs: PPYOLOEOutputs) -> PPYOLOEOutputs:
    return PPYOLOEOutputs(outputs.aux_class_logits, outputs.aux_reg_dist)


def tensors(arrays: list[np.ndarray]) -> list[paddle.Tensor]:
    return [paddle.to_tensor(a) for a in arrays]


def test_aux_head_assigns_once_tal_has_taken_over() -> None:
    outputs, real = with_auxiliary(), tensors(truth())
    guided = ppyoloe_loss(CONFIG).assign(outputs, *real, TAL)
    alone = ppyoloe_loss(CONFIG).assign(auxiliary_part(outputs), *real, TAL)
    detector = ppyoloe_loss(CONFIG).assign(main_part(outputs), *real, TAL)
    for x, y in zip(guided, alone):
        np.testing.assert_array_equal(x.numpy(), y.numpy())
    assert not np.array_equal(guided.score_BS.numpy(), detector.score_BS.numpy())


def test_atss_takes_its_soft_labels_from_the_detector() -> None:
    outputs, real = with_auxiliary(), tensors(truth())
    guided = ppyoloe_loss(CONFIG).assign(outputs, *real, ATSS)
    for x, y in zip(guided, ppyoloe_loss(CONFIG).assign(main_part(outputs), *real, ATSS)):
        np.testing.assert_array_equal(x.numpy(), y.numpy())


@pytest.mark.parametrize("step", [ATSS, TAL])
def test_heads_share_one_assignment_and_normalizer(step: int) -> None:
    outputs, real = with_auxiliary(same=True), tensors(truth())
    alone = ppyoloe_loss(CONFIG)(main_part(outputs), *real, step)
    # An auxiliary head that says what the detector says:
    both = ppyoloe_loss(CONFIG)(outputs, *real, step)
    assert float(both.normalizer) == float(alone.normalizer)
    np.testing.assert_allclose(float(both.total), 2 * float(alone.total), rtol=1e-6)
    np.testing.assert_allclose(float(both.parts["loss_aux"]), float(alone.total), rtol=1e-6)
    for name, value in alone.parts.items():
        assert float(both.parts[name]) == float(value)
    assert both.parts["loss_aux"].stop_gradient and set(both.parts) - set(alone.parts) == {
        "loss_aux"
    }


def test_aux_head_leaves_detector_targets_unchanged() -> None:
    outputs, real = with_auxiliary(), tensors(truth())
    ppyoloe_loss(CONFIG)(outputs, *real, ATSS).total.backward()
    want = main_part(random_outputs())
    ppyoloe_loss(CONFIG)(want, *real, ATSS).total.backward()
    for got, x in zip(sum(outputs, ()), sum(want, ())):
        np.testing.assert_allclose(got.grad.numpy(), x.grad.numpy(), rtol=1e-6, atol=1e-8)


def test_aux_head_detached_after_first_epochs() -> None:
    config = {"size": "t", "width_multiple": 0.125, "num_classes": CLASSES, "auxiliary": True}
    model = PPYOLOE(PPYOLOEConfig.model_validate(config))
    loss = PPYOLOELoss.build(
        PPYOLOELossConfig(auxiliary_attached_epochs=2.5), model, steps_per_epoch=4
    )
    for step, detached in ((0, False), (9, False), (10, True), (99, True), (3, False)):
        loss.prepare(model, step)
        assert model.detach_auxiliary is detached


def test_the_strides_are_those_of_the_model() -> None:
    config = {"size": "t", "width_multiple": 0.125, "num_classes": CLASSES, "levels": "P2-P5"}
    model = PPYOLOE(PPYOLOEConfig.model_validate(config))
    loss = PPYOLOELoss.build(PPYOLOELossConfig(), model, steps_per_epoch=1)
    outputs, real = model(paddle.randn([2, 3, 64, 96])), tensors(truth())
    for step in (0, 100):
        slots = loss.assign(outputs, *real, step)
        assert int(slots.anchor_BS.max()) >= 126 and float(slots.is_positive_BS.sum()) > 0
        result = loss(outputs, *real, step)
        assert np.isfinite(float(result.total)) and float(result.normalizer) > 0
