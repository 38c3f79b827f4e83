"""The commands: `ppdist COMMAND ...`, or tools/COMMAND.py in a clone.

Each module is one command: its options, then what it does, from top to bottom.  Paddle is imported
when the options are understood, so `--help` answers at once.
"""

import argparse
import difflib
import functools
import importlib
import importlib.metadata
import itertools
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ppdist import __version__
from ppdist.common import errors, job, process

if TYPE_CHECKING:
    from ppdist.config.experiment import ExperimentConfig

COMMANDS = {
    "train": "train a detector or a classifier",
    "launch": "start a command on many cards and machines, as fleetrun does",
    "eval": "evaluate weights on the validation split",
    "predict": "find objects in images and videos",
    "export": "export weights to Paddle Inference and ONNX",
    "convert": "convert weights between formats",
    "data": "check, count, show, convert and split data sets",
    "config": "list, show and copy configurations",
    "doctor": "check hosts, cluster and data before a run",
    "report": "write a run as an HTML page",
    "tune": "search hyper-parameters, run studies",
    "ensemble": "fuse detections, average weights",
    "plan": "predict time, cost and bottleneck of a training",
    "benchmark": "measure training, loading, evaluation and inference speed",
    "verify": "verify cards, equivalence, parity, metrics and exports",
}
# Each of these commands writes one result; under fleetrun all ranks would write it at once.
_ONE_PROCESS = {"predict", "export", "convert", "data", "config", "report", "plan"}
# What other trainers call our commands.
_NAMES_ELSEWHERE = {
    **{"val": "eval", "test": "eval", "infer": "predict", "track": "predict", "checks": "doctor"},
    **{"detect": "predict", "classify": "predict"},  # alone, as detect.py of YOLOv5
}
# Commands of earlier versions and of other trainers, and what to know instead.
_REMOVED = {
    "completion": "leave its line out of what your shell reads at its start",
    **dict.fromkeys(("segment", "pose", "obb"), "ppdist finds boxes and classifies whole images"),
}
_TASKS_ELSEWHERE = ("yolo", "detect", "classify")  # before the command: `yolo detect train`
CLONE = Path(__file__).resolve().parents[2]
_PROGRAM = "ppdist {}"  # what --help calls a command that no script of tools/ has started
_typed_command: list[str] = []  # words of another trainer in place of the command


def run(command: str) -> NoReturn:
    """Runs one of COMMANDS on sys.argv and ends with its exit code."""

    def main() -> int | None:
        require_one_process(command)
        return load_main(command)()

    process.run(main)


@contextmanager
def naming_data(arguments: argparse.Namespace) -> Iterator[None]:
    """Gives errors of the `with` block the words that name the data: DATA, or -c and its -o items.

    Args: arguments: from a parser with `add_data`.
    """
    try:
        yield
    except errors.DataError as error:
        of_data = [item for item in arguments.override if item.startswith("data.")]
        source = [arguments.data] if arguments.data else ["-c", arguments.config]
        if source[-1]:
            error.data_words = (*source, *(["-o", *of_data] if of_data else []))
        raise


def require_one_process(command: str) -> None:
    """Checks that a command which needs a single process runs as one.

    Raises: ConfigError: fleetrun started several processes.  LaunchError: fleetrun did not, but
        environment variables say that there are several.
    """
    ranks = job.launched_ranks()
    if command in _ONE_PROCESS and ranks > 1:
        from ppdist.distributed.comm import require_own_ranks  # imports Paddle

        require_own_ranks(os.environ)
        raise errors.ConfigError(
            f"ppdist {command} runs as one process, but fleetrun started {ranks}",
            code="one_process_only",
            where=f"fleetrun ... ppdist {command}",
            fix=f"run `ppdist {command}` without fleetrun; for several cards, split the images and "
            "run one per card"
            if command == "predict"
            else f"run `ppdist {command}` without fleetrun",
        )


def load_main(command: str) -> Callable[[], int | None]:
    """Loads the `main` of one of COMMANDS, which reads sys.argv."""
    command_main: Callable[[], int | None] = importlib.import_module(f"ppdist.cli.{command}").main
    return command_main


