"""Evaluates weights on the validation split: python tools/eval.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("eval")
