"""PP-YOLOE's loss with an auxiliary head: who assigns, what is added, and what may not change."""

import numpy as np
import paddle
import pytest

from ppdist.config.loss import PPYOLOELossConfig
from ppdist.config.model import PPYOLOEConfig
from ppdist.losses.ppyoloe import PPYOLOELoss
from ppdist.models.outputs import PPYOLOEOutputs
from ppdist.models.ppyoloe import PPYOLOE
from tests.unit.losses.cases import ATSS, STATIC, TAL, random_outputs, truth

CLASSES = 3
CONFIG = PPYOLOELossConfig(tal_radius=2.0)


def criterion(config: PPYOLOELossConfig = CONFIG) -> PPYOLOELoss:
    return PPYOLOELoss(config, num_classes=CLASSES, static_steps=STATIC)


def with_auxiliary(images: int = 2, same: bool = False) -> PPYOLOEOutputs:
    main = random_outputs(images)
    auxiliary = random_outputs(images, seed=0 if same else 5)
    return PPYOLOEOutputs(*main[:2], *auxiliary[:2])


def main_part(outputs: PPYOLOEOutputs) -> PPYOLOEOutputs:
    return PPYOLOEOutputs(outputs.class_logits, outputs.reg_dist)


def auxiliary_part(outputs: PPYOLOEOutputs) -> PPYOLOEOutputs:
    return PPYOLOEOutputs(outputs.aux_class_logits, outputs.aux_reg_dist)


def tensors(arrays: list[np.ndarray]) -> list[paddle.Tensor]:
    return [paddle.to_tensor(a) for a in arrays]


@pytest.mark.parametrize("step", [ATSS, TAL])
def test_images_without_objects_reach_aux_outputs(step: int) -> None:
    outputs = with_auxiliary()
    result = criterion()(outputs, *tensors(truth((0, 0), boxes=1)), step)
    result.total.backward()
    assert float(result.normalizer) == 0
    for x in outputs.class_logits + outputs.aux_class_logits:
        assert np.isfinite(x.grad.numpy()).all() and float(x.grad.abs().sum()) > 0
    for x in outputs.reg_dist + outputs.aux_reg_dist:
        assert x.grad is not None and not x.grad.numpy().any()


def test_aux_head_assigns_once_tal_has_taken_over() -> None:
    outputs, real = with_auxiliary(), tensors(truth())
    guided = criterion().assign(outputs, *real, TAL)
    alone = criterion().assign(auxiliary_part(outputs), *real, TAL)
    detector = criterion().assign(main_part(outputs), *real, TAL)
    for x, y in zip(guided, alone):
        np.testing.assert_array_equal(x.numpy(), y.numpy())
    assert not np.array_equal(guided.score_BS.numpy(), detector.score_BS.numpy())


def test_atss_takes_its_soft_labels_from_the_detector() -> None:
    outputs, real = with_auxiliary(), tensors(truth())
    guided = criterion().assign(outputs, *real, ATSS)
    for x, y in zip(guided, criterion().assign(main_part(outputs), *real, ATSS)):
        np.testing.assert_array_equal(x.numpy(), y.numpy())


@pytest.mark.parametrize("step", [ATSS, TAL])
def test_heads_share_one_assignment_and_normalizer(step: int) -> None:
    outputs, real = with_auxiliary(same=True), tensors(truth())
    alone = criterion()(main_part(outputs), *real, step)
    both = criterion()(outputs, *real, step)  # an auxiliary head that says what the detector says
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
    criterion()(outputs, *real, ATSS).total.backward()
    want = main_part(random_outputs())
    criterion()(want, *real, ATSS).total.backward()
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
