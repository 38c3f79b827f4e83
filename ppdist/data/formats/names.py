"""Class names and lists of images, for the formats whose annotation files do not hold them."""

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from ppdist.data.formats.annotations import read_text
from ppdist.data.formats.raw import Complain
from ppdist.errors import DataError

NAME_FILES = ("label_list.txt", "classes.txt")


class _Plain(yaml.SafeLoader):
    """Plain data without aliases: ten lines of those can stand for more than any memory holds."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def class_names(
    root: Path, configured: tuple[str, ...], complain: Complain | None = None
) -> tuple[str, ...]:
    """Names in the order of their numbers, or () when nobody gives them.

    From data.class_names, else label_list.txt or classes.txt in root (a name a line), else the
    `names` of the one YAML file in root that has them (ultralytics' data file).

    Raises: DataError: a name is listed twice, or a file is malformed.
    """
    names, source = configured, "data.class_names"
    for file in (root / name for name in NAME_FILES):
        if not names and file.is_file():
            names, source = tuple(read_list(file, complain)), str(file)
    if not names:
        named = {file: _yaml_names(file, complain) for file in sorted(root.glob("*.y*ml"))}
        named = {file: found for file, found in named.items() if found}
        if len(set(named.values())) > 1:
            files = ", ".join(map(str, named))
            raise DataError(
                "give different class names",
                code="class_names_ambiguous",
                where=files,
                fix="set data.class_names",
            )
        for file, found in named.items():
            names, source = found, str(file)
    return _distinct(names, source)


def read_names(file: Path) -> tuple[str, ...]:
    """Class names of a file that has one a line.

    Raises: DataError: absent, not UTF-8 text, or a name is listed twice.
    """
    return _distinct(tuple(read_list(file)), str(file))


def _distinct(names: tuple[str, ...], source: str) -> tuple[str, ...]:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"class {twice[0]!r} is listed twice", code="class_name_duplicate", where=source
        )
    return names


def _yaml_names(file: Path, complain: Complain | None) -> tuple[str, ...]:
    try:
        content = yaml.load(read_text(file, complain), Loader=_Plain)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        return ()  # some other file that happens to lie here
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, dict):
        if set(names) != set(range(len(names))):
            raise DataError(
                f"expected the numbers 0 to {len(names) - 1} as keys",
                code="bad_class_numbers",
                where=f"{file}: names",
            )
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list) or any(isinstance(name, list | dict) for name in names):
        return ()
    return tuple(map(str, names))


def read_list(path: Path, complain: Complain | None = None) -> list[str]:
    """The lines that are not empty, without surrounding blanks."""
    text = read_text(path, complain)
    return [line.strip() for line in text.splitlines() if line.strip()]
