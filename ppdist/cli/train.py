"""Trains a detector.

ppdist train DATA --model ppyoloe_plus_s [--epochs 100] [--batch 32] [--weights NAME|FILE]
ppdist train DATA --model yolov5n [--steps 50000] [--classes car bus] [--single-cls]
ppdist train DATA --model ppyoloe_plus_s --dry-run
ppdist train -c cfg.yml [--eval] [-o k=v]
ppdist train --resume RUN [--epochs +50]
fleetrun --nproc_per_node 2 ppdist train -c cfg.yml [--eval] [-o k=v]

DATA: a data.yaml (ultralytics, Roboflow), or a folder with COCO's JSON, Pascal VOC's XML or YOLO's
labels; for a classifier a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg.
Everything else is decided, shown, and written to the output_dir as a configuration.
"""

import argparse
import logging
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ppdist.cli import (
    RECIPE,
    add_config,
    command_line,
    make_parser,
    naming_data,
    require_one_source,
)
from ppdist.common.arguments import at_least
from ppdist.common.errors import ConfigError
from ppdist.common.job import launched_rank, launched_ranks
from ppdist.common.limits import require_limits
from ppdist.common.process import importing, say
from ppdist.common.signals import hold_signals

if TYPE_CHECKING:
    from ppdist.engine.callbacks import Callback
    from ppdist.engine.run import TrainingPlan


