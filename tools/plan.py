"""Predicts time, cost and bottleneck of a training: python tools/plan.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("plan")
