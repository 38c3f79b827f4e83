"""Signals that come while a program still imports what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Runs a program up to the import of a module, and ends as the signals are held by then.
UNTIL = """
import os, runpy, signal, sys

class Look:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            os._exit({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP} <= held)

wanted, script, *words = sys.argv[1:]
sys.meta_path.insert(0, Look())
sys.argv = [script, *words]
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("ppdist.cli", ["tools/train.py"]),
        ("ppdist.cli", ["ppdist/__main__.py", "train"]),
        ("ppdist.cli", ["ppdist/__main__.py", "launch"]),
        ("ppdist.common.errors", ["tools/launch.py"]),
    ],
)
def test_signals_are_held_before_the_first_import(module: str, words: list[str]) -> None:
    command = [sys.executable, "-c", UNTIL, module, *words]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 1
