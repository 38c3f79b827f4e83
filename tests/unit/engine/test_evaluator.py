import json
import logging
from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from ppdist.config.distributed import DistributedConfig
from ppdist.config.evaluate import NMSConfig
from ppdist.data.types import Batch, DetectionSet, ImageRecord
from ppdist.distributed import comm
from ppdist.engine.evaluator import Evaluator, detect, draw_batch, in_eval_mode
from ppdist.engine.train_step import Clock
from ppdist.metrics.coco import METRICS, evaluate_boxes
from ppdist.models.base import Detector
from tests.distributed import run_on_ranks

IMAGES, CLASSES = 5, 2
HEIGHT, WIDTH = 32, 64  # input; originals are 320 x 256 (y, x), so the scales are 0.1 and 0.25
SCALE_YX = (0.1, 0.25)


def five_images() -> DetectionSet:
    """Image i has i objects; the first has none."""
    records = []
    for index in range(IMAGES):
        corner = np.array([[10.0 + 40 * k, 20 + 60 * k] for k in range(index)]).reshape(-1, 2)
        boxes_M4 = np.concatenate([corner, corner + np.array([32, 50])], axis=1).astype(np.float32)
        records.append(
            ImageRecord(
                path=f"/images/{index}.jpg",
                image_id=100 + index,
                width=256,
                height=320,
                boxes_M4=boxes_M4,
                labels_M=np.arange(index) % CLASSES,
                crowd_M=np.zeros(index, bool),
                area_M=np.full(index, 1600, np.float32),
            )
        )
    return DetectionSet(
        records=tuple(records), class_names=("cat", "dog"), category_ids=(1, 2), source="test"
    )


class Loader:
    """Rank r's images r, r+W, ... in batches of 2, the last filled up with padding.

    Every pixel of image i is i, which is how the oracle below knows what it looks at.
    """

    def __init__(self, dataset: DetectionSet, indices: list[int]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.indices), 2):
            index_B = [*self.indices[start : start + 2], -1][:2]
            boxes_BM4 = np.zeros((2, IMAGES, 4), np.float32)
            labels_BM, mask_BM = np.zeros((2, IMAGES), np.int64), np.zeros((2, IMAGES), np.float32)
            for row, index in enumerate(index_B):
                record = self.dataset.records[index]
                count = len(record.labels_M) if index >= 0 else 0
                boxes_BM4[row, :count] = record.boxes_M4[:count] * np.array(SCALE_YX[::-1] * 2)
                labels_BM[row, :count] = record.labels_M[:count]
                mask_BM[row, :count] = 1
            pixels = np.array(index_B).clip(0).astype(np.uint8)
            images = np.broadcast_to(pixels[:, None, None, None], (2, 3, HEIGHT, WIDTH))
            yield Batch(
                images_B3HW=paddle.to_tensor(images.copy()),
                boxes_BM4=paddle.to_tensor(boxes_BM4),
                labels_BM=paddle.to_tensor(labels_BM),
                mask_BM=paddle.to_tensor(mask_BM),
                image_index_B=paddle.to_tensor(np.array(index_B, np.int64)),
                scale_B2=paddle.to_tensor(np.array([SCALE_YX] * 2, np.float32)),
                offset_B2=paddle.zeros([2, 2]),
            )


