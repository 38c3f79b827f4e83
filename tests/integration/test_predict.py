"""ppdist predict: several sources, formats, slices, tracks, standard input."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from ppdist.cli import predict
from ppdist.common.manifest import CARD_NOTE
from ppdist.config.experiment import load_config
from ppdist.models.model_card import card_of
from ppdist.models.weights import write_arrays
from ppdist.predict import sources
from tests.errors import raises
from tests.media import assert_usable_by_pycocotools, picture, write_video
from tests.unit.export.tiny import tiny_classifier, tiny_model

CONFIG = """
data: {root: nowhere, train: {}, val: {}}
model: {name: ppyoloe, width_multiple: 0.125, depth_multiple: 0.33, num_classes: 3,
        image_size: [64, 96]}
nms: {score_threshold: 0.3}
"""
CLASSES = """
data: {format: folder, root: nowhere, train: {}, val: {}}
model: {name: yolov5_cls, width_multiple: 0.125, depth_multiple: 0.33, num_classes: 7,
        image_size: [64, 96]}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """w.npz and classes.npz with their cards, one/, two/ and film.avi."""
    folder = tmp_path_factory.mktemp("project")
    for text, model, file, names in (
        (CONFIG, tiny_model(), "w.npz", ("person", "bus", "cat")),
        (CLASSES, tiny_classifier(), "classes.npz", tuple("abcdefg")),
    ):
        (folder / "cfg.yml").write_text(text, encoding="utf-8")
        arrays = {key: value.numpy() for key, value in model.state_dict().items()}
        card = card_of(load_config(folder / "cfg.yml"), model, names, range(1, len(names) + 1))
        write_arrays(folder / file, arrays, {CARD_NOTE: card.text()})
    for number, name in enumerate(("one/a.jpg", "one/deep/b.png", "two/a.jpg")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / name), picture(96, 128, number))
    write_video(folder / "film.avi", 3)
    return folder


