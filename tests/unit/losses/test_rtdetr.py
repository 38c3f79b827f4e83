"""The loss of RT-DETR and D-FINE: its laws.  Its values: tests/reference/test_detr_losses.py."""

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from ppdist.config.loss import RTDETRLossConfig
from ppdist.losses.base import LossOutput, Teaching, Term
from ppdist.losses.boxes import aligned_giou, aligned_iou, cxcywh_to_xyxy, xyxy_to_cxcywh
from ppdist.losses.matcher import Truth, hungarian_matcher, matching_cost
from ppdist.losses.rtdetr import DDF_TEMPERATURE, RTDETRLoss, fine_grained_localization_loss
from ppdist.models.outputs import BINS, Denoised, Refined, RTDETROutputs

CLASSES, QUERIES, SIZE = 3, 12, (96, 128)
REAL = (3, 0, 5, 1)  # boxes of four images
SCALE_1 = paddle.to_tensor([4.0])
FAMILIES = ("rtdetr", "dfine")


def criterion(family: str = "dfine", **keys: Any) -> RTDETRLoss:
    of_bins = {"up_1": paddle.to_tensor([0.5]), "reg_scale_1": SCALE_1} if family == "dfine" else {}
    return RTDETRLoss(RTDETRLossConfig.model_validate(keys), **of_bins)


def refined(queries: int, in_bins: bool) -> Refined:
    boxes = paddle.uniform([len(REAL), queries, 4], min=0.2, max=0.6)
    logits = paddle.randn([len(REAL), queries, CLASSES])
    corners = paddle.randn([len(REAL), queries, 4, BINS]) if in_bins else None
    for x in (logits, boxes, corners):
        if x is not None:
            x.stop_gradient = False
    return Refined(logits, boxes, corners, boxes.detach() + 0.02 if in_bins else None)


