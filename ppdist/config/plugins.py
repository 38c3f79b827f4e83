"""Plugins: models, formats, backbones and trackers of other packages, by `package.module:Name`.

    model.name         a DetectorConfig, which names its model and its loss
    model.body         a Backbone, of PP-YOLOE
    data.format        a DataConfig, which names its reader
    log.trackers       a TrackerConfig, which names its writer

A Section lies in a module without Paddle, because configurations are read without it.  It names as
text, `package.module:Name`, what computes, which is imported when a run builds it.  A package is
found where it is installed or on PYTHONPATH, never through the current folder.

What a user names is imported.  What a stored configuration names (of a run, a checkpoint or an
export, which may come from a stranger) is imported only where the user's own configuration or -o
names it, too, or --trust-plugins is given.
"""

import os
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from ppdist.common.errors import ConfigError
from ppdist.common.plugin import is_plugin, load, package_of
from ppdist.config.data import DataConfig
from ppdist.config.model import DetectorConfig, PPYOLOEConfig
from ppdist.config.output import LogConfig, ShippedTracker, TrackerConfig
from ppdist.config.schema import choices
from ppdist.config.section import OnResume, Section
from ppdist.config.yaml import Node, Problem

TRUST_VARIABLE = "PPDIST_TRUST_PLUGINS"  # 1: as --trust-plugins; processes of a job inherit it
SectionT = TypeVar("SectionT", bound=Section)

_BASES: Mapping[str, type[Section]] = {
    "model.name": DetectorConfig,
    "data.format": DataConfig,
    "log.trackers": TrackerConfig,
}
_NAMES = {DetectorConfig: ("model", "loss"), DataConfig: ("reader",), TrackerConfig: ("writer",)}
_named_by_user: set[str] = set()  # `package.module:Name`, of this process
_opened_packages: set[str] = set()


def forget() -> None:
    """Forgets the parts that were named and imported so far, as in a new process."""
    _named_by_user.clear()
    _opened_packages.clear()
    _import_section.cache_clear()
    _open_schema.cache_clear()


def packages() -> list[str]:
    """Lists the top-level names of the packages whose parts were named."""
    return sorted(_opened_packages)


# --- Sections -------------------------------------------------------------------------------------


def open_section(
    schema: type[SectionT], tree: Node, problems: list[Problem], *, stored: bool = False
) -> type[SectionT]:
    """Derives a Section from `schema` with the parts of other packages that the tree names.

    Args:
        problems: receives a problem for each part that cannot be used.
        stored: True if ppdist wrote the tree; items that -o adds still count as the user's.
    """
    parts: dict[str, list[str]] = {}
    for key, place, node in _plugin_nodes(tree):
        if not is_plugin(node.value):
            continue
        target = str(node.value)
        try:
            _require_trusted(target, stored and not node.place.source.startswith("-o "))
            if key == "model.body":
                _opened_packages.add(package_of(target))
            else:
                _import_section(key, target)
            parts.setdefault(key, []).append(target)
        except ConfigError as error:
            message = f"{place}: {error.what}" + (f"; {error.fix}" if error.fix else "")
            problems.append(Problem(node.place, message, error.code))
    if not parts:
        return schema
    return cast(
        type[SectionT], _open_schema(schema, tuple((k, tuple(v)) for k, v in parts.items()))
    )


def _plugin_nodes(tree: Node) -> Iterator[tuple[str, str, Node]]:
    """Yields (kind of part, key path, value) for names that may refer to another package."""
    empty = Node({}, tree.place, tree.place)
    model, data, log = (tree.child(key) or empty for key in ("model", "data", "log"))
    for section, key in ((model, "model.name"), (model, "model.body"), (data, "data.format")):
        node = section.child(key.partition(".")[2])
        if node is not None:
            yield key, key, node
    trackers = log.child("trackers")
    items = trackers.value if trackers is not None else None
    for number, item in enumerate(items if isinstance(items, list) else ()):
        node = item if isinstance(item.value, str) else item.child("name")
        if node is not None:
            yield "log.trackers", f"log.trackers[{number}].name", node


def _require_trusted(target: str, stored: bool) -> None:
    """Refuses a part that only a stored configuration names, unless its code is trusted.

    Raises: ConfigError: the code is not trusted.
    """
    if not stored:
        _named_by_user.add(target)
    elif target not in _named_by_user and os.environ.get(TRUST_VARIABLE) != "1":
        raise ConfigError(
            f"{target} is code of another package, which this stored configuration names",
            code="plugin_untrusted",
            fix="if you trust it, add --trust-plugins, or name it in your own configuration or -o",
        )


