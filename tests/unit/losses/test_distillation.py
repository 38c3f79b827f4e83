"""What a student learns from a teacher, against numpy, and its laws: nothing to learn from itself,
no gradient to the teacher, the images of a batch one by one.
"""

from functools import partial

import numpy as np
import paddle
import pytest

from ppdist.losses.base import LossOutput, Teaching, Term
from ppdist.losses.distillation import (
    MIN_TEACHER_SCORE,
    binary_distillation,
    channel_wise_distillation,
    confident_scores,
    localisation_distillation,
    quality_distillation,
)
from ppdist.losses.yolov5 import LEVEL_WEIGHTS, Gains, YOLOv5Loss
from tests.unit.losses import cases
from tests.unit.losses.cases import CLASSES, ppyoloe_loss

ppyoloe_outputs = partial(cases.random_outputs, 2, features=5)
yolov5_outputs = partial(cases.yolov5_outputs, 2, features=5)
TERMS = ("logits", "features", "boxes")
ALL = Teaching(Term(2.0, 1.5), Term(3.0, 2.0), Term(0.5, 10.0))


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, shape).astype("float32")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype("float64")))


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x.astype("float64") - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def tensors(*arrays: np.ndarray) -> list[paddle.Tensor]:
    return [paddle.to_tensor(each) for each in arrays]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_class_scores_are_quality_focal_soft_labels(temperature: float) -> None:
    ours, theirs = drawn(2, 3, 7), drawn(2, 3, 7, seed=1)
    s, t = sigmoid(ours / temperature), sigmoid(theirs / temperature)
    bce = -t * np.log(s) - (1 - t) * np.log(1 - s)
    expected = temperature**2 * (np.abs(t - s) ** 2 * bce).sum()
    found = quality_distillation(*tensors(ours, theirs), temperature)
    assert found.shape == [] and float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_yes_and_no_are_the_divergence_of_two_coins(temperature: float) -> None:
    ours, theirs = drawn(2, 7), drawn(2, 7, seed=1)
    s, t = sigmoid(ours / temperature), sigmoid(theirs / temperature)
    expected = temperature**2 * (t * np.log(t / s) + (1 - t) * np.log((1 - t) / (1 - s)))
    found = binary_distillation(*tensors(ours, theirs), temperature)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_channels_are_distributions_over_the_cells(temperature: float) -> None:
    ours, theirs = drawn(2, 5, 3, 4), drawn(2, 5, 3, 4, seed=1)
    s, t = (softmax(each.reshape(2, 5, 12) / temperature) for each in (ours, theirs))
    expected = temperature**2 / 5 * (t * np.log(t / s)).sum((1, 2))
    found = channel_wise_distillation(*tensors(ours, theirs), temperature)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 10.0])
def test_sides_are_distributions_over_the_bins(temperature: float) -> None:
    ours, theirs = drawn(2, 6, 4, 17), drawn(2, 6, 4, 17, seed=1)
    weight = np.random.default_rng(2).uniform(0, 1, (2, 6)).astype("float32")
    s, t = softmax(ours / temperature), softmax(theirs / temperature)
    kl = (t * np.log(t / s)).sum(-1).mean(-1)
    expected = temperature**2 * (kl * weight).sum()
    found = localisation_distillation(*tensors(ours, theirs, weight), temperature)
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_a_teacher_that_is_not_sure_says_nothing() -> None:
    score = paddle.to_tensor([0.01, MIN_TEACHER_SCORE, 0.099, 0.9])
    assert confident_scores(score).numpy() == pytest.approx([0.0, MIN_TEACHER_SCORE, 0.0, 0.9])


def yolov5_loss() -> YOLOv5Loss:
    anchors = np.random.default_rng(3).uniform(1, 4, (3, 3, 2)).astype("float32")
    return YOLOv5Loss(
        Gains(0.05, 1.0, 0.5),
        num_classes=CLASSES,
        strides=(8, 16, 32),
        anchors_LA2=paddle.to_tensor(anchors),
        threshold=4.0,
        reference_batch=16,
    )


