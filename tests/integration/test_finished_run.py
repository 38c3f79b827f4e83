"""A training that is complete stays so, whatever its images and its pictures do."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.distributed import run_on_ranks
from tests.forked import exit_code_of, run_tool, succeeded
from tests.project import TINY_PPYOLOE, write_config
from tests.unit.data.pictures import broken_animation

CONFIG = """
data: {check_images: none}
train: {max_steps: 2, batch_size_per_card: 4}
optimizer: {name: momentum, lr: 0.001}
schedule: {warmup_epochs: 0}
"""


def train(folder: str) -> int:
    """ppdist train, whose drawing kills its process; its exit code.

    Leaves the seconds that the table at the end shares out: of a slow run, plots are not in it.
    """
    from ppdist.common import run_log
    from ppdist.engine import data
    from ppdist.viz import run_plots

    summary = run_log.run_summary

    def keep_seconds(output_dir: Path, seconds: Mapping[str, float]) -> list[tuple[str, str, str]]:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))
        return summary(output_dir, seconds)

    run_log.run_summary = keep_seconds
    data.BAD_SHARE = 0.5

    def draw(folder: Path, **_: object) -> None:
        time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGSEGV)

    run_plots.draw_run = draw  # type: ignore[assignment]
    return exit_code_of("train", "-c", f"{folder}/cfg.yml", "--eval")


@pytest.mark.slow
def test_deadly_images_and_pictures_cost_no_run(tmp_path: Path) -> None:
    sizes = ["--train", 8, "--val", 1, "--size", 64]
    succeeded(run_tool("data", "synthetic", "--out", tmp_path / "data", *sizes))
    names = [tmp_path / "data" / "images" / "train" / f"{number:05d}.jpg" for number in (0, 1)]
    names[0].write_bytes(broken_animation(64, 64))  # of which OpenCV dies
    names[1].unlink()
    os.mkfifo(names[1])
    write_config(tmp_path, f"output_dir: {tmp_path}/out{CONFIG}", TINY_PPYOLOE, val="train")
    assert run_on_ranks(1, f"{__name__}:train", str(tmp_path), hosts=1) == [0]
    log = (tmp_path / "out" / "train.log").read_text(encoding="utf-8")
    assert f"{names[1]}: not a file" in log
    assert "training has completed" in log and "(killed by SIGSEGV)" in log
    assert f"ppdist report {tmp_path / 'out'}" in log
    seconds = json.loads((tmp_path / "seconds.json").read_text())
    assert seconds["plots"] >= 0.5, "the table at the end tells their time from training's"
    succeeded(run_tool("report", tmp_path / "out"))
    assert (tmp_path / "out" / "plots" / "worst.jpg").is_file()
