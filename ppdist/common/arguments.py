"""Types of command-line options: counts, shares, times, sizes; for `type=` of argparse."""

import argparse
import re
from collections.abc import Callable


def at_least(minimum: int) -> Callable[[str], int]:
    """Returns the type of an option that takes a whole number of at least `minimum`."""

    def parse(text: str) -> int:
        if not text.lstrip("+-").isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"expected a whole number, {minimum} or more, found {text!r}"
            )
        return int(text)

    return parse


def share(text: str) -> float:
    """Parses the value of an option that takes a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text!r}")
    return value


def time_in(unit: str) -> Callable[[str], float]:
    """Returns the type of an option that takes a time above 0.

    Args: unit: unit of the time, used in the error message.
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number of {unit} above 0, found {text!r}")
        return value

    return parse


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_count(text: str) -> int:
    """Parses the value of an option that takes a size, such as 256MB or 1GiB, into bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", text, re.IGNORECASE)
    count = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 256MB or 1GiB, found {text!r}")
    return count
