import json

import numpy as np

from ppdist.engine.evaluator import ClassificationEvaluator
from ppdist.viz.run_pictures import EvaluationPictures
from tests.unit.engine.oracle import HEIGHT, NAMES, WIDTH, ZOOM, Lookup, classification_evaluator


def test_accuracy_counts_each_image_once_and_no_padding():
    result = classification_evaluator().evaluate(Lookup())
    assert (result["top1"], result["top5"]) == (0.2, 1.0)
    assert result["eval_seconds"] > 0 and json.loads(json.dumps(result)) == result
    assert ClassificationEvaluator.headline == ("top1", "top5")


def test_the_ranking_is_in_the_order_of_the_set():
    ranking = classification_evaluator([4, 0, 2, 1, 3]).predict(Lookup())
    assert ranking.index_N.tolist() == ranking.place_N.tolist() == [0, 1, 2, 3, 4]
    assert ranking.labels_NK.tolist() == [[0, 1, 2, 3, 4]] * 5
    np.testing.assert_allclose(ranking.scores_NK[:, 0], 0.7)


def test_images_are_limited_redrawn_and_omit_padding():
    for most, expected in ((3, 3), (100, 5), (0, 0)):
        pictures = EvaluationPictures(NAMES, most)
        under_test = classification_evaluator(observer=pictures)
        for _ in range(2):
            under_test.evaluate(Lookup())
            shapes = [picture.shape for picture in pictures.drawn]
            assert shapes == [(ZOOM * HEIGHT, 2 * ZOOM * WIDTH + 4, 3)] * expected
