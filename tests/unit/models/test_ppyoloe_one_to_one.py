"""PP-YOLOE's head without suppression: what it learns from, what it leaves alone, what remains."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.common.errors import ConfigError
from ppdist.config.evaluate import NMSConfig
from ppdist.config.loss import PPYOLOELossConfig
from ppdist.engine.loss_sums import LossSums
from ppdist.losses.ppyoloe import PPYOLOELoss
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.models.weights import arrays_of, load_all_weights, load_weights
from tests.errors import raises
from tests.unit.engine.tiny import tiny_config
from tests.unit.models.tiny import shake, static_outputs, tiny

HEADS = ("yolo_head.", "one_to_one_head.")


def truth() -> list[paddle.Tensor]:
    box = paddle.to_tensor(
        [[[4.0, 4, 40, 50], [20.0, 30, 60, 62]], [[8.0, 8, 30, 30], [0, 0, 0, 0]]]
    )
    return [box, paddle.to_tensor([[1, 2], [0, 0]]), paddle.to_tensor([[1.0, 1.0], [1.0, 0.0]])]


def loss_of(model: PPYOLOE, **keys: object) -> PPYOLOELoss:
    return PPYOLOELoss.build(PPYOLOELossConfig.model_validate(keys), model, 1)


def gradients(model: PPYOLOE) -> dict[str, np.ndarray]:
    named = model.named_parameters()
    return {key: p.grad.numpy() for key, p in named if p.grad is not None}


def trained_once(model: PPYOLOE, image: paddle.Tensor, step: int = 0, **keys: object):
    output = loss_of(model, static_assigner_epochs=0, **keys)(model(image), *truth(), step)
    whole = (
        output.total if output.separate_loss is None else output.total + output.separate_loss.total
    )
    whole.backward()
    return output


def test_second_head_starts_as_copy_rest_unchanged() -> None:
    plain, both = arrays_of(tiny()), arrays_of(tiny(one_to_one=True))
    assert set(plain) == {key for key in both if not key.startswith(HEADS[1])}
    for key, value in plain.items():
        assert np.array_equal(both[key], value), key
    for key, value in both.items():
        if key.startswith(HEADS[1]):
            assert np.array_equal(value, both[key.replace(*HEADS[::-1])]), key


@pytest.mark.slow
def test_rest_learns_the_same_without_second_head() -> None:
    image = paddle.randn([2, 3, 64, 64])
    plain, model = tiny(), tiny(one_to_one=True)
    for each in (plain, model):
        shake(each)
        state = arrays_of(plain)
        for key, value in each.state_dict().items():
            if key in state:
                value.set_value(state[key])
    alone, output = trained_once(plain, image), trained_once(model, image)
    assert float(alone.total) == float(output.total)
    assert float(alone.normalizer) == float(output.normalizer)
    want, got = gradients(plain), gradients(model)
    for key, value in want.items():
        assert np.array_equal(got[key], value), key
    added = set(got) - set(want)
    assert added and all(key.startswith(HEADS[1]) for key in added)


def test_each_object_has_one_prediction_its_best_aligned() -> None:
    model = tiny(one_to_one=True)
    shake(model)
    with paddle.no_grad():
        model.eval()
        outputs = model(paddle.randn([2, 3, 64, 64]))
        loss = loss_of(model, static_assigner_epochs=0)
        found = loss(outputs, *truth(), 0)
        scores, boxes = (x.numpy() for x in model.decode(outputs))
    best = 0.0
    points = [
        ((x + 0.5) * s, (y + 0.5) * s)
        for s in model.strides for y in range(64 // s) for x in range(64 // s)
    ]  # fmt: skip
    for image, (real, labels) in enumerate(zip(*(t.numpy() for t in truth()[:2]))):
        for (x1, y1, x2, y2), label in zip(real, labels):
            if x2 == 0:
                continue
            metric = []
            for n, (px, py) in enumerate(points):
                a, b, c, d = boxes[image, n]
                shared = max(0.0, min(x2, c) - max(x1, a)) * max(0.0, min(y2, d) - max(y1, b))
                union = (x2 - x1) * (y2 - y1) + (c - a) * (d - b) - shared
                inside = x1 < px < x2 and y1 < py < y2
                overlap = shared / union
                metric.append((scores[image, n, label] * overlap**6 * inside, overlap))
            aligned, overlap = max(metric)
            best += overlap * aligned / (aligned + 1e-9)
    np.testing.assert_allclose(float(found.normalizer), best, rtol=1e-4)  # about the IoU of each


def test_its_loss_is_divided_by_its_own_soft_labels() -> None:
    model = tiny(one_to_one=True)
    shake(model)
    output = trained_once(model, paddle.randn([2, 3, 64, 64]))
    assert output.separate_loss is not None and output.separate_loss.separate_loss is None
    assert 0 < float(output.separate_loss.normalizer) < float(output.normalizer)
    sums = {
        "normalizer": 8.0, "loss": 30.0, "loss_cls": 4.0,
        "separate normalizer": 2.0, "separate loss": 6.0, "separate loss_one_to_one": 6.0,
    }  # fmt: skip
    found = normalised(sums)
    assert found.losses == {"loss": 24 / 8 + 6 / 2, "loss_cls": 0.5, "loss_one_to_one": 3.0}
    assert found.divisor == 8.0
    assert normalised({"normalizer": 0.0, "loss": 3.0}) == ({"loss": 3.0}, 1.0)


def normalised(sums):
    of_step = LossSums()
    of_step.terms = dict.fromkeys(sums)
    return of_step.normalise([*sums.values()])


@pytest.mark.slow
def test_only_second_head_predicts_and_is_deployed(tmp_path: Path) -> None:
    model, image = tiny(one_to_one=True, auxiliary=True), paddle.randn([2, 3, 64, 96])
    shake(model)
    model.eval()
    training = model.decode(model(image))  # gradients are recorded
    with paddle.no_grad():
        quiet = model(image)
        assert quiet.one_class_logits == quiet.aux_class_logits == ()
        assert np.array_equal(quiet.class_logits[0].numpy(), model(image).class_logits[0].numpy())
        one = model.decode(quiet)
    for x, y in zip(training, one):
        np.testing.assert_allclose(x.numpy(), y.numpy(), atol=1e-4)
    before = [x.numpy() for x in one]
    kept = {k: v.shape for k, v in tiny(auxiliary=True).state_dict().items()}
    model.fuse()
    assert model.one_to_one_head is None and set(model.state_dict()) < set(kept) | {
        key for key in model.state_dict() if ".conv.weight" in key or ".conv.bias" in key
    }
    for got, want in zip(static_outputs(model, tmp_path, image), before):
        np.testing.assert_allclose(got, want, atol=1e-2, rtol=1e-4)


def test_plain_weights_start_both_heads_and_say_so(tmp_path: Path) -> None:
    plain = tiny()
    shake(plain)
    np.savez(tmp_path / "plain.npz", **arrays_of(plain))
    model = tiny(one_to_one=True)
    report = load_weights(model, tmp_path / "plain.npz")
    assert not report.fresh and not report.ignored
    assert str(report).count("one_to_one_head") == 1 and "\n" not in str(report)
    state = arrays_of(model)
    for key, value in arrays_of(plain).items():
        assert np.array_equal(state[key], value)
        if key.startswith("yolo_head."):
            assert np.array_equal(state[key.replace(*HEADS)], value)
    with raises("weights_of_other_config"):
        load_all_weights(model, tmp_path / "plain.npz")


def test_own_weights_load_whole_and_into_plain_model(tmp_path: Path) -> None:
    model = tiny(one_to_one=True)
    shake(model)
    np.savez(tmp_path / "both.npz", **arrays_of(model))
    again = tiny(one_to_one=True)
    load_all_weights(again, tmp_path / "both.npz")
    want = arrays_of(model)
    for key, value in arrays_of(again).items():
        assert np.array_equal(value, want[key])
    report = load_weights(tiny(), tmp_path / "both.npz")
    assert report.ignored and all(key.startswith(HEADS[1]) for key in report.ignored)


def test_such_a_model_is_evaluated_without_suppression(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, ["model.one_to_one=true", "nms.keep=50"])
    assert config.suppression == NMSConfig(iou_threshold=None, keep=50)
    assert tiny_config(tmp_path).suppression == NMSConfig()
    assert tiny_config(tmp_path, model="yolov5").suppression == NMSConfig()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.one_to_one=true", "nms.iou_threshold=0.5"], "needs no suppression"),
        (["model.one_to_one=true", "nms.candidates=10"], "needs no suppression"),
        (["model.body=yolov5", "model.levels=P2-P5"], "yolov5 has the levels P3-P5 or P3-P6"),
        (["model.body=yolov5", "model.auxiliary=true"], "set auxiliary: false"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_config(tmp_path, overrides)
