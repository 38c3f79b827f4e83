"""Runs hyper-parameter searches and studies with several seeds: python tools/tune.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("tune")
