"""YOLOv5: sizes, keys, first outputs, anchors, decoding, oneDNN, static graph, export."""

import importlib
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import paddle
import pytest
from pydantic import ValidationError

from ppdist.common.errors import ConfigError
from ppdist.config.model import YOLOv5Config
from ppdist.config.parse import parse_config
from ppdist.cpu import onednn
from ppdist.cpu.switch import self_check, use_onednn
from ppdist.distributed.paddle_api import epsilon, momentum
from ppdist.models.build import build_model
from ppdist.models.layers import ConvBNLayer
from ppdist.models.outputs import YOLOv5Outputs
from ppdist.models.yolov5 import P5_ANCHORS, YOLOv5
from tests.reference.parity.reference import read_formulas, set_weights

PARAMETERS = {"n": 1_872_157, "s": 7_235_389, "m": 21_190_557, "n6": 3_246_940}
ROW_ANCHORS = (((8, 16), (16, 8), (32, 32)), ((64, 32), (32, 64), (64, 64)),
               ((128, 64), (64, 128), (256, 256)))  # fmt: skip
SHARED_SIZES = ["n", "s", "m", "n6", "s6"]
SLOW = [pytest.param(size, marks=pytest.mark.slow) for size in "lx"]


def tiny(size: str = "n", num_classes: int = 3, **changes: object) -> YOLOv5:
    paddle.seed(0)
    config = {"size": size, "width_multiple": 0.125, "num_classes": num_classes, **changes}
    return build_model(YOLOv5Config.model_validate(config))


@cache
def census(size: str) -> tuple[int, list[tuple[str, list[int]]]]:
    """Parameter count of the published size, and its entries by the original's keys."""
    model = build_model(YOLOv5Config.model_validate({"size": size}))
    official = model.official_keys()
    entries = [(official[key], list(value.shape)) for key, value in model.state_dict().items()]
    return model.parameter_count(), entries


@pytest.mark.parametrize(
    "size", ["n", "n6", *(pytest.param(size, marks=pytest.mark.slow) for size in "sm")]
)
def test_parameter_counts_are_the_published_ones(size: str) -> None:
    assert census(size)[0] == PARAMETERS[size]


@pytest.mark.parametrize("size", [*SHARED_SIZES, *SLOW])
def test_keys_shapes_and_their_order_are_the_original_s(size: str, shared_dir: Path) -> None:
    listed = json.loads((shared_dir / "parity" / "yolov5_keys.json").read_text())[f"yolov5{size}"]
    entries = [item for item in listed.items() if "num_batches_tracked" not in item[0]]
    assert census(size)[1] == entries


@pytest.mark.parametrize("size", ["n", "n6", pytest.param("m", marks=pytest.mark.slow)])
def test_decoded_predictions_are_the_original_s(size: str, shared_dir: Path) -> None:
    formulas = read_formulas(shared_dir / "parity")
    model = build_model(YOLOv5Config.model_validate({"size": size}))
    set_weights(model, formulas)
    model.eval()
    with paddle.no_grad():
        image = paddle.to_tensor(formulas.parity_image("unit", *formulas.EVAL_CASE))
        scores_BNC, boxes_BN4 = model.decode(model(image))
    with np.load(shared_dir / "parity" / f"yolov5{size}.npz") as archive:
        where, want = archive["anchor_idx"], archive["pred_xywh_obj_cls"]
        assert scores_BNC.shape == [1, int(archive["num_anchors"]), 80]
    x1, y1, x2, y2 = boxes_BN4.numpy()[0, where].T
    xywh = np.stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1], axis=1)
    np.testing.assert_allclose(xywh, want[:, :4], rtol=0, atol=1e-2)
    scores = want[:, 4:5] * want[:, 5:]
    np.testing.assert_allclose(scores_BNC.numpy()[0, where], scores, rtol=0, atol=2e-5)


def test_norms_have_0_97_momentum_and_0_001_epsilon() -> None:
    blocks = [layer for layer in tiny().sublayers() if isinstance(layer, ConvBNLayer)]
    assert len(blocks) == 57
    assert {(momentum(block.bn), epsilon(block.bn)) for block in blocks} == {(0.97, 1e-3)}


def test_conv_init_uniform_within_rsqrt_of_fan_in() -> None:
    model = build_model(YOLOv5Config(size="n"))
    weight = model.backbone.down5.conv.weight.numpy()
    bound = (weight.shape[1] * 9) ** -0.5
    assert 0.999 * bound < np.abs(weight).max() <= bound
    assert abs(weight.std() / (bound / 3**0.5) - 1) < 0.01


def test_initial_biases_expect_eight_objects_a_level() -> None:
    model = tiny(num_classes=20)
    for level, stride in ((3, 8), (4, 16), (5, 32)):
        bias = getattr(model.head, f"predict{level}").bias.numpy().reshape(3, 25)
        np.testing.assert_allclose(np.exp(bias[:, 4]) * (640 / stride) ** 2, 8, rtol=1e-5)
        np.testing.assert_allclose(np.exp(bias[:, 5:]), 0.6 / 19.00001, rtol=1e-5)
        assert not bias[:, :4].any()


