"""YAML files and -o items as trees that remember their lines.

Scalars follow the core schema of YAML 1.2, plus the exponent form everybody writes: `1e-3` is a
number, `010` is ten, and `yes`, `no`, `on`, `2024-01-01` are text.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ppdist.common.errors import ConfigError
from ppdist.common.files import read_file
from ppdist.config.shipped import find_config, near

BASE_KEY = "_BASE_"
_TAG = "tag:yaml.org,2002:"
_MAX_FILE_BYTES = 1 << 24  # 16 MiB
_MAX_VALUES = 100_000  # per file: ten lines of aliases can expand to more than memory holds
_MAX_DIGITS = 1000  # of an integer; what has more is a float, and too large for any key
_INT = re.compile(r"^(?:[-+]?[0-9]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN))$"
)

Scalar = str | int | float | bool | None


class Place(NamedTuple):
    """A position in a file, or a whole -o item (line 0)."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        """Writes `file:line:column`, or the -o item."""
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def order(self) -> tuple[bool, str, int, int]:
        """Returns a sort key: files before -o items, then by line."""
        return (self.line == 0, self.source, self.line, self.column)


@dataclass(frozen=True)
class Node:
    """A scalar, a list of nodes, or a mapping to nodes."""

    value: "Scalar | list[Node] | dict[str, Node]"
    place: Place  # of the value
    key_place: Place  # of its key, or of the value where there is no key
    text: str = ""  # a scalar as it was typed
    quoted: bool = False

    def child(self, part: str | int) -> "Node | None":
        """Returns the value of a key or the item at an index; None if there is none."""
        if isinstance(self.value, dict) and isinstance(part, str):
            return self.value.get(part)
        if isinstance(self.value, list) and isinstance(part, int) and part < len(self.value):
            return self.value[part]
        return None

    def plain(self) -> object:
        """Returns the value without positions, as plain data for json.dumps."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def tree_of(value: object, place: Place) -> Node:
    """Builds a tree from plain data, all at one position; the inverse of `Node.plain`."""
    if isinstance(value, dict):
        return Node({key: tree_of(child, place) for key, child in value.items()}, place, place)
    if isinstance(value, list | tuple):
        return Node([tree_of(child, place) for child in value], place, place)
    assert value is None or isinstance(value, str | int | float)
    return Node(value, place, place, "" if value is None else str(value))


class Problem(NamedTuple):
    """A problem in a configuration: its position, and `key.path: what is wrong; what to do`.

    code: error code, as in UserError.
    """

    place: Place
    message: str
    code: str