def main() -> NoReturn:
    """Runs the command named by the first word of the command line."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print("usage: ppdist COMMAND ...   (COMMAND --help says more)\n")
        print(*(f"  {name:10} {purpose}" for name, purpose in COMMANDS.items()), sep="\n")
        print("\n  --version  of ppdist, Paddle and Python")
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        print(version())
        sys.exit(0)
    if words[0] not in COMMANDS:
        command, rest = _command_elsewhere(words)
        if rest and command:
            _typed_command[:] = itertools.takewhile(lambda word: word != rest[0], words)
            sys.argv = [_PROGRAM.format(command), *rest]
            run(command)  # ends with what to type
        suggestions = [*filter(None, [command]), *difflib.get_close_matches(words[0], COMMANDS)]
        hint = (
            f"did you mean ppdist {suggestions[0]}?"
            if suggestions
            else f"expected {', '.join(COMMANDS)}"
        )
        hint = next((_REMOVED[word] for word in words[:2] if word in _REMOVED), hint)
        process.say(f"ppdist: error: there is no command {words[0]!r}; {hint}")
        sys.exit(2)
    sys.argv = [_PROGRAM.format(words[0]), *words[1:]]
    run(words[0])


def _command_elsewhere(words: Sequence[str]) -> tuple[str, list[str]]:
    """Finds our command in `yolo detect train data=...`; returns it, or "", and what follows it."""
    tasks = [*itertools.takewhile(lambda word: word in _TASKS_ELSEWHERE, words)]
    following = words[len(tasks) : len(tasks) + 1]
    for word in following:
        command = word if word in COMMANDS else _NAMES_ELSEWHERE.get(word, "")
        if command:
            track = ["--track"] if word == "track" else []
            return command, [*words[len(tasks) + 1 :], *track]
    if tasks and tasks != ["yolo"]:
        return _NAMES_ELSEWHERE.get(tasks[-1], ""), [*words[len(tasks) :]]
    return "", []


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations that recognises options of other trainers.

    Options are never completed from a prefix: `--conf 0.1` of another trainer is not --config.
    """

    def __init__(self, *args: Any, command: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._command = command

    def add_subparsers(self, **kwargs: Any) -> Any:
        below = functools.partial(type(self), command=self._command)
        return super().add_subparsers(**{"parser_class": below, **kwargs})

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        if _typed_command:
            typed = " ".join(_typed_command)
            _typed_command.clear()
            self._answer(self._options() - self._own_options(), typed)
            self.error(f"there is no command {typed!r}")
        leading = itertools.takewhile(lambda word: word[:1] != "-", sys.argv[1:])
        if "=" in "".join(leading) or "--source" in sys.argv:
            self._answer(())  # `model=yolov5n.pt data=...`, which DATA or --source would take
        return super().parse_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        _, unrecognized, words = message.partition("unrecognized arguments: ")
        options, own_options = self._options(), self._own_options()
        words_and_options = {
            spelling for word in words.split() for spelling in (word, word.partition("=")[0])
        }
        if message.startswith("the following arguments are required"):
            # argparse says this before it looks at `source=photos` of other trainers
            words_and_options = {word for word in sys.argv[1:] if "=" in word}
        self._answer(words_and_options | (set() if unrecognized else options - own_options))
        unknown_options = [word for word in words.split() if word[:2] == "--"]
        option_of_word = {word.lstrip("-"): word for word in own_options if word[:2] == "--"}
        mistyped = unknown_options[0].partition("=")[0].lstrip("-") if unknown_options else ""
        similar_options = [
            option_of_word[spelling]
            for spelling in difflib.get_close_matches(mistyped, option_of_word, 1, 0.5)
        ]
        message += f"; did you mean {similar_options[0]}?" if similar_options else ""
        examples = [
            line for line in (self.description or "").splitlines() if self._is_example(line)
        ]
        if not examples:
            super().error(message)
        process.say("\n".join([
            f"{self.prog}: error: {message}", *(f"  {line}" for line in examples),
            f"`{self.prog} --help` lists all options",
        ]))  # fmt: skip
        sys.exit(2)

    @staticmethod
    def _options() -> set[str]:
        return {word.partition("=")[0] for word in sys.argv[1:] if word[:1] == "-"}

    def _own_options(self) -> set[str]:
        return {*re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", self.format_help())}

    @staticmethod
    def _is_example(line: str) -> bool:
        return line.startswith(("ppdist ", "fleetrun "))

    def _answer(self, unknown: Container[str], typed_command: str = "") -> None:
        from ppdist.config.migration import refuse_options

        refuse_options(self._command, sys.argv[1:], unknown, typed_command)


def make_parser(command: str, text: str | None) -> Parser:
    """Builds the parser of one of COMMANDS.

    Args: text: the docstring of the command's module, shown line by line at the top of --help.
    """
    form = argparse.RawDescriptionHelpFormatter
    return Parser(command=command, description=text, formatter_class=form)


def version() -> str:
    """Returns `ppdist 0.1.0, paddlepaddle 3.3.1, Python 3.11.7` without importing Paddle."""
    parts = [f"ppdist {__version__}"]
    for name in ("paddlepaddle-gpu", "paddlepaddle"):
        with suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join([*parts, f"Python {platform.python_version()}"])


# The help text of -c for commands whose weights may include their configuration.
OR_OF_WEIGHTS = "YAML file of the experiment, or the name of a shipped one (default: that of -w)"


_CONFIG = "YAML file of the experiment, or the name of a shipped one (ppdist config list)"


def add_config(
    parser: argparse.ArgumentParser,
    *,
    required: bool,
    config: str = _CONFIG,
    override: str = "overrides of config keys, e.g. -o train.epochs=10 data.root=datasets/mine",
) -> None:
    """Adds -c and -o to a parser, with the given help texts."""
    parser.add_argument("-c", "--config", required=required, help=config)
    parser.add_argument(
        "-o", "--override", nargs="+", action="extend", default=[],
        metavar="KEY=VALUE", help=override,
    )  # fmt: skip
    parser.add_argument(
        "--trust-plugins", action=_TrustPlugins, nargs=0,
        help="import the packages that the configuration of a run, a checkpoint or an export names "
        "(package.module:Name), too",
    )  # fmt: skip


class _TrustPlugins(argparse.Action):
    """The argparse action of an option that trusts plug-ins here and in all child processes."""

    def __call__(self, *_: Any) -> None:
        from ppdist.config.plugins import TRUST_VARIABLE

        os.environ[TRUST_VARIABLE] = "1"


# The recipe whose input size and augmentation apply to DATA when --model is not given.
RECIPE = "ppyoloe_plus_s"


def add_data(
    parser: argparse.ArgumentParser, *, recipe: str | None = None, config: str = _CONFIG
) -> None:
    """Adds DATA, -c and -o to a parser; `load_experiment` reads them.

    Args:
        recipe: default of --model, the name of a shipped recipe; without it there is no --model.
        config: help text of -c.
    """
    parser.add_argument("data", nargs="?", metavar="DATA", help="a data.yaml or a folder")
    add_config(parser, required=False, config=config)
    if recipe is not None:
        help_text = f"with DATA: the recipe that reads it ({recipe})"
        parser.add_argument("--model", metavar="NAME", help=help_text)
        parser.set_defaults(recipe=recipe)


def require_one_source(arguments: argparse.Namespace, command: str, model: str = "") -> None:
    """Requires either DATA or -c.

    Args: model: value of --model in the example that the error message shows, for a command
        that needs --model with DATA.
    Raises: ConfigError: both were given, or neither.
    """
    if bool(arguments.data) == bool(arguments.config):
        sources = " and ".join(filter(None, (arguments.data, arguments.config)))
        if model and arguments.config and not os.path.splitext(arguments.config)[1]:
            model = arguments.config  # the name of a recipe, which -c and --model both take
        more = f" --model {shlex.quote(model)}" if model else ""
        data, config = map(
            shlex.quote, (arguments.data or "data.yaml", arguments.config or "cfg.yml")
        )
        if sources and "=" in arguments.data and not os.path.exists(arguments.data):
            from ppdist.config.migration import refuse_options

            refuse_options(command.split()[0], sys.argv[1:], (arguments.data,))
            raise errors.ConfigError(
                "a key of the configuration goes behind -o",
                code="options_conflict",
                where=arguments.data,
                fix=f"write `-o {shlex.quote(arguments.data)}`",
            )
        raise errors.ConfigError(
            f"expected either DATA or -c, found {f'both ({sources})' if sources else 'neither'}",
            code="options_conflict" if sources else "option_missing",
            where=command,
            fix=f"`ppdist {command} {data}{more}`, or `ppdist {command} -c {config}`",
        )


def load_experiment(arguments: argparse.Namespace, command: str) -> "ExperimentConfig":
    """Loads the configuration of -c, or fits a recipe to DATA; then applies -o.

    Args: arguments: from a parser with `add_data`.  command: as users type it, for messages.
    """
    from ppdist.engine.recipe import (
        TrainOptions,
        fit_recipe,
        load_config_with_data,
        read_task,
    )

    require_one_source(arguments, command)
    model: str | None = getattr(arguments, "model", None)
    if arguments.config:
        if model:
            raise errors.ConfigError(
                "--model needs DATA; it does not work with -c",
                code="options_conflict",
                where=f"{command} -c {arguments.config}",
                fix="choose the model with -c NAME",
            )
        return load_config_with_data(arguments.config, arguments.override)
    from ppdist.data.datasets.layout import find_layout

    options = TrainOptions(model or str(getattr(arguments, "recipe", RECIPE)))
    layout = find_layout(arguments.data, read_task(options))
    for subject, reason in layout.notes:
        process.say(f"ppdist: note: {subject}: {reason}")
    return fit_recipe(layout, options, arguments.override, world=1).config


def load_config_of(
    arguments: argparse.Namespace, *, needs_data: bool = False
) -> "ExperimentConfig":
    """Loads the configuration of -c, or of the weights of -w; then applies -o.

    Args: needs_data: see `config_of_weights`.
    """
    from ppdist.engine.recipe import fit_to_root, load_config_with_data

    if arguments.config:
        config = load_config_with_data(arguments.config, arguments.override)
        _warn_of_other_size(arguments, config)
        return config
    from ppdist.models.model_card import config_of_weights

    config = config_of_weights(arguments.weights, arguments.override, needs_data=needs_data)
    return fit_to_root(config, arguments.override) if needs_data else config


def _warn_of_other_size(arguments: argparse.Namespace, config: "ExperimentConfig") -> None:
    """Warns if -c has another input size than the weights, and nobody asked for it."""
    from ppdist.models.model_card import read_card

    is_asked_for = any(item.startswith("model.image_size") for item in arguments.override)
    if is_asked_for or job.launched_rank():
        return
    card = None
    with suppress(errors.CodedError):  # said where the weights are loaded
        card = read_card(arguments.weights)
    size = config.model.image_size
    if card is None or card.image_size in (None, size):
        return
    of_config, of_weights = (" x ".join(map(str, pair or ())) for pair in (size, card.image_size))
    process.warn(
        f"-c {arguments.config} has images of {of_config} pixels, {arguments.weights} is for "
        f"{of_weights}; without -c the settings of the weights hold"
    )


def command_line() -> list[str]:
    """Returns the words that start this command again, for the records of a run."""
    program, *options = sys.argv
    by_name = {_PROGRAM.format(command): command for command in COMMANDS}
    return ["ppdist", by_name[program], *options] if program in by_name else sys.argv


def script_words(command: str) -> list[str]:
    """Returns the words with which fleetrun starts a command on its ranks.

    Runs record them and messages show them, so in a clone they name the script in tools/ that a
    user would type.
    """
    door = CLONE / "tools" / f"{command}.py"
    if is_clone() and door.is_file():
        return [str(door)]
    return [str(Path(__file__).resolve().parents[1] / "__main__.py"), command]


def is_clone() -> bool:
    """Returns True if this package is in a clone of its repository, not in site-packages."""
    return (CLONE / "setup.py").is_file()


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table to stdout; long cells are wrapped."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table(*(Column(title, overflow="fold") for title in header))
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def weights_words(arguments: argparse.Namespace) -> str:
    """Returns -w with -c and -o, without overrides of `data.`, as text for a new command."""
    words = ["-c", arguments.config] if arguments.config else []
    words += ["-w", arguments.weights]
    items = [item for item in arguments.override if not item.startswith("data.")]
    return shlex.join([*words, *(["-o", *items] if items else [])])


def print_commands(commands: Iterable[tuple[str, str]]) -> None:
    """Prints commands to copy, as (purpose, command) pairs, like those at the end of training."""
    for purpose, command in commands:
        print(f"{purpose:10}{command}")


def default_folder(weights: Path, name: str) -> Path:
    """Returns the default output folder: in the run that the weights belong to, else named after
    the weights.

    Args: weights: a run, a checkpoint, a file or a name; or an export in a run.
    Raises: UserError: the folder in the run, or a folder below it, is a link.
    """
    from ppdist.common.files import require_no_links
    from ppdist.models.weights import checkpoint_of

    checkpoint, run = checkpoint_of(weights), None
    if (checkpoint / "manifest.json").is_file() and checkpoint.parent.name == "checkpoints":
        run = checkpoint.parent.parent
    elif (weights.parent / "checkpoints").is_dir():
        run = weights.parent
    if run is not None:
        require_no_links(run / name)
        return run / name
    return Path("output") / f"{weights.stem}_{name}"
