"""An exported program on VisualDL's GRAPHS page, through VisualDL's own reader."""

import json
from pathlib import Path
from typing import Any

from ppdist.viz.graph import write_graph


def operation(kind: str, inputs: list[int], outputs: list[int], layer: str = "") -> dict[str, Any]:
    """As Paddle 3.3.1 writes it to model.json."""
    attributes = [
        {"N": "strides", "AT": {"#": "0.a_array", "D": [{"#": "0.a_i32", "D": 2}] * 2}},
        {"N": "name", "AT": {"#": "0.a_str", "D": "images"}},
    ]
    if layer:
        attributes.append({"N": "struct_name", "AT": {"#": "0.a_str", "D": layer}})
    tensor = {"#": "0.t_dtensor", "D": [{"#": "0.t_f32"}, [1, 3, 8, 8], "NCHW", [], 0]}
    return {
        "#": kind,
        "A": attributes,
        "I": [{"%": number} for number in inputs],
        "O": [{"%": number, "TT": tensor} for number in outputs],
    }


def parameter(number: int, name: str) -> dict[str, Any]:
    tensor = {"#": "0.t_dtensor", "D": [{"#": "0.t_f32"}, [3, 3, 3, 3], "NCHW", [], 0]}
    return {"#": "p", "A": [0, 1, 1, name], "O": {"%": number, "TT": tensor}}


OPERATIONS = [
    parameter(1, "conv2d_0.w_0"),
    operation("1.data", [], [2]),
    operation("1.conv2d", [2, 1], [3], "/Net/Stem/Conv2D/"),
    operation("1.swish", [3], [4], "/Net/Stem/"),
    operation("1.full", [], [5], "/Net/"),
    operation("0.combine", [3, 4], [6]),
    operation("1.concat", [6, 5], [7], "/Net/Stem_1/"),
    operation("1.scale", [7], [8]),
    operation("1.fetch", [8], [9]),
]


def test_visualdl_shows_layers_and_opens_them(tmp_path: Path) -> None:
    from visualdl.reader.graph_reader import GraphReader

    program = tmp_path / "model.json"
    program.write_text(json.dumps({"program": {"regions": [{"blocks": [{"ops": OPERATIONS}]}]}}))
    folder = tmp_path / "vdl"
    folder.mkdir()
    write_graph(program, folder)
    reader = GraphReader(str(folder))
    assert reader.component_tabs(update=True) == {"dynamic_graph"}
    (run,) = reader.runs()

    closed = reader.get_graph(run)
    assert [node["type"] for node in closed["nodes"]] == ["Net", "decode"]
    assert [each["arguments"][0]["name"] for each in closed["inputs"]] == ["images"]
    assert [each["arguments"][0]["name"] for each in closed["outputs"]] == ["scale_8"]
    assert links(closed) == {("Net", "decode")}

    assert links(reader.get_graph(run, "/Net", True)) == {("Stem", "Stem"), ("Stem", "decode")}
    opened = reader.get_graph(run, expand_all=True)
    assert links(opened) == {
        ("conv2d", "swish"), ("conv2d", "concat"), ("swish", "concat"), ("concat", "scale"),
    }  # fmt: skip
    (convolution,) = [node for node in opened["nodes"] if node["type"] == "conv2d"]
    attributes = {each["name"]: each["value"] for each in convolution["attributes"]}
    assert attributes["strides"] == [2, 2]
    weights = convolution["inputs"][0]["arguments"][1]
    assert weights["name"] == "conv2d_0.w_0"
    assert weights["initializer"]["shape"]["dimensions"] == [3, 3, 3, 3]


def links(graph: dict[str, Any]) -> set[tuple[str, str]]:
    """Kinds of nodes that a variable leads from and to."""
    makers = {name: node["type"] for node in graph["nodes"] for name in names(node, "outputs")}
    return {
        (makers[name], node["type"])
        for node in graph["nodes"]
        for name in names(node, "inputs")
        if name in makers
    }


def names(node: dict[str, Any], side: str) -> list[str]:
    return [each["name"] for group in node[side] for each in group["arguments"]]