def parse() -> argparse.Namespace:
    parser = make_parser("train", __doc__)
    parser.add_argument("data", nargs="?", metavar="DATA", help="a data.yaml or a folder")
    add_config(parser, required=False)
    fitted = parser.add_argument_group("with DATA (with -c these are keys of the configuration)")
    fitted.add_argument(
        "--model", metavar="NAME",
        help="a shipped recipe: ppyoloe_plus_s, yolov5n, ..., for classes of whole images "
        "yolov5s_cls (ppdist config list)",
    )  # fmt: skip
    length = fitted.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=_parse_length, metavar="N|+N",
                        help="passes over the training images (default: depends on their number); "
                        "with --resume RUN: the new total, or +N more")  # fmt: skip
    length.add_argument("--steps", type=_parse_length, metavar="N|+N",
                        help="instead, the length in optimizer steps, which the whole schedule "
                        "spans; with --resume RUN as --epochs")  # fmt: skip
    fitted.add_argument("--batch", type=_parse_batch, metavar="N", help="images a card, as "
                        "train.batch_size_per_card, or auto: 16 on 4 cards are 64 in all "
                        "(YOLOv5: 16); the rate follows (as the recipe)")  # fmt: skip
    fitted.add_argument(
        "--weights", metavar="NAME|FILE", help="start from these, as model.pretrained",
        type=lambda text: text or None,  # '' means from scratch, as in YOLOv5
    )  # fmt: skip
    fitted.add_argument("--image-size", type=_parse_side, nargs="+", metavar="N",
                        help="pixels: one number is a square, two are height and width (as the "
                        "recipe)")  # fmt: skip
    fitted.add_argument("--classes", nargs="+", type=_parse_class, metavar="NAME|N",
                        help="train on these classes alone, as data.classes (all)")  # fmt: skip
    fitted.add_argument("--single-cls", action="store_true", default=None, dest="single_class",
                        help="all objects are of one class, as data.single_class")  # fmt: skip
    fitted.add_argument("--fraction", type=_parse_fraction, metavar="F", help="share of the "
                        "training images to train on, as data.fraction (1)")  # fmt: skip
    parser.add_argument(
        "--eval", action=argparse.BooleanOptionalAction, default=None,
        help="evaluate during training and keep the best checkpoint (default: yes with DATA or "
        "RUN, no with -c)",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="check everything, show the decisions, write the configuration and say how long it "
        "will take, without training",
    )  # fmt: skip
    parser.add_argument(
        "--resume", nargs="?", const="", default=None, metavar="RUN|auto",
        help="continue RUN (an output_dir or a checkpoint) with its own settings; without a value, "
        "continue from this run's newest checkpoint; auto: the same, or start if there is none",
    )  # fmt: skip
    parser.add_argument(
        "--resume-changed", action="store_true",
        help="with --resume: continue although settings changed that change what is learned",
    )  # fmt: skip
    # fleetrun needs these when it rejoins its job, before it joins.
    parser.add_argument("--digests", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.resume_changed and arguments.resume is None:
        parser.error("--resume-changed goes with --resume")
    if arguments.resume:
        from ppdist.config.migration import refuse_weights

        refuse_weights(arguments.resume)
    _check_source(arguments)
    return arguments


def _parse_length(text: str) -> int | str:
    """Parses a number of epochs or steps; `+50` stays as it is."""
    number = at_least(1)(text.removeprefix("+"))
    return f"+{number}" if text.startswith("+") else number


def _parse_batch(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"expected a whole number, 1 or more, or auto (what fits into memory), found {text!r}"
        )
    return text if text == "auto" else at_least(1)(text)


def _parse_class(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _parse_fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(
            f"expected a share above 0, at most 1, such as 0.1, found {text!r}"
        )
    return fraction


def _parse_side(text: str) -> int:
    if re.fullmatch(r"\d+ ?[,x] ?\d+", text):
        height, width = re.findall(r"\d+", text)
        raise argparse.ArgumentTypeError(
            f"height and width are two words: --image-size {height} {width}"
        )
    return at_least(32)(text)


_DATA_OPTIONS = {  # and what they are behind -o
    "model": "",
    "epochs": "train.epochs={}",
    "steps": "train.steps={}",
    "batch": "train.batch_size_per_card={}",
    "weights": "model.pretrained={}",
    "image_size": "model.image_size={}",
    "classes": "data.classes={} model.num_classes={classes}",
    "single_class": "data.single_class=true model.num_classes=1",
    "fraction": "data.fraction={}",
}
_LENGTHS = ("epochs", "steps")  # also allowed with --resume RUN


def _check_source(arguments: argparse.Namespace) -> None:
    """Requires DATA with its options, -c, or --resume RUN without either.

    Raises: ConfigError: the options are incompatible.
    """
    word = arguments.resume
    if word and word != "auto" and not (arguments.data or arguments.config):  # a run to continue
        given_options = [
            name for name in _DATA_OPTIONS if name not in _LENGTHS and getattr(arguments, name)
        ]
        if given_options:
            raise ConfigError(
                f"{_join_options(given_options)} needs DATA; it does not work with --resume RUN",
                code="options_conflict",
                where=f"train --resume {arguments.resume}",
                fix="leave it out: a resumed run keeps its own settings",
            )
        return
    require_one_source(arguments, "train", model=RECIPE)
    if arguments.data and not arguments.model:
        raise ConfigError(
            "--model is missing",
            code="option_missing",
            where=f"train {arguments.data}",
            fix=f"for example `{_with_model(arguments)}` (others: ppdist config list)",
        )
    given_options = [name for name in _DATA_OPTIONS if getattr(arguments, name) is not None]
    if arguments.config and given_options:
        raise ConfigError(
            f"{_join_options(given_options)} needs DATA; it does not work with -c",
            code="options_conflict",
            where=f"train -c {arguments.config}",
            fix=f"instead: `{_with_keys(arguments, given_options)}`",
        )
    if arguments.image_size and len(arguments.image_size) > 2:
        raise ConfigError(
            f"{len(arguments.image_size)} numbers; expected one, or height and width",
            code="bad_value",
            where="--image-size",
        )


def _with_model(arguments: argparse.Namespace) -> str:
    """Returns the command line with the --model that its weights name, or one to begin with."""
    from ppdist.config.migration import model_of_weights

    model = model_of_weights(arguments.weights) if arguments.weights else RECIPE
    return shlex.join(["ppdist", "train", *sys.argv[1:], "--model", model])


def _with_keys(arguments: argparse.Namespace, names: Sequence[str]) -> str:
    """Returns the command line with keys behind -o in place of the options of DATA."""
    keys = [
        key.format(_as_key_value(getattr(arguments, name)), classes=len(arguments.classes or ()))
        for name in names
        for key in _DATA_OPTIONS[name].split()
    ]
    switches = [
        *(["--eval"] if arguments.eval else []), *(["--dry-run"] if arguments.dry_run else []),
        *(["--resume"] if arguments.resume is not None else []), *filter(None, [arguments.resume]),
        *(["--resume-changed"] if arguments.resume_changed else []),
    ]  # fmt: skip
    override = ["-o", *arguments.override, *keys] if arguments.override or keys else []
    config = arguments.model or arguments.config
    return shlex.join(["ppdist", "train", "-c", config, *switches, *override])


def _as_key_value(value: object) -> str:
    """Formats the value of an option as a configuration key expects it."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else f"{value}"


_OPTION_NAMES = {"single_class": "--single-cls"}


def _join_options(names: Sequence[str]) -> str:
    return ", ".join(_OPTION_NAMES.get(name, f"--{name.replace('_', '-')}") for name in names)


def train(arguments: argparse.Namespace, callbacks: Sequence["Callback"] = ()) -> int:
    """Trains on this rank; returns the exit code.

    Args:
        arguments: from `parse`.
        callbacks: called in this order on the events of training.
    """
    hold_signals()  # the entry points have already done so
    require_limits()
    with importing():
        from ppdist.config.experiment import default_output_dir
        from ppdist.engine.continuation import Continuation
        from ppdist.engine.recipe import TrainOptions
        from ppdist.engine.run import localise, plan_training, run_training
        from ppdist.engine.stopping import until_first_step

    until_first_step()
    size = arguments.image_size
    plan = plan_training(
        data=arguments.data,
        config=arguments.config,
        options=TrainOptions(
            model=arguments.model,
            epochs=arguments.epochs,
            batch=arguments.batch,
            weights=arguments.weights,
            image_size=None if size is None else (size[0], size[-1]),
            steps=arguments.steps,
            classes=arguments.classes,
            single_class=arguments.single_class,
            fraction=arguments.fraction,
        ),
        overrides=arguments.override,
        resume=Continuation(arguments.resume or None, arguments.resume_changed),
    )
    output_dir = Path(
        plan.config.output_dir or default_output_dir(arguments.config or arguments.data)
    )
    if arguments.resume == "":  # resume this run
        plan = replace(plan, resume=replace(plan.resume, source=output_dir))
    evaluate = not arguments.config if arguments.eval is None else arguments.eval
    if arguments.digests:
        from ppdist.engine.digests import write_digests

        fitted = plan.recipe is not None
        write_digests(arguments.digests, plan.config, evaluate=evaluate, fitted=fitted)
        return 0
    if arguments.dry_run:
        source = ["-c", arguments.config] if arguments.config else []
        items = ["-o", *arguments.override] if arguments.override else []
        return _dry_run(localise(plan, output_dir), output_dir, evaluate, [*source, *items])

    if launched_ranks() > 1 and launched_rank() == 0:
        from ppdist.launch.cli import warn_of_stock_launcher

        if notice := warn_of_stock_launcher():  # before the ranks join and might wait forever
            say(f"ppdist: warning: {notice}")
    return run_training(
        plan,
        output_dir,
        evaluate=evaluate,
        command=command_line(),
        callbacks=callbacks,
    )


def _dry_run(plan: "TrainingPlan", output_dir: Path, evaluate: bool, source: Sequence[str]) -> int:
    """Makes and checks every decision of a training run, without training.

    Args: source: -c and -o as typed, with which another command reads the same data.
    """
    from ppdist.cli.data import check_splits, describe_problems, describe_splits, describe_verdict
    from ppdist.cli.screen import Screen
    from ppdist.common.console import EarlyLog
    from ppdist.distributed import comm
    from ppdist.engine.advice import advice
    from ppdist.engine.build import build_model, decide_training
    from ppdist.engine.recipe import ASIDE, FILE, file_of_plan, write_recipe
    from ppdist.engine.rehearsal import rehearse
    from ppdist.engine.run import locate_run

    screen = Screen()

    def write_plan() -> tuple[str, str]:
        if plan.recipe is None:
            return "", ""
        screen.print_decisions(plan.recipe.rows)
        name = file_of_plan(plan.recipe, output_dir)
        earlier = {*output_dir.glob(ASIDE)}
        return name, write_recipe(plan.recipe, output_dir, earlier, evaluate, name)

    def check_data() -> bool:
        report = check_splits(plan.config, fast=True)
        screen.print_short(describe_splits(report))
        problems = describe_problems(report, brief=True)
        if report.errors:
            screen.print(problems)
            print(describe_verdict(report), file=sys.stderr)
            return False
        words = ["-c", str(output_dir / name)] if name else source
        screen.print_problems(problems, shlex.join(["ppdist", "data", "check", *words]))
        screen.print([describe_verdict(report)])
        return True

    comm.init(plan.config.device, plan.config.distributed)
    url, output_dir = locate_run(output_dir)
    if url:
        from ppdist.storage.stores import require_writable

        say(f"ppdist: output_dir: {comm.run_on_main(lambda: require_writable(url))}")
    build_model(plan.config)  # fails if sizes do not match
    name, command = comm.run_on_main(write_plan)
    usable = comm.run_on_main(check_data)
    warnings: list[str] = []
    lines: list[str] = []
    if usable:  # what the run itself would reject or warn about
        with EarlyLog(comm.is_main()), _quiet("ppdist.data"):  # `check_data` has printed it
            decisions = decide_training(
                plan.config, output_dir=output_dir, evaluate=evaluate, resume=plan.resume,
                hold=False,
            )  # fmt: skip
            time_line = rehearse(decisions)
        warnings = [*decisions.warnings, *advice(decisions.config, decisions.schedule)]
        selection = plan.config.data.describe_selection()
        if selection and plan.recipe is None:  # a recipe's table already shows it
            lines.append(f"of the data: {selection}")
        lines.append(time_line)
    if name:
        if name != FILE:
            lines.append(f"{output_dir / FILE} stays: it is of the run that was made there")
        lines.append(f"wrote {output_dir / name}, which says why in full")
        lines.append(f"to train: {command}")
    if comm.is_main():
        screen.print_end(warnings, lines)
    return 0 if usable else 2


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silences the warnings of a logger inside the `with` block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def main() -> int:
    arguments = parse()
    with naming_data(arguments):
        return train(arguments)
