import json

import numpy as np
import pytest

from ppdist.data.types import DetectionSet
from ppdist.metrics.analysis import analyse, class_table
from ppdist.metrics.classification import Ranking, compute_accuracy, rank, write_ranking
from tests.unit.data.classified import classified_set
from tests.unit.metrics.cases import detection_set, record


def ranking_of(probabilities_NC, labels_N) -> Ranking:
    labels_N = np.array(labels_N)
    return rank(np.array(probabilities_NC, np.float32), labels_N, np.arange(len(labels_N)))


def test_top1_and_top5_equal_sorted_class_search():
    rng = np.random.default_rng(0)
    probabilities_NC, labels_N = rng.random((200, 20)), rng.integers(0, 20, 200)
    metrics = compute_accuracy(ranking_of(probabilities_NC, labels_N))
    for name, count in (("top1", 1), ("top5", 5)):
        best = [sorted(range(20), key=lambda c: -row[c])[:count] for row in probabilities_NC]
        hits = [label in classes for label, classes in zip(labels_N, best)]
        assert metrics[name] == pytest.approx(np.mean(hits))
    assert 0 < metrics["top1"] < metrics["top5"] < 1


def test_equal_scores_rank_smaller_class_first():
    ranking = ranking_of([[0.25, 0.25, 0.25, 0.25]] * 2, [0, 3])
    assert ranking.place_N.tolist() == [0, 3]
    assert ranking.labels_NK.tolist() == [[0, 1, 2, 3]] * 2
    assert compute_accuracy(ranking) == {"top1": 0.5, "top5": 1.0}


def test_a_model_that_gives_no_numbers_is_never_right():
    ranking = ranking_of([[np.nan] * 3, [0.0, np.nan, 1.0]], [0, 2])
    assert compute_accuracy(ranking) == {"top1": 0.0, "top5": 0.0}


def test_no_more_than_five_classes_are_kept_best_first():
    ranking = ranking_of([[0.1, 0.2, 0.05, 0.3, 0.25, 0.06, 0.04]], [6])
    assert ranking.labels_NK.tolist() == [[3, 4, 1, 0, 5]]
    np.testing.assert_allclose(ranking.scores_NK[0], [0.3, 0.25, 0.2, 0.1, 0.06])


def test_written_list_names_image_class_and_surest(tmp_path):
    dataset: DetectionSet = classified_set([1, 0], ("cat", "dog"))
    ranking = ranking_of([[0.25, 0.75], [0.5, 0.5]], [1, 0])
    write_ranking(tmp_path / "new" / "found.json", dataset, ranking)
    written = json.loads((tmp_path / "new" / "found.json").read_text(encoding="utf-8"))
    assert written[0] == {
        "image_id": 1,
        "file_name": "/images/0.jpg",
        "true": "dog",
        "best": [
            {"class": 1, "name": "dog", "score": 0.75},
            {"class": 0, "name": "cat", "score": 0.25},
        ],
    }
    assert [entry["image_id"] for entry in written] == [1, 2]


def test_the_analysis_of_thousands_of_classes_is_bounded():
    classes, images = 8000, 2000
    names = tuple(map(str, range(classes)))
    records = [record(i, [[0, 0, 1, 1]], [i]) for i in range(images)]
    dataset = detection_set(*records, names=names, category_ids=tuple(range(classes)))
    labels_N = np.arange(images)
    best_N5 = (labels_N[:, None] + np.arange(5)) % classes
    ranking = Ranking(labels_N, np.zeros(images, np.int64), best_N5, np.ones((images, 5)))
    content = analyse(dataset, ranking)
    assert content["confusion"]["cells"][:2] == [[0, 0, 1], [1, 1, 1]]
    assert content["metrics"]["top1"] == 1.0 and content["per_class"][1999]["top1"] == 1.0
    assert content["per_class"][2000] == {
        "name": "2000", "images": 0, "top1": None, "top5": None, "precision": None,
    }  # fmt: skip
    assert len(json.dumps(content)) < 1_500_000


def test_analysis_counts_classes_and_confusions():
    names = ("cat", "dog", "bird")
    dataset = classified_set([0, 0, 1, 1, 1], names)
    probabilities = [[0.9, 0.1, 0], [0.2, 0.8, 0], [0, 1, 0], [0, 0.4, 0.6], [np.nan] * 3]
    content = analyse(dataset, ranking_of(probabilities, [0, 0, 1, 1, 1]), step=3)
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["step"] == 3 and content["images"] == 5
    assert "duplicate_boxes" not in content  # which a classifier has none of
    assert content["metrics"] == {"top1": 0.4, "top5": 0.8}
    assert content["confusion"]["counts"] == [[1, 1, 0], [0, 1, 1], [0, 0, 0]]
    cat, dog, bird = content["per_class"]
    assert cat == {"name": "cat", "images": 2, "top1": 0.5, "top5": 1.0, "precision": 1.0}
    assert dog["top1"] == pytest.approx(1 / 3) and dog["precision"] == 0.5
    assert (bird["images"], bird["top1"], bird["precision"]) == (0, None, 0.0)
    assert "top1" in class_table(content) and "bird" in class_table(content)
