"""What is drawn of a run: every picture is there and shows what the files say; nothing raises."""

import json
import logging
import math
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from ppdist.data.types import DetectionSet, ImageRecord
from ppdist.metrics.analysis import EXTRA, MISSED, analyse, counts_objects_twice
from ppdist.metrics.run import Run
from ppdist.viz import draw, plots
from ppdist.viz.run_plots import METRICS, draw_run, validation_folders

OF_METRICS = ["results.png"]
OF_EVALUATION = ["confusion.png", "pr_curve.png", "worst.jpg", "best.jpg"]
NAMES = ("cat", "_$odd$ <name>", "红细胞", *(f"class {number}" for number in range(3, 500)))


pytestmark = pytest.mark.usefixtures("no_warning")


def trained(steps: int) -> list[dict]:
    """Records of a run of ten steps an epoch, evaluated after each."""
    records: list[dict] = [{"step": 0, "derived": {"warmup_steps": {"value": 20, "why": "so"}}}]
    for step in range(2, steps + 1, 2):
        loss = 1 + 2 * math.exp(-step / 100)
        record = {"step": step, "epoch": step / 10, "loss": loss, "loss_box": loss / 2}
        record |= {"lr": 0.01 * min(1, step / 20), "gradient_norm": 5.0}
        record |= {"images_per_second": 40.0, "data_seconds": 0.01, "step_seconds": 0.4}
        records.append(record)
        if step % 10 == 0:
            score = step / steps / 2
            record = {"step": step, "epoch": step / 10, "mAP": score, "mAP50": 1.5 * score}
            record |= {"mAP_large": -1.0, "val_loss": loss + 0.1, "eval_seconds": 1.0}
            records.append(record)
    return records


def detected(folder: Path, classes: int, images: int = 6) -> dict:
    """evaluation.json of random detections in images that are there."""
    rng = np.random.RandomState(0)
    folder.mkdir(parents=True, exist_ok=True)
    records, rows = [], []
    for index in range(images):
        path = folder / f"{index}.png"
        cv2.imwrite(str(path), rng.randint(0, 255, (120, 160, 3)).astype(np.uint8))
        low_M2 = rng.uniform(0, 80, (2 + classes, 2))
        boxes_M4 = np.concatenate([low_M2, low_M2 + 30], 1).astype(np.float32)
        labels_M = rng.permutation(2 + classes) % classes
        crowd_M, area_M = np.zeros(len(labels_M), bool), np.full(len(labels_M), 900, np.float32)
        records.append(
            ImageRecord(str(path), index + 1, 160, 120, boxes_M4, labels_M, crowd_M, area_M)
        )
        moved_M4 = boxes_M4 + rng.uniform(0, 15, (len(labels_M), 1))
        rows.append(
            np.column_stack(
                [np.full(len(labels_M), index), labels_M, rng.rand(len(labels_M)), moved_M4]
            )
        )
    dataset = DetectionSet(records, NAMES[:classes], tuple(range(classes)), "made")
    return analyse(dataset, np.concatenate(rows).astype(np.float32), step=100)


def write(folder: Path, records: list[dict] | None = None, evaluation: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if records is not None:
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / "metrics.jsonl").write_text("".join(lines))
    if evaluation is not None:
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def run_of(records: list[dict], metric: str = "") -> Run:
    run = Run(Path(), config={"evaluate.metric": metric})
    run.add_records(records)
    return run


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


@pytest.mark.parametrize(
    "classes", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 80))]
)
def test_every_picture_of_a_run_shows_something(tmp_path, classes):
    run = write(tmp_path / "$run_", trained(400), detected(tmp_path / "images", classes))
    paths = draw_run(run, image_folders=[tmp_path])
    assert names(paths) == OF_METRICS + OF_EVALUATION
    assert {path.parent for path in paths} == {run / "plots"}
    for path in paths:
        with Image.open(path) as image:
            assert min(image.size) > 150 and max(image.size) < 5000
            assert len(np.unique(np.asarray(image.convert("L")))) > 20


