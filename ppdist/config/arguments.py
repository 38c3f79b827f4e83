"""Options that several commands share: which experiment, which data, how many."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ppdist.common.errors import ConfigError

if TYPE_CHECKING:
    from ppdist.config.data import DataConfig


_FORMATS = ("coco", "voc", "yolo", "csv", "folder")
_WITH_FORMAT = ("root", "images", "annotations", "names")


def at_least(least: int) -> Callable[[str], int]:
    """For `type=` of an option: a whole number, so large at least."""

    def number(text: str) -> int:
        if not text.lstrip("+-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number, {least} or more, found {text!r}"
            )
        return int(text)

    return number


def time_in(unit: str) -> Callable[[str], float]:
    """For `type=` of an option: a time above 0, in a unit that the message names."""

    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not 0 < found < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number of {unit} above 0, found {text!r}")
        return found

    return number


def described(text: str | None) -> argparse.ArgumentParser:
    """A parser whose --help begins with the docstring of its module, line by line."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_config(
    parser: argparse.ArgumentParser,
    *,
    required: bool,
    config: str = "YAML file of the experiment",
    override: str = "overrides of config keys, e.g. -o train.epochs=10 data.root=datasets/mine",
) -> None:
    """-c and -o, with these texts in --help."""
    parser.add_argument("-c", "--config", required=required, help=config)
    parser.add_argument(
        "-o", "--override", nargs="+", action="extend", default=[],
        metavar="KEY=VALUE", help=override,
    )  # fmt: skip


def add_source(parser: argparse.ArgumentParser) -> None:
    """-c and -o, or --format and what goes with it: for `source_of`."""
    add_config(parser, required=False)
    parser.add_argument("--format", choices=_FORMATS, help="of data without a YAML file")
    parser.add_argument("--root", metavar="DIR", help="what the paths are relative to (.)")
    parser.add_argument("--images", metavar="DIR", help="folder of the images (images)")
    parser.add_argument("--annotations", metavar="PATH", help="file, list or folder")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="of the classes, in order")


def source_of(arguments: argparse.Namespace) -> "DataConfig":
    """The data of the configuration, or what the command line says; then val is train.

    Raises: ConfigError: it says both, neither, or too little.
    """
    from ppdist.config import load_config
    from ppdist.config.data import DataConfig, SplitConfig

    if bool(arguments.config) == bool(arguments.format):
        raise ConfigError(
            f"{arguments.command} needs -c or --format, one of them", code="option_missing"
        )
    if arguments.config:
        unused = [f"--{name}" for name in _WITH_FORMAT if getattr(arguments, name) is not None]
        if unused:
            raise ConfigError(
                f"{', '.join(unused)} goes with --format",
                code="options_conflict",
                fix=(
                    f"with -c the data is that of {arguments.config}: change it there, or by -o "
                    "data.root=PATH ..."
                ),
            )
        data: DataConfig = load_config(arguments.config, arguments.override).data
        return data
    if arguments.override:
        raise ConfigError(
            f"-o {' '.join(arguments.override)} goes with -c; with --format the data is what "
            "--root, --images, --annotations and --names say",
            code="options_conflict",
        )
    if not arguments.annotations and arguments.format != "folder":
        raise ConfigError(
            f"--annotations is missing: format {arguments.format} needs it", code="option_missing"
        )
    root = "." if arguments.root is None else arguments.root
    if not Path(root).is_dir():
        raise ConfigError(
            "is not a folder", code="folder_not_found", where=f"--root {root}", fix="set --root DIR"
        )
    part = SplitConfig(
        images="images" if arguments.images is None else arguments.images,
        annotations=arguments.annotations or "",
    )
    return DataConfig(
        format=arguments.format,
        root=root,
        train=part,
        val=part,
        class_names=tuple(arguments.names or ()),
    )
