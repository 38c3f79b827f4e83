"""tools/data.py as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/data.py", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    done = run("synthetic", "--out", root, "--train", 6, "--val", 3, "--size", 96)
    assert done.returncode == 0, done.stderr
    assert f"wrote 6 + 3 images of circle, square, triangle to {root}" in done.stdout
    (root / "cfg.yml").write_text(
        f"data: {{root: {root}, train: {{annotations: annotations/instances_train.json}},"
        f" val: {{annotations: annotations/instances_val.json}}}}\n"
        f"model: {{name: ppyoloe, num_classes: 3}}\n"
    )
    return root


def test_check_reports_both_splits(made):
    done = run("check", "-c", made / "cfg.yml", "--decode")
    assert done.returncode == 0, done.stderr
    for text in ("instances_train.json", "instances_val.json", "1 circle", "96x96 (6)"):
        assert text in done.stdout
    assert "ok: both splits can be used; every image decodes" in done.stdout


def test_check_exits_2_with_one_message_for_wrong_input(made):
    done = run("check", "-c", made / "cfg.yml", "-o", "model.num_classes=80")
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        f"ppdist: error: model.num_classes is 80 but {made}/annotations/instances_train.json has 3 "
        f"categories (circle, square, triangle): set model.num_classes: 3"
    )
    assert "Traceback" not in done.stderr


def test_check_names_every_image_that_does_not_decode(made, tmp_path):
    image = made / "images" / "val" / "00001.jpg"
    content = image.read_bytes()
    image.write_bytes(content[:500])
    try:
        done = run("check", "-c", made / "cfg.yml", "--decode")
    finally:
        image.write_bytes(content)
    assert done.returncode == 2
    assert f"1 images cannot be used:\n  {image}: the JPEG data end early" in done.stderr


def test_check_ends_with_a_warning_of_classes_that_cannot_be_learned(made, tmp_path):
    file = made / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    content["annotations"] = [x for x in content["annotations"] if x["category_id"] != 2]
    (tmp_path / "without.json").write_text(json.dumps(content))
    done = run("check", "-c", made / "cfg.yml", "-o",
               f"data.train.annotations={tmp_path / 'without.json'}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[-1] == (
        "ppdist: warning: 1 of 3 classes have no object in the training split, so they cannot be "
        "learned: square"
    )
    whole = run("check", "-c", made / "cfg.yml")
    assert "warning" not in whole.stderr and "none" not in whole.stdout


def test_stats_says_at_once_where_it_cannot_write(made):
    done = run("stats", "-c", made / "cfg.yml", "--json", "/dev/null/counts.json")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.strip() == (
        "ppdist: error: /dev/null: cannot be written to: it is a file; expected a folder"
    )


def test_stats_writes_the_counts(made, tmp_path):
    done = run("stats", "-c", made / "cfg.yml", "--json", tmp_path / "new" / "counts.json")
    assert done.returncode == 0, done.stderr
    counts = json.loads((tmp_path / "new" / "counts.json").read_text())
    assert dict(map(tuple, counts["train"]))["images"] == "6"
    assert dict(map(tuple, counts["val"]))["images"] == "3"
