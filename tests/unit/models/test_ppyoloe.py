"""PP-YOLOE: sizes, first outputs, normalisation, decoding, re-parameterisation, static graph."""

import numpy as np
import paddle
import pytest

from ppdist.common.errors import UserError
from ppdist.config.model import PPYOLOEConfig
from ppdist.models.build import build_model
from ppdist.models.outputs import anchor_points, decode_boxes
from tests.unit.models.tiny import shake, tiny

DEPLOY = {"s": 7_926_277, "m": 23_427_509, "l": 52_198_941, "x": 98_424_061}
TRAIN = {"s": (8_084_605, 8_084_611), "m": (24_134_909, 24_134_921),
         "l": (54_078_573, 54_078_591), "x": (102_331_501, 102_331_525)}  # fmt: skip
SLOW = [pytest.param(size, marks=pytest.mark.slow) for size in "lx"]


@pytest.mark.parametrize("size", ["s", pytest.param("m", marks=pytest.mark.slow), *SLOW])
def test_parameter_counts_are_the_published_ones(size: str) -> None:
    for variant, trained in zip(("crn", "plus"), TRAIN[size]):
        config = {"variant": variant, "size": size}
        model = build_model(PPYOLOEConfig.model_validate(config))
        assert model.parameter_count() == trained
        model.fuse()
        assert model.parameter_count() == DEPLOY[size]


@pytest.mark.parametrize("variant", ["crn", "plus"])
def test_fusing_keeps_the_outputs_of_every_level(variant: str) -> None:
    model = tiny(variant=variant)
    shake(model)
    model.eval()
    image = paddle.randn([2, 3, 96, 64])
    before, points = model(image), model.decode(model(image))
    model.fuse()
    after = model(image)
    for level_before, level_after in zip(sum(before, ()), sum(after, ())):
        np.testing.assert_allclose(level_after.numpy(), level_before.numpy(), atol=1e-4)
    for x, y in zip(points, model.decode(after)):
        np.testing.assert_allclose(y.numpy(), x.numpy(), atol=1e-2)


def test_untrained_head_gives_one_percent_scores() -> None:
    model = tiny(variant="plus")
    scores, boxes = model.decode(model(paddle.randn([1, 3, 64, 96])))
    assert scores.shape == [1, 126, 3] and boxes.shape == [1, 126, 4]
    np.testing.assert_allclose(scores.numpy(), 0.01, rtol=1e-5)
    first, last = boxes.numpy()[0, 0], boxes.numpy()[0, -1]
    np.testing.assert_allclose(first, [16 - 256, 16 - 256, 16 + 256, 16 + 256], atol=1e-3)
    np.testing.assert_allclose(last, [92 - 64, 60 - 64, 92 + 64, 60 + 64], atol=1e-3)


def test_initial_convs_he_normal_and_attention_faint() -> None:
    paddle.seed(0)
    model = build_model(PPYOLOEConfig(size="s"))
    weight = model.backbone.stages[3].conv_down.conv.weight
    expected = (2 / (weight.shape[1] * 9)) ** 0.5
    assert abs(float(weight.std()) / expected - 1) < 0.01
    assert abs(float(model.yolo_head.stem_cls[0].fc.weight.std()) / 0.001 - 1) < 0.02
    assert model.yolo_head.proj_conv.weight.stop_gradient


def test_plus_divides_by_255_first_uses_imagenet() -> None:
    image = paddle.to_tensor(np.arange(256, dtype="uint8").reshape(1, 1, 16, 16).repeat(3, axis=1))
    plain = image.numpy().astype("float32")
    np.testing.assert_allclose(
        tiny(variant="plus").normalize(image).numpy(), plain / 255, atol=1e-6
    )
    mean = np.array([0.485, 0.456, 0.406], "float32").reshape(1, 3, 1, 1)
    std = np.array([0.229, 0.224, 0.225], "float32").reshape(1, 3, 1, 1)
    got = tiny(variant="crn").normalize(image).numpy()
    np.testing.assert_allclose(got, (plain / 255 - mean) / std, atol=1e-5)


def test_train_and_eval_outputs_alike_at_any_size() -> None:
    model = tiny(variant="plus")
    for height, width in ((64, 64), (32, 96)):
        image = paddle.randn([2, 3, height, width])
        model.train()
        trained = model(image)
        model.eval()
        evaluated = model(image)
        assert [x.shape for x in sum(trained, ())] == [x.shape for x in sum(evaluated, ())]
        assert trained.class_logits[2].shape == [2, 3, height // 8, width // 8]


def test_anchor_points_are_cell_centres_row_by_row() -> None:
    maps = (paddle.zeros([1, 1, 2, 3]), paddle.zeros([1, 1, 4, 6]))
    points, stride = anchor_points(maps, (32, 16))
    assert points.shape == [30, 2]
    assert points.numpy()[:4].tolist() == [[16, 16], [48, 16], [80, 16], [16, 48]]
    assert points.numpy()[6].tolist() == [8, 8]
    assert stride.numpy()[[0, 5, 6, 29], 0].tolist() == [32, 32, 16, 16]


def test_decoding_measures_sides_outwards_in_strides() -> None:
    sides = np.full((1, 1, 4, 17), -50.0, "float32")
    for side, length in enumerate((1, 2, 3, 16)):
        sides[0, 0, side, length] = 50
    boxes = decode_boxes(
        paddle.to_tensor(sides), paddle.to_tensor([[100.0, 60.0]]), paddle.to_tensor([[8.0]])
    )
    np.testing.assert_allclose(boxes.numpy()[0, 0], [92, 44, 124, 188], atol=1e-4)


def test_a_config_of_no_known_size_is_refused() -> None:
    with pytest.raises((UserError, ValueError)):
        PPYOLOEConfig.model_validate({"size": "xxl"})
