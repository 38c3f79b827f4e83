"""What tools/infer.py refuses, whose classes it names, and the pictures it reads and writes."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from ppdist.cli import predict
from ppdist.common.manifest import CARD_NOTE
from ppdist.common.process import printable
from ppdist.config.experiment import load_config
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.export.spec import describe, validation_set
from ppdist.models.model_card import ModelCard
from ppdist.models.weights import write_arrays
from ppdist.predict.model import load_weights
from ppdist.predict.results import (
    Pictures,
    picture_names,
    require_no_foreign_files,
)
from ppdist.predict.sources import Frame, Source, frames_of
from tests.errors import raises
from tests.ports import free_port
from tests.project import TINY_PPYOLOE, write_config
from tests.unit.export.tiny import tiny_model


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cfg.yml, weights.npz, data/, and a folder `photos` of a sound and a broken image."""
    folder = tmp_path_factory.mktemp("project")
    make_shapes(folder / "data", train=1, val=1, size=128)
    write_config(folder, "model: {image_size: [64, 96]}\nnms: {score_threshold: 0.3}", TINY_PPYOLOE)
    state = tiny_model().state_dict()
    np.savez(folder / "weights.npz", **{key: value.numpy() for key, value in state.items()})

    photos = folder / "photos"
    photos.mkdir()
    image = next((folder / "data/images/val").iterdir())
    (photos / "one.jpg").write_bytes(image.read_bytes())
    (photos / "broken.jpg").write_bytes(b"no image at all")
    return folder


def call_infer(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["infer.py", *map(str, arguments)])
    predict.main()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--source nowhere --out o -w x", "source_not_found"),
        ("--source . --out .", "out_holds_source"),
        ("--source a.md --out o", "not_a_picture"),
        ("--source empty --out o", "no_images"),
        ("--source . --out theirs", "out_not_ours"),
        ("--source a.jpg --out o", "option_missing"),
        ("--source a.jpg --out o --threshold 50", "option_invalid"),
        ("--source a.jpg --out o --model m -w x", "options_conflict"),
        ("--source a.jpg --out o --model empty", "not_an_export"),
        ("--source a.jpg --out o --model absent", "not_an_export"),
        ("--source a.jpg --out o --model a.pdparams", "weights_not_export"),
        ("--source a.jpg --out o --model yolov5n_coco", "weights_not_export"),
        ("--source a.jpg --out o -c c -w x --threads 2", "options_conflict"),
        ("--source a.jpg --out o --model m --threads 0", "option_invalid"),
        ("--source a.jpg --out o -c c -w x --int8", "options_conflict"),
        ("--source a.jpg --out o --model m --int8 --backend paddle", "options_conflict"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "theirs"):
        (tmp_path / name).mkdir()
    for name in ("a.md", "a.jpg", "theirs/b.jpg"):
        (tmp_path / name).touch()
    with raises(code):
        call_infer(monkeypatch, *arguments.split())