@cache
def _import_section(key: str, target: str) -> type[Section]:
    """Imports the Section of a part and gives it the part's target as its tag.

    Raises: ConfigError: it cannot be imported, or is not a Section of this kind.
    """
    base = _BASES[key]
    section = load(target)
    _opened_packages.add(package_of(target))
    if not (isinstance(section, type) and issubclass(section, base)):
        raise _invalid_error(target, f"is not a subclass of {base.__module__}.{base.__name__}")
    for attribute in _NAMES[cast(Any, base)]:
        if not all(getattr(section, attribute, "").partition(":")):
            raise _invalid_error(
                target, f'needs `{attribute}: ClassVar[str] = "package.module:Name"`'
            )
    tagged = _with_tag(section, key.rpartition(".")[2], target)

    def reduce(self: Section) -> tuple[Any, ...]:  # no module has the class by its name
        return _unpickle_section, (key, target, self.model_dump_json())

    tagged.__reduce__ = reduce  # type: ignore[assignment]
    return tagged


def _unpickle_section(key: str, target: str, text: str) -> Section:
    """Rebuilds a Section that another process of this run has sent."""
    return _import_section(key, target).model_validate_json(text)


def _invalid_error(target: str, fault: str) -> ConfigError:
    """Builds the error for a part that does not fit its kind."""
    return ConfigError(
        f"{target} {fault}", code="plugin_invalid", fix="docs/extend.md shows each kind"
    )


def _with_tag(section: type[Section], key: str, target: str) -> type[Section]:
    """Derives the Section whose tag is the target."""
    tag = "name" if key == "trackers" else key
    field = Field(default=target, description="the part of another package")
    return _derive(section, {tag: (Literal.__getitem__(target), field)})


@cache
def _open_schema(schema: type[Any], parts: tuple[tuple[str, tuple[str, ...]], ...]) -> type[Any]:
    """Derives the schema that accepts the parts; `parts` are targets by kind."""
    fields: dict[str, Any] = {}
    for key, targets in parts:
        # A detector brings its loss, so that `loss.name` follows from `model.name`.
        if key == "model.name":
            section = _import_section(key, targets[0])
            loss = cast(type[DetectorConfig], section).loss_config
            fields |= {"model": section, "loss": _with_tag(loss, "name", targets[0])}
        # Only the shipped PP-YOLOE has a body to replace; another package's detector does not.
        elif key == "model.body" and "model" not in fields:
            body = PPYOLOEConfig.model_fields["body"]
            names = Literal.__getitem__((*choices(body.annotation), targets[0]))
            fields["model"] = _derive(PPYOLOEConfig, {"body": (names, _copy_field(names, body))})
        elif key == "data.format":
            fields["data"] = _import_section(key, targets[0])
        elif key == "log.trackers":
            fields["log"] = _open_log(targets)
    # Some documents, such as a teacher's, read only a part of the sections.
    used = {key: annotation for key, annotation in fields.items() if key in schema.model_fields}
    return _derive(schema, {key: _keep_note(schema, key, section) for key, section in used.items()})


def _open_log(targets: tuple[str, ...]) -> type[Section]:
    """Derives the `log` section that accepts trackers of other packages."""
    members: list[Any] = [
        ShippedTracker,
        *(_import_section("log.trackers", target) for target in targets),
    ]
    tracker: Any = Annotated[
        reduce(lambda left, right: left | right, members), Field(discriminator="name")
    ]
    trackers = tuple[tracker, ...]
    field = LogConfig.model_fields["trackers"]
    return _derive(LogConfig, {"trackers": (trackers, _copy_field(trackers, field))})


def _keep_note(schema: type[Any], key: str, annotation: Any) -> tuple[Any, Any]:
    """Returns the type and field of a key, with its note on what a resumed run may change."""
    field = schema.model_fields[key]
    note = next((item for item in field.metadata if isinstance(item, OnResume)), None)
    with_note = annotation if note is None else Annotated[annotation, note]
    return with_note, _copy_field(annotation, field)


def _derive(schema: type[Any], fields: Mapping[str, Any]) -> type[Any]:
    """Derives a Section with other fields."""
    options: dict[str, Any] = {"__base__": schema, "__module__": schema.__module__}
    return create_model(schema.__name__, __doc__=schema.__doc__, **options, **fields)


def _copy_field(annotation: Any, field: FieldInfo) -> Any:
    """Copies the default and description of a field to a field of another type.

    A default that is a Section is rebuilt as the new type, because the old one would be refused.
    """
    options: dict[str, Any] = {"description": field.description}
    if field.is_required():
        return Field(**options)
    default = field.default
    if isinstance(default, Section) and isinstance(annotation, type):
        default = annotation()
    return Field(default=default, **options)