def test_a_run_without_evaluation_has_its_curves_alone(tmp_path):
    records = [each for each in trained(40) if "mAP" not in each]
    assert names(draw_run(write(tmp_path, records))) == OF_METRICS


def test_an_empty_folder_gives_no_picture(tmp_path, caplog):
    assert draw_run(tmp_path) == []
    assert not caplog.records
    (tmp_path / "file").write_text("")
    assert draw_run(tmp_path / "file") == []
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_a_classifier_has_no_background(tmp_path):
    rows = [{"name": name, "images": 5, "top1": 0.5, "top5": 1.0} for name in NAMES[:3]]
    found = {"step": 1, "images": 15, "class_names": NAMES[:3], "metrics": {"top1": 0.5}}
    found |= {"per_class": rows, "confusion": {"counts": np.full((3, 3), 5).tolist()}}
    records = [{**each, "top1": 0.5, "top5": 1.0} for each in trained(40) if "mAP" in each]
    paths = draw_run(write(tmp_path, [*trained(40), *records], found))
    assert names(paths) == [*OF_METRICS, "confusion.png"]
    labels = [text.get_text() for text in plots.confusion(found).axes[0].get_xticklabels()]
    assert len(labels) == 3


def test_the_matrix_has_shares_of_rows_and_counts():
    found = {"class_names": ["a"], "confusion": {"iou": 0.5, "confidence": 0.3}}
    found["confusion"]["counts"] = [[30, 10], [1234, 0]]
    shares, counts = plots.confusion(found).axes
    assert [text.get_text() for text in shares.texts] == ["75", "25"]
    assert [text.get_text() for text in counts.texts] == ["30", "10", "1k"]


def test_the_diagonal_of_the_matrix_is_the_recall():
    """Of 83 objects 38 are found; a detection that is extra is a share of nothing."""
    found = {"class_names": ["a", "b"], "per_class": [{"objects": 83}, {"objects": 0}]}
    found["confusion"] = {"counts": [[38, 27, 18], [0, 0, 0], [0, 5, 0]]}
    shares, counts = plots.confusion(found).axes
    assert [text.get_text() for text in shares.texts] == ["46", "33", "22"]
    names = [text.get_text() for text in counts.get_yticklabels()]
    assert names[-1] == EXTRA and counts.texts[-1].get_text() == "5"


def test_a_matrix_of_an_earlier_version_says_that_objects_count_twice():
    found = {"class_names": ["a", "b"], "per_class": [{"objects": 83}, {"objects": 5}]}
    for counts, twice in ([[38, 27, 18], [0, 4, 1]], False), ([[38, 27, 43], [0, 4, 1]], True):
        found["confusion"] = {"counts": [*counts, [0, 5, 0]]}
        assert counts_objects_twice(found) is twice
        assert ("earlier version" in plots.confusion(found).axes[0].get_title()) is twice


@pytest.mark.parametrize(("classes", "drawn"), [(3, 3), (120, 40)])
def test_of_many_classes_the_most_confused_are_drawn(classes, drawn):
    """Of 1300; a field of all would be smaller than a pixel."""
    cells = [[at, at, 5] for at in range(classes)] + [[at, 1300, at] for at in range(1, classes)]
    counts = [0] * 1301
    for row, _, count in cells:
        counts[row] += count
    found = {
        "class_names": [f"class {at}" for at in range(1300)],
        "confusion": {"cells": cells, "true_counts": counts},
    }
    if classes == 120:  # what is taken for another class comes before what is missed
        cells.append([0, 1250, 1])
        counts[0] += 1
    figure = plots.confusion(found)
    shares = figure.axes[0]
    down, across = (
        [text.get_text() for text in labels]
        for labels in (shares.get_yticklabels(), shares.get_xticklabels())
    )
    assert len(down) == drawn and across == [*down, "(others)", MISSED]
    assert down[0] == "class 0" and down[1] == ("class 1" if classes == 3 else "class 82")
    assert f"{drawn} of 1300 classes" in figure.get_suptitle()
    assert len(shares.texts) > drawn


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("apple \N{RED APPLE}", "apple"),
        ("\U0001f469\U0001f3fd\u200d\U0001f680 pilot \u2708\ufe0f one", "pilot one"),
        ("\N{RED APPLE}", "#3"),
        ("Größe", "Größe"),
        ("apple", "apple"),
    ],
)
def test_an_emoji_alone_is_left_out_of_a_name(monkeypatch, name, shown):
    """Where no font has it."""
    monkeypatch.setattr(draw, "_find_font", lambda text: text.replace(" ", "").isalpha() or None)
    assert draw.readable(name, 3) == shown
    monkeypatch.setattr(plots, "_in_fonts", lambda text: text.replace(" ", "").isalpha())
    assert plots.drawable(name, 3) == shown


