"""The commands behind tools/*.py; importing this loads no Paddle."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppdist.common import errors, process

if TYPE_CHECKING:
    from ppdist.engine.callbacks import Callback

_CLONE = Path(__file__).resolve().parents[1]
_TRAIN = "Trains a detector: fleetrun --nproc_per_node 2 tools/train.py -c cfg.yml [--eval]"


def use_clone(folder: str) -> None:
    """Makes a folder of the source repository importable that no installed package has.

    Args: folder: such as "tests/reference".
    Raises: ConfigError: ppdist was not started from a clone of its repository.
    """
    if not (_CLONE / folder / "__init__.py").is_file():
        raise errors.ConfigError(
            f"this command needs the folder {folder} of the source repository",
            code="needs_clone",
            where=str(_CLONE / folder),
            fix="clone the repository and run the command there",
        )
    if str(_CLONE) not in sys.path:
        sys.path.insert(0, str(_CLONE))


def parse_train() -> argparse.Namespace:
    """The command line of tools/train.py."""
    parser = argparse.ArgumentParser(description=_TRAIN)
    parser.add_argument("-c", "--config", required=True, help="YAML file of the experiment")
    parser.add_argument(
        "-o", "--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="overrides of config keys, e.g. -o train.epochs=10 data.root=datasets/mine",
    )  # fmt: skip
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
        arguments: of `parse_train`.
        callbacks: called in this order at the moments of the training.
    """
    process.hold_signals()
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
        command=sys.argv,
        resume_changed=arguments.resume_changed,
        callbacks=callbacks,
    )
    with experiment.log:
        notice = started_by_stock_launcher()
        if notice:
            experiment.log.warning(notice)
        status = experiment.trainer.fit()
        if comm.is_main() and status == 0:  # whoever asked to stop kills what does not end in time
            from ppdist.viz.run_plots import draw_labels, draw_run

            draw_run(output_dir)
            draw_labels(output_dir, experiment.sets, config.data, config.model.image_size)
        experiment.log.run_summary()
        return status
