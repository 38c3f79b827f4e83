"""Non-maximum suppression against a plain loop, eager and in a saved graph."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.config.evaluate import NMSConfig
from ppdist.losses.nms import multiclass_nms


def random_predictions(images: int = 2, count: int = 120, classes: int = 3) -> tuple:
    rng = np.random.default_rng(0)
    scores = rng.uniform(0, 1, (images, count, classes)).astype("float32")
    low = rng.uniform(0, 80, (images, count, 2))
    boxes = np.concatenate([low, low + rng.uniform(10, 50, (images, count, 2))], -1)
    return scores, boxes.astype("float32")


def overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    sides = np.minimum(a[2:], b[:, 2:]) - np.maximum(a[:2], b[:, :2])
    inter = sides.clip(0).prod(axis=1)
    return inter / ((a[2:] - a[:2]).prod() + (b[:, 2:] - b[:, :2]).prod(axis=1) - inter)


def nms_of_one_image(scores_NC: np.ndarray, boxes_N4: np.ndarray, nms: NMSConfig) -> np.ndarray:
    rows = []
    if not nms.multi_label or nms.class_agnostic:
        best = np.arange(scores_NC.shape[1]) == scores_NC.argmax(axis=1)[:, None]
        scores_NC = np.where(best, scores_NC, -1)
    groups = (
        [range(scores_NC.shape[1])]
        if nms.class_agnostic
        else [[c] for c in range(scores_NC.shape[1])]
    )
    for labels in groups:
        scores_N = scores_NC[:, labels].max(axis=1)
        order = np.argsort(-scores_N, kind="stable")
        order = order[scores_N[order] > nms.score_threshold][: nms.candidates]
        while len(order):
            best, rest = order[0], order[1:]
            label = labels[scores_NC[best, labels].argmax()]
            rows.append([label, scores_N[best], *boxes_N4[best]])
            if nms.iou_threshold is not None:
                rest = rest[overlap(boxes_N4[best], boxes_N4[rest]) <= nms.iou_threshold]
            order = rest
    best_first = sorted(rows, key=lambda row: -row[1])[: nms.keep]
    if nms.class_agnostic:
        return np.array(best_first, "float32").reshape(-1, 6)
    return np.array(sorted(best_first, key=lambda row: (row[0], -row[1])), "float32").reshape(-1, 6)


def test_rows_equal_a_plain_loop_per_class_and_image() -> None:
    scores, boxes = random_predictions()
    for nms in (
        NMSConfig(),
        NMSConfig(score_threshold=0.3, iou_threshold=0.4, candidates=30, keep=20),
        NMSConfig(score_threshold=0.0, iou_threshold=0.4, multi_label=False),
        NMSConfig(score_threshold=0.6, candidates=30, keep=20, multi_label=False),
        NMSConfig(score_threshold=0.3, iou_threshold=0.4, class_agnostic=True),
        NMSConfig(score_threshold=0.3, candidates=30, keep=20, class_agnostic=True),
    ):
        rows, count = multiclass_nms(paddle.to_tensor(scores), paddle.to_tensor(boxes), nms)
        want = [nms_of_one_image(s, b, nms) for s, b in zip(scores, boxes)]
        assert count.tolist() == [len(w) for w in want]
        np.testing.assert_allclose(rows.numpy(), np.concatenate(want), atol=1e-6)


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("keep", [7, 300, 1000])  # fewer, more than pass, more than there are
def test_without_an_overlap_the_best_stay(keep: int, multi_label: bool) -> None:
    scores, boxes = random_predictions()
    keys = {"score_threshold": 0.35, "keep": keep, "multi_label": multi_label}
    nms = NMSConfig(iou_threshold=None, **keys)
    rows, count = multiclass_nms(paddle.to_tensor(scores), paddle.to_tensor(boxes), nms)
    want = [nms_of_one_image(s, b, nms) for s, b in zip(scores, boxes)]
    assert count.tolist() == [len(w) for w in want] and count.dtype == paddle.int32
    best_first = [w[np.argsort(-w[:, 1], kind="stable")] for w in want]
    np.testing.assert_allclose(rows.numpy(), np.concatenate(best_first), atol=1e-6)


@pytest.mark.parametrize("iou_threshold", [0.5, None])
def test_a_score_at_the_threshold_does_not_pass(iou_threshold: float | None) -> None:
    scores = paddle.to_tensor([[[0.25], [0.5]]])
    boxes = paddle.to_tensor([[[0.0, 0.0, 8.0, 8.0], [20.0, 20.0, 28.0, 28.0]]])
    nms = NMSConfig(score_threshold=0.25, iou_threshold=iou_threshold)
    rows, _ = multiclass_nms(scores, boxes, nms)
    assert rows[:, 1].tolist() == [0.5]


def test_nothing_above_the_threshold_is_an_empty_result() -> None:
    scores, boxes = random_predictions()
    rows, count = multiclass_nms(
        paddle.to_tensor(scores * 0.001), paddle.to_tensor(boxes), NMSConfig()
    )
    assert rows.shape == [0, 6] and count.tolist() == [0, 0]


@pytest.mark.parametrize("overlap", [0.7, None])
@pytest.mark.parametrize("multi_label", [True, False])
def test_a_saved_graph_suppresses_like_eager(
    tmp_path: Path, multi_label: bool, overlap: float | None
) -> None:
    nms = NMSConfig(score_threshold=0.3, multi_label=multi_label, iou_threshold=overlap)

    class Suppress(paddle.nn.Layer):
        @paddle.jit.not_to_static
        def forward(self, scores: paddle.Tensor, boxes: paddle.Tensor) -> tuple:
            return multiclass_nms(scores, boxes, nms)

    spec = [
        paddle.static.InputSpec([None, None, 3], "float32", "scores"),
        paddle.static.InputSpec([None, None, 4], "float32", "boxes"),
    ]
    static = paddle.jit.to_static(Suppress(), input_spec=spec, full_graph=True, backend=None)
    paddle.jit.save(static, str(tmp_path / "nms"))
    loaded = paddle.jit.load(str(tmp_path / "nms"))
    for images in (1, 3):
        tensors = [paddle.to_tensor(x) for x in random_predictions(images)]
        rows, count = multiclass_nms(*tensors, nms)
        got_rows, got_count = loaded(*tensors)
        assert got_count.tolist() == count.tolist()
        assert np.array_equal(got_rows.numpy(), rows.numpy())
