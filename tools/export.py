"""Exports weights for deployment: python tools/export.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("export")
