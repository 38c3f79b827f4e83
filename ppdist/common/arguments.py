"""Options that several commands share: which experiment, how many, how long."""

import argparse
import re
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


def share(text: str) -> float:
    """For `type=` of an option: 0..1."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text!r}")
    return found


def time_in(unit: str) -> Callable[[str], float]:
    """For `type=` of an option: a time above 0.

    Args: unit: for the message.
    """

    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not 0 < found < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number of {unit} above 0, found {text!r}")
        return found

    return number


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_count(text: str) -> int:
    """For `type=` of an option: 256MB or 1GiB, in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", text, re.IGNORECASE)
    count = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 256MB or 1GiB, found {text!r}")
    return count