def test_the_best_evaluation_is_marked():
    figure = plots.results(run_of(trained(100)), "run")
    panel = next(axes for axes in figure.axes if axes.get_title() == "mean average precision")
    assert "best mAP: 0.500" in [text.get_text() for text in panel.get_legend().get_texts()]
    assert panel.lines[-1].get_xdata() == [10.0]
    shown = [line.get_label() for axes in figure.axes for line in axes.lines]
    assert "mAP_large" not in shown, "-1 is nothing to measure"
    loss = next(axes for axes in figure.axes if axes.get_title() == "loss")
    assert {"training", "validation"} <= {line.get_label() for line in loss.lines}


@pytest.mark.parametrize(
    ("metric", "label", "at"),
    [("", "best mAP: 0.500", 10.0), ("mAP50", "best mAP50: 0.900", 3.0),
     ("fitness", "best 0.1 mAP50 + 0.9 mAP: 0.700", 2.0), ("top1", "best mAP: 0.500", 10.0)],
)  # fmt: skip
def test_the_best_is_by_the_configured_metric(tmp_path, metric, label, at):
    records = [{**each, "fitness": 0.1} if "mAP" in each else each for each in trained(100)]
    scored = [each for each in records if "mAP" in each]
    scored[2]["mAP50"], scored[1]["fitness"] = 0.9, 0.7
    figure = plots.results(run_of(records, metric), "run")
    panel = next(axes for axes in figure.axes if axes.get_title() == "mean average precision")
    assert label in [text.get_text() for text in panel.get_legend().get_texts()]
    assert panel.lines[-1].get_xdata() == [at]


ODD_LINES = [
    "null\n[1, 2]\n3",
    '{"loss": 1, "lr": 2}',
    '{"step": "x", "loss": 1, "lr": 1}',
    '{"step": 1, "epoch": null, "loss": null, "lr": null, "gradient_norm": "much"}',
    '{"step": 1, "mAP": null, "epoch": 1}\n{"step": 2, "top1": [], "finished": {}}',
    '{"step": 1, "derived": []}\n{"step": 1, "derived": {"warmup_steps": 3}}\n\x00\xff',
    '{"step": 3, "los',
]


@pytest.mark.parametrize(
    "lines",
    ["\n".join(ODD_LINES), *(pytest.param(each, marks=pytest.mark.slow) for each in ODD_LINES)],
)
def test_odd_lines_of_metrics_cost_no_other_picture(tmp_path, lines, caplog):
    write(tmp_path, trained(40))
    with (tmp_path / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write(lines)
    assert names(draw_run(tmp_path)) == OF_METRICS
    assert not caplog.records
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="latin-1")
    draw_run(tmp_path)
    assert not caplog.records


def test_a_broken_part_costs_its_picture(tmp_path, caplog):
    found = {**detected(tmp_path, 2), "confusion": {"counts": "many"}, "worst": [3]}
    paths = draw_run(write(tmp_path, None, found), image_folders=[tmp_path])
    missing = {"confusion.png", "worst.jpg"}
    assert set(names(paths)) == set(OF_EVALUATION) - missing
    (warning,) = caplog.records
    assert all(name in warning.getMessage() for name in ("confusion", "worst"))
    caplog.clear()
    assert draw_run(tmp_path, image_folders=[tmp_path], files=(METRICS,)) == []
    assert not caplog.records, "it is not drawn"


