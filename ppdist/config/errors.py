"""Turns errors of pydantic into lines that a user can act on.

configs/a.yml:12:3: train.epoch: unknown key; did you mean train.epochs?
configs/a.yml:13:11: train.epochs: found "ten" (text), expected whole number >= 1
-o data.rot=../x: data.rot: unknown key; did you mean data.root?
"""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ppdist.config.migration import answer_key, our_key, our_value
from ppdist.config.schema import (
    SectionType,
    all_keys,
    choices,
    field_at,
    matching_sections,
    owners,
    sections_in,
    type_in_words,
)
from ppdist.config.yaml import Node, Place, Problem, describe_value

Path = tuple[str | int, ...]


class CrossKeyErrors(ValueError):
    """Conflicts between keys: messages that begin with `key: `."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("; ".join(messages))
        self.messages = tuple(messages)


def problems_of(error: ValidationError, tree: Node, schema: SectionType) -> list[Problem]:
    """Converts a pydantic error into problems, one for each wrong key."""
    details = error.errors(include_url=False)
    paths = [_path(detail, tree) for detail in details]
    problems: dict[Path, Problem] = {}
    for detail, path in zip(details, paths):
        crossing = detail.get("ctx", {}).get("error")
        if isinstance(crossing, CrossKeyErrors):
            for message in crossing.messages:
                key = tuple(message.partition(":")[0].split("."))
                problems[key] = Problem(_place(detail, key, tree), message, "bad_value")
            continue
        # A union reports an error for each member; an error deeper inside one says more.
        deeper = any(len(longer) > len(path) and longer[: len(path)] == path for longer in paths)
        is_a_type = detail["type"].endswith("_type")
        if path not in problems and not (deeper and is_a_type):
            problems[path] = Problem(
                _place(detail, path, tree),
                _message(detail, path, tree, schema),
                _code(detail, path, tree),
            )
    return list(problems.values())


def numbers_for_text(error: ValidationError, tree: Node) -> Iterator[Path]:
    """Yields the paths of numbers from -o where text is expected."""
    for detail in error.errors(include_url=False):
        path = _path(detail, tree)
        node = _nearest(tree, path)
        # In a file, quotes distinguish text from numbers; a shell removes them.
        is_number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        if detail["type"] == "string_type" and is_number and node.place.line == 0:
            yield path


def _path(detail: Any, tree: Node) -> Path:
    """Returns the key path in pydantic's location, without the union members in it."""
    path: list[str | int] = []
    node: Node | None = tree
    location = detail["loc"]
    for index, part in enumerate(location):
        child = node.child(part) if node is not None else None
        if child is not None:
            path.append(part)
            node = child
        elif index == len(location) - 1 and _is_absent(detail):
            path.append(part)
    # Pydantic reports a wrong tag at the section; the user looks for it at the tag's own key.
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path.append(detail["ctx"]["discriminator"].strip("'"))
    return tuple(path)


def _is_absent(detail: Any) -> bool:
    """Returns True if a key is missing; a missing item of a list is a wrong length."""
    return detail["type"] == "missing" and isinstance(detail["loc"][-1], str)


def _nearest(tree: Node, path: Path) -> Node:
    """Returns the node at a path, or its nearest existing parent."""
    for part in path:
        child = tree.child(part)
        if child is None:
            break
        tree = child
    return tree


def _place(detail: Any, path: Path, tree: Node) -> Place:
    """Returns the position that a message names: the key's or the value's."""
    # The key is at fault if it is unknown or missing, otherwise the value.  A mapping begins below
    # its key, where nobody would look for the error.
    node = _nearest(tree, path)
    at_key = detail["type"] in ("extra_forbidden", "union_tag_not_found") or _is_absent(detail)
    return node.key_place if at_key or isinstance(node.value, dict) else node.place


def _code(detail: Any, path: Path, tree: Node) -> str:
    """Returns our error code for one of pydantic's error details."""
    if detail["type"] == "extra_forbidden":
        return "foreign_key" if answer_key(path, _nearest(tree, path)) else "unknown_key"
    if detail["type"] == "union_tag_not_found" or _is_absent(detail):
        return "missing_key"
    return "bad_value"


