"""Writes an HTML report of one run: python tools/report.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("report")