class Oracle(Detector):
    """Finds what is there, surest first, and a wrong box at the end; counts its forward passes."""

    def __init__(self, dataset: DetectionSet) -> None:
        super().__init__(CLASSES, (32,), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        self.dataset = dataset
        self.norm = paddle.nn.BatchNorm2D(3)
        self.frozen = paddle.nn.BatchNorm2D(3)
        self.frozen.eval()
        self.modes: list[bool] = []

    def forward(self, images_B3HW):
        self.modes.append(self.norm.training)
        self.norm(images_B3HW)
        return images_B3HW.mean(axis=[1, 2, 3])

    def decode(self, outputs):
        scores_BNC = np.zeros((len(outputs), IMAGES, CLASSES), np.float32)
        boxes_BN4 = np.zeros((len(outputs), IMAGES, 4), np.float32)
        for row, index in enumerate(outputs.numpy().round().astype(int)):
            record = self.dataset.records[index]
            for k, (box, label) in enumerate(zip(record.boxes_M4, record.labels_M)):
                scores_BNC[row, k, label] = 0.9 - 0.1 * k - 0.01 * index
                boxes_BN4[row, k] = box * np.array(SCALE_YX[::-1] * 2)
            scores_BNC[row, IMAGES - 1, 0] = 0.2  # hangs over the right and lower edge
            boxes_BN4[row, IMAGES - 1] = [50, 28, 90, 50]
        return paddle.to_tensor(scores_BNC), paddle.to_tensor(boxes_BN4)


def evaluator(indices=None, **options) -> Evaluator:
    dataset = five_images()
    indices = list(range(IMAGES)) if indices is None else indices
    return Evaluator(dataset, Loader(dataset, indices), NMSConfig(), **options)


def on_ranks(argument):
    comm.init("cpu", DistributedConfig())
    share = list(range(IMAGES))[comm.rank() :: comm.world_size()]
    if argument == "twice":
        share = [0, *share] if comm.rank() else share
    under_test = evaluator(share)
    detections = under_test.predict(Oracle(five_images()))
    result = under_test.evaluate(Oracle(five_images()))
    return {"result": result, "detections": detections.tolist()}


def test_boxes_come_back_in_original_pixels_and_inside_the_image():
    detections_R7 = evaluator().predict(Oracle(five_images()))
    assert detections_R7.dtype == np.float32
    assert (np.diff(detections_R7[:, 0]) >= 0).all()
    third = detections_R7[detections_R7[:, 0] == 2]
    by_score = third[np.argsort(-third[:, 2])]
    np.testing.assert_allclose(by_score[:2, 3:], five_images().records[2].boxes_M4, atol=1e-3)
    assert by_score[:2, 1].tolist() == [0, 1]
    np.testing.assert_allclose(by_score[2, 3:], [200, 280, 256, 320], atol=1e-3)


def test_the_metrics_are_those_of_the_detections():
    under_test = evaluator()
    result = under_test.evaluate(Oracle(five_images()))
    detections_R7 = under_test.predict(Oracle(five_images()))
    expected = evaluate_boxes(five_images(), detections_R7)
    assert {key: result[key] for key in expected} == expected
    assert result["mAP50"] == pytest.approx(1.0) and result["eval_seconds"] > 0
    assert json.loads(json.dumps(result)) == result


def test_fitness_counts_map_nine_times_as_much_as_map50(monkeypatch):
    found = {"mAP": 0.4, "mAP50": 0.8}
    monkeypatch.setattr("ppdist.engine.evaluator.evaluate_boxes", lambda *_: dict(found))
    result = evaluator().evaluate(Oracle(five_images()))
    assert result["fitness"] == pytest.approx(0.9 * 0.4 + 0.1 * 0.8)


def test_two_ranks_with_uneven_shares_get_what_one_rank_gets():
    alone = evaluator().evaluate(Oracle(five_images()))
    detections = evaluator().predict(Oracle(five_images())).tolist()
    first, second = run_on_ranks(2, "tests.unit.engine.test_evaluator:on_ranks")
    assert first == second
    assert first["detections"] == detections
    names = [*METRICS, "AP/cat", "AP/dog"]
    assert [first["result"][name] for name in names] == [alone[name] for name in names]


def test_an_image_seen_by_two_ranks_is_an_error_on_both():
    with pytest.raises(AssertionError) as error:
        run_on_ranks(2, "tests.unit.engine.test_evaluator:on_ranks", "twice")
    assert str(error.value).count("first /images/0.jpg (2 times)") == 2


def test_an_image_left_out_is_an_error_that_names_it():
    message = r"each of the 5 images once; 1 were not, first /images/4.jpg \(0 times\)"
    with pytest.raises(RuntimeError, match=message):
        evaluator([0, 1, 2, 3]).evaluate(Oracle(five_images()))


def test_the_model_runs_in_eval_mode_and_every_layer_gets_its_mode_back():
    model = Oracle(five_images())
    model.train()
    model.frozen.eval()
    before = model.norm._mean.numpy().copy()
    evaluator().evaluate(model)
    assert model.modes == [False] * 3
    assert model.training and model.norm.training and not model.frozen.training
    assert (model.norm._mean.numpy() == before).all()


def test_modes_come_back_after_an_exception_too():
    model = Oracle(five_images())
    model.train()
    with pytest.raises(ZeroDivisionError), in_eval_mode(model):
        assert not model.norm.training
        raise ZeroDivisionError
    assert model.norm.training


def test_a_model_that_finds_nothing_scores_zero():
    class Blind(Oracle):
        def decode(self, outputs):
            scores_BNC, boxes_BN4 = super().decode(outputs)
            return scores_BNC * 0, boxes_BN4

    under_test = evaluator()
    assert under_test.predict(Blind(five_images())).shape == (0, 7)
    assert under_test.evaluate(Blind(five_images()))["mAP"] == 0.0


def test_an_untrained_model_gives_a_bounded_number_of_boxes():
    class Untrained(Oracle):
        def decode(self, outputs):
            rng = np.random.default_rng(0)
            corner = rng.uniform(0, 50, (len(outputs), 2000, 2))
            boxes_BN4 = np.concatenate([corner, corner + 3], axis=2).astype(np.float32)
            scores_BNC = rng.random((len(outputs), 2000, CLASSES)).astype(np.float32)
            return paddle.to_tensor(scores_BNC), paddle.to_tensor(boxes_BN4)

    detections_R7 = evaluator().predict(Untrained(five_images()))
    counts = np.bincount(detections_R7[:, 0].astype(int))
    assert len(counts) == IMAGES and counts.max() <= NMSConfig().keep


def test_pictures_show_truth_beside_predictions_and_are_limited():
    under_test = evaluator(max_pictures=3)
    under_test.evaluate(Oracle(five_images()))
    assert [picture.shape for picture in under_test.pictures] == [(HEIGHT, 2 * WIDTH + 4, 3)] * 3
    assert under_test.pictures[1].dtype == np.uint8
    under_test.evaluate(Oracle(five_images()))
    assert len(under_test.pictures) == 3, "drawn anew at each evaluation"
    assert evaluator().pictures == []


def test_padding_is_not_drawn():
    dataset = five_images()
    (batch,) = Loader(dataset, [3])
    _, rows_R6, count_B = detect(Oracle(dataset), batch.images_B3HW, NMSConfig(), Clock())
    assert len(draw_batch(batch, rows_R6, count_B, dataset.class_names, 10)) == 1


def test_a_long_evaluation_reports_how_far_it_is(monkeypatch, caplog):
    monkeypatch.setattr("ppdist.engine.evaluator._REPORT_SECONDS", -1.0)
    with caplog.at_level(logging.INFO, logger="ppdist"):
        evaluator().predict(Oracle(five_images()))
    assert "evaluated 2/5 images, ETA 0s" in caplog.text