def test_a_source_without_one_readable_image_is_an_error(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    source = project / "photos" / "broken.jpg"
    with raises("no_good_image", "broken.jpg"):
        call_infer(monkeypatch, "-c", project / "cfg.yml", "-w", project / "weights.npz",
                   "--source", source, "--out", tmp_path / "out")  # fmt: skip
    assert "broken.jpg" in capsys.readouterr().err


def test_results_that_cannot_be_written_are_one_message(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises("file_unwritable", "/dev/null/x", "Not a directory"):
        call_infer(monkeypatch, "-c", project / "cfg.yml", "-w", project / "weights.npz",
                   "--source", project / "photos" / "one.jpg", "--out", "/dev/null/x")  # fmt: skip


OURS = '{"info": {"description": "found by ppdist predict", "files": ["more/one.jpg"]}}'


def test_a_strangers_picture_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "album"
    require_no_foreign_files(out, ["one.jpg"])
    (out / "more").mkdir(parents=True)
    (out / "more" / "one.jpg").write_text("a holiday", encoding="utf-8")
    require_no_foreign_files(out, ["one.jpg"])
    with raises("out_not_ours"):
        require_no_foreign_files(out, ["zero.jpg", "more/one.jpg"])
    (out / "detections.json").write_text('{"images": [], "annotations": []}')  # somebody else's
    with raises("out_not_ours"):
        require_no_foreign_files(out, ["more/one.jpg"])
    (out / "detections.json").write_text(OURS)
    require_no_foreign_files(out, ["more/one.jpg", "detections.json"])
    (out / "two.jpg").touch()  # put there since
    with raises("out_not_ours", "two.jpg"):
        require_no_foreign_files(out, ["more/one.jpg", "two.jpg"])


def test_classes_of_weights_are_those_of_the_data_by_name(project: Path, tmp_path: Path) -> None:
    config, image = load_config(project / "cfg.yml"), np.zeros((64, 96, 3), np.uint8)
    found = {}
    for order in (("circle", "square", "triangle"), ("triangle", "circle", "square")):
        file, card = tmp_path / f"{order[0]}.npz", ModelCard(class_names=order)
        arrays = dict(np.load(project / "weights.npz"))
        arrays["yolo_head.pred_cls.0.bias"] = np.array([2, 1, 0], np.float32)
        write_arrays(file, arrays, {CARD_NOTE: card.text()})
        warnings: list[str] = []
        loaded = load_weights(config, file, warnings.append)
        (rows_R6,) = loaded.predictor([image])
        best = loaded.spec.class_names[int(rows_R6[0, 0])]
        found[order[0]] = (best, [text for text in warnings if "by name" in text])
    assert found["circle"] == ("circle", [])
    best, notes = found["triangle"]
    assert best == "triangle" and len(notes) == 1


def test_missing_data_set_numbers_classes_and_warns(project: Path) -> None:
    config = load_config(project / "cfg.yml", ["data.root=/nowhere"])
    warnings: list[str] = []
    spec = describe(config, validation_set(config, warnings.append))
    assert spec.class_names == ("class 0", "class 1", "class 2")
    assert len(warnings) == 1 and "made up (class 0" in warnings[0] and "/nowhere" in warnings[0]


def test_unreachable_store_numbers_classes_and_warns(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppdist.common.retry._START_SECONDS", 0.0)
    address = f"data.root=http://127.0.0.1:{free_port()}/set"
    warnings: list[str] = []
    assert validation_set(load_config(project / "cfg.yml", [address]), warnings.append) is None
    assert len(warnings) == 1 and "the connection failed" in warnings[0]


def test_names_and_ids_come_from_annotations_alone(project: Path, tmp_path: Path) -> None:
    file = project / "data/annotations/instances_val.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    for category in content["categories"]:
        category["id"] += 10
    for annotation in content["annotations"]:
        annotation["category_id"] += 10
    (tmp_path / "val.json").write_text(json.dumps(content), encoding="utf-8")
    overrides = [f"data.root={tmp_path}", "data.val.annotations=val.json"]
    overrides += ["data.train.annotations=val.json"]
    config = load_config(project / "cfg.yml", overrides)
    spec = describe(config, validation_set(config, pytest.fail))
    assert spec.class_names == ("circle", "square", "triangle")
    assert spec.category_ids == (11, 12, 13)


@pytest.mark.parametrize("root", ["/nowhere", None])
def test_class_names_of_other_count_are_refused(project: Path, root: str | None) -> None:
    overrides = ["data.class_names=[a,b]"] + ([f"data.root={root}"] if root else [])
    config = load_config(project / "cfg.yml", overrides)
    with raises("class_names_count"):
        describe(config, validation_set(config, lambda text: None))


def test_non_utf8_name_is_read_written_and_printed(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"caf\xe9.png")
    try:
        source.touch()
    except OSError:
        pytest.skip("this file system wants UTF-8")
    image_HW3 = np.zeros((20, 30, 3), np.uint8)
    Pictures(tmp_path, {source.name: source.name}).write(
        Frame(source.name, None, image_HW3), image_HW3
    )
    (frame,) = frames_of(Source(source, source.name), pytest.fail)
    assert np.array_equal(frame.image_HW3, image_HW3)
    assert printable(source.name) == r"caf\udce9.png"
    film, reports = source.with_suffix(".mp4"), []
    assert list(frames_of(Source(film, "film"), reports.append)) == []
    assert len(reports) == 1 and reports[0].startswith(f"{film}: ") and "UTF-8" in reports[0]


def test_no_two_pictures_have_one_name() -> None:
    names = ["a.avi", "a.jpg", "a.mov", "a.mp4", "b.MP4", "d/a.avi", "d/a.avi.mp4", "d/a.mp4"]
    assert picture_names(names) == [
        "a.avi.mp4", "a.jpg", "a.mov.mp4", "a.mp4", "b.mp4",
        "d/a.avi.mp4.mp4", "d/a.avi.mp4", "d/a.mp4",
    ]  # fmt: skip


def test_a_video_without_frames_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").write_bytes(b"")
    reports: list[str] = []
    assert list(frames_of(Source(tmp_path / "empty.mp4", "empty.mp4"), reports.append)) == []
    assert len(reports) == 1 and reports[0].startswith(f"{tmp_path}/empty.mp4: ")


def test_png_round_trip_keeps_pixels_and_colours(tmp_path: Path) -> None:
    image_HW3 = np.random.default_rng(0).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    Pictures(tmp_path, {"x": "deep/x.png"}).write(Frame("x", None, image_HW3), image_HW3)
    (frame,) = frames_of(Source(tmp_path / "deep" / "x.png", "x.png"), pytest.fail)
    assert np.array_equal(frame.image_HW3, image_HW3) and frame.index is None
