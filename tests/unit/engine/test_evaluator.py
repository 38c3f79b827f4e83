import json
import logging
from dataclasses import replace

import numpy as np
import paddle
import pytest

from ppdist.config.evaluate import NMSConfig
from ppdist.distributed.paddle_api import running_statistics
from ppdist.engine.evaluator import Evaluator, detect, in_eval_mode
from ppdist.metrics.analysis import analyse
from ppdist.metrics.coco import evaluate_boxes
from ppdist.metrics.scored import left_out_line
from ppdist.viz.run_pictures import EvaluationPictures, draw_detections
from tests.unit.engine.oracle import (
    CLASSES,
    HEIGHT,
    IMAGES,
    WIDTH,
    ZOOM,
    Loader,
    Oracle,
    damaged_evaluator,
    evaluator,
    five_images,
)


def test_boxes_are_original_pixels_within_image():
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


def test_an_image_left_out_is_an_error_that_names_it():
    message = r"each of the 5 images once; 1 were not, first /images/4.jpg \(0 times\)"
    with pytest.raises(RuntimeError, match=message):
        evaluator([0, 1, 2, 3]).evaluate(Oracle(five_images()))


def test_an_image_that_cannot_be_read_is_left_out_of_the_score(caplog):
    under_test = damaged_evaluator()
    with caplog.at_level(logging.WARNING, "ppdist"):
        metrics = under_test.evaluate(Oracle(five_images()))
    (record,) = caplog.records
    content = analyse(under_test.scored, under_test.results, step=1)
    assert content["images"] == 4 and len(content["left_out"]) == 1
    assert left_out_line(content) == record.getMessage()
    rest = [0, 1, 3, 4]
    rows_R7 = evaluator().predict(Oracle(five_images()))
    rows_R7 = rows_R7[rows_R7[:, 0] != 2]
    rows_R7[:, 0] = [rest.index(int(at)) for at in rows_R7[:, 0]]
    others = replace(five_images(), records=[five_images().records[at] for at in rest])
    expected = evaluate_boxes(others, rows_R7)
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["left_out_images"] == 1


def test_boxes_that_are_given_twice_are_counted_beside_the_score():
    dataset = replace(five_images(), duplicates={1: 2, 2: 1})
    under_test = Evaluator(dataset, Loader(dataset, [*range(IMAGES)]), NMSConfig())
    metrics = under_test.evaluate(Oracle(dataset))
    assert metrics["duplicate_boxes"] == 3
    content = analyse(under_test.scored, under_test.results, step=1)
    assert content["duplicate_boxes"] == 3
    plain = evaluator().evaluate(Oracle(five_images()))
    seconds = {"eval_seconds", "duplicate_boxes"}
    assert {n: v for n, v in metrics.items() if n not in seconds} == {
        n: v for n, v in plain.items() if n not in seconds
    }
    assert "duplicate_boxes" not in plain


def test_evaluation_restores_mode_of_every_layer():
    model = Oracle(five_images())
    model.train()
    model.frozen.eval()
    before = running_statistics(model.norm)[0].numpy().copy()
    evaluator().evaluate(model)
    assert model.modes == [False] * 3
    assert model.training and model.norm.training and not model.frozen.training
    assert (running_statistics(model.norm)[0].numpy() == before).all()


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


def test_untrained_model_gives_bounded_box_count():
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


def test_images_show_truth_and_boxes_up_to_limit():
    pictures = EvaluationPictures(five_images().class_names, 3)
    under_test = evaluator(observer=pictures)
    under_test.evaluate(Oracle(five_images()))
    shown = (ZOOM * HEIGHT, 2 * ZOOM * WIDTH + 4, 3)  # with text, so 480 pixels at least
    assert [picture.shape for picture in pictures.drawn] == [shown] * 3
    assert pictures.drawn[1].dtype == np.uint8
    under_test.evaluate(Oracle(five_images()))
    assert len(pictures.drawn) == 3, "drawn anew at each evaluation"


def test_padding_is_not_drawn():
    dataset = five_images()
    (batch,) = Loader(dataset, [3])
    _, rows_R6, count_B = detect(Oracle(dataset), batch.images_B3HW, NMSConfig())
    assert len(draw_detections(batch, rows_R6, count_B, dataset.class_names, 10)) == 1


def test_a_long_evaluation_reports_how_far_it_is(monkeypatch, caplog):
    monkeypatch.setattr("ppdist.distributed.progress._REPORT_SECONDS", -1.0)
    with caplog.at_level(logging.INFO, logger="ppdist"):
        evaluator().predict(Oracle(five_images()))
    assert "2 of 5 images" in caplog.text
