"""tools/data.py as a user runs it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.forked import run_here
from tests.unit.data.sets import write_images


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    done = run_here("data", "synthetic", "--out", root, "--train", 6, "--val", 3, "--size", 96)
    assert done.returncode == 0, done.stderr
    assert f"wrote 6 + 3 images of circle, square, triangle to {root}" in done.stdout
    (root / "cfg.yml").write_text(
        f"data: {{root: {root}, train: {{annotations: annotations/instances_train.json}},"
        f" val: {{annotations: annotations/instances_val.json}}}}\n"
        f"model: {{name: ppyoloe, num_classes: 3}}\n"
    )
    return root


def test_check_says_that_all_is_well(made, tmp_path):
    done = run_here(
        "data", "check", "-c", made / "cfg.yml", "--json", tmp_path / "new" / "found.json"
    )
    assert done.returncode == 0, done.stderr
    assert f"train: {made}/annotations/instances_train.json: 6 images" in done.stdout
    assert f"val: {made}/annotations/instances_val.json: 3 images" in done.stdout
    assert done.stdout.endswith("ok: both splits can be used; every image decodes\n")
    found = json.loads((tmp_path / "new" / "found.json").read_text())
    assert found["decoded"] and found["splits"]["train"]["images"] == 6


@pytest.mark.parametrize("command", ["check --fast", "stats", "show --count 2"])
def test_a_folder_needs_no_configuration(made, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    done = run_here("data", *command.split(), made, "-o", "model.image_size=96")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "samples.png").is_file() is command.startswith("show")


def test_every_command_on_data_writes_the_same_set(made, tmp_path):
    told = {}
    for source in ([made], ["-c", made / "cfg.yml"]):
        out = tmp_path / str(len(source))
        assert run_here("data", "convert", *source, "--to", "yolo", "--out", out).returncode == 0
        told[out.name] = {f.relative_to(out): f.read_bytes() for f in out.rglob("*.txt")}
    assert told["1"] == told["2"] and len(told["1"]) > 8
    done = run_here("data", "split", made, "--parts", "a=0.5", "b=0.5", "--out", tmp_path / "parts")
    assert done.returncode == 0 and (tmp_path / "parts").is_dir(), done.stderr


def test_data_without_a_validation_split_are_checked(made, tmp_path):
    shutil.copytree(made / "images" / "train", tmp_path / "one" / "images")
    shutil.copy(made / "annotations" / "instances_train.json", tmp_path / "one" / "all.json")
    file = tmp_path / "one" / "all.json"
    file.write_text(file.read_text().replace("train/", ""))
    done = run_here("data", "check", tmp_path / "one", "--fast")
    assert done.returncode == 0, done.stderr + done.stdout


PARTS = "split {made} --parts"
REFUSED = [  # a command, and what its message names
    ("check", "DATA or -c, found neither"),
    ("check here -c yolov5n", "found both (here and"),
    ("check -c {cfg} -o model.num_classes=80 --fast", "model.num_classes: 3"),
    ("check -c {cfg} --fix {made}", "--fix {made}: "),
    ("check -c x --workers -1", "--workers: "),
    ("anchors -c x --generations=-5", "--generations: "),
    ("anchors {made} --model ppyoloe_plus_s", "ppyoloe has no anchors"),
    ("stats {made}/cfg.yml", "write `-c "),
    ("stats -c {cfg} --json /dev/null/counts.json", "/dev/null: "),
    ("show -c yolov5n --model yolov5s", "--model needs DATA"),
    ("show -c x --out x.png --count 0", "--count: "),
    ("show -c x --out x.png --epoch 1.5", "--epoch: "),
    ("show -c {cfg} --out {tmp}/x.png --epoch 1 -o train.epochs=1", "--epoch 1: "),
    ("show -c {cfg} --out {tmp}/x.jpg", "--out {tmp}/x.jpg: "),
    ("show -c {cfg} --out {tmp}/x.png -o data.augment.copy_paste=0.5", "copy_paste: 0.5"),
    ("split --parts a=1 --seed -1", "--seed: "),
    ("split -c {cfg} -o data.train.annotations=annotations/instances_val.json --out {tmp} "
     "--parts a=0.4 b=0.3 c=0.2 d=0.1", "leave none for d"),
    (f"{PARTS} train=0.8 val=0.3", "--parts train=0.8 val=0.3"),
    (f"{PARTS} train=1", "--parts train=1: "),
    (f"{PARTS} a=0.5 a=0.5", "of different names"),
    (f"{PARTS} ../a=0.5 b=0.5", "--parts ../a=0.5: "),
    (f"{PARTS} a=x b=0.5", "--parts a=x: "),
    ("convert --to voc --out x -c {cfg}", "no longer written: use coco"),
    ("synthetic --out x --size 63", "found '63'"),
    ("synthetic --out x --val 0", "--val: "),
    *(
        (f"{command} {options}", named)
        for command in ("convert --to yolo --out x", "split --parts a=0.5 b=0.5")
        for options, named in (
            ("", "DATA or -c, found neither"),
            ("-c {cfg} --format coco", "--format coco: an option of earlier versions"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("command", "named"), REFUSED)
def test_what_cannot_be_done_is_one_message_and_exit_2(made, tmp_path, command, named):
    places = {"made": made, "cfg": made / "cfg.yml", "tmp": tmp_path}
    done = run_here("data", *command.format(**places).split())
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert not done.stdout or (command.startswith("check") and "ok:" not in done.stdout)
    assert named.format(**places) in done.stderr and not list(tmp_path.iterdir())


@pytest.fixture
def dirty(made, tmp_path) -> Path:
    """A copy of the set with a torn image, a swapped box and a class without an object."""
    root = tmp_path / "dirty"
    shutil.copytree(made, root)
    image = root / "images" / "val" / "00001.jpg"
    image.write_bytes(image.read_bytes()[:500])
    file = root / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    content["annotations"] = [x for x in content["annotations"] if x["category_id"] != 2]
    x, y, width, height = content["annotations"][0]["bbox"]
    content["annotations"][0]["bbox"] = [x + width, y + height, -width, -height]
    file.write_text(json.dumps(content))
    (root / "cfg.yml").write_text((made / "cfg.yml").read_text().replace(str(made), str(root)))
    return root


def test_check_lists_issues_with_count_and_example(dirty, tmp_path):
    done = run_here("data", "check", "-c", dirty / "cfg.yml", "--json", tmp_path / "found.json")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    counts = {row["kind"]: row["counts"] for row in found["kinds"]}
    assert counts["image_truncated"] == {"val": 1}
    assert counts["box_swapped"] == {"train": 1}
    assert counts["class_unused"] == {"train": 1}
    for text in (
        "error: image_truncated: 1 in val: ",
        f"{dirty}/images/val/00001.jpg",
        "no object of class 'square'",
    ):
        assert done.stdout.count(text) == 1


def test_check_says_each_problem_once(dirty):
    shutil.copy(dirty / "images/val/00000.jpg", dirty / "images/val/00001.jpg")
    done = run_here("data", "check", "-c", dirty / "cfg.yml")
    assert done.returncode == 0, done.stderr
    for fact in ("box_swapped", "corners the wrong way round", "put in order (data.bad_boxes)"):
        assert done.stdout.count(fact) == 1
    assert "order" not in done.stderr and "instances_train.json" not in done.stderr


def test_check_writes_clean_copy_without_issues(dirty, tmp_path):
    done = run_here("data", "check", "-c", dirty / "cfg.yml", "--fix", tmp_path / "clean")
    assert done.returncode == 2  # what was checked is as bad as before
    told = [line for line in done.stdout.splitlines() if line.startswith("fixed: ")]
    assert told and all(len(line) < 300 for line in told)
    _, _, settings = done.stdout.partition("to use it:\n")
    (tmp_path / "cfg.yml").write_text(f"{settings}model: {{name: ppyoloe, num_classes: 3}}\n")
    again = run_here("data", "check", "-c", tmp_path / "cfg.yml")
    assert again.returncode == 0, again.stderr
    assert "clean/annotations/instances_val.json: 2 images" in again.stdout
    for kind in ("image_truncated", "box_swapped"):
        assert kind in done.stdout and kind not in again.stdout


def test_convert_prints_settings_that_can_be_used(made, tmp_path):
    done = run_here(
        "data", "convert", "--to", "yolo", "--out", tmp_path / "yolo", "-c", made / "cfg.yml"
    )
    assert f"`ppdist train {tmp_path / 'yolo'} --model yolov5n`" in done.stdout
    _, _, settings = done.stdout.partition("to use it:\n")
    (tmp_path / "cfg.yml").write_text(f"{settings}model: {{name: ppyoloe, num_classes: 3}}\n")
    assert run_here("data", "check", "-c", tmp_path / "cfg.yml", "--fast").returncode == 0


def test_synthetic_data_never_replaces_other_data(made, tmp_path):
    shutil.copytree(made, tmp_path / "data")
    file = tmp_path / "data" / "annotations" / "instances_train.json"
    sizes = ["--train", 6, "--val", 3, "--size", 96]
    assert run_here("data", "synthetic", "--out", tmp_path / "data", *sizes).returncode == 0
    file.write_text("mine")
    done = run_here("data", "synthetic", "--out", tmp_path / "data", *sizes)
    assert done.returncode == 2 and file.read_text() == "mine"
    assert "[folder_not_empty]" in done.stderr


def test_stats_shows_both_splits_and_writes_counts(made, tmp_path):
    done = run_here(
        "data", "stats", "-c", made / "cfg.yml", "--json", tmp_path / "new" / "counts.json"
    )
    assert done.returncode == 0, done.stderr
    for text in (f"train: {made}/annotations/instances_train.json", "96x96 (6)", "96x96 (3)"):
        assert text in done.stdout
    counts = json.loads((tmp_path / "new" / "counts.json").read_text())
    assert counts["train"]["images"] == 6 and counts["val"]["images"] == 3


def test_show_draws_training_and_evaluation_inputs(made, tmp_path):
    tune = ["-o", "model.image_size=[128,128]", "train.multi_scale=[]", "train.epochs=2"]
    pictures = {}
    for name, *more in (("one",), ("again",), ("later", "--epoch", "1"), ("eval", "--eval")):
        file = tmp_path / f"{name}.png"
        done = run_here(
            "data", "show", "-c", made / "cfg.yml", "--count", 3, "--out", file, *more, *tune
        )
        assert done.returncode == 0, done.stderr
        assert str(file) in done.stdout
        pictures[name] = np.asarray(Image.open(file))
        # Two across, two down; each of 128 pixels four times as large, six of white between.
        assert pictures[name].shape == (2 * 512 + 6, 2 * 512 + 6, 3)
        assert (pictures[name][520:, 520:] == 255).all()  # there is no fourth
    assert (pictures["one"] == pictures["again"]).all()
    assert (pictures["one"] != pictures["later"]).any()
    assert (pictures["one"] != pictures["eval"]).any()


def test_split_divides_and_its_settings_can_be_used(made, tmp_path):
    done = run_here("data", "split", made, "--parts", "train=0.5", "val=0.5", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    files = [tmp_path / f"instances_train_{part}.json" for part in ("train", "val")]
    found = [image["id"] for file in files for image in json.loads(file.read_text())["images"]]
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    _, _, settings = done.stdout.partition("to train and evaluate with them:\n")
    (tmp_path / "cfg.yml").write_text(f"{settings}model: {{name: ppyoloe, num_classes: 3}}\n")
    again = run_here("data", "stats", "-c", tmp_path / "cfg.yml")
    assert again.returncode == 0, again.stderr


def test_split_divides_all_images_whatever_the_limit(made, tmp_path):
    parts = ["--parts", "a=0.5", "b=0.5", "--out", tmp_path / "parts"]
    words = ["-c", made / "cfg.yml", *parts, "-o", "data.train.limit=4"]
    assert run_here("data", "split", *words).returncode == 0
    texts = [file.read_text() for file in (tmp_path / "parts").iterdir()]
    assert [len(json.loads(text)["images"]) for text in texts] == [3, 3]


def test_stats_says_what_a_limit_leaves_out(made, tmp_path):
    file = tmp_path / "counts.json"
    done = run_here(
        "data", "stats", "-c", made / "cfg.yml", "-o", "data.train.limit=4", "--json", file
    )
    assert "(data.train.limit: 4 of 6" in done.stdout
    counts = json.loads(file.read_text())
    assert counts["train"]["limited"] and counts["val"]["limited"] is None


def test_class_only_set_is_counted_shown_and_split(tmp_path):
    for split, count in (("train", 4), ("val", 2)):
        for name in ("cat", "dog"):
            write_images(tmp_path / split / name, count, (80, 70))
    (tmp_path / "cfg.yml").write_text(
        f"data: {{format: folder, root: {tmp_path}, train: {{images: train}},"
        f" val: {{images: val}}}}\n"
        f"model: {{name: yolov5_cls, num_classes: 2, image_size: [64, 64]}}\n"
    )
    config = ["-c", tmp_path / "cfg.yml"]
    done = run_here("data", "stats", *config, "--plots", tmp_path / "plots")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["classes.png"]
    for more in ([], ["--eval"]):
        done = run_here("data", "show", *config, "--count", 4, "--out", tmp_path / "x.png", *more)
        assert done.returncode == 0, done.stderr
    done = run_here("data", "split", *config, "--parts", "a=0.5", "b=0.5")
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "train_a.csv").read_text().split()
    assert rows[0] == "path,label"
    assert sorted(row.split(",")[1] for row in rows[1:]) == ["cat", "cat", "dog", "dog"]
    done = run_here("data", "check", *config, "--fix", tmp_path / "clean")
    assert done.returncode == 2 and "[no_boxes_to_fix]" in done.stderr