class InvalidConfig(ConfigError):
    """Error with all problems of a configuration; a single problem determines its code."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        if len(problems) == 1:
            (only,) = problems
            super().__init__(only.message, code=only.code, where=str(only.place))
            return
        lines = [f"{problem.place}: {problem.message}" for problem in problems]
        text = "\n  ".join([f"{len(lines)} problems in the configuration:", *lines])
        super().__init__(text, code="invalid_config")

    def __reduce__(self) -> tuple[Any, ...]:
        return InvalidConfig, (self.problems,)


def problems_error(problems: Sequence[Problem]) -> InvalidConfig:
    """Builds one error from all problems, in the order of the files."""
    return InvalidConfig(tuple(sorted(set(problems), key=lambda problem: problem.place.order())))


class _TooManyNodes(Exception):
    """Raised for a file with too many nodes, before its aliases are written out."""


class _Loader(yaml.SafeLoader):
    """Loader with the scalars of YAML 1.2 and a limit on the number of nodes."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML declares it so)
    composed = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # PyYAML calls this for every node, before an alias is written out where it is used.
        self.composed += 1
        if self.composed > 2 * _MAX_VALUES:  # keys are nodes, too
            raise _TooManyNodes
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which a YAML reader would take for another type."""


_Loader.add_implicit_resolver(
    _TAG + "null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]
)
_Loader.add_implicit_resolver(
    _TAG + "bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(_TAG + "int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver(_TAG + "merge", re.compile(r"^<<$"), ["<"])
_Dumper.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+0123456789."))
_Dumper.add_representer(
    list,
    lambda dumper, data: dumper.represent_sequence(
        _TAG + "seq", data, flow_style=not any(isinstance(item, dict) for item in data)
    ),
)


def dump(value: object) -> str:
    """Writes plain data as YAML text; lists of scalars on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def merge(base: Node, over: Node) -> Node:
    """Merges mappings key by key; other values of `over` replace those of `base`."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    value = dict(base.value)
    for key, child in over.value.items():
        value[key] = merge(value[key], child) if key in value else child
    # A mapping from a file keeps its position in the file when -o adds a key to it.
    return replace(base if over.place.line == 0 else over, value=value)


@dataclass
class Reader:
    """Reader of files and -o items, which collects their problems.

    Files whose structure cannot be known (missing, not YAML) raise ConfigError at once, because
    whatever a later check said about them would be wrong.
    """

    problems: list[Problem] = field(default_factory=list)

    def read_file(
        self, path: str, opened: tuple[str, ...] = (), place: Place | None = None
    ) -> Node:
        """Reads the tree of a file, with its `_BASE_` files merged underneath.

        Args:
            path: as the user or the including file names it; used in messages as it is.
            opened: real paths of the files being read, outermost first (finds cycles).
            place: where `path` was written, None for the command line.
        """
        where = f"{place}: {BASE_KEY}" if place else ""
        real = os.path.realpath(path)
        if real in opened:
            chain = " -> ".join(os.path.relpath(item) for item in [*opened, real])
            raise ConfigError(
                f"the files include each other: {chain}", code="include_cycle", where=where
            )
        tree = self.read_alone(path, where)
        assert isinstance(tree.value, dict)
        keys = dict(tree.value)
        bases = keys.pop(BASE_KEY, None)
        tree = replace(tree, value=keys)
        start = Place(path, 1, 1)
        # Later base files replace earlier ones, and the file itself replaces them all.
        merged = Node({}, start, start)
        names = [] if bases is None else bases.value if isinstance(bases.value, list) else [bases]
        for base in names:
            if not isinstance(base.value, str):
                value = describe_value(base)
                message = f"{BASE_KEY}: found {value}, expected a file name or a list of them"
                self.problems.append(Problem(base.place, message, "bad_value"))
                continue
            # A file beside the one that names it takes precedence over a shipped config.
            beside = os.path.normpath(os.path.join(os.path.dirname(path), base.value))
            base_path = beside if os.path.isfile(beside) else find_config(base.value)
            if base_path == base.value:  # no file and no name
                base_path = beside
            merged = merge(merged, self.read_file(base_path, (*opened, real), base.place))
        return merge(merged, tree)

    def read_alone(self, path: str, where: str = "") -> Node:
        """Reads the mapping in one file, without opening its `_BASE_`.

        Args: where: position that names the file; messages begin with it; "" for none.
        """
        where = f"{where}: {path}" if where else path
        try:
            text = read_file(path, _MAX_FILE_BYTES).decode("utf-8-sig")
        except FileNotFoundError:
            names = near(path)
            raise ConfigError(
                f"no such file (looked in {Path.cwd()}), and no config of this name is shipped",
                code="config_missing",
                where=where,
                fix=f"did you mean {' or '.join(names)}?" if names else "see `ppdist config list`",
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"not UTF-8 text: {error}", code="not_utf8", where=where) from None
        except OSError as error:
            raise ConfigError(
                f"cannot be read: {error.strerror}", code="config_unreadable", where=where
            ) from None
        return self.read_text(text, path)

    def read_text(self, text: str, source: str) -> Node:
        """Reads the mapping in a text; opens no file.

        Args: source: name of the text in messages.
        """
        start = Place(source, 1, 1)
        root = self._compose(text, source)
        if root is None:
            return Node({}, start, start)
        tree = _Converter(self.problems, source, start).convert(root, ())
        if not isinstance(tree.value, dict):
            raise ConfigError(
                f"expected `key: value` lines, found {describe_value(tree)}",
                code="not_a_mapping",
                where=str(tree.place),
            )
        return replace(tree, place=start, key_place=start)

    def read_override(self, item: str) -> Node | None:
        """Reads the tree of one `a.b=value`; None, and a problem, if it is malformed."""
        place = Place(f"-o {item}" if len(item) <= 80 else f"-o {item[:77]}...")
        dotted, equals, text = item.partition("=")
        keys = [key.strip() for key in dotted.split(".")]
        if not equals or not all(keys):
            message = "expected key.path=value, as in -o train.epochs=10"
            self.problems.append(Problem(place, message, "bad_override"))
            return None
        if keys[0] == BASE_KEY:
            message = f"{BASE_KEY} belongs in the file, not in -o"
            self.problems.append(Problem(place, message, "base_in_override"))
            return None
        try:
            root = self._compose(text, place.source)
            plain = root is None or (isinstance(root, yaml.ScalarNode) and root.style is None)
            if plain and text[0 if root is None else root.end_mark.index :].strip():
                # There are no comments in -o: the value in `-o data.root=my #1 set` includes `#1
                # set`.
                root = self._compose(json.dumps(text.strip(), ensure_ascii=False), place.source)
        except ConfigError:
            message = (
                f"{dotted}: {text!r} is not a YAML value; to give it as text, quote it twice: "
            )
            message += f"-o '{dotted}=\"...\"'"
            self.problems.append(Problem(place, message, "override_not_yaml"))
            return None
        # An empty value (`-o model.pretrained=`) means null, as it does in a file.
        converter = _Converter(self.problems, None, place)
        node = Node(None, place, place) if root is None else converter.convert(root, tuple(keys))
        for key in reversed(keys):
            node = Node({key: replace(node, key_place=place)}, place, place)
        return node

    def _compose(self, text: str, source: str) -> yaml.Node | None:
        """Composes YAML text into PyYAML's nodes; None for an empty text.

        Raises: ConfigError: it is not YAML, has too many values or is nested too deeply.
        """
        try:
            return yaml.compose(text, Loader=_Loader)
        except _TooManyNodes:  # to compose 16 MiB of them would take minutes
            raise ConfigError(
                f"more than {_MAX_VALUES} values", code="too_many_values", where=source
            ) from None
        except RecursionError:
            raise ConfigError(
                "lists or mappings are nested too deeply", code="nested_too_deeply", where=source
            ) from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            reason = ", ".join(filter(None, [error.context, error.problem]))
            if "'\\t'" in reason:
                reason = "a tab; indent with spaces"
            raise ConfigError(
                f"not YAML: {reason}", code="not_yaml", where=f"{source}:{line}:{column}"
            ) from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
            code = error.character if isinstance(error.character, int) else ord(error.character)
            raise ConfigError(
                f"not YAML: character U+{code:04X} is not allowed",
                code="not_yaml",
                where=f"{source}:{line}:{column}",
            ) from None


@dataclass
class _Converter:
    """Converter of PyYAML's nodes, from a file or an -o item (`file` is None), to our Nodes."""

    problems: list[Problem]
    file: str | None
    item_place: Place
    open: set[int] = field(default_factory=set)  # ids of the collections being converted
    converted: int = 0

    def place(self, node: yaml.Node) -> Place:
        """Returns where a node begins in the file, or the place of the -o item."""
        if self.file is None:
            return self.item_place
        return Place(self.file, node.start_mark.line + 1, node.start_mark.column + 1)

    def convert(self, node: yaml.Node, path: tuple[str, ...], key: yaml.Node | None = None) -> Node:
        """Converts a YAML node and its children, recursively, to a `Node`.

        Args: path: keys leading to this node, used in error messages. key: the node's key, if any.
        """
        place = self.place(node)
        key_place = place if key is None else self.place(key)
        self.converted += 1
        if self.converted > _MAX_VALUES:
            raise ConfigError(
                f"more than {_MAX_VALUES} values, aliases written out",
                code="too_many_values",
                where=f"{place}: {'.'.join(path)}",
            )
        if isinstance(node, yaml.ScalarNode):
            quoted = node.style in ("'", '"')
            return Node(self.convert_scalar(node, path), place, key_place, node.value, quoted)
        # PyYAML uses the same node object for an alias, so a cycle repeats an id.
        if id(node) in self.open:
            raise ConfigError(
                "the alias contains itself",
                code="alias_contains_itself",
                where=f"{place}: {'.'.join(path)}",
            )
        self.open.add(id(node))
        if node.tag not in (_TAG + "seq", _TAG + "map"):
            self.report_tag(node, path)
        value: list[Node] | dict[str, Node]
        if isinstance(node, yaml.SequenceNode):
            value = [self.convert(item, path) for item in node.value]
        else:
            assert isinstance(node, yaml.MappingNode)  # the only other kind
            value = self.convert_mapping(node, path)
        self.open.discard(id(node))
        return Node(value, place, key_place)

    def convert_mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Node]:
        """Converts a mapping; its own keys override those that `<<` merges in."""
        entries: dict[str, Node] = {}
        inherited: dict[str, Node] = {}
        for key, item in node.value:
            if key.tag == _TAG + "merge":
                for part in item.value if isinstance(item, yaml.SequenceNode) else [item]:
                    inherited = {**inherited, **self.convert_merged(part, path)}
                continue
            if not isinstance(key, yaml.ScalarNode):
                message = f"{'.'.join(path) or 'a key'}: a key must be text, not a list or mapping"
                self.problems.append(Problem(self.place(key), message, "key_not_text"))
                continue
            key_path = (*path, key.value)
            if key.value in entries:
                first = entries[key.value].key_place
                message = f"{'.'.join(key_path)}: given twice; the first is at {first}; remove one"
                self.problems.append(Problem(self.place(key), message, "duplicate_key"))
            entries[key.value] = self.convert(item, key_path, key)
        return {**inherited, **entries}

    def convert_merged(self, node: yaml.Node, path: tuple[str, ...]) -> dict[str, Node]:
        """Converts the value of `<<`, which must be a mapping."""
        converted = self.convert(node, path)
        if isinstance(converted.value, dict):
            return converted.value
        message = (
            f"{'.'.join((*path, '<<'))}: found {describe_value(converted)}, expected a mapping"
        )
        self.problems.append(Problem(converted.place, message, "not_a_mapping"))
        return {}

    def convert_scalar(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> Scalar:
        """Converts a scalar by its tag; numbers that YAML 1.2 does not know stay text."""
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int" and _INT.match(text) and len(text) <= _MAX_DIGITS:
            return int(text, 16) if text.startswith("0x") else int(text)
        if kind in ("int", "float") and _FLOAT.match(text):
            # Python reads `inf` and `nan`, YAML writes them with a dot.
            special = text.lower().lstrip("+-") in (".inf", ".nan")
            return float(text.replace(".", "") if special else text)
        if kind not in ("str", "merge"):
            self.report_tag(node, path)
        return text

    def report_tag(self, node: yaml.Node, path: tuple[str, ...]) -> None:
        """Reports an explicit tag, such as `!!python/object`, as a problem."""
        tag = node.tag.replace(_TAG, "!!")
        message = f"{'.'.join(path)}: the tag {tag} has no meaning here; write a plain value"
        self.problems.append(Problem(self.place(node), message, "unknown_tag"))


def describe_value(node: Node) -> str:
    """Describes a value in words, for messages."""
    value = node.value
    if isinstance(value, dict):
        return "a mapping with the keys " + ", ".join(value) if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing (null)"
    if isinstance(value, str):
        shown = value if len(value) <= 60 else value[:57] + "..."
        return f'"{shown}" (text)'
    return node.text or str(value)