@pytest.mark.parametrize(
    "text",
    [
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("", "[]", "{", "\x00", '{"class_names": 3}')
        ),
        "[" * 100_000,
    ],
)
def test_an_evaluation_cut_short_is_one_warning(tmp_path, text, caplog):
    (write(tmp_path, trained(40)) / "evaluation.json").write_text(text)
    assert names(draw_run(tmp_path)) == OF_METRICS
    (warning,) = caplog.records
    assert "evaluation.json" in warning.getMessage()


@pytest.mark.slow
def test_torn_metrics_cost_no_evaluation_plot(tmp_path, caplog):
    run = write(tmp_path, None, detected(tmp_path, 2))
    (run / "metrics.jsonl").mkdir()
    assert names(draw_run(run, image_folders=[tmp_path])) == OF_EVALUATION
    (warning,) = caplog.records
    assert "metrics.jsonl cannot be" in warning.getMessage()


def test_without_matplotlib_there_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "ppdist.viz.plots")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delattr("ppdist.viz.plots")
    assert draw_run(write(tmp_path, trained(40))) == []
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING and "could not draw" in warning.getMessage()


@pytest.mark.slow
def test_images_that_are_gone_or_elsewhere(tmp_path):
    found = detected(tmp_path / "data" / "images", 2)
    for entry in found["worst"]:
        entry["file"] = Path(entry["file"]).name
    for entry in found["best"]:
        entry["file"] = f"/nowhere/{entry['file']}\x00"
    run = write(tmp_path / "run", None, found)
    root = json.dumps(str(tmp_path / "data"))
    (run / "config.yml").write_text(f"data: {{root: {root}, val: {{images: images}}}}\n")
    assert [path for path in names(draw_run(run)) if path.endswith("jpg")] == ["worst.jpg"]
    (run / "config.yml").write_text("[")
    assert "worst.jpg" not in names(draw_run(run))


def test_images_that_lie_outside_the_set_are_not_shown(tmp_path):
    for folder in ("data/images", "private"):
        (tmp_path / folder).mkdir(parents=True)
        cv2.imwrite(str(tmp_path / folder / "a.png"), np.full((9, 9, 3), 90, np.uint8))
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "private")
    folders = validation_folders({"data.root": f"{tmp_path}/data", "data.val.images": "images"})
    for file, shown in {
        "a.png": True,
        f"{tmp_path}/data/images/a.png": True,
        "linked/a.png": True,
        f"{tmp_path}/private/a.png": False,
        f"{tmp_path}/data/../private/a.png": False,
        "../private/a.png": False,
        "../../private/a.png": False,
    }.items():
        entry = {"file": file, "objects": 1, "found": 1, "missed": 0, "wrong": 0}
        assert (plots.mosaic([entry], ["a"], folders) is not None) == shown, file
    assert validation_folders({"data": 3}) == validation_folders({"data.root": [1]}) == []


def test_long_images_have_tiles_of_bounded_size(tmp_path):
    entry = {"objects": 1, "found": 0, "missed": 1, "wrong": 0, "true": [[0, 1, 1, 9, 9, False]]}
    for height, width in ((4000, 6), (6, 4000), (1, 1)):
        cv2.imwrite(str(tmp_path / "a.png"), np.full((height, width, 3), 90, np.uint8))
        picture = plots.mosaic([{**entry, "file": "a.png"}] * 12, ["a"], [tmp_path])
        assert picture.shape[0] < 3250 and picture.shape[1] == 4 * 480 + 3 * 6


def test_curves_of_many_classes_are_one_bundle(tmp_path):
    for classes, shown in ((3, 4), (60, 2 + 8)):  # of many, the weakest are named
        figure = plots.pr_curve(detected(tmp_path, classes))
        assert len(figure.axes[0].get_legend().get_texts()) == shown


def test_a_set_without_detections_is_drawn(tmp_path):
    nothing = analyse(DetectionSet([], NAMES[:2], (0, 1), "none"), np.zeros((0, 7), np.float32))
    draw_run(write(tmp_path, None, nothing))
