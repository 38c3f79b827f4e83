"""The commands: `python -m ppdist COMMAND ...`, and tools/COMMAND.py in a clone.

Each module is one command: its options, then what it does, from top to bottom.  Paddle is imported
when the options are understood, so `--help` answers at once.
"""

import importlib
import sys
from pathlib import Path
from typing import NoReturn

from ppdist.common import errors, process

COMMANDS = {
    "train": "train a detector or a classifier",
    "launch": "start a command on many cards and machines, as fleetrun does",
    "eval": "evaluate weights on the validation split",
    "predict": "find objects in images and videos",
    "export": "export weights to Paddle Inference and ONNX",
    "convert": "convert weights between formats",
    "data": "check, count, show, convert and split data sets",
    "config": "show a resolved configuration; regenerate docs and schema",
    "doctor": "check hosts, cluster and data before a run",
    "report": "write one run, or several, as an HTML page",
    "tune": "search hyper-parameters, run studies",
    "ensemble": "fuse detections, average weights",
    "plan": "predict time, cost and bottleneck of a training",
    "benchmark": "measure training, loading, evaluation and inference speed",
    "verify": "verify cards, equivalence, parity, metrics and exports",
}
CLONE = Path(__file__).resolve().parents[2]
_PROGRAM = "ppdist {}"  # what --help calls a command that no script of tools/ has started


def run(command: str) -> NoReturn:
    """Runs one of COMMANDS on sys.argv and ends with its exit code."""
    process.run(importlib.import_module(f"ppdist.cli.{command}").main)


def main() -> NoReturn:
    """Runs the command that the first word of the command line names."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print("usage: python -m ppdist COMMAND ...   (COMMAND --help says more)\n")
        print(*(f"  {name:10} {what}" for name, what in COMMANDS.items()), sep="\n")
        sys.exit(0 if words else 2)
    if words[0] not in COMMANDS:
        process.say(f"ppdist: error: {words[0]!r}: expected one of {', '.join(COMMANDS)}")
        sys.exit(2)
    sys.argv = [_PROGRAM.format(words[0]), *words[1:]]
    run(words[0])


def command_line() -> list[str]:
    """The words that start this command again, for what a run records."""
    program, *options = sys.argv
    by_name = {_PROGRAM.format(command): command for command in COMMANDS}
    if program in by_name:
        return ["python", "-m", "ppdist", by_name[program], *options]
    return sys.argv


def script_of(command: str) -> list[str]:
    """The words by which fleetrun starts one of COMMANDS on each of its ranks.

    Runs record them and messages show them, so a clone's door is named as a user would type it.
    """
    door = CLONE / "tools" / f"{command}.py"
    if is_clone() and door.is_file():
        return [str(door)]
    return [str(Path(__file__).resolve().parents[1] / "__main__.py"), command]


def is_clone() -> bool:
    """Whether this package stands in its source repository, and not where pip put it."""
    return (CLONE / "setup.py").is_file()


def require_clone(folder: str) -> Path:
    """A folder of the source repository, which no installed package has.

    Args: folder: such as "tests/reference".
    Raises: ConfigError: ppdist was not started from a clone of its repository.
    """
    found = CLONE / folder
    if not (is_clone() and found.is_dir()):
        raise errors.ConfigError(
            f"this command needs the folder {folder} of the source repository",
            code="needs_clone",
            where=str(found),
            fix="clone the repository and run the command there",
        )
    return found


def use_clone(folder: str) -> None:
    """Makes a folder of the source repository importable; see `require_clone`."""
    require_clone(folder)
    if str(CLONE) not in sys.path:
        sys.path.insert(0, str(CLONE))
