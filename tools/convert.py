"""Converts weights: python tools/convert.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("convert")
