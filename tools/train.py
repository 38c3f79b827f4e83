"""Trains a detector: fleetrun --nproc_per_node 2 tools/train.py -c cfg.yml [--eval]"""

from ppdist.common.signals import hold_signals

if __name__ == "__main__":
    hold_signals()
    from ppdist import cli

    cli.run("train")
