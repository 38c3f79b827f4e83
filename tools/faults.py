"""Injects faults into small two-rank trainings: python tools/faults.py --help"""

from ppdist import cli
from ppdist.common import process

if __name__ == "__main__":
    cli.use_clone("tests/faults")
    from tests.faults.command import main

    process.run(main)
