"""The tools on a classifier: check, stats, train, eval, export, infer, each as a user runs it."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from ppdist.export.spec import read_spec
from tests.forked import run_here, run_tool, succeeded
from tests.media import write_video
from tests.unit.data.classified import CONFIG, PATTERNS, write_patterns

pytestmark = pytest.mark.slow


def succeed(name: str, *arguments: object) -> str:
    return succeeded(run_tool(name, *arguments))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cfg.yml, the images of both splits, and run/ of a training that learned something."""
    folder = tmp_path_factory.mktemp("project")
    write_patterns(folder / "train", 16, seed=0)
    write_patterns(folder / "val", 3, seed=1)
    (folder / "cfg.yml").write_text(CONFIG.format(root=folder), encoding="utf-8")
    succeed("train", "-c", folder / "cfg.yml", "-o", f"output_dir={folder}/run")
    return folder


@pytest.fixture(scope="module")
def exported(project: Path) -> Path:
    out = project / "exported"
    said = succeed("export", "-c", project / "cfg.yml", "-w", weights(project), "--out", out)
    assert "paddle: equals eager: probabilities within" in said and "boxes" not in said
    return out


def weights(project: Path) -> Path:
    return project / "run" / "checkpoints" / "last"


def test_eval_accuracy_matches_written_classes(project: Path, tmp_path: Path) -> None:
    succeed("eval", "-c", project / "cfg.yml", "-w", weights(project),
            "--json", tmp_path / "metrics.json", "--save-detections", tmp_path / "best.json",
            "--out", tmp_path / "out", "--at-least", "top5=0.99")  # fmt: skip
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    entries = json.loads((tmp_path / "best.json").read_text(encoding="utf-8"))
    assert [Path(entry["file_name"]).parent.name for entry in entries] == [
        name for name in PATTERNS for _ in range(3)
    ]
    right = [entry["best"][0]["name"] == entry["true"] for entry in entries]
    assert metrics == {
        "top1": pytest.approx(np.mean(right)), "top5": 1.0, "images": len(entries), "limit": None,
        "split": "val", "left_out": [],
    }  # fmt: skip
    assert metrics["top1"] >= 0.7  # by chance a third
    scores = {tuple(kind["score"] for kind in entry["best"]) for entry in entries}
    assert len(scores) == len(entries), "images make no difference"
    for entry in entries:
        assert sum(kind["score"] for kind in entry["best"]) == pytest.approx(1, abs=1e-4)
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in content["per_class"]] == list(PATTERNS)
    assert sum(map(sum, content["confusion"]["counts"])) == len(entries)
    assert json.loads((tmp_path / "out" / "detections.json").read_text()) == entries


def test_eager_and_export_write_same_classes(project: Path, exported: Path, tmp_path: Path) -> None:
    spec = read_spec(exported)
    assert (spec.task, spec.class_names, spec.category_ids) == ("classify", PATTERNS, (0, 1, 2))
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "a.png").write_bytes((project / "val" / "dots" / "000.png").read_bytes())
    (photos / "broken.jpg").write_bytes(b"no image")
    write_video(photos / "film.avi", 3)
    found = {}
    for name, model in (
        ("eager", ("-c", project / "cfg.yml", "-w", weights(project))),
        ("export", ("--model", exported)),
    ):
        done = run_tool("infer", *model, "--source", photos, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert "broken.jpg: " in done.stderr and "skipped" in done.stderr
        assert "of 3 frames" in done.stdout and "of 4 images" in done.stdout
        text = (tmp_path / name / "classes.json").read_text(encoding="utf-8")
        found[name] = json.loads(text)
        picture, photo = (cv2.imread(str(each / "a.png")) for each in (tmp_path / name, photos))
        enlarged = cv2.resize(photo, picture.shape[1::-1], interpolation=cv2.INTER_CUBIC)
        assert max(picture.shape) >= 480 and (picture[:20] != enlarged[:20]).any()
    assert found["eager"]["categories"][1] == {"id": 1, "name": "dots"}
    assert [image["file_name"] for image in found["eager"]["images"]] == ["a.png"] + 3 * [
        "film.avi"
    ]
    for one, other in zip(found["eager"]["images"], found["export"]["images"], strict=True):
        assert [kind["name"] for kind in one["best"]] == [kind["name"] for kind in other["best"]]
        for kind, same in zip(one["best"], other["best"]):
            assert kind["score"] == pytest.approx(same["score"], abs=2e-4)


def test_export_without_data_set_takes_names_file(project: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("one\ntwo\nthree\n", encoding="utf-8")
    done = run_tool("export", "-c", project / "cfg.yml", "-w", weights(project),
                    "--out", tmp_path / "out", "--class-names", tmp_path / "names.txt",
                    "-o", "data.root=/nowhere")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "/nowhere" in done.stderr
    spec = read_spec(tmp_path / "out")
    assert (spec.class_names, spec.category_ids) == (("one", "two", "three"), (0, 1, 2))


def refused(tool: str, *arguments: object) -> str:
    """What a tool says on stderr when it ends with 2, having done nothing."""
    done = run_here(tool, *arguments)
    assert done.returncode == 2 and not done.stdout
    return done.stderr


def test_what_only_boxes_have_is_refused(project: Path, exported: Path, tmp_path) -> None:
    eager = ("-c", project / "cfg.yml", "-w", weights(project), "--out", tmp_path / "out")
    looking = ("--source", project / "val", "--threshold", 0.3)
    for words in (
        ("infer", *eager, *looking),
        ("infer", "--model", exported, "--out", tmp_path / "out", *looking),
        ("export", *eager, "--without-nms"),
    ):
        assert "only applies to detectors" in refused(*words)
    assert not (tmp_path / "out").exists()


def test_a_file_of_class_names_is_read_with_care(project: Path, tmp_path) -> None:
    eager = ("-c", project / "cfg.yml", "-w", weights(project), "--out", tmp_path / "out")
    names = tmp_path / "names.txt"
    for content, message in (
        (b"one\ntwo\none\n", f"{names}: class 'one'"),
        ("Käse\n".encode("latin-1"), f"{names}: not UTF-8"),
        (b"one\n", "[class_names_count]"),
    ):
        names.write_bytes(content)
        assert message in refused("export", *eager, "--class-names", names)
    assert not (tmp_path / "out").exists()


def test_eval_refuses_bad_options_before_evaluating(project: Path, tmp_path) -> None:
    eager = ("-c", project / "cfg.yml", "-w", weights(project))
    (tmp_path / "file").touch()
    for option, value, message in (
        ("--at-least", "mAP=0.5", "[unknown_metric]"),
        ("--json", "/dev/null/x.json", "/dev/null: "),
        ("--out", tmp_path / "file", "[folder_expected]"),
        ("--save-detections", tmp_path, f"{tmp_path}: "),
    ):
        assert message in refused("eval", *eager, option, value)
