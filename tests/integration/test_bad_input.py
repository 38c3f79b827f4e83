"""Wrong input ends tools/train.py with exit code 2 and one message that says what to do."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ppdist.config.experiment import load_config
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.models.build import build_model
from tests.forked import run_here

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "examples" / "demo.yml"


@pytest.fixture
def shapes(tmp_path):
    make_shapes(tmp_path / "data", train=4, val=2, size=64, seed=0)
    return tmp_path / "data"


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def train(tmp_path, *overrides, config=CONFIG):
    """Exit code and what stderr says."""
    arguments = [f"data.root={tmp_path / 'data'}", f"output_dir={tmp_path / 'out'}"]
    arguments += ["train.max_steps=1", "model.image_size=[64,64]", *overrides]
    done = run_here("train", "-c", config, "-o", *arguments)
    return done.returncode, done.stderr


CASES = [  # one of each layer: the file of keys, the options, the weights, the folder, the images
    (["train.epoch=3"], None, ("train.epoch", "did you mean train.epochs")),
    (["model.num_classes=4"], None, ("has 3 categories", "num_classes: 3")),
    (["model.pretrained=nowhere.pdparams"], None, ("nowhere.pdparams",)),
    (["data.root=nowhere"], None, ("nowhere is not a folder", "data.root")),
    ([], lambda content: content.pop("categories"), ("instances_train.json", "categories")),
    ([], lambda content: content["annotations"][0].update(category_id=9), ("category_id 9",)),
]


@pytest.mark.parametrize(("overrides", "change", "named"), CASES)
def test_wrong_input_is_one_message_and_exit_2(overrides, change, named, shapes, tmp_path):
    if change:
        edit(shapes / "annotations" / "instances_train.json", change)
    code, stderr = train(tmp_path, *overrides)
    message = stderr[stderr.index("ppdist: error:") :]
    assert code == 2 and all(each in message for each in named), message


def test_a_missing_config_is_one_message(shapes, tmp_path):
    code, stderr = train(tmp_path, config=tmp_path / "absent.yml")
    assert code == 2
    assert "absent.yml" in stderr


def test_weights_of_another_shape_name_both_shapes(shapes, tmp_path):
    key = "backbone.stem.conv1.conv.weight"
    model = build_model(load_config(CONFIG).model)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    save_file(weights | {key: np.zeros((5, 3, 3, 3), "float32")}, tmp_path / "odd.safetensors")
    code, stderr = train(tmp_path, f"model.pretrained={tmp_path / 'odd.safetensors'}")
    assert code == 2
    assert key in stderr
    assert "[5, 3, 3, 3]" in stderr


def test_fleetrun_prints_one_message_and_exits_2(shapes, tmp_path):
    fleetrun = [sys.executable, str(ROOT / "tools" / "launch.py"), "--nproc_per_node", "2"]
    done = subprocess.run(
        [*fleetrun, "--log_dir", str(tmp_path / "log"), str(ROOT / "tools" / "train.py"),
         "-c", str(CONFIG), "-o", f"data.root={shapes}", "model.num_classes=7"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    both = done.stdout + done.stderr
    assert both.count("model.num_classes is 7") == 1
    assert "Traceback" not in both
