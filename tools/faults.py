"""Injects faults into small two-rank trainings: python tools/faults.py --help"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from ppdist.common import process
    from tests.faults.command import main

    process.run(main)
