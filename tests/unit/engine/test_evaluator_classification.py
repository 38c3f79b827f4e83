import json

import numpy as np
import paddle
import pytest

from ppdist.distributed import comm
from ppdist.engine.evaluator import ClassificationEvaluator
from ppdist.viz.run_pictures import EvaluationPictures
from tests.distributed import run_on_ranks
from tests.unit.data.classified import classified_set
from tests.unit.engine.oracle import HEIGHT, WIDTH, ZOOM, Loader, SeesNumbers
from tests.unit.engine.tiny import init_cpu

NAMES = tuple("abcdefg")
LABELS = [0, 1, 2, 3, 4]  # of five images


class Lookup(SeesNumbers):
    """Image i is of class i, which comes i-th: images 0 is right, 0 to 4 are among five."""

    def __init__(self) -> None:
        super().__init__(len(NAMES), 32)

    def decode(self, outputs):
        """Class c of image i: higher scores for smaller c, so that class i has i above it."""
        scores_C = np.linspace(0.7, 0.1, len(NAMES)).astype(np.float32)
        return paddle.to_tensor(np.repeat(scores_C[None], len(outputs), axis=0))


def evaluator(indices=(0, 1, 2, 3, 4), **options) -> ClassificationEvaluator:
    dataset = classified_set(LABELS, NAMES)
    return ClassificationEvaluator(dataset, Loader(dataset, [*indices]), **options)


def on_ranks(argument):
    """What both evaluations of each case say."""
    init_cpu()
    uneven = list(range(5))[comm.rank() :: comm.world_size()]
    found = {}
    for case, share in {"uneven": uneven, "none": [] if comm.rank() else list(range(5))}.items():
        under_test = evaluator(share)
        result = under_test.evaluate(Lookup())
        ranking = under_test.predict(Lookup())
        found[case] = {"result": result, "ranking": [value.tolist() for value in ranking]}
    return found


@pytest.fixture(scope="module")
def two_ranks():
    return run_on_ranks(2, "tests.unit.engine.test_evaluator_classification:on_ranks")


def test_accuracy_counts_each_image_once_and_no_padding():
    result = evaluator().evaluate(Lookup())
    assert (result["top1"], result["top5"]) == (0.2, 1.0)
    assert result["eval_seconds"] > 0 and json.loads(json.dumps(result)) == result
    assert ClassificationEvaluator.headline == ("top1", "top5")


def test_the_ranking_is_in_the_order_of_the_set():
    ranking = evaluator([4, 0, 2, 1, 3]).predict(Lookup())
    assert ranking.index_N.tolist() == ranking.place_N.tolist() == [0, 1, 2, 3, 4]
    assert ranking.labels_NK.tolist() == [[0, 1, 2, 3, 4]] * 5
    np.testing.assert_allclose(ranking.scores_NK[:, 0], 0.7)


@pytest.mark.parametrize("case", ["uneven", "none"])
def test_two_ranks_equal_one_even_with_empty_rank(case, two_ranks):
    alone = evaluator().predict(Lookup())
    first, second = (rank[case] for rank in two_ranks)
    assert first == second
    assert (first["result"]["top1"], first["result"]["top5"]) == (0.2, 1.0)
    assert first["ranking"] == [value.tolist() for value in alone]


def test_images_are_limited_redrawn_and_omit_padding():
    for most, expected in ((3, 3), (100, 5), (0, 0)):
        pictures = EvaluationPictures(NAMES, most)
        under_test = evaluator(observer=pictures)
        for _ in range(2):
            under_test.evaluate(Lookup())
            shapes = [picture.shape for picture in pictures.drawn]
            assert shapes == [(ZOOM * HEIGHT, 2 * ZOOM * WIDTH + 4, 3)] * expected
