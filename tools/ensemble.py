"""Fuses detections or averages weights of several models: python tools/ensemble.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("ensemble")
