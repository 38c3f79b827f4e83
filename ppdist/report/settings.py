"""Which keys of a run's configuration were set: those with other values than their defaults."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from ppdist.report.run import flat


class Setting(NamedTuple):
    """A key, its value and its default, as YAML writes them; "" for a key without default."""

    key: str
    value: str
    default: str


def written(value: object) -> str:
    """A value on one line, nearly as YAML has it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def settings_of(tree: Mapping[str, Any]) -> tuple[list[Setting], str]:
    """Compares a configuration with the defaults of this version.

    Returns: the keys that differ, in the order of the file; and "", or why none could be compared.
    """
    if not tree:
        return [], "there is no configuration"
    try:
        # Here alone, because it needs Paddle; a page about a run that was copied does without.
        from ppdist.config import ExperimentConfig
    except ImportError as error:
        return [], f"this machine cannot tell the defaults: {error}"
    try:
        config = ExperimentConfig.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return [], f"another version wrote it: {where}: {first['msg']}"
    return list(_changed(config, tree)), ""


def _changed(config: BaseModel, tree: Mapping[str, Any]) -> Iterator[Setting]:
    differing = dict(flat(config.model_dump(mode="json", exclude_defaults=True)))
    for key, value in flat(tree):
        if key in differing:
            yield Setting(key, written(value), _default(config, key.split(".")))


def _default(config: BaseModel, path: list[str]) -> str:
    section: Any = config
    for part in path[:-1]:
        section = getattr(section, part, None)
    field = type(section).model_fields.get(path[-1]) if isinstance(section, BaseModel) else None
    value = PydanticUndefined if field is None else field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    return written(value.model_dump(mode="json") if isinstance(value, BaseModel) else value)
