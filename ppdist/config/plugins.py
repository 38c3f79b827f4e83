"""Plugins: models, formats, backbones and trackers of other packages, by name.

    register_detector, register_dataset, register_backbone, register_tracker
    open_section     a Section that knows the registered names beside our own
    find_names       looks for the packages that bring what a configuration names

An installed package has an entry point of the group `ppdist.plugins`: a function without arguments
that registers its parts.  Packages are looked for only when a configuration names something that
neither we nor an earlier registration know, so without plugins nothing is read and nothing costs.

Sections are registered as classes, because configurations are read without Paddle.  What computes
is registered as text, `package.module:Name`, and imported when a run builds it.
"""

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, reduce
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from ppdist.common.errors import ConfigError
from ppdist.config.base import OnResume, Section
from ppdist.config.data import DataConfig
from ppdist.config.loss import LossConfig
from ppdist.config.model import DetectorConfig, ModelConfig, PPYOLOEConfig
from ppdist.config.output import LogConfig, ShippedTracker, TrackerConfig
from ppdist.config.schema import choices
from ppdist.config.yaml import Node, Problem

GROUP = "ppdist.plugins"  # of entry points
OFF_VARIABLE = "PPDIST_PLUGINS_OFF"  # names of entry points that are left alone, by commas; or all
_LOGGER = logging.getLogger("ppdist.config")
SectionT = TypeVar("SectionT", bound=Section)


@dataclass(frozen=True)
class Registration:
    """One registered part.

    kind: "detector", "dataset", "backbone" or "tracker".
    name: as a configuration has it.
    target: `package.module:Name` of what computes: model, reader, backbone or writer.
    section: its keys; None for a backbone.
    loss_target, loss_section: of a detector.
    """

    kind: str
    name: str
    target: str
    section: type[Section] | None = None
    loss_target: str = ""
    loss_section: type[Section] | None = None


_registered: dict[tuple[str, str], Registration] = {}  # by kind and name


def register_detector(
    *, config: type[DetectorConfig], model: str, loss_config: type[Section], loss: str
) -> None:
    """Makes a detector usable as `model: {name: ...}`.

    Args:
        config: its keys; `name: Literal["x"] = "x"` says how it is called.
        model: `package.module:Class`, a `ppdist.models.base.Detector` that takes a `config`.
        loss_config: keys of its loss, with the same `name`.
        loss: `package.module:Class`, a `ppdist.losses.base.Loss`.
    Raises: ConfigError: the name is taken, or one of these is not what it should be.
    """
    name = _name_of(config, "name", DetectorConfig)
    if _name_of(loss_config, "name", Section) != name:
        raise _invalid(name, f"{loss_config.__name__}.name differs from {config.__name__}.name")
    _register(Registration("detector", name, model, config, loss, loss_config))


def register_dataset(*, config: type[DataConfig], reader: str) -> None:
    """Makes an annotation format of boxes usable as `data: {format: ...}`.

    Args:
        config: the keys of `data` with its own beside them; `format: Literal["x"] = "x"` says how
            the format is called.
        reader: `package.module:function`, called as `function(config, split, complain)` with split
            "train" or "val"; it returns a `ppdist.data.types.RawSet` and hands what is wrong with
            parts of the files to `complain`.
    Raises: ConfigError: as of `register_detector`.
    """
    _register(Registration("dataset", _name_of(config, "format", DataConfig), reader, config))


def register_backbone(name: str, backbone: str) -> None:
    """Makes a backbone usable as `model: {name: ppyoloe, body: ...}`.

    Args: backbone: `package.module:Class`, a `ppdist.models.backbones.Backbone`.
    Raises: ConfigError: as of `register_detector`.
    """
    _register(Registration("backbone", name, backbone))


def register_tracker(*, config: type[TrackerConfig], writer: str) -> None:
    """Makes an experiment tracker usable in `log.trackers`.

    Args:
        config: its keys; `name: Literal["x"] = "x"` says how it is called.
        writer: `package.module:Class`, a `ppdist.common.writers.MetricWriter` that takes a
            `ppdist.common.trackers.TrackedRun`.
    Raises: ConfigError: as of `register_detector`.
    """
    _register(Registration("tracker", _name_of(config, "name", TrackerConfig), writer, config))


def registered(kind: str, name: str) -> Registration | None:
    """What was registered by this name; None: nothing was."""
    return _registered.get((kind, name))


def names_of(kind: str) -> list[str]:
    """Names of this kind: ours, then those that were registered."""
    return [*_OUR_NAMES[kind](), *(each.name for each in _registered.values() if each.kind == kind)]


def packages() -> list[str]:
    """Top-level names of the packages whose parts are registered."""
    return sorted({each.target.replace(":", ".").split(".")[0] for each in _registered.values()})


