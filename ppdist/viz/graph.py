"""VisualDL's GRAPHS page of an exported model.

`LogWriter.add_graph` of VisualDL 2.5.3 needs Paddle's old program format and fails with the
current one.  An export's model.json has the same content: operations, their layers (`struct_name`)
and shapes.  This module writes the part of `add_graph`'s output that the page reads;
`visualdl --logdir OUTPUT/vdl` shows it beside a run's curves.

Source: github.com/PaddlePaddle/VisualDL 2.5.3, visualdl/reader/graph_reader.py and
component/graph/{graph_component,netron_graph}.py.
"""

import json
from pathlib import Path
from typing import Any

from ppdist.common.files import replace_file

_FILE = "vdlgraph.model.log"  # the page looks for `vdlgraph` in names
_VERSION = "1.0.0"
_ROOT = "/"
_DTYPES = {"t_f32": "float32", "t_f64": "float64", "t_i32": "int32", "t_i64": "int64"}
_PASS_THROUGH = ("combine", "split")  # operations whose outputs equal their inputs
_ENDS = {"data": "feed", "fetch": "fetch"}  # the page's names for inputs and outputs
_DECODING = "/decode/"  # for operations outside any layer: box decoding, suppression


def write_graph(program: Path, folder: Path) -> Path:
    """Writes the VisualDL GRAPHS page of a program; returns its file.

    Args:
        program: model.json of an export.
        folder: where VisualDL looks (`--logdir`).
    Raises: OSError: the program cannot be read, or the page cannot be written.  KeyError: the file
        is not such a program.
    """
    graph = build_graph(json.loads(program.read_bytes()))
    replace_file(folder / _FILE, json.dumps(graph).encode())
    return folder / _FILE


def build_graph(program: dict[str, Any]) -> dict[str, Any]:
    """Builds the nodes (operations and enclosing layers) and variables in VisualDL's format.

    Omits constants; replaces pass-through operations by their inputs.
    """
    (block,) = program["program"]["regions"][0]["blocks"]
    nodes: dict[str, dict[str, Any]] = {_ROOT: _make_node(_ROOT)}
    variables: dict[str, dict[str, Any]] = {}
    variables_of: dict[int, list[str]] = {}  # value of the program -> variables it represents
    for index, operation in enumerate(block["ops"]):
        kind = operation["#"].partition(".")[2] or operation["#"]
        outputs = operation["O"] if isinstance(operation["O"], list) else [operation["O"]]
        inputs = [
            name for value in operation.get("I", ()) for name in variables_of.get(value["%"], ())
        ]
        if kind in _PASS_THROUGH:
            variables_of |= {value["%"]: inputs for value in outputs}
            continue
        # Operations without inputs compute constants, which the page does not need to show.
        if not inputs and kind not in ("p", "data"):
            continue
        attributes = {
            entry["N"]: entry["AT"] for entry in operation["A"] if isinstance(entry, dict)
        }
        output_names = []
        for value in outputs:
            if kind == "p":
                name = operation["A"][3]
            elif kind == "data":
                name = attributes["name"]["D"]
            else:
                name = f"{kind}_{value['%']}"
            output_names.append(name)
            variables_of[value["%"]] = [name]
            variables[name] = _make_variable(name, value.get("TT"), parameter=kind == "p")
        if kind == "p":
            continue
        layer = attributes.pop("struct_name", {"D": _ROOT})["D"]
        if layer == _ROOT and kind not in _ENDS:
            # Operations outside any layer are box decoding and suppression.
            layer = _DECODING
        node = _make_node(f"{layer}{kind}_{index}", _ENDS.get(kind, kind))
        node["is_leaf_node"] = True
        node["input_vars"] = {"X": inputs} if inputs else {}
        node["output_vars"] = {"Y": output_names} if output_names else {}
        node["attrs"] = {name: _plain(value) for name, value in attributes.items()}
        node["attr_types"] = {name: value["#"][4:].upper() for name, value in attributes.items()}
        nodes[node["name"]] = node
        for name in inputs:
            variables[name]["to_nodes"].append(node["name"])
        for name in output_names:
            variables[name]["from_node"] = node["name"]
        _put_into_layers(node["name"], nodes)
    _join_layers(nodes, variables)
    return {
        "version": _VERSION,
        "nodes": list(nodes.values()),
        "vars": list(variables.values()),
        "edges": [],  # the page draws them from the variables of nodes
    }


def _make_node(name: str, kind: str = "") -> dict[str, Any]:
    """Creates an empty node; its default kind is its name without a number."""
    if not kind:
        stem, _, number = name.rpartition("/")[2].rpartition("_")
        kind = stem if number.isdecimal() else name.rpartition("/")[2]
    return {
        "name": name,
        "show_name": name,
        "type": kind,
        "attrs": {},
        "attr_types": {},
        "children_node": [],
        "parent_node": "",
        "input_vars": {},
        "output_vars": {},
        "is_leaf_node": False,
    }


def _make_variable(name: str, kind: dict[str, Any] | None, *, parameter: bool) -> dict[str, Any]:
    """Creates a variable.

    Args: kind: type and shape of a tensor; None if it is not a tensor.
    """
    dtype, shape = "", []
    if kind is not None and kind["#"].endswith("t_dtensor"):
        dtype, shape = kind["D"][0]["#"].rpartition(".")[2], kind["D"][1]
    return {
        "name": name,
        "shape": shape,
        "dtype": _DTYPES.get(dtype, dtype.removeprefix("t_")),
        "persistable": parameter,
        "from_node": "",
        "to_nodes": [],
    }


def _plain(attribute: dict[str, Any]) -> Any:
    """Returns the value of an attribute, with lists converted recursively."""
    if attribute["#"].endswith("a_array"):
        return [_plain(entry) for entry in attribute["D"]]
    return attribute.get("D")


def _put_into_layers(name: str, nodes: dict[str, dict[str, Any]]) -> None:
    """Adds a node to its enclosing layer, recursively up to the root."""
    while name != _ROOT:
        parent = name.rpartition("/")[0] or _ROOT
        nodes[name]["parent_node"] = parent
        is_known = parent in nodes
        nodes.setdefault(parent, _make_node(parent))["children_node"].append(name)
        if is_known:
            return
        name = parent


def _join_layers(nodes: dict[str, dict[str, Any]], variables: dict[str, dict[str, Any]]) -> None:
    """Sets the inputs and outputs of each layer.

    Inputs are variables created outside and used inside the layer; outputs are the reverse.
    """
    for name, layer in nodes.items():
        if layer["is_leaf_node"]:
            continue
        inside = name if name == _ROOT else f"{name}/"
        entering, leaving = [], []
        for variable in variables.values():
            made_here = variable["from_node"].startswith(inside)
            used_here = [user.startswith(inside) for user in variable["to_nodes"]]
            if made_here and not all(used_here):
                leaving.append(variable["name"])
            elif any(used_here) and not made_here:
                entering.append(variable["name"])
        layer |= {"input_vars": {"X": entering}, "output_vars": {"Y": leaving}}
