"""Runs hyper-parameter searches and ablation studies: python tools/tune.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("tune")
