"""Two lists of classes, matched by name.

The one place where those of weights and data, teacher and student, or two files meet.
"""

from collections.abc import Sequence

from ppdist.common.errors import ConfigError

_MOST_SHOWN = 100  # names of a list in a message; COCO has 80


def tell_apart(names: Sequence[str]) -> bool:
    """Whether names say which class is which.

    They do not where there are none, one stands twice, or all are numbers.
    """
    plain = [_plain(name) for name in names]
    numbers = all(name.removeprefix("class").strip().isdecimal() for name in plain)
    return not numbers and len(set(plain)) == len(plain)


def match_classes(ours: Sequence[str], theirs: Sequence[str]) -> list[int | None]:
    """Where classes of our names stand in another list; None: nowhere.

    Case and spaces around a name do not count.
    """
    places = {_plain(name): place for place, name in reversed([*enumerate(theirs)])}
    return [places.get(_plain(name)) for name in ours]


def require_same_classes(
    ours: Sequence[str], theirs: Sequence[str], *, where: str, of_ours: str, fix: str
) -> None:
    """Checks that two lists have the same names, in any order.

    Lists that do not tell their classes apart pass: they can only be matched by number.

    Args: where: what has their names; of_ours: what has ours.
    Raises: ConfigError `classes_differ`, with both lists.
    """
    if not (tell_apart(ours) and tell_apart(theirs)):
        return
    if len(ours) != len(theirs) or None in match_classes(ours, theirs):
        raise classes_differ(ours, theirs, where=where, of_ours=of_ours, fix=fix)


def classes_differ(
    ours: Sequence[str], theirs: Sequence[str], *, where: str, of_ours: str, fix: str
) -> ConfigError:
    """The error of two lists of classes that cannot be matched."""
    return ConfigError(
        f"its classes are {_listed(theirs)}; those of {of_ours} are {_listed(ours)}",
        code="classes_differ",
        where=where,
        fix=fix,
    )


def _plain(name: str) -> str:
    return name.strip().casefold()


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
