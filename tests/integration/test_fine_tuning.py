"""One line makes a trained model one of other classes, as a user types it."""

import json
from pathlib import Path

import pytest

from ppdist.data.datasets.synthetic import make_shapes
from tests.forked import run_tool, succeeded
from tests.project import TINY_PPYOLOE, write_config

CONFIG = """
data: {check_images: none}
train: {epochs: 2, batch_size_per_card: 4}
schedule: {warmup_epochs: 0}
log: {every_steps: 1, visualdl: false}
"""


def merge_classes(annotations: Path) -> None:
    """Makes a set of two classes of one of three."""
    content = json.loads(annotations.read_text())
    for each in content["annotations"]:
        each["category_id"] = 1 + (each["category_id"] > 1)
    content["categories"] = [{"id": 1, "name": "round"}, {"id": 2, "name": "edged"}]
    annotations.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a set of three classes, one of two, cfg.yml, and first/, a run on the first."""
    folder = tmp_path_factory.mktemp("fine")
    for name in ("three", "two"):
        make_shapes(folder / name, train=8, val=4, size=64, seed=0)
    for split in ("train", "val"):
        merge_classes(folder / "two" / "annotations" / f"instances_{split}.json")
    write_config(folder, f"output_dir: {folder}/first{CONFIG}", TINY_PPYOLOE, folder / "three")
    succeeded(run_tool("train", "-c", folder / "cfg.yml", "--eval", "-o", "train.epochs=1"))
    return folder


@pytest.mark.slow
def test_one_line_fine_tunes_run_to_other_classes(trained: Path) -> None:
    second = trained / "second"
    succeeded(
        run_tool(
            "train", "-c", trained / "cfg.yml", "--eval", "-o",
            f"model.pretrained={trained / 'first'}", f"data.root={trained / 'two'}",
            "model.num_classes=2", "data.train.limit=4", "train.freeze=2",
            "optimizer.layer_decay=0.8", f"output_dir={second}",
        )
    )  # fmt: skip
    log = (second / "train.log").read_text()
    (weights,) = [line for line in log.splitlines() if "weights: " in line and "from" in line]
    assert f"{trained / 'first' / 'checkpoints' / 'best'}; 6 start fresh: class layers, the file " \
        "knows 3 classes, the model 2" in weights  # fmt: skip
    assert "(backbone.stem, backbone.stages.0)" in log and "neck x 0.8, head x 1" in log
    assert "data.train.limit: 4 of 8 images" in log
    records = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    assert any("mAP" in record for record in records)
    file = second / "eval.json"
    scored = run_tool(
        "eval", "-c", second / "config.yml", "-w", second, "--json", file, "-o", "data.val.limit=3"
    )
    succeeded(scored)
    assert "ppdist: data.val.limit: 3 of 4 images" in scored.stderr
    found = json.loads(file.read_text())
    assert "mAP" in found and (found["images"], found["limit"]) == (3, 3)


@pytest.mark.slow
def test_other_classes_without_num_classes_are_error(trained: Path) -> None:
    done = run_tool(
        "train", "-c", trained / "cfg.yml", "-o", f"model.pretrained={trained / 'first'}",
        f"data.root={trained / 'two'}", f"output_dir={trained / 'third'}",
    )  # fmt: skip
    assert done.returncode == 2
    assert "model.num_classes" in done.stderr and not (trained / "third").exists()
