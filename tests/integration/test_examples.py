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
