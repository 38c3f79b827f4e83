"""Matching of two lists of classes by name: of weights and data, teacher and student, two files."""

from collections.abc import Sequence

from ppdist.common.errors import ConfigError

_MOST_SHOWN = 100  # names of a list in a message; COCO has 80


def tell_apart(names: Sequence[str]) -> bool:
    """Returns True if the names identify the classes.

    They do not if there are none, if one occurs twice, or if all are numbers (`class 3` is one).
    """
    normalized = [_normalize(name) for name in names]
    numbers = all(name.removeprefix("class").strip().isdecimal() for name in normalized)
    return not numbers and len(set(normalized)) == len(normalized)


def match_classes(names: Sequence[str], other_names: Sequence[str]) -> list[int | None]:
    """Finds the index of each class in another list of classes.

    Case and surrounding spaces are ignored; of equal names, the first is used.

    Returns: for each name its index in `other_names`, or None.
    """
    places = {_normalize(name): place for place, name in reversed([*enumerate(other_names)])}
    return [places.get(_normalize(name)) for name in names]


def require_same_classes(
    names: Sequence[str], other_names: Sequence[str], *, where: str, owner: str, fix: str
) -> None:
    """Checks that two lists have the same names, in any order.

    Lists whose names do not identify their classes pass: they can only be matched by number.

    Args:
        where: owner of `other_names`, such as a file; the message begins with it.
        owner: owner of `names`, in words.
        fix: what the user can do.
    Raises: ConfigError `classes_differ`, with both lists.
    """
    if not (tell_apart(names) and tell_apart(other_names)):
        return
    if len(names) != len(other_names) or None in match_classes(names, other_names):
        raise classes_differ(names, other_names, where=where, owner=owner, fix=fix)


def classes_differ(
    names: Sequence[str], other_names: Sequence[str], *, where: str, owner: str, fix: str
) -> ConfigError:
    """Builds the error for two lists of classes that cannot be matched.

    Args: see `require_same_classes`.
    """
    return ConfigError(
        f"its classes are {_list_names(other_names)}; those of {owner} are {_list_names(names)}",
        code="classes_differ",
        where=where,
        fix=fix,
    )


def _normalize(name: str) -> str:
    return name.strip().casefold()


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
