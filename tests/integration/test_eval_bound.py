"""--at-least of tools/eval.py is understood before the evaluation, not after it."""

import numpy as np

from ppdist.cli.eval import judge, read_bound, require_metric
from ppdist.config.evaluate import NMSConfig
from ppdist.engine.evaluator import ClassificationEvaluator, Evaluator
from ppdist.metrics.classification import rank
from tests.errors import raises
from tests.unit.data.classified import classified_set


def test_a_bound_is_a_metric_and_a_number():
    assert read_bound("mAP50=0.8") == ("mAP50", 0.8)
    assert read_bound(None) is None
    with raises("option_invalid", "mAP50"):
        read_bound("mAP50")


def test_a_metric_below_its_bound_is_an_error():
    judge("mAP50", 0.8, {"mAP50": 0.8})
    with raises("metric_below_floor", "mAP50", "0.7000"):
        judge("mAP50", 0.8, {"mAP50": 0.7})


def test_a_metric_that_does_not_exist_is_named():
    evaluator = Evaluator(classified_set([0], ("cat",)), [], NMSConfig())
    require_metric("fitness", evaluator.metrics)
    with raises("unknown_metric", "'mAP_50'", "AP/cat, fitness"):
        require_metric("mAP_50", evaluator.metrics)


def test_every_metric_that_can_be_asked_for_is_measured():
    boxes = Evaluator(classified_set([0], ("cat",)), [], NMSConfig())
    assert boxes.metrics == tuple(boxes.measure(np.zeros((0, 7), np.float32)))
    classes = ClassificationEvaluator(classified_set([0], ("cat",)), [])
    ranking = rank(np.ones((1, 1)), np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert classes.metrics == tuple(classes.measure(ranking))


def test_class_without_ground_truth_has_no_score():
    evaluator = Evaluator(classified_set([0], ("cat", "dog")), [], NMSConfig())
    nothing_found = evaluator.measure(np.zeros((0, 7), np.float32))
    assert evaluator.class_scores(nothing_found) == [0.0, None]
