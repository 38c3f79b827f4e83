"""Defaults of tools/ensemble.py fuse: what is taken where nothing is said, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.errors import ConfigError
from ppdist.ensemble.fuse import fuse_class, view_iou, write_fused
from ppdist.ensemble.members import member_of
from tests.unit.engine.oracle import five_images

# Two boxes of the same class that overlap by 0.6.
BOXES_R4 = np.array([[0.0, 0, 100, 100], [0, 0, 100, 60]])
SCORES_R, WEIGHT_R = np.array([0.9, 0.5]), np.ones(2)


@pytest.mark.parametrize(
    ("method", "iou", "sigma", "scores"),
    [
        ("wbf", None, None, [0.7]),
        ("wbf", 0.65, None, [0.45, 0.25]),
        ("nms", None, None, [0.9, 0.5]),
        ("nms", 0.55, None, [0.9]),
        ("soft-nms-linear", None, None, [0.9, 0.5 * 0.4]),
        ("soft-nms-linear", 0.65, None, [0.9, 0.5]),
        ("soft-nms-gaussian", None, None, [0.9, 0.5 * np.exp(-0.36 / 0.5)]),
        ("soft-nms-gaussian", None, 2.0, [0.9, 0.5 * np.exp(-0.36 / 2)]),
    ],
)
def test_each_method_has_the_setting_of_its_paper_until_told(method, iou, sigma, scores) -> None:
    found_K = fuse_class(method, iou, sigma)(BOXES_R4, SCORES_R, WEIGHT_R, 2.0)[1]
    np.testing.assert_allclose(found_K, scores)


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        (
            ("wbf", None, 1.0),
            "options_conflict",
            "--sigma is for soft-nms-gaussian; wbf takes --iou",
        ),
        (
            ("soft-nms-gaussian", 0.5, None),
            "options_conflict",
            "--iou: soft-nms-gaussian has none; give --sigma",
        ),
        (
            ("soft-nms-gaussian", None, 0.0),
            "option_invalid",
            "--sigma 0: expected a number above 0",
        ),
    ],
)
def test_a_setting_of_another_method_is_refused(settings, code, message) -> None:
    with pytest.raises(ConfigError) as error:
        fuse_class(*settings)
    assert (error.value.code, str(error.value)) == (code, message)


@pytest.mark.parametrize(
    ("method", "iou", "asked", "written", "expected"),
    [
        ("wbf", None, None, 0.7, 0.45),  # a cluster of 0.55, less the margin
        ("wbf", 0.7, None, 0.7, 0.6),
        ("wbf", 0.9, None, 0.7, 0.7),  # never less strict than the configuration
        ("wbf", 0.05, None, 0.7, 0.0),
        ("wbf", None, 0.7, 0.7, 0.7),  # the user is obeyed
        ("wbf", None, None, None, None),  # a model without suppression has none here
        ("nms", None, None, 0.7, None),
        ("soft-nms-linear", None, 0.9, 0.7, 0.9),
    ],
)
def test_views_are_suppressed_more_strictly_than_a_cluster_is_wide(
    method, iou, asked, written, expected
) -> None:
    assert view_iou(method, iou, asked, written) == expected


def test_scores_are_written_where_truth_is_known(tmp_path: Path) -> None:
    dataset = five_images()
    rows_R7 = np.array([[1, 0, 0.9, 10, 20, 42, 70]], np.float32)  # the object of image 1
    for truth, name in ((dataset, "known"), (None, "unknown")):
        (tmp_path / name).mkdir()
        member = member_of("one", rows_R7, 1.0, truth)
        scores = write_fused(tmp_path / name, dataset, [member], rows_R7)
        assert len(json.loads((tmp_path / name / "detections.json").read_text())) == 1
        if truth is None:
            assert scores is None and not (tmp_path / name / "scores.json").exists()
        else:
            assert scores == json.loads((tmp_path / name / "scores.json").read_text())
            assert scores["members"] == [{"name": "one", **member.scores}]
            assert scores["fused"]["mAP"] == member.scores["mAP"] > 0
