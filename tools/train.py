"""Trains a detector: fleetrun --nproc_per_node 2 tools/train.py -c configs/... [--eval] [-o k=v]"""

from ppdist import cli
from ppdist.common import process


def main() -> int:
    return cli.train(cli.parse_train())


if __name__ == "__main__":
    process.run(main)
