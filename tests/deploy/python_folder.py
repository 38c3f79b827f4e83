"""The package that deploy/python links to, by the name that it has without ppdist."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "deploy" / "python"
RUNTIME = REPOSITORY / "ppdist" / "runtime"  # what FOLDER links to
sys.path.insert(0, str(FOLDER))
predictor: Any = importlib.import_module("ppdist_runtime.predictor")
Predictor, PredictorError = predictor.Predictor, predictor.PredictorError


def run_file(*arguments: object, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """Runs a file of the repository as a user does, in a new Python."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
