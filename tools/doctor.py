"""Checks hosts, cluster and data before a run: python tools/doctor.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("doctor")
