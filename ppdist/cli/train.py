"""Trains a detector.

fleetrun --nproc_per_node 2 tools/train.py -c cfg.yml [--eval] [-o k=v]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppdist.cli import add_config, command_line
from ppdist.common import process
from ppdist.common.arguments import described

if TYPE_CHECKING:
    from ppdist.engine.callbacks import Callback


def parse() -> argparse.Namespace:
    parser = described(__doc__)
    add_config(parser, required=True)
    parser.add_argument(
        "--eval", action="store_true", help="evaluate during training and keep the best"
    )
    parser.add_argument(
        "--resume", nargs="?", const="", default=None, metavar="PATH|auto",
        help="continue from PATH (a checkpoint or an output_dir), or from this run's newest; "
        "auto: from that, or anew where there is none",
    )  # fmt: skip
    parser.add_argument(
        "--resume-changed", action="store_true",
        help="with --resume: continue although settings changed that change what is learned",
    )  # fmt: skip
    arguments = parser.parse_args()
    if arguments.resume_changed and arguments.resume is None:
        parser.error("--resume-changed goes with --resume")
    return arguments


def train(arguments: argparse.Namespace, callbacks: Sequence["Callback"] = ()) -> int:
    """Trains on this rank; returns the exit code.

    Args:
        arguments: of `parse`.
        callbacks: called in this order at the moments of the training.
    """
    process.hold_signals()
    from ppdist.config import load_config
    from ppdist.engine.run import run_training
    from ppdist.engine.state import AUTO
    from ppdist.engine.trainer import until_first_step
    from ppdist.launch.cli import started_by_stock_launcher

    until_first_step()
    config = load_config(arguments.config, arguments.override)
    output_dir = Path(config.output_dir or f"output/{Path(arguments.config).stem}")
    word = arguments.resume
    return run_training(
        config,
        output_dir,
        evaluate=arguments.eval,
        resume=word if word in (None, AUTO) else Path(word or output_dir),
        command=command_line(),
        resume_changed=arguments.resume_changed,
        callbacks=callbacks,
        notice=started_by_stock_launcher,
    )


def main() -> int:
    return train(parse())
