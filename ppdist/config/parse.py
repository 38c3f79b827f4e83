"""Reads YAML and plain data as Sections.

    base files (`_BASE_`) <- file <- -o overrides        mappings merge, everything else replaces
    -> checked as one tree against a Section             every problem is reported, each on a line

The tree of all Sections is `ppdist.config.experiment.ExperimentConfig`.  docs/config.md and
configs/schema.json are generated from the same classes (schema.py).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from pydantic import ValidationError

from ppdist.config.errors import numbers_for_text, problems_of
from ppdist.config.migration import refuse_file
from ppdist.config.removed import is_stored, without_removed
from ppdist.config.section import OnResume, Section, SectionT
from ppdist.config.shipped import find_config
from ppdist.config.yaml import Node, Place, Problem, Reader, dump, merge, problems_error

# Changes to a configuration: items of -o, or values by key, `{"train": {"epochs": 3}}` or
# `{"train.epochs": 3}`.
Overrides: TypeAlias = Sequence[str] | Mapping[str, Any]


class Document(Section):
    """A Section that is a whole file, or a part of one that is read by itself."""

    @classmethod
    def open_plugins(
        cls, tree: Node, problems: list[Problem], *, stored: bool = False
    ) -> type[Section]:
        """Returns this Section, extended by the plugin parts that the tree names."""
        return cls

    @classmethod
    def complete(cls, tree: Node) -> Node:
        """Adds implied keys to the tree before it is checked."""
        return tree


def parse_config(
    path: str | Path,
    overrides: Sequence[str],
    schema: type[SectionT],
    defaults: Mapping[str, str] | None = None,
) -> SectionT:
    """Reads a file as any Section; `load_config` reads experiments.

    Args:
        path: path of a file, or name of a shipped one.
        defaults: top-level values that depend on the path.
    """
    reader = Reader()
    file = find_config(str(path))
    refuse_file(Reader().read_alone(file), file)  # before the files that it names are opened
    tree = reader.read_file(file)
    return _parse_with_overrides(
        tree, reader, file, overrides, schema, defaults, stored=is_stored(file)
    )


def parse_plain(
    tree: Mapping[str, Any],
    source: str,
    overrides: Sequence[str],
    schema: type[SectionT],
    defaults: Mapping[str, str] | None = None,
    *,
    stored: bool = False,
) -> SectionT:
    """Reads plain data as any Section; like `parse_config`, without a file.

    Args: source: where the data came from, for messages. stored: see `without_removed`.
    """
    reader = Reader()
    node = reader.read_text(dump(dict(tree)), source)
    return _parse_with_overrides(node, reader, source, overrides, schema, defaults, stored=stored)


def _parse_with_overrides(
    tree: Node,
    reader: Reader,
    source: str,
    overrides: Sequence[str],
    schema: type[SectionT],
    defaults: Mapping[str, str] | None,
    *,
    stored: bool,
) -> SectionT:
    """Applies -o items and defaults to a tree, and builds its Section."""
    for item in overrides:
        node = reader.read_override(item)
        if node is not None:
            tree = merge(tree, node)
    # Defaults go underneath: a file or an item that has the key wins.
    place = Place(source, 1, 1)
    given = {key: Node(value, place, place, value) for key, value in (defaults or {}).items()}
    tree = merge(Node(given, place, place), tree)
    return parse_tree(tree, schema, reader.problems, stored=stored)


def parse_tree(
    tree: Node, schema: type[SectionT], problems: Sequence[Problem], *, stored: bool = False
) -> SectionT:
    """Builds the Section described by files and -o items.

    Args: problems: problems found while reading them. stored: see `without_removed`.
    Raises: ConfigError: as `parse_config`.
    """
    errors = [*problems]
    schema_with_plugins = schema
    if issubclass(schema, Document):
        schema_with_plugins = cast(type[SectionT], schema.open_plugins(tree, errors, stored=stored))
        tree = schema.complete(tree)
    tree = without_removed(tree, schema_with_plugins, errors, stored=stored)
    try:
        config = _validate(tree, schema_with_plugins)
    except ValidationError as error:
        # Only pydantic knows which keys take text, so numbers from -o become text after a first
        # try.
        for path in numbers_for_text(error, tree):
            tree = _as_text(tree, path)
        try:
            config = _validate(tree, schema_with_plugins)
        except ValidationError as remaining:
            # Values that the reader could not convert, such as tagged ones, fail here again.
            reported = {problem.place for problem in errors}
            invalid = problems_of(remaining, tree, schema_with_plugins)
            invalid = [problem for problem in invalid if problem.place not in reported]
            raise problems_error([*errors, *invalid]) from None
    if errors:
        raise problems_error(errors)
    return config


def _validate(tree: Node, schema: type[SectionT]) -> SectionT:
    # Strict JSON rules are what YAML users expect: a list fills a tuple and 1 is a float, but
    # "3" is not a number, 1.5 not an integer, and 0 not false.
    return schema.model_validate_json(json.dumps(tree.plain()), strict=True)


def _as_text(tree: Node, path: Sequence[str | int]) -> Node:
    """Replaces a number by its text as typed: `-o output_dir=2024` needs no quotes."""
    if not path:
        return replace(tree, value=tree.text)
    head, *rest = path
    if isinstance(tree.value, dict) and isinstance(head, str):
        return replace(tree, value={**tree.value, head: _as_text(tree.value[head], rest)})
    if isinstance(tree.value, list) and isinstance(head, int):
        items = [*tree.value]
        items[head] = _as_text(items[head], rest)
        return replace(tree, value=items)
    raise AssertionError(f"no value at {path}")


def dump_yaml(config: Section) -> str:
    """Writes YAML text with every key; reading it gives the same configuration."""
    return dump(config.model_dump(mode="json"))


def override_items(overrides: Overrides, above: str = "") -> list[str]:
    """Writes overrides as items of -o."""
    if not isinstance(overrides, Mapping):
        return [*overrides]
    items = []
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            items += override_items(value, f"{above}{key}.")
        else:  # JSON is YAML, so that text stays text
            items.append(f"{above}{key}={json.dumps(value, ensure_ascii=False, default=str)}")
    return items


def on_resume(config: Section, key: str) -> OnResume | None:
    """Returns the note of a key or of its section; None if there is none."""
    for name in key.split("."):
        field = type(config).model_fields.get(name)
        if field is None:
            return None
        for note in field.metadata:
            if isinstance(note, OnResume):
                return note
        value = getattr(config, name)
        if not isinstance(value, Section):
            return None
        config = value
    return None


def flattened(config: Section) -> dict[str, Any]:
    """Returns JSON values by key path: `train.amp.enabled`."""
    return dict(leaves(config.model_dump(mode="json")))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key path, value) pairs; a list is one value."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
