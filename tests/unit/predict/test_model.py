"""Loaded models: which of their boxes are asked for, and another suppression."""

from typing import Any

import numpy as np
import pytest

from ppdist.common.errors import ConfigError
from ppdist.export.spec import InferenceSpec
from ppdist.predict.model import LoadedModel, make_loaded, wanted, with_suppression
from tests.errors import raises
from tests.unit.export.tiny import SIZE, tiny_spec

# Two boxes of class 0 with an IoU of 0.6, one of class 1 in the place of the first.
ROWS_R6 = np.array(
    [[0, 0.9, 0, 0, 40, 40], [1, 0.8, 0, 0, 40, 40], [0, 0.4, 0, 10, 40, 50]], np.float32
)
IMAGE = np.zeros((*SIZE, 3), np.uint8)


def spec(**changes: Any) -> InferenceSpec:
    return tiny_spec().model_copy(update=changes)


@pytest.mark.parametrize(
    ("known", "asked", "threshold"), [(None, None, 0.25), (0.41, None, 0.41), (0.41, 0.7, 0.7)]
)
def test_the_threshold_is_the_asked_the_best_or_the_usual(known, asked, threshold) -> None:
    choice = wanted(spec(best_f1_threshold=known), asked, None, pytest.fail)
    assert choice.threshold == threshold and bool(choice.whence) == (asked is None)
    assert (choice.of(ROWS_R6)[:, 1] >= threshold).all()


def test_boxes_that_the_model_leaves_out_are_warned_of() -> None:
    said: list[str] = []
    least = spec().nms.score_threshold
    wanted(spec(), least, None, said.append)
    assert not said
    wanted(spec(), least / 2, None, said.append)
    assert len(said) == 1 and "nms.score_threshold" in said[0]


@pytest.mark.parametrize(
    ("classes", "labels"),
    [("red", {0}), (["green"], {1}), ([1, "red"], {0, 1}), ("1", {1}), (2, set()), (None, {0, 1})],
)
def test_classes_are_names_or_numbers(classes, labels) -> None:
    assert {*wanted(spec(), 0.3, classes, pytest.fail).of(ROWS_R6)[:, 0]} == labels


@pytest.mark.parametrize(
    ("classes", "fix"),
    [("gren", "did you mean green?"), ("GREEN", "did you mean green?"), (3, "numbers from 0 to 2")],
)
def test_other_classes_are_refused(classes, fix) -> None:
    with pytest.raises(ConfigError, match=fix) as error:
        wanted(spec(), None, classes, pytest.fail)
    assert error.value.code == "class_unknown"


def exported(nms_in_graph: bool) -> LoadedModel:
    """One whose graph gives ROWS_R6, or the same as scores and boxes."""

    def graph(batch_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        if nms_in_graph:
            return ROWS_R6, np.array([len(ROWS_R6)])
        scores_RC = np.zeros((len(ROWS_R6), 3), np.float32)
        scores_RC[np.arange(len(ROWS_R6)), ROWS_R6[:, 0].astype(int)] = ROWS_R6[:, 1]
        return scores_RC[None], ROWS_R6[None, :, 2:]

    graph.output_names = ()  # type: ignore[attr-defined]
    return make_loaded(spec(), graph, nms_in_graph)  # type: ignore[arg-type]


@pytest.mark.parametrize("nms_in_graph", [True, False])
@pytest.mark.parametrize(("iou", "left"), [(0.65, 3), (0.55, 2)])
def test_an_export_suppresses_at_another_iou(nms_in_graph, iou, left) -> None:
    model = exported(nms_in_graph)
    (rows_R6,) = with_suppression(model, iou)([IMAGE])
    assert len(rows_R6) == left and (np.diff(rows_R6[:, 1]) <= 0).all()
    assert len(model([IMAGE])[0]) == 3, "the model itself is as it was"


def test_a_graph_that_left_out_more_is_refused() -> None:
    for iou, code in ((0.9, "options_conflict"), (1.5, "option_invalid")):
        with raises(code):
            with_suppression(exported(True), iou)
    assert len(with_suppression(exported(False), 0.9)([IMAGE])[0]) == 3


def test_agnostic_without_a_threshold_is_refused() -> None:
    model = exported(True)
    nms = model.spec.nms.model_copy(update={"iou_threshold": None})
    model = make_loaded(model.spec.model_copy(update={"nms": nms}), model.graph, True)
    assert with_suppression(model) is model
    with raises("option_missing"):
        with_suppression(model, agnostic=True)
    assert len(with_suppression(model, 0.5, agnostic=True)([IMAGE])[0]) >= 1
