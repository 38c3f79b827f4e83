"""Exported detectors of queries: the same boxes, in whatever order rounding selects the queries."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.config.evaluate import NMSConfig
from ppdist.config.model import RTDETRConfig
from ppdist.config.runtime import RuntimeOptions
from ppdist.export.export import deployment_copy, export_model
from ppdist.export.predictor import EagerPredictor, ExportedPredictor
from ppdist.export.spec import read_spec
from ppdist.export.verify import BOX_TOLERANCE, SCORE_TOLERANCE, decided_batches, raw_differences
from ppdist.models.base import Detector
from ppdist.models.rtdetr import RTDETR
from tests.reference.export_subjects import enliven
from tests.unit.export.tiny import FORMATS, assert_same_boxes, pictures, tiny_spec

NO_NMS = NMSConfig(score_threshold=0.01, iou_threshold=None, keep=20)


def lively(variant: str, size: str, queries: int) -> RTDETR:
    paddle.seed(0)
    config = {"variant": variant, "size": size, "num_classes": 3, "queries": queries}
    model = RTDETR(RTDETRConfig.model_validate(config))
    enliven(model, pictures(4, 128, 128))
    return model


# With 40 queries the smallest of the D-FINE's inputs has fewer cells.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "size", "queries", "free"),
    [("dfine", "n", 40, True), ("rtdetr", "r18", 20, True), ("dfine", "s", 20, False)],
)
def test_exported_queries_are_those_of_eager(
    variant: str, size: str, queries: int, free: bool, tmp_path: Path
) -> None:
    model = lively(variant, size, queries)
    spec = tiny_spec(dynamic_batch=free, dynamic_size=free)
    spec = spec.model_copy(update={"nms": NO_NMS})
    report = export_model(model, tmp_path / "model", spec, FORMATS, nms_in_graph=free)
    assert set(report.agreement) >= set(FORMATS)
    eager = EagerPredictor(deployment_copy(model), NO_NMS)
    shapes = [(1, 64, 96)] + ([(3, 96, 160), (2, 64, 64)] if free else [])
    for backend in FORMATS:
        found = ExportedPredictor(tmp_path / "model", RuntimeOptions(backend=backend))
        assert found.form.nms_in_graph is free
        for shape in shapes:
            images = pictures(*shape)
            assert_same_boxes(found(images), eager(images))
    assert read_spec(tmp_path / "model").nms == NO_NMS


def made_up(predictions: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 60, (2, predictions, 2))
    boxes_BN4 = np.concatenate([corner, corner + rng.uniform(5, 40, corner.shape)], axis=2)
    return rng.uniform(0, 1, (2, predictions, 3)), boxes_BN4


def test_queries_in_another_order_agree_and_another_query_does_not() -> None:
    true = made_up()
    order = np.random.default_rng(1).permutation(true[0].shape[1])
    found = raw_differences((true[0][:, order], true[1][:, order]), true, "it")
    assert (found.score, found.box, found.boxes) == (0, 0, 80)
    other = true[1].copy()
    other[1, 3, 0] -= 2.0
    assert raw_differences((true[0][:, order], other[:, order]), true, "it").box == 2.0
    twice = np.where(np.arange(40) == 7, 6, np.arange(40))  # one query in the place of another
    found = raw_differences((true[0][:, twice], true[1][:, twice]), true, "it")
    assert found.score > SCORE_TOLERANCE and (found.box or 0) > BOX_TOLERANCE


class Balanced(Detector):
    """Selects one of two queries by the mean of the first image, near 100."""

    def __init__(self, strides: tuple[int, ...]) -> None:
        super().__init__(1, strides, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 32)

    def predict(self, images_B3HW: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        chosen = float(images_B3HW[0].astype("float64").mean() > 100)
        batch = images_B3HW.shape[0]
        return paddle.full([batch, 1, 1], 0.5), paddle.full([batch, 1, 4], 10.0 * chosen)


def test_images_whose_queries_rounding_selects_are_left_out() -> None:
    clear, balanced = (np.full((1, 3, 32, 32), mean, np.float32) for mean in (90, 100))
    assert decided_batches(Balanced(()), [balanced, clear]) == [clear]
    assert len(decided_batches(Balanced(()), [balanced])) == 1  # one picture is better than none
    assert len(decided_batches(Balanced((8,)), [balanced, clear])) == 2
