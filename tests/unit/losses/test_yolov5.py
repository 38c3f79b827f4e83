"""The YOLOv5 loss against numpy and the original's values, and its laws: batches, padding, sync."""

import math

import numpy as np
import paddle
import pytest

from ppdist.config.loss import YOLOv5LossConfig
from ppdist.config.model import YOLOv5Config
from ppdist.losses.base import LossOutput
from ppdist.losses.yolov5 import YOLOv5Loss
from ppdist.models.outputs import YOLOv5Outputs
from ppdist.models.yolov5 import YOLOv5
from tests.unit.losses.cases import CLASSES, numbers, yolov5_loss, yolov5_outputs
from tests.unit.losses.cases import YOLO_SIZE as SIZE


def truth(real: tuple[int, ...] = (6, 2, 0), boxes: int = 6) -> list[np.ndarray]:
    """Padded boxes, labels and mask; boxes 3 and 5 of the first image meet 1 and 2 in cells."""
    rng = np.random.default_rng(1)
    wh = rng.uniform(6, 60, (len(real), boxes, 2))
    low = rng.uniform(0, np.array(SIZE[::-1]) - wh)
    mask = (np.arange(boxes) < np.array(real)[:, None]).astype("float32")
    box = np.concatenate([low, low + wh], -1)
    if boxes == 6:
        box[0, 3] = box[0, 1] + 0.5
        box[0, 5] = box[0, 2] + [-6, 1, -6, 1]
    labels = rng.integers(0, CLASSES, mask.shape) * mask
    return [(box * mask[..., None]).astype("float32"), labels.astype("int64"), mask]


def scored(
    outputs: YOLOv5Outputs, arrays: list[np.ndarray], label_smoothing: float = 0.0
) -> LossOutput:
    return yolov5_loss(label_smoothing)(outputs, *[paddle.to_tensor(a) for a in arrays], 0)


def test_smoothed_labels_change_the_class_part_alone_and_evenly() -> None:
    found = [numbers(scored(yolov5_outputs(), truth(), share)) for share in (0.0, 0.1, 0.2)]
    for name in ("loss_box", "loss_obj"):
        assert len({parts[name] for parts in found}) == 1
    class_parts = [parts["loss_cls"] for parts in found]
    assert np.diff(class_parts) == pytest.approx([class_parts[1] - class_parts[0]] * 2, rel=1e-4)
    assert class_parts[0] != class_parts[1]


@pytest.mark.parametrize(
    "box, cells",
    [
        ([10.0, 10.0, 24.0, 24.0], {(2, 2), (2, 1), (1, 2)}),  # centre (17, 17): upper left
        ([8.0, 8.0, 38.0, 35.0], {(2, 2), (2, 3), (3, 2)}),  # centre (23, 21.5): lower right
        ([10.0, 10.0, 30.0, 30.0], {(2, 2)}),  # centre in the very middle of cell (2, 2)
        ([0.0, 0.0, 12.0, 12.0], {(0, 0), (0, 1), (1, 0)}),  # centre (6, 6)
        ([0.0, 0.0, 7.0, 7.0], {(0, 0)}),  # centre (3.5, 3.5): neighbours outside the image
        ([85.0, 54.0, 96.0, 64.0], {(7, 11), (6, 11), (7, 10)}),  # centre (90.5, 59)
    ],
)
def test_box_assigned_to_cell_and_nearer_neighbours(
    box: list[float], cells: set[tuple[int, int]]
) -> None:
    arrays = [np.float32([[box]]), np.int64([[0]]), np.float32([[1]])]
    match = yolov5_loss().matches(*[paddle.to_tensor(a) for a in arrays], SIZE)
    taken = match.is_positive_LBAS.numpy()[0, 0].any(axis=0)
    rows, columns = np.divmod(match.cell_LBS.numpy()[0, 0][taken], SIZE[1] // 8)
    assert sorted(zip(rows.tolist(), columns.tolist())) == sorted(cells)  # each once


@pytest.mark.parametrize(("side", "fits"), [(31.9, True), (32.0, False), (33.0, False)])
def test_an_anchor_does_not_fit_from_the_threshold_on(side: float, fits: bool) -> None:
    box = [[40 - side / 2, 28.0, 40 + side / 2, 36.0]]  # 8 pixels high
    loss = yolov5_loss()
    loss.anchors_LA2 = paddle.ones([3, 1, 2])  # 8 x 8 pixels on the first level
    targets = paddle.to_tensor([box], "float32"), paddle.zeros([1, 1], "int64"), paddle.ones([1, 1])
    assert bool(loss.local_normalizers(*targets, SIZE)[1] > 0) == fits


def test_slots_are_not_taken_for_another_mask() -> None:
    boxes, labels = paddle.to_tensor([[[8.0, 8.0, 24.0, 24.0]]]), paddle.zeros([1, 1], "int64")
    loss = yolov5_loss()
    loss.local_normalizers(boxes, labels, paddle.zeros([1, 1]), SIZE)
    assert loss.matches(boxes, labels, paddle.ones([1, 1]), SIZE).is_positive_LBAS.any()


def test_gains_follow_image_size_classes_and_levels() -> None:
    settings = YOLOv5Config(
        size="n6", depth_multiple=0.1, width_multiple=0.05, num_classes=20, image_size=(320, 1280)
    )
    model = YOLOv5(settings)
    loss = YOLOv5Loss.build(YOLOv5LossConfig(), model, steps_per_epoch=1)
    assert loss.gains == pytest.approx((0.05 * 0.75, 4 * 0.75, 0.5 * 0.25 * 0.75))
    outputs = YOLOv5Outputs(tuple(paddle.zeros([1, 75, 64 // s, 128 // s]) for s in model.strides))
    tensors = [paddle.to_tensor(a) for a in truth((2,), 2)]
    result = loss(outputs, *tensors, 0)
    matched = int((loss.local_normalizers(*tensors, (64, 128))[1:] > 0).sum())
    assert matched >= 2  # levels with an anchor for one of the boxes
    # Nothing but zeros: every objectness costs log 2, whatever it should be; every class too.
    want = np.array([4 * (4 + 1 + 0.25 + 0.06), 0.5 * 0.25 * matched]) * 0.75 * math.log(2)
    got = [float(result.parts[name]) for name in ("loss_obj", "loss_cls")]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_anchors_of_weights_loaded_later_count() -> None:
    model = YOLOv5(YOLOv5Config(size="n", depth_multiple=0.1, width_multiple=0.05))
    loss = YOLOv5Loss.build(YOLOv5LossConfig(), model, steps_per_epoch=1)
    tensors = [paddle.to_tensor(a) for a in truth()]
    before = loss.local_normalizers(*tensors, SIZE)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    model.set_state_dict({**state, "head.anchors": np.full([3, 3, 2], 1e-3, "float32")})
    after = loss.local_normalizers(*tensors, SIZE)
    assert float(before[1:].sum()) > 0 and after.tolist() == [3, 0, 0, 0]