def random_outputs(family: str, seed: int = 0) -> RTDETROutputs:
    """Three layers; groups of denoising queries as many as each image has room for."""
    paddle.seed(seed)
    in_bins = family == "dfine"
    groups = [max(1, 6 // max(1, real)) for real in REAL]
    most = max(2 * real * each for real, each in zip(REAL, groups))
    positive, negative, target = np.zeros([3, len(REAL), most])
    for image, (real, each) in enumerate(zip(REAL, groups)):
        used = 2 * real * each
        positive[image, :used] = np.tile(np.repeat([1, 0], real), each)
        negative[image, :used] = 1 - positive[image, :used]
        target[image, :used] = np.tile(np.arange(real), 2 * each)
    denoised = Denoised(
        tuple(refined(most, in_bins) for _ in range(3)),
        refined(most, False) if in_bins else None,
        paddle.to_tensor(target, "int64"),
        *(paddle.to_tensor(x, "float32") for x in (positive, negative, groups)),
    )
    layers = tuple(refined(QUERIES, in_bins) for _ in range(3))
    size = paddle.to_tensor(SIZE[::-1] * 2, "float32")
    preliminary = refined(QUERIES, False) if in_bins else None
    return RTDETROutputs(layers, refined(QUERIES, False), size, preliminary, denoised)


def truth(boxes: int = 5) -> list[paddle.Tensor]:
    rng = np.random.default_rng(1)
    low = rng.uniform(0, 40, (len(REAL), 5, 2))
    mask = (np.arange(5) < np.array(REAL)[:, None]).astype("float32")
    box = np.concatenate([low, low + rng.uniform(20, 50, low.shape)], -1) * mask[..., None]
    labels = rng.integers(0, CLASSES, mask.shape) * mask
    padded = [np.zeros([len(REAL), boxes, *x.shape[2:]]) for x in (box, labels, mask)]
    for into, x in zip(padded, (box, labels, mask)):
        into[:, :5] = x
    kinds = zip(padded, ("float32", "int64", "float32"))
    return [paddle.to_tensor(x.astype(kind)) for x, kind in kinds]


def replaced(outputs: Any, **changes: Any) -> Any:
    """A copy of a named tuple with other fields."""
    fields = dict(zip(type(outputs).__annotations__, outputs, strict=True))
    return type(outputs)(**fields | changes)


def mapped(outputs: Any, change: Any) -> Any:
    """The same outputs with every tensor but the size changed."""
    if isinstance(outputs, paddle.Tensor):
        return change(outputs)
    if isinstance(outputs, RTDETROutputs):
        return replaced(type(outputs)(*(mapped(x, change) for x in outputs)), size_4=outputs.size_4)
    if isinstance(outputs, tuple):
        each = [mapped(x, change) for x in outputs]
        return tuple(each) if type(outputs) is tuple else type(outputs)(*each)
    return outputs


def part(outputs: RTDETROutputs, images: slice) -> RTDETROutputs:
    """Those of some images, denoising queries padded to the longest of these alone."""
    own = mapped(outputs, lambda x: x[images])
    assert own.denoised is not None
    used = (own.denoised.positive_BD + own.denoised.negative_BD).numpy().any(0).sum()
    longest = max(1, int(used))
    trimmed = mapped(replaced(own.denoised, groups_B=None), lambda x: x[:, :longest])
    return replaced(own, denoised=replaced(trimmed, groups_B=own.denoised.groups_B))


def leaves(outputs: Any) -> list[paddle.Tensor]:
    if isinstance(outputs, paddle.Tensor):
        return [] if outputs.stop_gradient else [outputs]
    return [x for each in outputs or () for x in leaves(each)] if isinstance(outputs, tuple) else []


def gradients(outputs: RTDETROutputs, total: paddle.Tensor) -> list[np.ndarray]:
    tensors = leaves(outputs)
    for x in tensors:
        x.clear_gradient(False)
    total.backward()
    return [x.grad.numpy().copy() for x in tensors]


def numbers(output: LossOutput) -> dict[str, float]:
    return {"total": float(output.total)} | {k: float(x) for k, x in output.parts.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_add_up_and_each_family_has_its_own(family: str) -> None:
    found = numbers(criterion(family)(random_outputs(family), *truth(), 0))
    expected = {"loss_cls", "loss_l1", "loss_giou", "loss_denoising"}
    expected |= {"loss_fgl", "loss_ddf"} if family == "dfine" else set()
    assert found.keys() - {"total"} == expected
    assert found.pop("total") == pytest.approx(sum(found.values()), rel=1e-6)
    assert min(found.values()) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_boxes_does_not_matter(family: str) -> None:
    outputs, (boxes, labels, mask) = random_outputs(family), truth(9)
    few = criterion(family)(outputs, *truth(), 0)
    labels = labels + 99 * (1 - mask).astype("int64")  # anything where padded
    many = criterion(family)(outputs, boxes, labels, mask, 0)
    assert numbers(few) == pytest.approx(numbers(many), rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_output_has_a_gradient_without_objects(family: str) -> None:
    outputs = random_outputs(family)
    assert outputs.denoised is not None
    unused = {f"{kind}_BD": outputs.denoised.positive_BD * 0 for kind in ("positive", "negative")}
    outputs = replaced(outputs, denoised=replaced(outputs.denoised, **unused))
    boxes, labels, mask = truth()
    output = criterion(family)(outputs, boxes * 0, labels * 0, mask * 0, 0)
    found = gradients(outputs, output.total)
    assert all(np.isfinite(x).all() for x in found)
    assert all(x.grad is not None for x in leaves(outputs))
    values = numbers(output)
    assert values["loss_cls"] > 0  # all is background
    assert values["loss_l1"] == values["loss_giou"] == values["loss_denoising"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_low_precision_is_computed_in_float32(family: str) -> None:
    low = mapped(random_outputs(family), lambda x: _like(x, "bfloat16"))
    same = mapped(low, lambda x: _like(x, "float32"))
    with paddle.amp.auto_cast(dtype="bfloat16", level="O2"):
        found = criterion(family)(low, *truth(), 0)
    assert found.total.dtype == paddle.float32
    assert numbers(found) == pytest.approx(numbers(criterion(family)(same, *truth(), 0)), rel=1e-6)


def _like(x: paddle.Tensor, dtype: str) -> paddle.Tensor:
    return x if x.stop_gradient else x.astype(dtype)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("leaf", ["logits_BQC", "boxes_BQ4"])
def test_outputs_that_are_not_finite_do_not_raise(leaf: str, value: float) -> None:
    outputs = random_outputs("dfine")
    layers = [replaced(x, **{leaf: getattr(x, leaf) * value}) for x in outputs.layers]
    total = criterion()(replaced(outputs, layers=tuple(layers)), *truth(), 0).total
    assert not np.isfinite(float(total))


def test_what_evaluation_keeps_has_a_loss() -> None:
    outputs = random_outputs("dfine")
    last = replaced(outputs, layers=outputs.layers[-1:], denoised=None)
    found = numbers(criterion()(last, *truth(), 0))
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


def test_denoising_queries_weigh_positives_by_the_union() -> None:
    outputs, (boxes, labels, mask) = part(random_outputs("dfine"), slice(0, 1)), truth()
    loss, kept = criterion(), outputs.denoised
    assert kept is not None and outputs.preliminary is not None
    _, terms = loss.terms(outputs, boxes[:1], labels[:1], mask[:1])
    found = Truth(xyxy_to_cxcywh(boxes[:1]) / outputs.size_4, labels[:1], mask[:1])
    scored = [*outputs.layers, outputs.encoder, outputs.preliminary]
    stacks = (paddle.stack([x[at] for x in scored]) for at in range(2))
    cost = matching_cost(*stacks, outputs.size_4, found, loss.costs)
    positives = int(hungarian_matcher(cost, found.mask_BM)[1].is_positive_LBQ.sum())
    roots = positives**0.5, (QUERIES - positives) ** 0.5
    share = roots[0] / sum(roots)
    is_positive = kept.positive_BD.numpy()[0] > 0
    *layers, last = (F.log_softmax(x.corners_BQ4R[0] / DDF_TEMPERATURE, -1) for x in kept.layers)
    surest = F.sigmoid(kept.layers[-1].logits_BQC[0]).max(-1).numpy()
    target = found.boxes_BM4[0][kept.target_BD[0]]
    expected = 0.0
    for scored, layer in zip(kept.layers, layers):
        kl = DDF_TEMPERATURE**2 * (last.exp() * (last - layer)).sum(-1).mean(-1).numpy()
        iou = aligned_iou(*(cxcywh_to_xyxy(x) for x in (scored.boxes_BQ4[0], target)))
        means = (kl * iou.numpy())[is_positive].mean(), (kl * surest)[~is_positive].mean()
        expected += 1.5 * (share * means[0] + (1 - share) * means[1])
    assert terms["ddf"].item() == pytest.approx(expected, rel=1e-4)


TEACHING = Teaching(Term(1.0, 2.0), None, Term(0.5, 1.0))


def distilled(
    outputs: RTDETROutputs, taught: RTDETROutputs, every: paddle.Tensor
) -> tuple[paddle.Tensor, dict[str, float]]:
    nothing = LossOutput(paddle.zeros([]), paddle.zeros([]), {})
    found = criterion().distil(nothing, outputs, taught, TEACHING, every)
    return found.total, {name: float(x) for name, x in found.parts.items()}


def test_a_teacher_sure_of_one_box_teaches_it_one_query() -> None:
    outputs, taught = random_outputs("dfine"), random_outputs("rtdetr", seed=1)
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
    outputs, taught = random_outputs("dfine"), random_outputs("rtdetr", seed=1)
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