def _message(detail: Any, path: Path, tree: Node, schema: SectionType) -> str:
    """Writes `key: what is wrong; what to do` for one of pydantic's error details."""
    kind = detail["type"]
    name = dotted(path)
    node = _nearest(tree, path)
    if kind == "extra_forbidden" and (answer := answer_key(path, node)):
        return answer
    if kind == "extra_forbidden":
        return f"{name}: unknown key; {_suggest_key(path, tree, schema)}"
    if kind in ("value_error", "assertion_error"):
        return f"{name}: {detail['ctx']['error']}" if name else str(detail["ctx"]["error"])
    field = field_at(schema, path, tree)
    if kind == "union_tag_not_found":
        tags = [tag for s in owners(schema, path, tree) for tag in _tag_values(s, path[-1])]
        return f"{name}: missing, expected one of {', '.join(tags)}"
    if field is None:
        return f"{name}: found {describe_value(node)}: {detail['msg']}"
    if kind == "union_tag_invalid":
        allowed = [tag.strip(" '") for tag in detail["ctx"]["expected_tags"].split(",")]
        hint = _suggest_similar(str(node.value), allowed)
        foreign = _plugin_hint(name)
        value = describe_value(node)
        return f"{name}: found {value}, expected one of {', '.join(allowed)}{foreign}{hint}"
    expected = _expected(field, path, tree)
    if _is_absent(detail):
        about = (field.description or "").split(". ")[0].rstrip(".")
        return f"{name}: missing, expected {expected}" + (f" ({about})" if about else "")
    hint = _hint(name, node, field.annotation)
    value = describe_value(node)
    return f"{name}: found {value}, expected {expected}{_plugin_hint(name)}{hint}"


def _plugin_hint(name: str) -> str:
    """Returns a hint on how to name a part of another package, if one is allowed."""
    of_tracker = name.startswith("log.trackers[") and name.endswith("].name")
    if not of_tracker and name not in ("model.name", "model.body", "data.format"):
        return ""
    return ", or package.module:Name of another package (docs/extend.md)"


def dotted(path: Sequence[str | int]) -> str:
    """Writes a key path as text: `log.trackers[0].name`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _expected(field: FieldInfo, path: Path, tree: Node) -> str:
    """Describes the expected type in words; for a list item, the type of its list."""
    sections = matching_sections(sections_in(field.annotation), _nearest(tree, path))
    if sections and not isinstance(path[-1], int):
        return "a mapping with keys such as " + ", ".join(list(sections[0].model_fields)[:5])
    words = type_in_words(field.annotation, field.metadata)
    if not isinstance(path[-1], int):
        return words
    while isinstance(path[-1], int):
        path = path[:-1]
    return f"{words} for {dotted(path)}"


def _tag_values(section: SectionType, key: Any) -> list[str]:
    """Lists the values of a union member's tag."""
    field = section.model_fields.get(key)
    return choices(field.annotation) if field is not None else []


def _hint(name: str, node: Node, annotation: Any) -> str:
    """Returns `; did you mean ...` for a value; "" if nothing similar is allowed."""
    value, words = node.value, type_in_words(annotation)
    if equivalent := our_value(name, node.text):
        return f"; did you mean {equivalent}?"
    if isinstance(value, str):
        close = _suggest_similar(value, choices(annotation))
        if close:
            return close
        if value in ("None", "none") and "null" in words:
            return "; did you mean null?"
        if value.lower() in ("yes", "on", "no", "off") and "true or false" in words:
            return f"; did you mean {'true' if value.lower() in ('yes', 'on') else 'false'}?"
        if node.quoted and "number" in words:
            return "; remove the quotes"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, float) and value.is_integer() and "whole number" in words:
        return f"; did you mean {int(value)}?"
    if "text" in words and (is_number or isinstance(value, bool)):
        return f'; did you mean "{node.text}" with quotes?'
    return ""


def _suggest_similar(text: str, candidates: Sequence[str]) -> str:
    """Returns `; did you mean ...` for the most similar candidate; "" if none is similar."""
    match = difflib.get_close_matches(text.lower(), candidates, 1)
    return f"; did you mean {match[0]}?" if match else ""


def _suggest_key(path: Path, tree: Node, schema: SectionType) -> str:
    """Suggests the key that was probably meant: a similar one, or one of another section."""
    key = str(path[-1])
    siblings = list(dict.fromkeys(k for s in owners(schema, path, tree) for k in s.model_fields))
    elsewhere: dict[str, str] = {}  # last part of a key path -> the first path that ends in it
    for parts in all_keys(schema):
        elsewhere.setdefault(parts[-1], ".".join(parts))

    parent = dotted(path[:-1])
    below = [".".join(parts) for parts in all_keys(schema) if parts[: len(path) - 1] == path[:-1]]
    nested = [name for name in below if name.endswith(f".{key}") and name != dotted(path)]
    if len(path) > 1 and nested:  # data.augment.rotate, of data.augment.affine
        return f"did you mean {nested[0]}?"
    # In order: a mistyped key of this section, the same key in another section, a less similar key
    # of this section, a mistyped key of another section.
    for names, cutoff in ((siblings, 0.75), ([key], 1.0), (siblings, 0.6), (list(elsewhere), 0.8)):
        for match in difflib.get_close_matches(key.lower(), names, 1, cutoff):
            if names is siblings or match in siblings:
                return f"did you mean {parent + '.' if parent else ''}{match}?"
            if match in elsewhere and elsewhere[match] != dotted(path):
                return f"did you mean {elsewhere[match]}?"
    if (equivalent := our_key(key)) and equivalent != dotted(path):
        return f"did you mean {equivalent}?"
    return f"{parent or 'the top level'} knows {', '.join(siblings)}"