def test_anchors_are_kept_in_cells_and_told_in_pixels() -> None:
    model = tiny()
    np.testing.assert_array_equal(model.anchors_LA2, np.array(P5_ANCHORS, "float32"))
    cells = model.state_dict()["head.anchors"].numpy()
    np.testing.assert_allclose(cells[2, 0], [116 / 32, 90 / 32])
    assert tiny(anchors=ROW_ANCHORS).anchors_LA2.tolist() == np.array(ROW_ANCHORS).tolist()


def test_new_anchors_reach_decoding_and_held_buffer() -> None:
    model = tiny()
    held, outputs = model.head.anchors, model(paddle.rand([1, 3, 64, 64]))
    before = model.decode(outputs)[1]
    model.set_anchors(2 * model.anchors_LA2)
    after = model.decode(outputs)[1]
    assert held is model.head.anchors
    size_before, size_after = (x[:, :, 2:] - x[:, :, :2] for x in (before, after))
    np.testing.assert_allclose(size_after.numpy(), 2 * size_before.numpy(), rtol=1e-4)
    copied = tiny()
    copied.set_state_dict(model.state_dict())
    np.testing.assert_array_equal(copied.anchors_LA2, model.anchors_LA2)


def test_anchors_of_other_level_count_name_line(tmp_path: Path) -> None:
    file = tmp_path / "model.yml"
    file.write_text(f"size: n6\nanchors: {json.dumps(ROW_ANCHORS)}\n")
    with pytest.raises(ConfigError) as error:
        parse_config(file, [], YOLOv5Config)
    assert f"{file}:2:10: anchors: " in str(error.value)
    assert "size n6 has 4" in str(error.value)


def test_zero_width_anchor_and_unknown_size_refused() -> None:
    flat = (((0, 16), *ROW_ANCHORS[0][1:]), *ROW_ANCHORS[1:])
    with pytest.raises(ValidationError, match="greater than 0"):
        YOLOv5Config.model_validate({"anchors": flat})
    with pytest.raises(ValidationError, match="'n6'"):
        YOLOv5Config.model_validate({"size": "n5"})


def test_decoding_is_the_published_formula_box_by_box() -> None:
    model = tiny("n", num_classes=2, anchors=ROW_ANCHORS)
    rng = np.random.default_rng(0)
    maps = [rng.standard_normal((2, 21, h, w)).astype("float32") for h, w in
            ((4, 6), (2, 3), (1, 2))]  # fmt: skip
    got_scores, got_boxes = model.decode(YOLOv5Outputs(tuple(paddle.to_tensor(m) for m in maps)))
    scores, boxes = [], []
    for logits, stride, anchors in zip(maps, (8, 16, 32), ROW_ANCHORS):
        s = 1 / (1 + np.exp(-logits[1].astype("float64")))
        for anchor, (anchor_w, anchor_h) in enumerate(anchors):
            for row, column in np.ndindex(s.shape[1:]):
                tx, ty, tw, th, objectness, *classes = s[7 * anchor : 7 * anchor + 7, row, column]
                x, y = (2 * tx - 0.5 + column) * stride, (2 * ty - 0.5 + row) * stride
                w, h = (2 * tw) ** 2 * anchor_w, (2 * th) ** 2 * anchor_h
                boxes.append([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
                scores.append([objectness * c for c in classes])
    np.testing.assert_allclose(got_boxes.numpy()[1], boxes, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(got_scores.numpy()[1], scores, rtol=1e-5)


@pytest.mark.parametrize(("size", "shapes"), [
    ("n", [(24, 16), (12, 8), (6, 4)]),
    ("n6", [(24, 16), (12, 8), (6, 4), (3, 2)]),
])  # fmt: skip
def test_training_and_evaluation_give_one_map_per_level(
    size: str, shapes: list[tuple[int, int]]
) -> None:
    model = tiny(size)
    assert model.size_multiple == max(model.strides) == 192 // shapes[-1][0]
    for mode in (model.train, model.eval):
        mode()
        outputs = model(paddle.rand([2, 3, 192, 128]))
        assert [x.shape for x in outputs.logits] == [[2, 24, h, w] for h, w in shapes]


def test_pixels_are_divided_by_255() -> None:
    image = paddle.to_tensor(np.arange(192, dtype="uint8").reshape(1, 3, 8, 8))
    np.testing.assert_allclose(
        tiny().normalize(image).numpy(), image.numpy() / np.float32(255), atol=1e-7
    )


def test_lower_precision_cast_leaves_anchors_exact() -> None:
    model = tiny()
    importlib.import_module("paddle.amp.auto_cast")
    # What paddle.amp.decorate(level="O2") does on a GPU; on a CPU it does nothing.
    sys.modules["paddle.amp.auto_cast"].amp_initialize([model], "bfloat16", None)
    assert model.head.predict3.weight.dtype == paddle.bfloat16
    assert model.head.anchors.dtype == paddle.float32


def test_convolutions_on_onednn_compute_the_same() -> None:
    try:
        onednn.library()
    except (OSError, onednn.OneDNNError) as error:
        pytest.skip(f"no oneDNN in this Paddle: {error}")
    model = build_model(YOLOv5Config(size="n"))
    assert self_check(model) is None
    assert use_onednn(model) == 60
