"""Options that several commands share: which experiment, how many, how long."""

import argparse
from collections.abc import Callable


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
