"""Runs an export without ppdist: `from predictor import Predictor` (README.md)."""

import sys

from ppdist_runtime.predictor import Predictor, PredictorError

__all__ = ["Predictor", "PredictorError"]

if __name__ == "__main__":
    sys.exit(
        "predictor.py is no longer a command: `ppdist predict --model DIR --source IMAGES` writes "
        "boxes and pictures; without ppdist, call Predictor as README.md shows"
    )
