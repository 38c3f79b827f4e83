"""Kinds of mistakes and the confusion matrix, against plain loops and worked examples."""

import numpy as np
import pytest

from ppdist.metrics.analysis import (
    MAX_MATRIX_ROWS,
    Kind,
    classify_errors,
    compute_gains,
    confusion_pairs,
    confusion_table,
    count_kinds,
)
from ppdist.metrics.matching import (
    CROWD,
    NOBODY,
    collect_objects,
    find_overlaps,
    match_as_coco,
    select_detections,
)
from tests.unit.metrics.cases import detection_set, odd_case, random_case, record

BOX = [100, 100, 200, 200]
WIDER = [100, 100, 260, 200]  # overlaps BOX by 0.625
SHIFTED = [160, 100, 260, 200]  # by 0.25


class Case:
    def __init__(self, dataset, rows_R7, classes=3):
        self.classes = classes
        self.truth = collect_objects(dataset)
        self.found = select_detections(self.truth, rows_R7)
        self.pairs = find_overlaps(self.truth, self.found)
        self.match_F = match_as_coco(self.truth, self.found, self.pairs, 0.5)
        self.kind_F, self.about_F = classify_errors(
            self.truth, self.found, self.pairs, self.match_F
        )
        self.all_F = np.ones(len(self.match_F), bool)

    def kinds(self) -> list[str]:
        return [Kind(int(kind)).name for kind in self.kind_F]

    def counts(self, confident_F=None) -> dict[str, int]:
        confident_F = self.all_F if confident_F is None else confident_F
        return count_kinds(self.truth, self.kind_F, self.about_F, confident_F)

    def compute_gains(self) -> dict[str, float]:
        return compute_gains(self.truth, self.found, self.kind_F, self.about_F, self.classes)

    def confusion(self, confident_F=None) -> np.ndarray:
        confident_F = self.all_F if confident_F is None else confident_F
        case = (self.truth, self.found, self.kind_F, self.about_F, confident_F, self.classes)
        return np.array(confusion_table(*confusion_pairs(*case), self.classes + 1)["counts"])


def test_each_kind_of_mistake_is_called_by_its_name():
    dataset = detection_set(record(1, [BOX], [0]), record(2, [BOX], [0]), record(3, [BOX], [1]))
    rows = [
        [0, 0, 0.9, *BOX],  # correct
        [0, 0, 0.8, *WIDER],  # of the same object
        [1, 0, 0.7, *SHIFTED],  # 0.25 is no find
        [1, 1, 0.6, *WIDER],  # its class is wrong
        [1, 1, 0.5, *SHIFTED],  # class and place are: nothing but leaving it out mends that
        [2, 0, 0.4, 400, 300, 500, 400],  # nothing is there
    ]
    case = Case(dataset, np.array(rows))
    assert case.kinds() == [
        "CORRECT", "DUPLICATE", "LOCALISATION", "CLASS", "BACKGROUND", "BACKGROUND",
    ]  # fmt: skip
    assert case.counts() == {
        "correct": 1, "localisation": 1, "class": 1, "duplicate": 1, "background": 2, "missed": 1,
    }  # fmt: skip
    assert case.counts(case.found.score_F > 0.65)["missed"] == 1
    assert case.counts(case.found.score_F > 0.75)["missed"] == 2


def kind_by_loops(case, f) -> str:
    """One detection, from all objects of its image."""
    if case.match_F[f] != NOBODY:
        return "IGNORED" if case.match_F[f] == CROWD else "CORRECT"
    x, y, width, height = case.found.box_F4[f]
    own, other = 0.0, 0.0
    for g in np.flatnonzero(case.truth.image_G == case.found.image_F[f]):
        gx, gy, gw, gh = case.truth.box_G4[g]
        iw = min(x + width, gx + gw) - max(x, gx)
        ih = min(y + height, gy + gh) - max(y, gy)
        shared = max(iw, 0) * max(ih, 0)
        union = width * height + gw * gh - shared
        if case.truth.crowd_G[g] or not union:
            continue
        if case.truth.label_G[g] == case.found.label_F[f]:
            own = max(own, shared / union)
        else:
            other = max(other, shared / union)
    if 0.1 <= own < 0.5:
        return "LOCALISATION"
    if other >= 0.5:
        return "CLASS"
    return "DUPLICATE" if own >= 0.5 else "BACKGROUND"


@pytest.mark.parametrize("seed", range(20))
def test_kinds_are_those_of_a_plain_loop(seed):
    case = Case(*odd_case(seed))
    assert case.kinds() == [kind_by_loops(case, f) for f in range(len(case.match_F))]


