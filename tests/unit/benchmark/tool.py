"""tools/benchmark.py in this process: its report, or how it refuses."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "examples" / "demo.yml"
SMALL = ["model.image_size=[64,64]", "train.batch_size_per_card=2", "data.workers=0",
         "model.width_multiple=0.125", "evaluate.batch_size_per_card=16"]  # fmt: skip


def run_tool(monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "benchmark.py"), run_name="__main__")
    return ended.value.code, *capsys.readouterr()


def report_of(monkeypatch, capsys, what, *options):
    """What it prints of data that it draws itself."""
    more = ["-c", CONFIG, "--synthetic", "8", "-o", *SMALL, *options]
    code, printed, said = run_tool(monkeypatch, capsys, what, *more)
    assert code == 0, said
    return json.loads(printed)


def refusal_of(monkeypatch, capsys, *arguments):
    code, _, said = run_tool(monkeypatch, capsys, *arguments)
    assert code == 2
    return said