@pytest.fixture
def run(project: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The command in this process, in the folder of the project."""

    def run(*arguments: object, weights: str = "w.npz") -> None:
        monkeypatch.chdir(project)
        monkeypatch.setattr(sys, "argv", [*map(str, ("predict", "-w", weights, *arguments))])
        assert predict.main() == 0

    return run


def written(out: Path) -> set[str]:
    return {str(file.relative_to(out)) for file in out.rglob("*.*")}


def test_several_sources_give_one_set_of_results(run, tmp_path, capsys) -> None:
    sources = ["one", "two/*.jpg", "film.avi", "one/a.jpg"]
    run("--source", *sources, "--out", tmp_path / "o",
        "--threshold", 0.31, "--batch", 2)  # fmt: skip
    assert written(tmp_path / "o") == {
        "a.jpg", "deep/b.png", "a_2.jpg", "film.mp4", "detections.json",
    }  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    names = [line.partition(":")[0] for line in lines[:4]]
    assert names == ["a.jpg", "deep/b.png", "a_2.jpg", "film.avi"]
    found = json.loads((tmp_path / "o/detections.json").read_text(encoding="utf-8"))
    assert len(found["images"]) == 6 and found["images"][5]["frame"] == 2
    assert found["categories"][1] == {"id": 2, "name": "bus"}
    first = [one["category_id"] for one in found["annotations"] if one["image_id"] == 1]
    assert first and lines[0].split(": ")[1].startswith(f"{max(map(first.count, first))} ")
    run("--source", *sources, "--out", tmp_path / "p",
        "--threshold", 0.31, "--classes", "bus", "2", "--iou", 0.1)  # fmt: skip
    fewer = json.loads((tmp_path / "p/detections.json").read_text(encoding="utf-8"))
    assert {one["category_id"] for one in fewer["annotations"]} <= {2, 3}
    assert len(fewer["annotations"]) < len(found["annotations"])
    assert_usable_by_pycocotools(tmp_path / "o/detections.json")


def test_formats_are_written_without_pictures(run, tmp_path) -> None:
    out = tmp_path / "o"
    options = ["--format", "yolo,voc,csv", "--no-pictures", "--threshold", 0.31]
    run("--source", "one/a.jpg", "--out", out, *options)
    assert written(out) == {
        "detections.json", "detections.csv", "labels/a.txt", "labels/classes.txt",
        "annotations/a.xml",
    }  # fmt: skip
    run("--source", "one/a.jpg", "--out", out, *options)  # its own: again
    other = tmp_path / "other"
    (other / "labels").mkdir(parents=True)
    with raises("out_not_ours"):
        run("--source", "one/a.jpg", "--out", other, *options)


@pytest.mark.parametrize("what", ["w.npz", "yolov5n_coco", "run"])
def test_weights_as_a_model_are_told_from_an_export(project, tmp_path, monkeypatch, what) -> None:
    monkeypatch.chdir(project)
    checkpoint = project / "run/checkpoints/step-00000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "manifest.json").write_text("{}")
    monkeypatch.setattr(
        sys, "argv", ["predict", "--model", what, "--source", "one", "--out", str(tmp_path / "o")]
    )
    with raises("weights_not_export", str(what)):
        predict.main()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--source one --out o --format coco,pdf", "option_invalid"),
        ("--source one --out o --overlap 0.5", "option_missing"),
        ("--source one --out o --overlap 1 --slice 64", "option_invalid"),
        ("--source one --out o --track", "options_conflict"),
        ("--source one/deep/*.png --out one/deep", "out_holds_source"),
        ("--source one nothing/*.png --out o", "no_images"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(run, arguments, code) -> None:
    with raises(code):
        run(*arguments.split())


def test_an_image_on_standard_input(run, project, tmp_path, monkeypatch) -> None:
    class Stdin:
        buffer = io.BytesIO((project / "one/a.jpg").read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin())
    run("--source", "-", "--out", tmp_path / "o")
    assert written(tmp_path / "o") == {"stdin.jpg", "detections.json"}


def test_slices_of_a_large_image(run, tmp_path) -> None:
    cv2.imwrite(str(tmp_path / "large.png"), picture(200, 300))
    counts = []
    for out, options in (("whole", []), ("sliced", ["--slice", 128, "--overlap", 0.1])):
        run("--source", tmp_path / "large.png", "--out", tmp_path / out,
            "--threshold", 0.31, *options)  # fmt: skip
        found = json.loads((tmp_path / out / "detections.json").read_text(encoding="utf-8"))
        counts.append(len(found["annotations"]))
    assert counts[1] > counts[0]


def test_ctrl_c_keeps_what_was_found_so_far(run, project, tmp_path, monkeypatch, capsys) -> None:
    frames_of = sources.frames_of

    def pressed(source, complain):
        if source.name.endswith("b.png"):
            raise KeyboardInterrupt
        yield from frames_of(source, complain)

    monkeypatch.setattr(sources, "frames_of", pressed)
    monkeypatch.chdir(project)
    for images, code in (("one", 130), ("one/deep", None)):
        out = tmp_path / images
        words = ["predict", "-w", "w.npz", "--source", images, "--out", out, "--batch", 1]
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        if code is None:  # nothing was found yet
            with pytest.raises(KeyboardInterrupt):
                predict.main()
            continue
        assert predict.main() == code
        content = json.loads((out / "detections.json").read_text())
        assert [image["file_name"] for image in content["images"]] == ["a.jpg"]


def test_tracks_go_through_a_video(run, tmp_path, capsys) -> None:
    pytest.importorskip("trackers", reason="needs trackers: pip install 'ppdist[track]'")
    frames = [picture(96, 128)] * 4
    video = cv2.VideoWriter(
        str(tmp_path / "still.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10, (128, 96)
    )
    for frame in frames:
        video.write(frame)
    video.release()
    run("--source", tmp_path / "still.avi", "--out", tmp_path / "o",
        "--track", "--threshold", 0.31)  # fmt: skip
    found = json.loads((tmp_path / "o/detections.json").read_text(encoding="utf-8"))
    tracks: dict[int, list[int]] = {}
    for one in found["annotations"]:
        tracks.setdefault(one.get("track_id", -1), []).append(one["image_id"])
    assert 1 in tracks.pop(-1)  # from its second frame on, and where it is sure enough
    assert tracks and all(images == [2, 3, 4] for images in tracks.values())
    assert "followed through 4 frames" in capsys.readouterr().out


def test_tracking_without_its_package_is_told(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "trackers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises("package_missing"):
        run("--source", "film.avi", "--out", tmp_path / "o", "--track")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "options", [["--threshold", "0.4"], ["--slice", "64"], ["--track"], ["--format", "yolo"]]
)
def test_a_classifier_has_no_boxes(run, tmp_path, options) -> None:
    if options == ["--track"]:
        pytest.importorskip("trackers", reason="needs trackers")
    with raises("options_conflict"):
        run("--source", "one", "--out", tmp_path / "o", *options,
            weights="classes.npz")  # fmt: skip
    assert not (tmp_path / "o").exists()


def test_a_classifier_tells_its_best_classes(run, tmp_path, capsys) -> None:
    run("--source", "one", "film.avi", "--out", tmp_path / "o",
        weights="classes.npz")  # fmt: skip
    assert "classes.json" in written(tmp_path / "o")
    out = capsys.readouterr().out
    assert "film.avi: of 3 frames" in out and "of 5 images" in out


def test_a_pattern_reads_no_earlier_results(run, project, tmp_path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p/a.jpg").write_bytes((project / "one/a.jpg").read_bytes())
    for _ in range(2):
        run("--source", tmp_path / "p/**/*.jpg", "--out", tmp_path / "p/o")
        found = json.loads((tmp_path / "p/o/detections.json").read_text(encoding="utf-8"))
        assert [image["file_name"] for image in found["images"]] == ["a.jpg"]
    assert np.array_equal(cv2.imread(str(tmp_path / "p/a.jpg")),
                          cv2.imread(str(project / "one/a.jpg")))  # fmt: skip