def test_error_type_gains_match_worked_example():
    # Four objects of one class; average precision over 101 recalls.
    dataset = detection_set(*(record(n, [BOX], [0]) for n in range(4)))
    rows = [
        [0, 0, 0.9, 400, 300, 500, 400],  # background, before everything else
        [0, 0, 0.8, *BOX],  # correct
        [1, 0, 0.7, *SHIFTED],  # its place is wrong
        [2, 1, 0.6, *BOX],  # its class is
        [0, 0, 0.5, *BOX],  # duplicate
    ]
    case = Case(dataset, np.array(rows))
    low, mid = 26, 51  # of 101 recalls are at most 1/4, 1/2
    before = low * (1 / 2) / 101  # precision 1/2 up to recall 1/4
    want = {
        "localisation": mid * (2 / 3) / 101 - before,  # right, right after a wrong one
        # Of the class's detections, in turn: wrong, right, wrong, right, wrong.
        "class": (low * (1 / 2) + (mid - low) * (1 / 2)) / 101 - before,
        "duplicate": 0.0,
        "background": low * 1 / 101 - before,
        "missed": (34 * (1 / 2)) / 101 - before,  # three objects: recall 1/3 is reached
    }
    assert case.compute_gains() == pytest.approx(want, abs=1e-12)


def test_only_surest_error_on_an_object_is_fixed():
    dataset = detection_set(record(1, [BOX], [0]))
    rows = np.array([[0, 0, 0.9, *SHIFTED], [0, 0, 0.8, *SHIFTED], [0, 1, 0.7, *BOX]])
    gained = Case(dataset, rows).compute_gains()
    assert gained["localisation"] == pytest.approx(1.0), "the second is left out"
    assert gained["class"] == 0.0, "its object could be had by a surer detection"


def test_errors_without_objects_have_no_gain():
    case = Case(detection_set(record(1, [], [])), np.array([[0, 0, 0.9, *BOX]]))
    assert set(case.compute_gains().values()) == {None}
    assert case.counts()["background"] == 1 and case.counts()["missed"] == 0


def test_confusion_matrix_matches_worked_example():
    dataset = detection_set(
        record(1, [BOX], [0]), record(2, [BOX, [300, 0, 400, 90]], [1, 2]),
        record(3, [BOX], [0], crowd=[True]),
    )  # fmt: skip
    rows = [
        [0, 0, 0.9, *BOX],  # cat found
        [0, 1, 0.95, *BOX],  # the same place called dog, too: multi_label
        [1, 0, 0.7, *WIDER],  # dog called cat
        [1, 2, 0.6, *BOX],  # and, less sure, bird
        [1, 2, 0.1, 300, 0, 400, 90],  # bird found, but not sure enough
        [2, 0, 0.6, *BOX],  # on a crowd
        [2, 1, 0.5, 400, 300, 500, 400],  # nothing is there
    ]
    case = Case(dataset, np.array(rows))
    counts = case.confusion(case.found.score_F >= 0.3)
    assert counts.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 2, 1, 0]]


def test_many_class_confusion_keeps_largest_cells():
    rng = np.random.default_rng(0)
    true_K, called_K = rng.integers(0, 30, (2, 5000))
    whole = np.array(confusion_table(true_K, called_K, 30)["counts"])
    assert whole.sum() == 5000 and whole.shape == (30, 30)
    large = confusion_table(true_K, called_K, MAX_MATRIX_ROWS + 1)
    assert len(large["true_counts"]) == MAX_MATRIX_ROWS + 1 and sum(large["true_counts"]) == 5000
    assert large["true_counts"][:30] == whole.sum(1).tolist()
    assert {(row, column): count for row, column, count in large["cells"]} == {
        (row, column): whole[row, column] for row, column in zip(*np.nonzero(whole))
    }
    counts = [count for *_, count in large["cells"]]
    assert counts == sorted(counts, reverse=True)
    many_K = np.repeat(np.arange(30_000), np.arange(30_000) % 3 + 1)
    cells = confusion_table(many_K, many_K, 30_000)["cells"]
    assert len(cells) == 20_000 and cells[-1][2] == 2, "those with 1 are left out"


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_the_confusion_sum_to_objects_and_columns_to_detections(seed):
    case = Case(*random_case(seed))
    confident_F = case.found.score_F >= 0.4
    counts, errors = case.confusion(confident_F), case.counts(confident_F)
    assert np.trace(counts) == errors["correct"]
    assert 0 < counts[:3, :3].sum() - np.trace(counts) <= errors["class"]
    nothing = errors["localisation"] + errors["duplicate"] + errors["background"]
    assert nothing <= counts[3].sum() <= nothing + errors["class"]
    counted_F = confident_F & (case.match_F != CROWD)
    objects = np.bincount(case.truth.label_G[~case.truth.crowd_G], minlength=3)
    assert counts.sum(axis=1)[:3].tolist() == objects.tolist()
    found = np.bincount(case.found.label_F[counted_F], minlength=3)
    assert counts.sum(axis=0)[:3].tolist() == found.tolist()
    right_F = counted_F & (case.match_F >= 0)
    right = np.bincount(case.found.label_F[right_F], minlength=3)
    assert np.diag(counts)[:3].tolist() == right.tolist()
