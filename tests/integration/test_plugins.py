"""A detector, a format and a tracker of another package are named in YAML, and train."""

import json
import sys
from pathlib import Path

import pytest

from ppdist.data.datasets.synthetic import make_shapes
from tests.distributed import run_on_ranks
from tests.forked import THIRD_PARTY, exit_code_of, run_on_two_ranks, run_tool, succeeded
from tests.unit.engine.runs import records

pytestmark = pytest.mark.slow
CONFIG = """
output_dir: {folder}/out
data:
  format: blobs.keys:BlobsSetConfig
  delimiter: ";"
  root: {folder}/data
  class_names: [circle, square, triangle]
  train: {{annotations: train.txt}}
  val: {{annotations: train.txt}}  # by heart, so that there is a score
  workers: 0
  augment: {{distort: 0, expand: 0, crop: 0, flip: 0, random_interpolation: false}}
model: {{name: "blobs.keys:BlobsConfig", channels: 8, num_classes: 3, image_size: [64, 64]}}
train: {{epochs: 3, batch_size_per_card: 2}}
optimizer: {{name: adamw, lr: 0.02}}
schedule: {{warmup_epochs: 0}}
log:
  {{every_steps: 1, visualdl: false, images: 0,
    trackers: [{{name: "blobs.keys:LinesConfig", digits: 17}}]}}
"""


def write_lines(folder: Path) -> None:
    """The format of the package, of the boxes in a COCO file."""
    make_shapes(folder, train=8, val=1, size=64, seed=0)
    told = json.loads((folder / "annotations/instances_train.json").read_text())
    names = {each["id"]: each["name"] for each in told["categories"]}
    images = {each["id"]: each for each in told["images"]}
    with (folder / "train.txt").open("w") as file:
        for each in told["annotations"]:
            image, (x, y, w, h) = images[each["image_id"]], each["bbox"]
            row = image["file_name"], image["width"], image["height"], names[each["category_id"]]
            print(*row, x, y, x + w, y + h, sep=";", file=file)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cfg.yml, and out/ of a training on two ranks."""
    folder = tmp_path_factory.mktemp("plugins")
    write_lines(folder / "data")
    (folder / "cfg.yml").write_text(CONFIG.format(folder=folder), encoding="utf-8")
    assert run_on_ranks(2, f"{__name__}:train", str(folder), hosts=1) == [0, 0]
    return folder


def train(folder: str) -> int:
    """tools/train.py on this rank, where the package is found: its exit code."""
    sys.path.append(str(THIRD_PARTY))
    return exit_code_of("train", "-c", f"{folder}/cfg.yml", "--eval")


def test_two_ranks_train_parts_of_another_package(project: Path) -> None:
    written = records(project / "out")
    assert written[0]["derived"]["ranks"]["value"] == 2
    losses = [each for each in written if "loss_iou" in each and "mAP" not in each]
    assert [each["step"] for each in losses] == [1, 2, 3, 4, 5, 6]
    assert losses[-1]["loss"] < losses[0]["loss"]
    assert [each["step"] for each in written if "mAP" in each] == [2, 4, 6]
    assert written[-1] | {"time": 0} == {"time": 0, "step": 6, "finished": "total"}
    # Its tracker, of rank 0 alone, has the same numbers.
    lines = (project / "out/trackers/blobs.keys:LinesConfig/points.txt").read_text().splitlines()
    points = [line.split() for line in lines]
    tracked = {int(step): float(value) for step, tag, value in points if tag == "train/loss"}
    assert tracked == {each["step"]: each["loss"] for each in losses}
    assert len(points) == len({(step, tag) for step, tag, _ in points})


def test_checkpoint_of_another_package_is_read_again(project: Path) -> None:
    """By its own config.yml, which names the parts."""
    saved = project / "out/checkpoints/last"
    options = ("-w", saved, "--json", project / "eval.json")
    refused = run_tool("eval", *options, packages=THIRD_PARTY)
    assert refused.returncode == 2 and "--trust-plugins" in refused.stderr
    succeeded(run_tool("eval", *options, "--trust-plugins", packages=THIRD_PARTY))
    (last,) = [each for each in records(project / "out") if each["step"] == 6 and "mAP" in each]
    assert json.loads((project / "eval.json").read_text())["mAP"] == pytest.approx(last["mAP"])


def test_without_the_package_its_parts_are_not_found(project: Path) -> None:
    done = run_tool("eval", "-c", project / "cfg.yml", "-w", project / "out/checkpoints/last")
    assert done.returncode == 2
    where = f"{project / 'cfg.yml'}:12:15: model.name: blobs.keys:BlobsConfig cannot be imported"
    assert where in done.stderr


def test_fleetrun_resumes_and_export_follows(project: Path) -> None:
    config, run = project / "cfg.yml", {"packages": THIRD_PARTY}
    more = ("--resume", "--resume-changed", "-o", "train.epochs=4")
    succeeded(run_on_two_ranks(project, "train", "-c", config, "--eval", *more, **run))
    assert [each["step"] for each in records(project / "out") if "mAP" in each] == [2, 4, 6, 8]
    saved, out = project / "out/checkpoints/last", project / "exported"
    printed = succeeded(run_tool("export", "-c", config, "-w", saved, "--out", out, **run))
    assert "paddle: equals eager" in printed
    # A backbone of that package under the head of PP-YOLOE; the search for a batch is a process.
    body = (
        "model={name: ppyoloe, width_multiple: 0.25, body: 'blobs.model:BlobsBackbone'}",
        "train.max_steps=1",
    )
    found = ("train.batch_size_per_card=auto", "train.auto_batch_most=4", f"output_dir={out}-body")
    text = config.read_text().replace('name: "blobs.keys:BlobsConfig", channels: 8, ', "")
    (project / "body.yml").write_text(text, encoding="utf-8")
    succeeded(run_tool("train", "-c", project / "body.yml", "-o", *body, *found, **run))
