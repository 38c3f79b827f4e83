"""MAL and the floor of small objects: against numpy, and off unless asked for."""

import numpy as np
import paddle
import pytest

from ppdist.errors import ConfigError
from ppdist.losses.assign import atss_slots, task_aligned_slots
from ppdist.losses.matchability import matchability_loss, stretched
from ppdist.losses.ppyoloe import PPYOLOELoss, PPYOLOELossConfig
from tests.engine.tiny import tiny_config
from tests.losses import test_assign as assign
from tests.losses.slopes import assert_value_and_slopes
from tests.losses.test_ppyoloe_loss import ATSS, CLASSES, STATIC, TAL, random_outputs, truth


def test_mal_equals_its_definition_and_the_gradient_its_difference_quotient() -> None:
    rng = np.random.default_rng(0)
    logits, gamma = rng.normal(0, 2, (2, CLASSES, 7)), 1.5
    index, score = np.array([[3, 12], [30, 3]]), np.array([[0.8, 0.2], [0.5, 0.9]])
    taken = np.array([[1, 1], [1, 0]])  # the last slot points at a taken entry and counts nothing

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def by_definition(x: np.ndarray) -> float:
        """The weight of a negative has no gradient: it is that of the logits above."""
        p, fixed, target = sigmoid(x), sigmoid(logits), np.zeros(x.size)
        positive = np.zeros(x.size, bool)
        target[index[taken > 0]], positive[index[taken > 0]] = score[taken > 0] ** gamma, True
        target, positive = target.reshape(x.shape), positive.reshape(x.shape)
        bce = -(target * np.log(p) + (1 - target) * np.log(1 - p))
        return float((np.where(positive, 1, fixed**gamma) * bce).sum())

    x = paddle.to_tensor(logits, dtype="float64")
    x.stop_gradient = False
    slots = (paddle.to_tensor(index), paddle.to_tensor(score), paddle.to_tensor(taken * 1.0))
    got = matchability_loss(x, *slots, gamma)
    assert_value_and_slopes(got, x, by_definition)


@pytest.mark.parametrize("step", [ATSS, TAL])
def test_with_mal_the_number_of_positives_divides_and_boxes_keep_their_share(step: int) -> None:
    """Of one image: the mean of its boxes is that with varifocal loss, by the soft labels."""
    arrays = [paddle.to_tensor(a) for a in truth()]
    criteria = {
        name: PPYOLOELoss(
            PPYOLOELossConfig(class_loss=name), num_classes=CLASSES, static_steps=STATIC
        )
        for name in ("varifocal", "mal")
    }
    outputs, normalizers = random_outputs(), []
    for image in (0, 1):
        one = type(outputs)(*[tuple(x[image : image + 1] for x in maps) for maps in outputs])
        part = [each[image : image + 1] for each in arrays]
        plain, mal = (criterion(one, *part, step) for criterion in criteria.values())
        slots = criteria["mal"].assign(one, *part, step)
        assert float(mal.normalizer) == pytest.approx(float(slots.taken_BS.sum()), rel=1e-5)
        normalizers.append(float(mal.normalizer))
        for name in ("loss_iou", "loss_dfl"):
            means = [float(each.parts[name] / each.normalizer) for each in (plain, mal)]
            assert means[0] == pytest.approx(means[1], rel=1e-4)
        assert float(mal.parts["loss_cls"]) != float(plain.parts["loss_cls"])
    both = criteria["mal"](outputs, *arrays, step)  # an image has its share wherever it is
    assert both.normalizer_B.numpy() == pytest.approx(normalizers, rel=1e-5)
    assert normalizers[0] > normalizers[1] > 0


def test_boxes_that_touch_no_object_count_alike_with_mal() -> None:
    score, taken = (
        paddle.to_tensor([[0.0, 0, 0], [0, 0, 0]]),
        paddle.to_tensor([[1.0, 0, 1], [0, 0, 0]]),
    )
    assert stretched(score, taken).numpy() == pytest.approx(taken.numpy())
    poor = stretched(paddle.to_tensor([[0.1, 0, 0.3]]), taken[:1])
    assert poor.numpy()[0] == pytest.approx([0.5, 0, 1.5])


