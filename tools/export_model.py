"""Exports weights for deployment, under PaddleDetection's name: tools/export.py"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("export")
