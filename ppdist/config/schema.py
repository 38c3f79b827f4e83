"""What a Section says about itself: types in words, docs/config.md and configs/schema.json."""

import json
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ppdist.config.yaml import Node

SectionType = type[BaseModel]

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "text",
    type(None): "null",
    Any: "anything",
}
_LIMITS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("multiple_of", "a multiple of"))


def type_in_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describes a type in words: `whole number >= 1`, `list of text`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_in_words(args[0], [*metadata, *args[1:]])
    limits = _limits_in_words(metadata)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(_value_in_words(a) for a in args)
    if origin in (Union, types.UnionType):
        members = [arg for arg in args if arg is not type(None)]
        words = [type_in_words(arg, metadata) for arg in members]
        words += ["null"] if type(None) in args else []
        return " or ".join(dict.fromkeys(words))
    if origin is tuple and (len(args) != 2 or args[1] is not Ellipsis):
        return "[" + ", ".join(type_in_words(arg) for arg in args) + "]" + limits
    if origin in (list, tuple, set, frozenset, Sequence):
        return f"list of {type_in_words(args[0])}" + limits
    if origin is dict:
        return f"mapping of {type_in_words(args[0])} to {type_in_words(args[1])}" + limits
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation))) + limits


def _limits_in_words(metadata: Sequence[Any]) -> str:
    """Describes limits: ` >= 1 and at most 3 long`; "" if there are none."""
    # Within a list or tuple, pydantic leaves the limits in the Field that declares them.
    metadata = [
        limit
        for item in metadata
        for limit in (item.metadata if isinstance(item, FieldInfo) else (item,))
    ]
    words = [
        f"{sign} {getattr(item, name):g}"
        for item in metadata
        for name, sign in _LIMITS
        if getattr(item, name, None) is not None
    ]
    lengths = [
        f"{sign} {getattr(item, name)} long"
        for item in metadata
        for name, sign in (("min_length", "at least"), ("max_length", "at most"))
        if getattr(item, name, None) is not None
    ]
    words += lengths
    return f" {' and '.join(words)}" if words else ""


def _value_in_words(value: Any) -> str:
    """Writes a value as users type it: text without quotes, else JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def choices(annotation: Any) -> list[str]:
    """Lists every text that a Literal anywhere in the annotation allows."""
    if get_origin(annotation) is Literal:
        return [arg for arg in get_args(annotation) if isinstance(arg, str)]
    if get_origin(annotation) is Annotated:
        return choices(get_args(annotation)[0])
    return [text for arg in get_args(annotation) for text in choices(arg)]


def sections_in(annotation: Any) -> list[SectionType]:
    """Lists the sections that a value of this type may be, in order."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [section for arg in get_args(annotation) for section in sections_in(arg)]


def matching_sections(sections: Sequence[SectionType], node: Node | None) -> list[SectionType]:
    """Returns the union members that match the node's tag (`name: ppyoloe`), else all."""

    def matches(section: SectionType) -> bool:
        for key, field in section.model_fields.items():
            given = node.child(key) if node is not None else None
            if get_origin(field.annotation) is not Literal or given is None:
                continue
            if given.value not in get_args(field.annotation):
                return False
        return True

    return [section for section in sections if matches(section)] or list(sections)


def owners(schema: SectionType, path: Sequence[str | int], tree: Node) -> list[SectionType]:
    """Returns the sections that own a path's last key; several if a union is undecided."""
    current: list[SectionType] = [schema]
    node: Node | None = tree
    for part in path[:-1]:
        node = node.child(part) if node is not None else None
        if isinstance(part, str):
            fields = [s.model_fields[part] for s in current if part in s.model_fields]
            current = [section for field in fields for section in sections_in(field.annotation)]
        # Members of a union differ by their tag; without one, all of them may own the key.
        if len(current) > 1:
            current = matching_sections(current, node)
    return current


def field_at(schema: SectionType, path: Sequence[str | int], tree: Node) -> FieldInfo | None:
    """Returns the field at a path; for a list item, the field of its list."""
    # An item has no field of its own: its type and limits are in the field of the list.
    while path and isinstance(path[-1], int):
        path = path[:-1]
    for section in owners(schema, path, tree) if path else []:
        if path[-1] in section.model_fields:
            return section.model_fields[str(path[-1])]
    return None


def all_keys(schema: SectionType, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields every key path that the schema knows, sections included, outermost first."""
    for key, field in schema.model_fields.items():
        path = (*prefix, key)
        yield path
        for section in sections_in(field.annotation):
            yield from all_keys(section, path)
