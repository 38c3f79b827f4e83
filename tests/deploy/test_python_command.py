"""deploy/python as a command: images and videos in, what tools/infer.py writes out."""

import csv
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from ppdist.data.image import read_image
from tests.deploy.python_folder import FOLDER, PredictorError, command, pictures, run_file
from tests.media import assert_usable_by_pycocotools, picture, write_video
from tests.unit.data.pictures import broken_animation
from tests.unit.export.tiny import exported_classifier, exported_detector

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_detector(tmp_path_factory)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_classifier(tmp_path_factory)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of every kind, a video, and files that are none."""
    folder = tmp_path_factory.mktemp("source") / "photos"
    (folder / "更多").mkdir(parents=True)
    Image.fromarray(picture(80, 120)).save(folder / "plain.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.fromarray(picture(60, 90, 1)).save(folder / "turned.jpg", exif=exif)
    cv2.imwrite(str(folder / "grey.png"), picture(50, 60, 2)[:, :, 0])
    cv2.imwrite(str(folder / "deep.png"), picture(50, 60, 3).astype(np.uint16) * 257)
    cv2.imwrite(str(folder / "deep.tiff"), picture(50, 60, 4).astype(np.uint16) * 257)
    alpha_HW4 = np.dstack([picture(70, 64, 5), picture(70, 64, 6)[:, :, 0]])
    Image.fromarray(alpha_HW4).save(folder / "更多" / "alpha.png")
    Image.fromarray(picture(64, 64, 8)).save(folder / "更多" / "web.webp", lossless=True)
    Image.fromarray(picture(64, 64, 9)).convert("CMYK").save(folder / "print.jpg")
    whole = (folder / "plain.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "broken.jpg").write_bytes(b"no image at all")
    (folder / "empty.png").touch()
    (folder / "notes.txt").write_text("not a picture", encoding="utf-8")
    write_video(folder / "film.avi", 5)
    return folder


def test_every_kind_of_image_is_read_as_in_training(photos: Path) -> None:
    read = 0
    for file in photos.rglob("*.*"):
        if file.suffix in pictures.IMAGE_SUFFIXES and file.name not in (
            "cut.jpg", "broken.jpg", "empty.png",
        ):  # fmt: skip
            np.testing.assert_array_equal(pictures.read_image(file), read_image(file))
            read += 1
    assert read == 8
    assert pictures.read_image(photos / "turned.jpg").shape == (90, 60, 3)


def test_truncated_files_are_told_from_whole_ones(photos: Path, tmp_path: Path) -> None:
    for name in ("plain.jpg", "turned.jpg", "grey.png", "更多/alpha.png"):
        content = (photos / name).read_bytes()
        for share in (0, 10, len(content) // 2, len(content) - 5):
            (tmp_path / "cut").write_bytes(content[:share])
            with pytest.raises(PredictorError, match=r"is empty|end early"):
                pictures.read_image(tmp_path / "cut")


def test_files_that_kill_or_stop_a_reader_are_refused(tmp_path: Path) -> None:
    (tmp_path / "moving.png").write_bytes(broken_animation())
    assert pictures.read_image(tmp_path / "moving.png").shape == (12, 16, 3)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", 1 << 40)  # it takes up no room
    for name in ("pipe", "zero", "large"):
        with pytest.raises(PredictorError, match="not a file, or too large"):
            pictures.read_image(tmp_path / f"{name}.png")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["predictor.py", *map(str, arguments)])
    return command.main()


def test_find_sources_leaves_out_hidden_folders_and_results(tmp_path: Path) -> None:
    for name in ("b/x.PNG", "a.jpg", "b/c.txt", "out/a.jpg", "b/._x.PNG", ".thumbnails/a.jpg",
                 "b/.ipynb_checkpoints/c/x.png", "d.heic"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    said: list[str] = []
    found = pictures.find_sources(tmp_path, tmp_path / "out", said.append)
    assert found == [tmp_path / "a.jpg", tmp_path / "b" / "x.PNG"]
    assert len(said) == 1 and "1 HEIC" in said[0]


def test_the_command_writes_what_tools_infer_writes(
    exported: Path, photos: Path, tmp_path: Path
) -> None:
    common = ["--model", exported, "--source", photos, "--threshold", 0.35]
    ours = run_file(FOLDER / "predictor.py", *common, "--out", tmp_path / "a", "--batch", 3,
                    "--backend", "paddle", "--csv", cwd=tmp_path)  # fmt: skip
    assert ours.returncode == 0, ours.stderr
    theirs = run_file("tools/infer.py", *common, "--out", tmp_path / "b", "--format", "csv")
    assert theirs.returncode == 0, theirs.stderr
    for name in ("broken.jpg", "cut.jpg", "empty.png"):
        assert f"photos/{name}: " in ours.stderr and name not in ours.stdout
    assert "3 of 12 files could not be read" in ours.stderr
    assert "film.avi: " in ours.stdout and "objects in 5 frames" in ours.stdout
    found, expected = (
        json.loads((tmp_path / out / "detections.json").read_text(encoding="utf-8")) for out in "ab"
    )
    assert found["images"] == expected["images"] and len(found["images"]) == 13
    assert found["categories"] == expected["categories"]
    assert len(found["annotations"]) == len(expected["annotations"]) > 5
    for one, other in zip(found["annotations"], expected["annotations"]):
        assert one.keys() == other.keys()
        assert (one["image_id"], one["category_id"]) == (other["image_id"], other["category_id"])
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)
        assert one["bbox"] == pytest.approx(other["bbox"], abs=0.06)
    assert_usable_by_pycocotools(tmp_path / "a" / "detections.json")
    tables = []
    for out in "ab":
        with (tmp_path / out / "detections.csv").open(encoding="utf-8") as opened:
            tables.append(list(csv.DictReader(opened)))
    lines, expected = tables
    assert len(lines) == len(expected) == len(found["annotations"])
    assert lines[0].keys() == expected[0].keys() and lines[0]["class"] in ("red", "green", "blue")
    written, wanted = (
        sorted(str(file.relative_to(tmp_path / out)) for file in (tmp_path / out).rglob("*.*"))
        for out in "ab"
    )
    assert written == wanted
    assert cv2.VideoCapture(str(tmp_path / "a" / "film.mp4")).get(cv2.CAP_PROP_FRAME_COUNT) == 5
    drawn = cv2.imread(str(tmp_path / "a" / "turned.jpg"))
    assert drawn.shape == (90, 60, 3)


def test_classes_are_written_and_drawing_is_optional(
    classifier: Path, tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    arguments = ["--model", classifier, "--source", photos, "--out", out]
    assert call(monkeypatch, *arguments, "--csv", "--no-pictures") == 0
    assert "the class of 13 images" in capsys.readouterr().out
    found = json.loads((out / "classes.json").read_text(encoding="utf-8"))
    assert all(len(image["best"]) == 5 for image in found["images"])
    assert sorted(file.name for file in out.iterdir()) == ["classes.csv", "classes.json"]
    assert len((out / "classes.csv").read_text(encoding="utf-8").splitlines()) == 1 + 13 * 5
    assert call(monkeypatch, *arguments) == 0
    assert (out / "plain.jpg").is_file() and (out / "film.mp4").is_file()
    assert call(monkeypatch, *arguments, "--threshold", 0.5) == 2
    assert "a classifier has none" in capsys.readouterr().err


def test_odd_file_names_are_escaped_on_terminal(exported: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    names = ["a\x1b[2J\u202e.jpg", os.fsdecode(b"caf\xe9.jpg")]
    film = source / os.fsdecode(b"film\xe9.avi")
    try:
        film.touch()
    except OSError:
        pytest.skip("this file system wants UTF-8")
    for name in names:
        Image.fromarray(picture(40, 60)).save(os.fsencode(source / name), "JPEG")
    done = run_file(FOLDER / "predictor.py", "--model", exported, "--source", source, "--out", out,
                    "--csv")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert r"a\u001b[2J\u202e.jpg: " in done.stdout and r"caf\udce9.jpg: " in done.stdout
    assert r"film\udce9.avi: OpenCV needs a UTF-8 path for a video" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    found = json.loads((out / "detections.json").read_text(encoding="utf-8"))
    assert [image["file_name"] for image in found["images"]] == names
    assert all(pictures.read_image(out / name).shape == (40, 60, 3) for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "nowhere", "--out", "o"], "nowhere: no such image, folder or video"),
        (["--source", ".", "--out", "."], "--out .: the pictures of --source are there"),
        (["--source", "theirs", "--out", "."], "--out .: the pictures of --source are there, or"),
        (["--source", ".", "--out", "theirs"], "--out theirs: is inside --source and holds files"),
        (["--source", "a.jpg", "--out", "album"], "album/a.jpg: the file (one of 1) exists"),
        (["--source", "a.txt", "--out", "o"], "a.txt: neither an image nor a video; "),
        (["--source", "empty", "--out", "o"], "empty: no image or video in this folder"),
        (["--source", "a.jpg", "--out", "o", "--threshold", "50"], "--threshold 50: expected 0..1"),
        (["--source", "a.jpg", "--out", "o", "--batch", "0"], "--batch 0: expected 1 or more"),
        (["--source", "a.jpg", "--out", "o", "--threads", "0"], "threads 0: expected 1 or more"),
        (["--source", "a.jpg", "--out", "o", "--model", "empty"], "infer.yml: No such file"),
        (["--source", "a.jpg", "--out", "/dev/null/o"], "/dev/null/o: cannot be made"),
        (["--source", "a.jpg", "--out", "o", "--int8"], "holds no int8 model; export with"),
        (["--source", "a.jpg", "--out", "o"], "a.jpg: no image or video there could be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_is_one_message_and_exit_code_2(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture, arguments: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a.jpg"):
        Path(name).touch()
    Path("empty").mkdir()
    Path("theirs").mkdir()
    Path("theirs/b.jpg").touch()
    Path("album").mkdir()
    Path("album/a.jpg").touch()
    assert call(monkeypatch, "--model", exported, *arguments) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error:" in text]
    assert line.startswith("predictor: error: ") and message in line


def test_frames_are_prefetched_until_reader_ends() -> None:
    made = []

    def numbers() -> Any:
        for number in range(1, 100):
            made.append(number)
            yield number

    before = threading.active_count()
    reader = pictures.ahead(numbers(), 4)
    assert [next(reader), next(reader)] == [1, 2]
    reader.close()
    assert len(made) <= 8 and threading.active_count() == before
    assert list(pictures.ahead(iter(range(1, 50)), 4)) == list(range(1, 50))

    def broken() -> Any:
        yield 1
        raise PredictorError("the disk is gone")

    with pytest.raises(PredictorError, match="the disk is gone"):
        list(pictures.ahead(broken(), 4))
