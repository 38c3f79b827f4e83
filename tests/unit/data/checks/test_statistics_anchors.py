"""Anchor fitting against plain loops, its laws, and the tool that shows it."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from ppdist.data.checks import statistics
from ppdist.data.types import DetectionSet, ImageRecord
from ppdist.models.yolov5 import YOLOv5
from tests.errors import raises
from tests.forked import run_here

PUBLISHED = np.float32(
    [
        [[10, 13], [16, 30], [33, 23]],
        [[30, 61], [62, 45], [59, 119]],
        [[116, 90], [156, 198], [373, 326]],
    ]
)


def sizes(count: int, seed: int = 0) -> np.ndarray:
    """Log-normal widths and heights around 30 pixels."""
    rng = np.random.default_rng(seed)
    return np.exp(rng.normal(3.4, 0.9, (count, 2))).clip(2, 600).astype("float32")


def record(width: int, height: int, boxes: list[list[float]], crowd: list[bool]) -> ImageRecord:
    box = np.float32(boxes).reshape(-1, 4)
    area = (box[:, 2:] - box[:, :2]).prod(axis=1)
    labels = np.zeros(len(box), np.int64)
    return ImageRecord("a.jpg", 1, width, height, box, labels, np.array(crowd, bool), area)


def test_recall_and_fitness_equal_loop_over_anchors() -> None:
    wh_N2 = sizes(200)
    reached, fits = 0, []
    for w, h in wh_N2.tolist():
        ratios = [min(w / a, a / w, h / b, b / h) for a, b in PUBLISHED.reshape(-1, 2).tolist()]
        reached += max(ratios) > 1 / 4
        fits.append(max(ratios) if max(ratios) > 1 / 4 else 0.0)
    assert 100 < reached < 200
    assert statistics.best_possible_recall(wh_N2, PUBLISHED, 4.0) == pytest.approx(reached / 200)
    assert statistics.fitness(wh_N2, PUBLISHED, 4.0) == pytest.approx(np.mean(fits), rel=1e-5)
    assert statistics.best_possible_recall(wh_N2, PUBLISHED, 1e3) == 1
    assert statistics.best_possible_recall(wh_N2[:0], PUBLISHED, 4.0) == 1


def test_anchor_sizes_are_in_input_without_crowds() -> None:
    boxes = [[0, 0, 40, 20], [10, 10, 90, 90], [0, 0, 1, 50]]
    some = DetectionSet(
        (record(200, 100, boxes, [False, True, False]), record(64, 64, [], [])), ("a",), (1,), "x"
    )
    stretched = statistics.sizes_in_input(some, (320, 320), "stretch")
    np.testing.assert_allclose(stretched, [[64, 64]])
    kept = statistics.sizes_in_input(some, (320, 320), "letterbox")
    np.testing.assert_allclose(kept, [[64, 32]])
    assert statistics.sizes_in_input(some, (3200, 3200), "stretch").shape == (2, 2)  # no speck now
    nothing = DetectionSet((), ("a",), (1,), "x")
    assert statistics.sizes_in_input(nothing, (320, 320), "stretch").shape == (0, 2)


def test_fitted_anchors_match_more_boxes_in_order() -> None:
    wh_N2 = sizes(3000) * 0.3  # far smaller than the published anchors are for
    fit = statistics.fit_anchors(wh_N2, PUBLISHED)
    assert fit.recall_before < 0.9 < statistics.ENOUGH_RECALL < fit.recall_after
    assert fit.fitness_after > fit.fitness_before + 0.1
    assert fit.recall_after == statistics.best_possible_recall(wh_N2, fit.anchors_LA2, 4.0)
    assert fit.anchors_LA2.shape == (3, 3, 2) and fit.anchors_LA2.dtype == np.float32
    assert (np.diff(fit.anchors_LA2.reshape(9, 2).prod(axis=1)) >= 0).all()
    np.testing.assert_allclose(fit.anchors_LA2 * 10, (fit.anchors_LA2 * 10).round(), atol=1e-3)


def test_refinement_only_improves_and_is_seeded() -> None:
    wh_N2 = sizes(500)
    some = [statistics.fit_anchors(wh_N2, PUBLISHED, generations=n) for n in (0, 100, 1000)]
    fits = [fit.fitness_after for fit in some]
    assert fits[0] + 0.002 < fits[1] + 0.001 < fits[2]
    again = statistics.fit_anchors(wh_N2, PUBLISHED, generations=100)
    assert np.array_equal(again.anchors_LA2, some[1].anchors_LA2)
    other = statistics.fit_anchors(wh_N2, PUBLISHED, generations=100, seed=1)
    assert not np.array_equal(other.anchors_LA2, some[1].anchors_LA2)


def test_clusters_that_are_there_are_found() -> None:
    rng = np.random.default_rng(0)
    centres = np.float32([[8, 8], [8, 60], [60, 8], [50, 50], [200, 60], [60, 250]])
    wh_N2 = np.repeat(centres, 50, axis=0) * np.exp(rng.normal(0, 0.02, (300, 2)))
    fit = statistics.fit_anchors(wh_N2.astype("float32"), np.ones((2, 3, 2), "float32"))
    assert fit.recall_before == 0 and fit.recall_after == 1
    got = fit.anchors_LA2.reshape(6, 2)
    for centre in centres:
        assert np.abs(np.log(got / centre)).max(axis=1).min() < 0.03, f"{centre} in\n{got}"


def test_present_anchors_that_fit_perfectly_stay() -> None:
    wh_N2 = np.repeat(PUBLISHED.reshape(9, 2), 5, axis=0)
    fit = statistics.fit_anchors(wh_N2, PUBLISHED, generations=50)
    np.testing.assert_array_equal(fit.anchors_LA2.reshape(9, 2), PUBLISHED.reshape(9, 2))
    assert fit.fitness_after == pytest.approx(1)


def test_too_few_boxes_are_refused_with_what_to_do() -> None:
    with raises("too_few_boxes"):
        statistics.fit_anchors(sizes(8), PUBLISHED)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    done = run_here("data", "synthetic", "--out", root, "--train", 6, "--val", 3, "--size", 96)
    assert done.returncode == 0, done.stderr
    (root / "cfg.yml").write_text(
        f"data: {{root: {root}, train: {{annotations: annotations/instances_train.json}},"
        f" val: {{annotations: annotations/instances_val.json}}}}\n"
        f"model: {{name: yolov5, size: n, num_classes: 3, image_size: [64, 64]}}\n"
    )
    return root


def test_the_tool_prints_anchors_that_can_be_pasted(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = made / "cfg.yml"
    done = run_here("data", "anchors", "-c", config, "--generations", 50)
    assert done.returncode == 0, done.stderr
    assert any("level 2" in line and "373, 326" in line for line in done.stdout.splitlines())
    shown = yaml.safe_load(
        done.stdout[done.stdout.index("model:\n") :].partition("training would")[0]
    )
    pasted = made / "pasted.yml"
    anchors_text = str(shown["model"]["anchors"])
    pasted.write_text(config.read_text().replace("size: n,", f"size: n, anchors: {anchors_text},"))
    again = run_here("data", "anchors", "-c", pasted, "--generations", 0)
    assert again.returncode == 0, again.stderr
    row = next(line for line in again.stdout.splitlines() if "best possible recall" in line)
    assert row.count("1.0000") == 2
    assert "keep the present anchors" in again.stdout
    monkeypatch.setattr(YOLOv5, "anchor_threshold", 1.5)
    fitted = run_here("data", "anchors", "-c", config)
    assert "fitted" in fitted.stdout.splitlines()[-1]


def test_the_tool_refuses_a_model_without_anchors(made: Path) -> None:
    done = run_here(
        "data", "anchors", "-c", made / "cfg.yml", "-o", "model.name=ppyoloe", "model.size=s"
    )
    assert done.returncode == 2
    assert "model.name: ppyoloe" in done.stderr and "[model_without_anchors]" in done.stderr
