"""Runs an export: python -m ppdist_runtime --model DIR --source DIR --out DIR"""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