SHARES = (7.0, 0.0, 2.0)  # of the normalizer, image by image


def nothing(images: slice = slice(0, 2)) -> LossOutput:
    """The loss of the ground truth, of these images."""
    shares = paddle.to_tensor(SHARES[images])
    return LossOutput(paddle.zeros([]), shares.sum(), {}, normalizer_B=shares)


TOTALS = (4.0, 6.0, 9.0, 3.0)  # images, and the matches of three levels
FAMILIES = {
    "ppyoloe": (ppyoloe_loss, ppyoloe_outputs),
    "yolov5": (yolov5_loss, yolov5_outputs),
}


def distilled(family, ours, theirs, teaching=ALL, images=slice(0, 2)) -> LossOutput:
    loss = FAMILIES[family][0]()
    totals = paddle.to_tensor(TOTALS)
    return loss.distil(nothing(images), ours, theirs, teaching, totals)


def values(output: LossOutput) -> dict[str, float]:
    return {name.removeprefix("loss_distill_"): float(x) for name, x in output.parts.items()}


def joined(maps: tuple[paddle.Tensor, ...]) -> np.ndarray:
    return np.concatenate([each.numpy().reshape(*each.shape[:2], -1) for each in maps], 2)


def test_a_ppyoloe_learns_by_the_gains_of_its_own_loss() -> None:
    ours, theirs = ppyoloe_outputs(seed=0), ppyoloe_outputs(seed=1)
    s, t = joined(ours.class_logits), joined(theirs.class_logits)
    logits = quality_distillation(*tensors(s, t), 1.5)
    side_S, side_T = (
        joined(each.reg_dist).transpose(0, 2, 1).reshape(2, -1, 4, 17) for each in (ours, theirs)
    )
    score = sigmoid(t).max(1)
    weight = np.where(score >= MIN_TEACHER_SCORE, score, 0).astype("float32")
    boxes = localisation_distillation(*tensors(side_S, side_T, weight), 10.0)
    features = sum(
        (channel_wise_distillation(*pair, 2.0).numpy() * SHARES[:2]).sum()
        for pair in zip(ours.features, theirs.features)
    )
    found = distilled("ppyoloe", ours, theirs)
    assert values(found) == pytest.approx(
        {
            "logits": 2.0 * 1.0 * float(logits),
            "features": 3.0 * 2.5 * float(features) / 3,
            "boxes": 0.5 * 0.5 * float(boxes),
        },
        rel=1e-5,
    )
    assert float(found.total) == pytest.approx(sum(values(found).values()), rel=1e-6)
    assert float(found.normalizer) == sum(SHARES[:2])


