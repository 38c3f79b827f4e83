"""Measures speed; JSON on stdout: python tools/benchmark.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("benchmark")
