"""What a Section says about itself: types in words, docs/config.md and configs/schema.json."""

import json
import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ppdist.config.yaml import BASE_KEY, Node

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
    """A type as a user reads it: `whole number >= 1`, `one of s, m, l`, `list of text`."""
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
    # Inside of a list or tuple the limits still stand in the Field that states them.
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
    return value if isinstance(value, str) else json.dumps(value)


def choices(annotation: Any) -> list[str]:
    """Every text that a Literal anywhere in the annotation allows."""
    if get_origin(annotation) is Literal:
        return [arg for arg in get_args(annotation) if isinstance(arg, str)]
    if get_origin(annotation) is Annotated:
        return choices(get_args(annotation)[0])
    return [text for arg in get_args(annotation) for text in choices(arg)]


def sections_in(annotation: Any) -> list[SectionType]:
    """The sections that a value of this type may be, in order."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [section for arg in get_args(annotation) for section in sections_in(arg)]


def fitting(sections: Sequence[SectionType], node: Node | None) -> list[SectionType]:
    """Of the members of a union, those whose tag (`name: ppyoloe`) is the node's, or else all."""

    def fits(section: SectionType) -> bool:
        for key, field in section.model_fields.items():
            given = node.child(key) if node is not None else None
            if get_origin(field.annotation) is not Literal or given is None:
                continue
            if given.value not in get_args(field.annotation):
                return False
        return True

    return [section for section in sections if fits(section)] or list(sections)


def owners(schema: SectionType, path: Sequence[str | int], tree: Node) -> list[SectionType]:
    """The sections that the last key of a path belongs to (several in an undecided union)."""
    current: list[SectionType] = [schema]
    node: Node | None = tree
    for part in path[:-1]:
        node = node.child(part) if node is not None else None
        if isinstance(part, str):
            fields = [s.model_fields[part] for s in current if part in s.model_fields]
            current = [section for field in fields for section in sections_in(field.annotation)]
        if len(current) > 1:
            current = fitting(current, node)
    return current


def field_at(schema: SectionType, path: Sequence[str | int], tree: Node) -> FieldInfo | None:
    """The declaration that rules a path; for an item of a list, the declaration of the list."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    for section in owners(schema, path, tree) if path else []:
        if path[-1] in section.model_fields:
            return section.model_fields[str(path[-1])]
    return None


def all_keys(schema: SectionType, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key path that the schema knows, sections included, outermost first."""
    for key, field in schema.model_fields.items():
        path = (*prefix, key)
        yield path
        for section in sections_in(field.annotation):
            yield from all_keys(section, path)


def markdown(schema: SectionType) -> str:
    """docs/config.md: one table for each section, in the order of the tree."""
    lines = [
        "# Configuration keys",
        "",
        "Generated by `ppdist config docs` from the classes that check the files; do not",
        "edit.  A file may start from others with `_BASE_: [...]` (relative to itself): mappings",
        "merge, lists replace.  `-o key.path=value ...` on the command line comes last, its values",
        "are YAML too.  A key that is not listed here is an error.  Paths are relative to the",
        "working directory unless the table says otherwise.  For completion in an editor, begin a",
        "file with `# yaml-language-server: $schema=<path to configs/schema.json>`.",
    ]
    for title, section in _tables(schema, ()):
        lines += ["", f"## {title}", "", *_introduction(section)]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, field in section.model_fields.items():
            words = type_in_words(field.annotation, field.metadata)
            cells = [f"`{key}`", words, _default(field), _meaning(field)]
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _tables(schema: SectionType, path: tuple[str, ...]) -> Iterator[tuple[str, SectionType]]:
    yield ".".join(path) or "Top level", schema
    for key, field in schema.model_fields.items():
        members = sections_in(field.annotation)
        for section in members:
            for title, inner in _tables(section, (*path, key)):
                tags = [
                    f"`{tag}: {get_args(tagged.annotation)[0]}`"
                    for tag, tagged in section.model_fields.items()
                    if inner is section
                    and get_origin(tagged.annotation) is Literal
                    and len(get_args(tagged.annotation)) == 1
                ]
                yield title + (f" ({', '.join(tags)})" if tags else ""), inner


def _introduction(section: SectionType) -> list[str]:
    text = (section.__doc__ or "").strip().split("\n\n")[0]
    return [*(line.strip() for line in text.splitlines()), ""] if text else []


def _meaning(field: FieldInfo) -> str:
    """Its description; a section may leave that to the first sentence of its docstring."""
    documented = [section.__doc__ for section in sections_in(field.annotation) if section.__doc__]
    about = " ".join(documented[0].split()).split(". ")[0] if documented else ""
    text = field.description or about
    if text and not text.split()[0].endswith(":"):  # `auto: ...` explains a value as it is typed
        text = text[0].upper() + text[1:]
    return text if not text or text[-1] in ".)" else text + "."


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, tuple | list) and any(isinstance(item, BaseModel) for item in value):
        return "see below"
    return f"`{json.dumps(value, default=str)}`"


def _cell(text: str) -> str:
    # Outside of code, `<name>` would be taken for HTML.
    plain = " ".join(text.split()).replace("|", "\\|")
    return plain if plain.startswith("`") else re.sub(r"<(?=[a-zA-Z/])", "&lt;", plain)


def json_schema(schema: SectionType) -> dict[str, Any]:
    """The JSON schema that editors use for completion.

    Nothing is required in it, because a base file or -o may give the rest, and `_BASE_` is known.
    """
    result = _without_required(schema.model_json_schema())
    result["properties"] = {
        BASE_KEY: {
            "description": "Files to start from, relative to this one; later ones win.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        },
        **result["properties"],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result}


def _without_required(value: Any, under_properties: bool = False) -> Any:
    if isinstance(value, list):
        return [_without_required(item) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = (
        value if under_properties else {("anyOf" if k == "oneOf" else k): value[k] for k in value}
    )
    return {
        key: _without_required(item, key == "properties" and not under_properties)
        for key, item in renamed.items()
        if under_properties or key not in ("required", "discriminator")
    }
