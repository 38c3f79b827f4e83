"""The loss of RT-DETR and D-FINE: its laws.  Its values: tests/reference/test_detr_losses.py."""

import numpy as np
import paddle
import pytest

from ppdist.losses.base import LossOutput, Teaching, Term
from ppdist.losses.boxes import aligned_giou, cxcywh_to_xyxy
from ppdist.losses.rtdetr import fine_grained_localization_loss
from ppdist.models.outputs import RTDETROutputs
from tests.unit.losses.cases import (
    REAL,
    SCALE_1,
    detr_loss,
    detr_outputs,
    mapped,
    numbers,
    replaced,
    truth,
)

FAMILIES = ("rtdetr", "dfine")


def objects() -> list[paddle.Tensor]:
    return [paddle.to_tensor(each) for each in truth(REAL)]


def part(outputs: RTDETROutputs, images: slice) -> RTDETROutputs:
    """Those of some images, denoising queries padded to the longest of these alone."""
    own = mapped(outputs, lambda x: x[images])
    assert own.denoised is not None
    used = (own.denoised.positive_BD + own.denoised.negative_BD).numpy().any(0).sum()
    longest = max(1, int(used))
    trimmed = mapped(replaced(own.denoised, groups_B=None), lambda x: x[:, :longest])
    return replaced(own, denoised=replaced(trimmed, groups_B=own.denoised.groups_B))


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_add_up_and_each_family_has_its_own(family: str) -> None:
    found = numbers(detr_loss(family)(detr_outputs(family), *objects(), 0))
    expected = {"loss_cls", "loss_l1", "loss_giou", "loss_denoising"}
    expected |= {"loss_fgl", "loss_ddf"} if family == "dfine" else set()
    assert found.keys() - {"total"} == expected
    assert found.pop("total") == pytest.approx(sum(found.values()), rel=1e-6)
    assert min(found.values()) > 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("leaf", ["logits_BQC", "boxes_BQ4"])
def test_outputs_that_are_not_finite_do_not_raise(leaf: str, value: float) -> None:
    outputs = detr_outputs("dfine")
    layers = [replaced(x, **{leaf: getattr(x, leaf) * value}) for x in outputs.layers]
    total = detr_loss()(replaced(outputs, layers=tuple(layers)), *objects(), 0).total
    assert not np.isfinite(float(total))


def test_what_evaluation_keeps_has_a_loss() -> None:
    outputs = detr_outputs("dfine")
    last = replaced(outputs, layers=outputs.layers[-1:], denoised=None)
    found = numbers(detr_loss()(last, *objects(), 0))
    assert found.keys() == {"total", "loss_cls", "loss_l1", "loss_giou", "loss_fgl"}


@pytest.mark.parametrize(
    ("move", "share"),
    [(-9.0, {0: 1.0}), (-1.5, {1: 1.0}), (0.125, {3: 0.75, 4: 0.25}), (9.0, {6: 1.0})],
)
def test_sides_learn_the_two_bins_beside_their_move(move: float, share: dict) -> None:
    bins_R = paddle.to_tensor([-4.0, -1.5, -0.5, 0.0, 0.5, 1.5, 4.0])
    reference = np.array([0.5, 0.5, 0.4, 0.2])
    half = np.array([0.4, 0.2]) * (0.5 + move / 4)  # all four sides move outwards alike
    target = np.array([0.5, 0.5, *2 * half])
    corners = np.random.default_rng(0).normal(size=(4, len(bins_R)))
    given = (paddle.to_tensor(x[None, None], "float32") for x in (corners, reference, target))
    found = fine_grained_localization_loss(*given, bins_R, SCALE_1)
    log_p = corners - np.log(np.exp(corners).sum(-1, keepdims=True))
    expected = -sum(weight * log_p[:, at].sum() for at, weight in share.items())
    assert found.item() == pytest.approx(expected, rel=1e-5)


TEACHING = Teaching(Term(1.0, 2.0), None, Term(0.5, 1.0))


def distilled(
    outputs: RTDETROutputs, taught: RTDETROutputs, every: paddle.Tensor
) -> tuple[paddle.Tensor, dict[str, float]]:
    nothing = LossOutput(paddle.zeros([]), paddle.zeros([]), {})
    found = detr_loss().distil(nothing, outputs, taught, TEACHING, every)
    return found.total, {name: float(x) for name, x in found.parts.items()}


def test_a_teacher_sure_of_one_box_teaches_it_one_query() -> None:
    outputs, taught = detr_outputs("dfine"), detr_outputs("rtdetr", seed=1)
    ours, theirs = (mapped(x.layers[-1], lambda x: x.detach()) for x in (outputs, taught))
    theirs.logits_BQC[:] = -9.0
    theirs.logits_BQC[1, 3] = paddle.to_tensor([-1.0, 1.0, -9.0])
    ours.boxes_BQ4[1, 5] = theirs.boxes_BQ4[1, 3] + 0.02
    ours.logits_BQC[1, 5] = paddle.to_tensor([0.5, 9.0, -9.0])
    pair = replaced(outputs, layers=(ours,)), replaced(taught, layers=(theirs,))
    _, found = distilled(*pair, paddle.to_tensor([9.0, 4.0]))
    s, t = (1 / (1 + np.exp(-np.array(x) / 2)) for x in ([0.5, 9, -9], [-1, 1, -9.0]))
    focal = (t - s) ** 2 * -(t * np.log(s) + (1 - t) * np.log(1 - s))
    box, target = (cxcywh_to_xyxy(x) for x in (ours.boxes_BQ4[1, 5], theirs.boxes_BQ4[1, 3]))
    apart = 5 * 4 * 0.02 + 2 * (1 - float(aligned_giou(box, target)))
    score = 1 / (1 + np.exp(-1.0))
    expected = {"logits": 4 * focal.sum() / 9, "boxes": 0.5 * score * apart / 9}
    assert found == pytest.approx({f"loss_distill_{k}": x for k, x in expected.items()}, rel=1e-4)


def test_the_last_layer_learns_what_its_teacher_is_sure_of() -> None:
    outputs, taught = detr_outputs("dfine"), detr_outputs("rtdetr", seed=1)
    every = paddle.to_tensor([9.0, 4.0])
    _, same = distilled(outputs, mapped(outputs, lambda x: x.detach()), every)
    assert same == {"loss_distill_logits": 0, "loss_distill_boxes": pytest.approx(0, abs=1e-5)}
    total, other = distilled(outputs, taught, every)
    assert min(other.values()) > 0 and float(total) == pytest.approx(sum(other.values()))
    total.backward()
    assert all(np.abs(x.grad.numpy()).max() > 0 for x in outputs.layers[-1][:2])
    assert taught.layers[-1].boxes_BQ4.grad is None and outputs.encoder.boxes_BQ4.grad is None
    shares = [slice(0, 1), slice(1, 4)]
    parts = [distilled(part(outputs, s), part(taught, s), every)[0] for s in shares]
    assert float(sum(parts)) == pytest.approx(float(total), rel=1e-6)
    unsure = replaced(taught.layers[-1], logits_BQC=taught.layers[-1].logits_BQC - 9)
    assert float(distilled(outputs, replaced(taught, layers=(unsure,)), every)[0]) == 0