def load(target: str) -> Any:
    """What `package.module:Name` names.

    Raises: ConfigError: it is not of ppdist, and cannot be imported.
    """
    module, _, name = target.partition(":")
    package = module.partition(".")[0]
    try:
        return reduce(getattr, name.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # another's code runs when it is imported
        if package == __name__.partition(".")[0]:
            raise
        raise ConfigError(
            f"registered as {target}, cannot be imported: {type(error).__name__}: {error}",
            code="plugin_failed",
            where=f"plugin {package}",
            fix="repair or reinstall that package",
        ) from error


def _register(new: Registration) -> None:
    for target in filter(None, (new.target, new.loss_target)):
        if not all(target.partition(":")):
            raise _invalid(new.name, f"{target!r} is not of the form package.module:Name")
    if not new.target or (new.kind == "detector" and not new.loss_target):
        raise _invalid(new.name, "what computes is missing")
    known = _registered.get((new.kind, new.name))
    if known is None and new.name in _OUR_NAMES[new.kind]():
        raise _taken(new, "ppdist itself")
    if known not in (None, new):
        raise _taken(new, f"registered as {known.target}" if known else "")
    _registered[new.kind, new.name] = new
    _opened.cache_clear()


def _name_of(section: Any, key: str, base: type[Section]) -> str:
    """The one value that a plugin's Section allows for its tag."""
    shown = getattr(section, "__name__", section)
    if not (isinstance(section, type) and issubclass(section, base)):
        raise _invalid(shown, f"it is not a subclass of {base.__module__}.{base.__name__}")
    field = section.model_fields.get(key)
    allowed = choices(field.annotation) if field is not None else []
    if len(allowed) != 1 or get_origin(field and field.annotation) is not Literal:
        raise _invalid(shown, f'it needs `{key}: Literal["..."]` with its one name')
    return allowed[0]


def _invalid(name: object, why: str) -> ConfigError:
    return ConfigError(
        f"cannot be registered: {why}",
        code="plugin_invalid",
        where=f"plugin part {name}",
        fix="docs/extend.md shows each kind",
    )


def _taken(new: Registration, by: str) -> ConfigError:
    return ConfigError(
        f"the name of the {new.kind} {new.name} is taken ({by})",
        code="plugin_name_taken",
        where=f"plugin part {new.target}",
        fix=f"give it another name, or switch one of them off with {OFF_VARIABLE}",
    )


# --- registrations in another process -------------------------------------------------------------


def registrations() -> list[dict[str, Any]]:
    """All registrations as JSON, for a child process."""

    def text(section: type[Section] | None) -> str:
        return f"{section.__module__}:{section.__qualname__}" if section else ""

    return [
        asdict(each) | {"section": text(each.section), "loss_section": text(each.loss_section)}
        for each in _registered.values()
    ]


def register_again(found: Sequence[Mapping[str, Any]]) -> None:
    """Repeats in a new process what another one had registered.

    Raises: ConfigError: a Section cannot be imported, such as one defined in a script.
    """
    for each in found:
        keys = ("section", "loss_section")
        sections = {key: load(each[key]) if each[key] else None for key in keys}
        _register(Registration(**{**each, **sections}))


# --- installed packages ---------------------------------------------------------------------------


class Broken(NamedTuple):
    """An entry point whose function could not be called."""

    plugin: str
    package: str
    why: str

    def __str__(self) -> str:
        return (
            f"the plugin {self.plugin} of the installed package {self.package} fails ({self.why}): "
            f"repair the package, or switch it off with {OFF_VARIABLE}={self.plugin}"
        )


@cache
def load_installed() -> tuple[Broken, ...]:
    """Calls the function of each installed plugin, once in a process.

    Returns: those that fail.
    """
    from importlib import metadata  # 10 ms, which runs without plugins need not wait for

    off = {name.strip() for name in os.environ.get(OFF_VARIABLE, "").split(",")}
    broken = []
    for point in metadata.entry_points(group=GROUP):
        if off & {"all", point.name}:
            continue
        try:
            point.load()()
        except (Exception, SystemExit) as error:  # another's code
            package = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            broken.append(Broken(point.name, package, f"{type(error).__name__}: {error}"))
    return tuple(broken)


def find_names(tree: Node) -> list[Problem]:
    """Loads the installed plugins if the tree names something unknown.

    Returns: a problem for each name that is still unknown while a plugin, which may bring it, is
    broken.  That a name is unknown otherwise is for the check of the Section to say.
    """
    if not any(True for _ in _unknown(tree)):
        return []
    broken = load_installed()
    unknown = list(_unknown(tree))
    if not unknown:
        for each in broken:
            _LOGGER.warning("%s", each)
        return []
    return [
        Problem(
            node.place,
            f'{key}: "{node.value}" is unknown, expected one of {", ".join(names_of(kind))}; '
            + "; ".join(map(str, broken)),
            "plugin_failed",
        )
        for kind, key, node in unknown
        if broken
    ]


def _unknown(tree: Node) -> Iterator[tuple[str, str, Node]]:
    """(kind, key, value) of each unregistered name in the tree."""
    for kind, key, node in _named(tree):
        if isinstance(node.value, str) and node.value not in names_of(kind):
            yield kind, key, node


def _named(tree: Node) -> Iterator[tuple[str, str, Node]]:
    nothing = Node({}, tree.place, tree.place)
    model, data, log = (tree.child(key) or nothing for key in ("model", "data", "log"))
    name, body, data_format = model.child("name"), model.child("body"), data.child("format")
    if name is not None:
        yield "detector", "model.name", name
    if name is not None and name.value == PPYOLOEConfig.model_fields["name"].default and body:
        yield "backbone", "model.body", body
    if data_format is not None:
        yield "dataset", "data.format", data_format
    trackers = log.child("trackers")
    if trackers is None or not isinstance(trackers.value, list):
        return
    for number, item in enumerate(trackers.value):
        node = item if isinstance(item.value, str) else item.child("name")
        if node is not None:
            yield "tracker", f"log.trackers[{number}].name", node


# --- Sections that know the registered names ------------------------------------------------------


def open_section(schema: type[SectionT], tree: Node) -> type[SectionT]:
    """The Section with registered names added to its unions.

    Args: tree: what will be read as it; the keys of `data` depend on the format that it names.
    """
    if not _registered:
        return schema
    data = tree.child("data")
    node = data.child("format") if data is not None else None
    return _opened(schema, node.value if node is not None and isinstance(node.value, str) else "")


@cache
def _opened(schema: type[Any], data_format: str) -> type[Any]:
    own = {
        "model": lambda: _union(ModelConfig, "detector", swapped=_with_backbones()),
        "loss": lambda: _union(LossConfig, "detector", loss=True),
        "data": lambda: _data(data_format),
        "log": _log,
    }
    fields: dict[str, Any] = {}
    for key, build in own.items():
        field = schema.model_fields.get(key)
        if field is not None:
            annotation = build()
            note = next((each for each in field.metadata if isinstance(each, OnResume)), None)
            noted = annotation if note is None else Annotated[annotation, note]
            fields[key] = noted, _of_type(annotation, field)
    return _derived(schema, fields)


def _derived(schema: type[Any], fields: Mapping[str, Any]) -> type[Any]:
    options: dict[str, Any] = {"__base__": schema, "__module__": schema.__module__}
    return create_model(schema.__name__, __doc__=schema.__doc__, **options, **fields)


def _of_type(annotation: Any, field: FieldInfo) -> Any:
    """Default and description of a field, for one of another type.

    A Section that is the default becomes one of that type: another would be refused.
    """
    given: dict[str, Any] = {"description": field.description}
    if field.is_required():
        return Field(**given)
    default = field.default
    if isinstance(default, Section) and isinstance(annotation, type):
        default = annotation()
    return Field(default=default, **given)


def _members(kind: str, loss: bool = False) -> list[type[Section]]:
    found = [each for each in _registered.values() if each.kind == kind]
    sections = [each.loss_section if loss else each.section for each in found]
    return [section for section in sections if section is not None]


def _union(
    ours: Any,
    kind: str,
    loss: bool = False,
    swapped: Mapping[type[Section], type[Section]] | None = None,
) -> Any:
    members = [(swapped or {}).get(each, each) for each in get_args(ours)]
    union = reduce(lambda left, right: left | right, [*members, *_members(kind, loss)])
    return Annotated[union, Field(discriminator="name")]


def _with_backbones() -> dict[type[Section], type[Section]]:
    if all(each.kind != "backbone" for each in _registered.values()):
        return {}
    body = PPYOLOEConfig.model_fields["body"]
    annotation = _literal(names_of("backbone"))
    return {
        PPYOLOEConfig: _derived(PPYOLOEConfig, {"body": (annotation, _of_type(annotation, body))})
    }


def _data(data_format: str) -> type[Section]:
    found = registered("dataset", data_format)
    if found is not None and found.section is not None:
        return found.section
    if all(each.kind != "dataset" for each in _registered.values()):
        return DataConfig
    known = DataConfig.model_fields["format"]
    annotation = _literal(names_of("dataset"))
    return _derived(DataConfig, {"format": (annotation, _of_type(annotation, known))})


def _log() -> type[Section]:
    if not _members("tracker"):
        return LogConfig
    one = _union(ShippedTracker, "tracker")
    field = LogConfig.model_fields["trackers"]
    trackers = tuple[one, ...]  # type: ignore[valid-type]
    return _derived(LogConfig, {"trackers": (trackers, _of_type(trackers, field))})


def _literal(names: Sequence[str]) -> Any:
    """The type of one of these texts."""
    return Literal.__getitem__(tuple(names))


def _tags(union: Any) -> list[str]:
    return [str(each.model_fields["name"].default) for each in get_args(union)]


_OUR_NAMES: dict[str, Callable[[], list[str]]] = {
    "detector": lambda: _tags(ModelConfig),
    "dataset": lambda: choices(DataConfig.model_fields["format"].annotation),
    "backbone": lambda: choices(PPYOLOEConfig.model_fields["body"].annotation),
    "tracker": lambda: _tags(ShippedTracker),
}
