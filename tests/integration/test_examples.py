"""examples/: each runs as it stands, on the smallest set."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT, run_tool, succeeded

SMALL = [
    "data.workers=0",
    "train.epochs=2",
    "model.image_size=[96,96]",
    "train.batch_size_per_card=2",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    succeeded(run_tool("data", "synthetic", "--out", folder, "--train", 4, "--val", 2))
    return folder


def run(*words: str, folder: Path) -> str:
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_own_loop_trains_and_is_evaluated(data, tmp_path):
    script = str(ROOT / "examples" / "own_loop.py")
    said = run(
        sys.executable, script, "-c", "demo", "-o", f"data.root={data}", *SMALL, folder=tmp_path
    )
    assert "step 4/4  loss " in said and "mAP50 " in said


@pytest.mark.slow
def test_own_callback_sees_every_step_on_two_ranks(data, tmp_path):
    script = str(ROOT / "examples" / "callback.py")
    launcher = [sys.executable, "-m", "ppdist", "launch", "--nproc_per_node", "2"]
    keys = [f"data.root={data}", "output_dir=out", *SMALL]
    said = run(*launcher, script, "-c", "demo", "--eval", "-o", *keys, folder=tmp_path)
    assert "after step 2: mAP " in said
    for rank in (0, 1):
        file = tmp_path / "out" / f"slowest_steps_{rank}.json"
        assert {row["step"] for row in json.loads(file.read_text(encoding="utf-8"))} == {1, 2}


@pytest.mark.slow
def test_own_format_is_trained_on(data, tmp_path):
    annotations = json.loads((data / "annotations/instances_train.json").read_text("utf-8"))
    images = {image["id"]: image for image in annotations["images"]}
    names = {kind["id"]: kind["name"] for kind in annotations["categories"]}
    with (tmp_path / "boxes.csv").open("w", encoding="utf-8") as file:
        for each in annotations["annotations"]:
            image, (x, y, width, height) = images[each["image_id"]], each["bbox"]
            row = [image["file_name"], image["width"], image["height"]]
            row += [names[each["category_id"]], x, y, x + width, y + height]
            file.write(",".join(map(str, row)) + "\n")
    part = f"{{images: {data}/images, annotations: {tmp_path}/boxes.csv}}"
    classes = f"[{', '.join(names.values())}]"
    (tmp_path / "mine.yml").write_text(
        "_BASE_: demo\ndata:\n  format: own_dataset:BoxesCsvConfig\n"
        f"  class_names: {classes}\n  train: {part}\n  val: {part}\n  root: /\n",
        encoding="utf-8",
    )
    words = ("-c", "mine.yml", "-o", f"output_dir={tmp_path / 'out'}", *SMALL)
    succeeded(run_tool("train", *words, cwd=tmp_path, packages=ROOT / "examples"))
    assert (tmp_path / "out" / "checkpoints" / "last").exists()


@pytest.mark.slow
def test_notebook_runs_from_its_first_cell_to_its_last(tmp_path):
    notebook = json.loads((ROOT / "examples" / "demo.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(each["source"]) for each in notebook["cells"] if each["cell_type"] == "code"]
    assert not any(each["outputs"] for each in notebook["cells"] if each["cell_type"] == "code")
    program = "\n".join(cells)
    for shown, small in (("EPOCHS = 16", "EPOCHS = 1"), ("train=320, val=80", "train=6, val=3")):
        assert shown in program
        program = program.replace(shown, small)
    (tmp_path / "demo.py").write_text(program, encoding="utf-8")
    run(sys.executable, "demo.py", folder=tmp_path)
    assert (tmp_path / "exported" / "infer.yml").is_file()
