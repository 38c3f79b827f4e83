import json

import numpy as np
import paddle
import pytest

from ppdist.config.distributed import DistributedConfig
from ppdist.data.types import Batch
from ppdist.distributed import comm
from ppdist.engine.evaluator import ClassificationEvaluator
from ppdist.models.base import ImageModel
from tests.distributed import run_on_ranks
from tests.unit.data.classified import classified_set

NAMES = tuple("abcdefg")
LABELS = [0, 1, 2, 3, 4]  # of five images
SIZE = 32


class Loader:
    """The given images in batches of 2, the last padded; every pixel of image i is i."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __iter__(self):
        for start in range(0, len(self.indices), 2):
            index_B = np.array([*self.indices[start : start + 2], -1][:2])
            labels_BM = np.zeros((2, 8), np.int64)
            labels_BM[:, 0] = np.where(index_B < 0, 0, np.array(LABELS)[index_B])
            pixels = np.broadcast_to(
                index_B.clip(0).astype(np.uint8)[:, None, None, None], (2, 3, SIZE, SIZE)
            )
            yield Batch(
                images_B3HW=paddle.to_tensor(pixels.copy()),
                boxes_BM4=paddle.zeros([2, 8, 4]),
                labels_BM=paddle.to_tensor(labels_BM),
                mask_BM=paddle.ones([2, 8]),
                image_index_B=paddle.to_tensor(index_B),
                scale_B2=paddle.ones([2, 2]),
                offset_B2=paddle.zeros([2, 2]),
            )


class Lookup(ImageModel):
    """Image i is of class i, which comes i-th: images 0 is right, 0 to 4 are among five."""

    def __init__(self) -> None:
        super().__init__(len(NAMES), 32, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        self.norm = paddle.nn.BatchNorm2D(3)
        self.modes: list[bool] = []

    def forward(self, images_B3HW):
        self.modes.append(self.norm.training)
        self.norm(images_B3HW)
        return images_B3HW.mean(axis=[1, 2, 3])

    def decode(self, outputs):
        """Class c of image i: higher scores for smaller c, so that class i has i above it."""
        scores_C = np.linspace(0.7, 0.1, len(NAMES)).astype(np.float32)
        return paddle.to_tensor(np.repeat(scores_C[None], len(outputs), axis=0))


def evaluator(indices=(0, 1, 2, 3, 4), **options) -> ClassificationEvaluator:
    return ClassificationEvaluator(classified_set(LABELS, NAMES), Loader([*indices]), **options)


def on_ranks(argument):
    comm.init("cpu", DistributedConfig())
    share = list(range(5))[comm.rank() :: comm.world_size()]
    if argument == "none":
        share = [] if comm.rank() else list(range(5))
    if argument == "twice":
        share = [0, *share] if comm.rank() else share
    under_test = evaluator(share)
    result = under_test.evaluate(Lookup())
    ranking = under_test.predict(Lookup())
    return {"result": result, "ranking": [value.tolist() for value in ranking]}


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


@pytest.mark.parametrize("argument", ["uneven", "none"])
def test_two_ranks_equal_one_even_with_empty_rank(argument):
    alone = evaluator().predict(Lookup())
    first, second = run_on_ranks(
        2, "tests.unit.engine.test_evaluator_classification:on_ranks", argument
    )
    assert first == second
    assert (first["result"]["top1"], first["result"]["top5"]) == (0.2, 1.0)
    assert first["ranking"] == [value.tolist() for value in alone]


def test_an_image_seen_by_two_ranks_is_an_error_on_both():
    with pytest.raises(AssertionError) as error:
        run_on_ranks(2, "tests.unit.engine.test_evaluator_classification:on_ranks", "twice")
    assert str(error.value).count("first /images/0.jpg (2 times)") == 2


def test_an_image_left_out_is_an_error_that_names_it():
    message = r"each of the 5 images once; 1 were not, first /images/4.jpg \(0 times\)"
    with pytest.raises(RuntimeError, match=message):
        evaluator([0, 1, 2, 3]).evaluate(Lookup())


def test_evaluation_restores_classifier_mode():
    model = Lookup()
    before = model.norm._mean.numpy().copy()
    evaluator().evaluate(model)
    assert model.modes == [False] * 3 and model.norm.training
    assert (model.norm._mean.numpy() == before).all()


def test_images_are_limited_redrawn_and_omit_padding():
    for most, expected in ((3, 3), (100, 5), (0, 0)):
        under_test = evaluator(max_pictures=most)
        for _ in range(2):
            under_test.evaluate(Lookup())
            shapes = [picture.shape for picture in under_test.pictures]
            assert shapes == [(SIZE, 2 * SIZE + 4, 3)] * expected
