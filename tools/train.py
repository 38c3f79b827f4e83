"""Trains a detector: fleetrun --nproc_per_node 2 tools/train.py -c cfg.yml [--eval]"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("train")
