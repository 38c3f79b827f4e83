"""The modules of deploy/python, which import each other as files of one folder."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "deploy" / "python"
sys.path.insert(0, str(FOLDER))
predictor: Any
pictures: Any
results: Any
command: Any
predictor, pictures, results, command = map(
    importlib.import_module, ("predictor", "pictures", "results", "command")
)
Predictor, PredictorError = predictor.Predictor, predictor.PredictorError


def run_file(*arguments: object, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """Runs a file of the repository as a user does, in a new Python."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
