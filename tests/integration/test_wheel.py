"""From the wheel in an empty folder to predictions: three commands."""

import json
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.forked import run_tool, succeeded
from tests.wheel import PIP, built_wheel

pytestmark = pytest.mark.slow
SMALL = ["data.workers=0", "train.batch_size_per_card=2"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment that has our wheel, and this one's packages but not this clone."""
    folder = tmp_path_factory.mktemp("installed")
    home = folder / "venv"
    venv.create(home, with_pip=False)
    install = [*PIP, "--python", home / "bin" / "python", "install", "--no-deps"]
    succeeded(_run(*install, built_wheel(folder), folder=folder))
    (packages,) = home.glob("lib/python*/site-packages")
    shared = Path(sysconfig.get_path("purelib"))
    (packages / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")
    where = "import ppdist; print(ppdist.__file__)"
    found = succeeded(_run(home / "bin" / "python", "-c", where, folder=folder))
    assert Path(found.strip()).is_relative_to(packages)
    return home / "bin"


def _run(*words: object, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = list(map(str, words))
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    succeeded(run_tool("data", "synthetic", "--out", folder, "--train", 6, "--val", 2))
    return folder


def test_three_commands_from_the_wheel(programs, shapes, tmp_path):
    words = ["--to", "yolo", "--out", tmp_path / "mine", "-c", "demo", "-o", f"data.root={shapes}"]
    succeeded(run_tool("data", "convert", *words))
    ppdist = programs / "ppdist"
    train = ["train", "mine", "--model", "yolov5n", "--epochs", "1", "--image-size", "96"]
    succeeded(_run(ppdist, *train, "-o", "output_dir=out", *SMALL, folder=tmp_path))
    assert (tmp_path / "out" / "recipe.yml").is_file()
    source = ["--source", shapes / "images" / "val", "--out", "found"]
    succeeded(_run(ppdist, "predict", "-w", "out", *source, folder=tmp_path))
    found = json.loads((tmp_path / "found" / "detections.json").read_text(encoding="utf-8"))
    assert len(found["images"]) == 2


def test_fleetrun_starts_commands_without_a_script(programs, shapes, tmp_path):
    words = ["--nproc_per_node", "2", "ppdist", "train", "-c", "demo"]
    keys = [f"data.root={shapes}", "train.epochs=1", "model.image_size=[96,96]", *SMALL]
    succeeded(_run(programs / "fleetrun", *words, "-o", *keys, folder=tmp_path))
    assert (tmp_path / "output" / "demo" / "checkpoints" / "last").exists()
    assert len(succeeded(_run(programs / "ppdist", "config", "list", folder=tmp_path))) > 1000
