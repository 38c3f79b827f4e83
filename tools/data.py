"""Checks, shows, converts and splits data sets: python tools/data.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("data")
