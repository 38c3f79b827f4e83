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
from ppdist.common.limits import require_limits
from ppdist.common.signals import hold_signals

if TYPE_CHECKING:
    from ppdist.config import ExperimentConfig
    from ppdist.engine.build import Experiment
    from ppdist.engine.callbacks import Callback

_DRAWING_SECONDS = 600.0  # some ten are usual


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
    hold_signals()  # as the doors have done already
    require_limits()
    from ppdist.common.logging import commands
    from ppdist.config import load_config
    from ppdist.distributed import comm, heartbeat
    from ppdist.engine.build import build_training
    from ppdist.engine.state import AUTO
    from ppdist.engine.trainer import until_first_step
    from ppdist.launch.cli import started_by_stock_launcher

    until_first_step()
    config = load_config(arguments.config, arguments.override)
    output_dir = Path(config.output_dir or f"output/{Path(arguments.config).stem}")
    comm.init(config.device, config.distributed)
    heartbeat.tell_run(output_dir)
    word = arguments.resume
    experiment = build_training(
        config,
        output_dir=output_dir,
        evaluate=arguments.eval,
        resume=word if word in (None, AUTO) else Path(word or output_dir),
        command=command_line(),
        resume_changed=arguments.resume_changed,
        callbacks=callbacks,
    )
    with experiment.log:
        notice = started_by_stock_launcher()
        if notice:
            experiment.log.warning(notice)
        status = experiment.trainer.fit()
        if comm.is_main() and status == 0:  # whoever asked to stop kills what does not end in time
            failed = process.apart(lambda: _draw(output_dir, experiment, config), _DRAWING_SECONDS)
            if failed:
                experiment.log.warning(
                    f"the training is complete, its pictures in {output_dir / 'plots'} are not "
                    f"({failed}); again: {commands(output_dir)[0]}"
                )
        try:
            experiment.log.run_summary()
        except Exception as error:  # no table is worth a run that is complete
            experiment.log.warn_once("the summary", error)
        return status


def _draw(output_dir: Path, experiment: "Experiment", config: "ExperimentConfig") -> None:
    """Pictures of the run and of its sets; a decoder may die of an image in them."""
    import cv2

    from ppdist.viz.run_plots import draw_labels, draw_run

    cv2.setNumThreads(0)  # its threads are not in a copy of the process
    draw_run(output_dir)
    draw_labels(output_dir, experiment.sets, config.data, config.model.image_size)


def main() -> int:
    return train(parse())
