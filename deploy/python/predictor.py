"""Runs an export without ppdist: python predictor.py --model DIR --source IMAGES --out DIR"""

import sys

from ppdist_runtime.command import main
from ppdist_runtime.predictor import Predictor, PredictorError

__all__ = ["Predictor", "PredictorError"]

if __name__ == "__main__":
    sys.exit(main())
