import json
import logging
from dataclasses import replace

import numpy as np
import paddle
import pytest

from ppdist.config.evaluate import NMSConfig
from ppdist.data.types import DetectionSet
from ppdist.distributed import comm
from ppdist.distributed.paddle_api import running_statistics
from ppdist.engine.evaluator import Evaluator, detect, in_eval_mode
from ppdist.metrics.analysis import analyse
from ppdist.metrics.coco import METRICS, evaluate_boxes
from ppdist.metrics.scored import left_out_line
from ppdist.viz.run_pictures import EvaluationPictures, draw_detections
from tests.distributed import run_on_ranks
from tests.unit.engine.oracle import (
    CLASSES,
    HEIGHT,
    IMAGES,
    WIDTH,
    ZOOM,
    Loader,
    Oracle,
    evaluator,
    five_images,
)
from tests.unit.engine.tiny import init_cpu


def on_ranks(argument):
    """What both evaluations of uneven shards say; the error of an image that two ranks see."""
    init_cpu()
    share = list(range(IMAGES))[comm.rank() :: comm.world_size()]
    under_test = evaluator(share)
    detections = under_test.predict(Oracle(five_images()))
    result = under_test.evaluate(Oracle(five_images()))
    with pytest.raises(RuntimeError) as error:
        evaluator([0, *share] if comm.rank() else share).predict(Oracle(five_images()))
    return {"result": result, "detections": detections.tolist(), "twice": str(error.value)}


@pytest.fixture(scope="module")
def two_ranks():
    return run_on_ranks(2, "tests.unit.engine.test_evaluator:on_ranks")


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


def test_two_ranks_with_uneven_shards_equal_one_rank(two_ranks):
    alone = evaluator().evaluate(Oracle(five_images()))
    detections = evaluator().predict(Oracle(five_images())).tolist()
    first, second = two_ranks
    assert first == second
    assert first["detections"] == detections
    names = [*METRICS, "AP/cat", "AP/dog"]
    assert [first["result"][name] for name in names] == [alone[name] for name in names]


def test_an_image_seen_by_two_ranks_is_an_error_on_both(two_ranks):
    assert all("first /images/0.jpg (2 times)" in rank["twice"] for rank in two_ranks)


def test_an_image_left_out_is_an_error_that_names_it():
    message = r"each of the 5 images once; 1 were not, first /images/4.jpg \(0 times\)"
    with pytest.raises(RuntimeError, match=message):
        evaluator([0, 1, 2, 3]).evaluate(Oracle(five_images()))


class Damaged(Loader):
    """The third image of the five cannot be read."""

    def __iter__(self):
        for batch in super().__iter__():
            index_B = batch.image_index_B.numpy()
            if 2 not in index_B:
                yield batch
                continue
            index_B = [index for index in index_B.tolist() if index not in (2, -1)]
            others = next(iter(Loader(self.dataset, index_B or [-1])))
            yield replace(others, bad_images={2: "cut short"})


def damaged_evaluator(indices):
    return Evaluator(five_images(), Damaged(five_images(), indices), NMSConfig())


def without_third() -> DetectionSet:
    whole = five_images()
    kept = [record for at, record in enumerate(whole.records) if at != 2]
    return replace(whole, records=kept)


def on_ranks_with_a_damaged_image(argument):
    init_cpu()
    under_test = damaged_evaluator(list(range(IMAGES))[comm.rank() :: comm.world_size()])
    return under_test.evaluate(Oracle(five_images()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_image_that_cannot_be_read_is_left_out_of_the_score(ranks, caplog):
    if ranks == 1:
        with caplog.at_level(logging.WARNING, "ppdist"):
            under_test = damaged_evaluator(list(range(IMAGES)))
            found = [under_test.evaluate(Oracle(five_images()))]
        line = (
            "1 of 5 images could not be read and is left out of the score: /images/2.jpg: cut short"
        )
        assert [record.getMessage() for record in caplog.records] == [line]
        content = analyse(under_test.scored, under_test.results, step=1)
        assert content["images"] == 4 and len(content["left_out"]) == 1
        assert left_out_line(content) == line
    else:
        found = run_on_ranks(2, "tests.unit.engine.test_evaluator:on_ranks_with_a_damaged_image")
    model = Oracle(five_images())
    rest = [0, 1, 3, 4]
    others_R7 = Evaluator(five_images(), Loader(five_images(), list(range(IMAGES))), NMSConfig())
    rows_R7 = others_R7.predict(model)
    rows_R7 = rows_R7[rows_R7[:, 0] != 2]
    rows_R7[:, 0] = [rest.index(int(at)) for at in rows_R7[:, 0]]
    expected = evaluate_boxes(without_third(), rows_R7)
    for metrics in found:
        assert {name: metrics[name] for name in expected} == expected
        assert metrics["left_out_images"] == 1


def test_boxes_that_are_given_twice_are_counted_beside_the_score():
    dataset = replace(five_images(), duplicates={1: 2, 2: 1})
    under_test = Evaluator(dataset, Loader(dataset, list(range(IMAGES))), NMSConfig())
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