def yolov5_boxes(maps: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """xyxy in cells from the corner of each cell; maps: [B, A, K, N]."""
    s = sigmoid(maps[:, :, :4])
    centre, half = 2 * s[:, :, :2] - 0.5, (2 * s[:, :, 2:]) ** 2 * anchors[None, :, :, None] / 2
    return np.concatenate([centre - half, centre + half], 2)


def giou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of boxes along axis 2."""
    low, high = np.maximum(a[:, :, :2], b[:, :, :2]), np.minimum(a[:, :, 2:], b[:, :, 2:])
    overlap = np.clip(high - low, 0, None).prod(2)
    union = sum((x[:, :, 2:] - x[:, :, :2]).prod(2) for x in (a, b)) - overlap
    low, high = np.minimum(a[:, :, :2], b[:, :, :2]), np.maximum(a[:, :, 2:], b[:, :, 2:])
    hull = (high - low).prod(2)
    return overlap / union - (hull - union) / hull


def test_yolov5_distills_with_its_own_gains() -> None:
    ours, theirs = yolov5_outputs(seed=0), yolov5_outputs(seed=1)
    anchors = yolov5_loss().anchors_LA2.numpy()
    matches, logits, boxes, features = sum(TOTALS[1:]) / 3, 0.0, 0.0, 0.0
    for level in range(3):
        s, t = (
            each.logits[level].numpy().reshape(2, 3, 5 + CLASSES, -1) for each in (ours, theirs)
        )
        kl = binary_distillation(*tensors(s, t), 1.5).numpy()
        seen = sigmoid(t[:, :, 4])
        sure = np.where(seen >= MIN_TEACHER_SCORE, seen, 0)
        share = LEVEL_WEIGHTS[3][level] / (TOTALS[0] * kl.shape[1] * kl.shape[3])
        logits += 1.0 * share * kl[:, :, 4].sum()
        logits += 0.5 * (kl[:, :, 5:] * sure[:, :, None]).sum() / (matches * CLASSES)
        off = 1 - giou(yolov5_boxes(s, anchors[level]), yolov5_boxes(t, anchors[level]))
        boxes += 0.05 * (off * sure).sum() / matches
        pair = ours.features[level], theirs.features[level]
        features += float(channel_wise_distillation(*pair, 2.0).sum()) / 3
    found = distilled("yolov5", ours, theirs)
    expected = {
        "logits": 2.0 * logits, "features": 3.0 * 0.05 * features / TOTALS[0], "boxes": 0.5 * boxes
    }  # fmt: skip
    assert values(found) == pytest.approx(expected, rel=1e-4)
    assert float(found.total) == pytest.approx(16 * sum(expected.values()), rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_student_equal_to_teacher_has_zero_loss(family: str) -> None:
    ours = FAMILIES[family][1]()
    found = distilled(family, ours, FAMILIES[family][1]())
    assert all(abs(value) < 1e-3 for value in values(found).values()), values(found)
    found.total.backward()
    for each in [x for group in ours for x in group]:
        # of the largest gradient that other teachers gave here, about 10
        assert each.grad is None or float(each.grad.abs().max()) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_reaches_student_and_not_teacher(family) -> None:
    make = FAMILIES[family][1]
    ours, theirs = make(seed=0), make(seed=1)
    distilled(family, ours, theirs).total.backward()
    for each in [x for group in ours for x in group]:
        gradient = each.grad.numpy()
        assert np.isfinite(gradient).all() and np.abs(gradient).sum() > 0
    assert all(x.grad is None for group in theirs for x in group)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_finite_when_both_surely_disagree(family: str) -> None:
    make = FAMILIES[family][1]
    ours, theirs = make(seed=0, scale=200.0), make(seed=1, scale=200.0)
    found = distilled(family, ours, theirs)
    assert np.isfinite(float(found.total))
    found.total.backward()
    assert all(np.isfinite(x.grad.numpy()).all() for group in ours for x in group)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", TERMS)
def test_each_of_the_three_may_stand_alone(family: str, name: str) -> None:
    make = FAMILIES[family][1]
    alone = Teaching(**(dict.fromkeys(TERMS) | {name: getattr(ALL, name)}))
    found = values(distilled(family, make(seed=0), make(seed=1), alone))
    whole = values(distilled(family, make(seed=0), make(seed=1)))
    assert found == pytest.approx({name: whole[name]})


def test_a_yolov5_with_other_anchors_is_no_teacher() -> None:
    loss = yolov5_loss()
    teacher = paddle.nn.Layer()
    teacher.head = paddle.nn.Layer()
    teacher.head.register_buffer("anchors", loss.anchors_LA2.clone())
    assert loss.teacher_mismatch(teacher) == ""
    teacher.head.anchors.set_value(paddle.ones([3, 3, 2]))
    said = loss.teacher_mismatch(teacher)
    assert "model.anchors=[[[8.0, 8.0]" in said
    assert ppyoloe_loss().teacher_mismatch(teacher) == ""
