"""tools/faults.py as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "faults.py"


@pytest.mark.slow
def test_two_kills_in_one_job_are_survived_and_measured(tmp_path: Path, record_property) -> None:
    words = ["kills", "--points", "2", "--per-job", "2", "--folder", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, str(TOOL), *words, "--json", str(tmp_path / "kills.json")],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert report == json.loads((tmp_path / "kills.json").read_text())
    assert (report["struck"], report["survived"], report["failures"]) == (2, 2, [])
    assert 0 < report["recovery_seconds_median"] <= report["recovery_seconds_worst"]
    # Checkpoints come every 4 steps; the kill may meet one that is still being written.
    assert 0 <= report["steps_lost_worst"] <= 8
    record_property("figure", f"goes on after {report['recovery_seconds_median']} s")


@pytest.mark.slow
def test_more_kill_points_than_steps_are_refused() -> None:
    words = [sys.executable, str(TOOL), "kills", "--per-job", "25"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 2
    assert "--per-job 25: " in ended.stderr and "[option_invalid]" in ended.stderr