def test_mal_reaches_every_output_where_no_image_has_an_object() -> None:
    outputs = random_outputs()
    config = PPYOLOELossConfig(class_loss="mal")
    criterion = PPYOLOELoss(config, num_classes=CLASSES, static_steps=STATIC)
    criterion(outputs, *[paddle.to_tensor(a) for a in truth((0, 0), boxes=1)], TAL).total.backward()
    for x in outputs.class_logits:
        assert np.isfinite(x.grad.numpy()).all() and float(x.grad.abs().sum()) > 0
    assert all(x.grad is not None for x in outputs.side_logits)


def small_truth(boxes: int, real: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Objects of 2 to 30 pixels a side: many hold no cell centre at all."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(2, 30, (boxes, 2))
    low = rng.uniform(0, np.array([160, 128]) - size)
    mask = np.arange(boxes) < real
    box = np.where(mask[:, None], np.concatenate([low, low + size], 1), 0)
    labels = rng.integers(0, assign.CLASSES, boxes) * mask
    return box.astype("float32"), labels.astype("int64"), mask.astype("float32")


def enlarged(box_M4: np.ndarray, floor: float) -> np.ndarray:
    """Each side at least so long, one box after the other."""
    result = box_M4.astype("float64")
    for box in result:
        for axis in range(2):
            centre = (box[axis] + box[axis + 2]) / 2
            half = max(box[axis + 2] - box[axis], floor) / 2
            box[axis], box[axis + 2] = centre - half, centre + half
    return result


FLOOR = 16.0


def is_small(box: np.ndarray) -> bool:
    return bool((box[2:] - box[:2] < FLOOR).any())


def test_atss_with_a_floor_equals_loops_over_its_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points, strides = (paddle.to_tensor(x) for x in assign.cells())
    truths = [small_truth(8, n, seed) for seed, n in enumerate((8, 3))]
    box, _, mask = assign.batch(truths)
    sizes = (assign.SIZES, assign.STRIDES, points, strides)
    plain, _ = assign.planes(atss_slots(box, mask, *sizes), 420)
    owner, _ = assign.planes(atss_slots(box, mask, *sizes, floor=FLOOR), 420)
    strictly_inside = assign.inside
    monkeypatch.setattr(
        assign, "inside", lambda at, one: strictly_inside(at, enlarged(one[None], FLOOR)[0])
    )
    for i, (box_M4, _, mask_M) in enumerate(truths):
        assert np.array_equal(owner[i], assign.atss_by_loops(box_M4, mask_M))
    learned, before = ({m for m in x[0] if m >= 0} for x in (owner, plain))
    assert before < learned  # objects that no cell learned without it


def test_task_alignment_with_a_floor_equals_loops_over_its_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points, strides = assign.cells()
    rng = np.random.default_rng(7)
    reach = rng.uniform(0.5, 3, (2, 420, 4)).astype("float32") * strides
    pred = np.concatenate([points - reach[..., :2], points + reach[..., 2:]], -1)
    scores = rng.uniform(0.01, 1, (2, assign.CLASSES, 420)).astype("float32")
    truths = [small_truth(8, n, seed) for seed, n in enumerate((8, 3))]
    inputs = *(paddle.to_tensor(x) for x in (scores, pred, points)), *assign.batch(truths)
    plain, _ = assign.planes(task_aligned_slots(*inputs), 420)
    owner, score = assign.planes(task_aligned_slots(*inputs, floor=FLOOR), 420)
    strictly_inside = assign.inside
    monkeypatch.setattr(
        assign, "inside", lambda at, one: strictly_inside(at, enlarged(one[None], FLOOR)[0])
    )
    for i, one in enumerate(truths):
        want_owner, want_score = assign.tal_by_loops(
            scores[i], pred[i], *one, None, lambda box: 1e-37 if is_small(box) else 1e-9
        )
        real_N = want_score > 1e-6
        assert np.array_equal(owner[i][real_N], want_owner[real_N])
        np.testing.assert_allclose(score[i], want_score, atol=1e-5)
        small_N = np.array([m >= 0 and is_small(one[0][m]) for m in owner[i]])
        assert small_N.any() and (score[i][small_N] > 0).all()  # else it stays background
    learned, before = ({m for m in x[0] if m >= 0} for x in (owner, plain))
    assert before < learned


@pytest.mark.parametrize("topk", [1, 13])
def test_an_object_that_holds_no_cell_is_learned_by_predictions_that_touch_it_alone(topk) -> None:
    points, _ = assign.cells()
    box = paddle.to_tensor([[[8.5, 8.5, 11.5, 11.5]]])  # the centres around it: 4 and 12
    real = (box, paddle.zeros([1, 1], "int64"), paddle.ones([1, 1]))
    pred = np.concatenate([points - 0.5, points + 0.5], -1)[None]  # none touches it
    scores = paddle.full([1, assign.CLASSES, 420], 0.01)
    names = {"topk": topk, "floor": 16.0}
    inputs = (scores, paddle.to_tensor(pred), paddle.to_tensor(points), *real)
    assert float(task_aligned_slots(*inputs, **names).taken_BS.sum()) == 0
    cell = int(np.flatnonzero((points == [12, 12]).all(1))[-1])
    pred[0, cell] = [-20, -20, 44, 44]  # as wide as an untrained head says: an IoU of 0.002
    inputs = (scores, paddle.to_tensor(pred), paddle.to_tensor(points), *real)
    owner, score = assign.planes(task_aligned_slots(*inputs, **names), 420)
    assert np.flatnonzero(owner[0] == 0).tolist() == [cell]
    assert score[0, cell] == pytest.approx(9 / 64**2, rel=1e-3)


def test_a_floor_below_every_side_changes_nothing_to_the_bit() -> None:
    arrays = [paddle.to_tensor(a) for a in truth()]  # sides of 10 to 50 pixels
    for step in (ATSS, TAL):
        plain, floored = (
            PPYOLOELoss(
                PPYOLOELossConfig(small_object_floor=floor),
                num_classes=CLASSES,
                static_steps=STATIC,
            )(random_outputs(), *arrays, step)
            for floor in (None, 9.9)
        )
        assert float(plain.total) == float(floored.total)
        assert float(plain.normalizer) == float(floored.normalizer)


def test_an_object_smaller_than_a_cell_is_learned_with_a_floor_only() -> None:
    box = paddle.to_tensor([[[8.5, 8.5, 11.5, 11.5]]])  # the centres around it: 4 and 12
    real = (box, paddle.zeros([1, 1], "int64"), paddle.ones([1, 1]))
    for step in (ATSS, TAL):
        taken = [
            float(
                PPYOLOELoss(
                    PPYOLOELossConfig(small_object_floor=floor),
                    num_classes=CLASSES,
                    static_steps=STATIC,
                )
                .assign(random_outputs(1), *real, step)
                .taken_BS.sum()
            )
            for floor in (None, 8.0)
        ]
        assert taken[0] == 0 < taken[1], step
    outputs = type(random_outputs(1))(
        *[tuple(x.detach() * 0.0 for x in maps) for maps in random_outputs(1)]
    )  # every side 8 strides long, as at first
    for x in sum(outputs, ()):
        x.stop_gradient = False
    config = PPYOLOELossConfig(small_object_floor=8.0)
    criterion = PPYOLOELoss(config, num_classes=CLASSES, static_steps=STATIC)
    result = criterion(outputs, *real, TAL)
    result.total.backward()
    assert float(result.normalizer) > 0
    assert max(float(x.grad.abs().max()) for x in outputs.side_logits) > 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss.mal_gamma=2"], "set loss.class_loss: mal too"),
        (["loss.tal_radius=2", "loss.small_object_floor=8"], "choose one"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(overrides: list[str], words: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_config(tmp_path, overrides)
