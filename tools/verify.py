"""Verifies cards, equivalence, parity, metrics and exports: python tools/verify.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("verify")
