"""An export as a model of Triton: config.pbtxt, where the files lie, who reads them."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.runtime import RuntimeOptions
from ppdist.export.export import drafted
from ppdist.export.predictor import ExportedPredictor
from ppdist.export.spec import read_spec, write_spec
from ppdist.export.triton import arrange, model_config
from ppdist.runtime.predictor import Predictor, PredictorError
from tests.unit.export.tiny import exported_detector, pictures

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

# Fields of model_config.proto that we write, and what may stand in them.
TENSOR = r'{ name: "\w+" data_type: TYPE_(FP32|INT32) dims: \[-?\d+(, -?\d+)*\] }'
FIELDS = (
    r'backend: "onnxruntime"', r"max_batch_size: \d+", f"input {TENSOR}", f"output {TENSOR}",
    r"dynamic_batching { }",
)  # fmt: skip
ONNX = RuntimeOptions(backend="onnx")
PIXELS = ("images", "FLOAT", ["batch", 3, "height", "width"])
RAW = [("scores", "FLOAT", ["batch", "predictions", 5]), ("boxes", "FLOAT", ["batch", 9, 4])]
KEPT = [("rows", "FLOAT", ["rows", 6]), ("count", "INT32", ["batch"])]


def file_of(folder: Path, images: tuple, outputs: list[tuple]) -> Path:
    """An ONNX file with such an input and outputs, and nothing between."""
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DataType.Value(kind), shape)
        for name, kind, shape in (images, *outputs)
    ]
    graph = onnx.helper.make_graph([], "empty", values[:1], values[1:])
    onnx.save(onnx.helper.make_model(graph), str(folder / "model.onnx"))
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("images", "outputs", "is_batched", "dims"),
    [
        (PIXELS, KEPT, False, [[-1, 3, -1, -1], [-1, 6], [-1]]),
        (PIXELS, RAW, True, [[3, -1, -1], [-1, 5], [9, 4]]),
        (("x", "FLOAT", [1, 3, 64, 96]), RAW[1:], False, [[1, 3, 64, 96], [-1, 9, 4]]),
    ],
    ids=["with suppression", "batched", "one image of one size"],
)
def test_the_configuration_says_what_the_graph_takes(
    tmp_path: Path, images: tuple, outputs: list[tuple], is_batched: bool, dims: list[list[int]]
) -> None:
    lines = model_config(file_of(tmp_path, images, outputs), is_batched).splitlines()
    for line in lines:
        assert any(re.fullmatch(field, line) for field in FIELDS), line
    assert (lines[1] == "max_batch_size: 8") == is_batched == ("dynamic_batching { }" in lines)
    for line, name, shape in zip(lines[2:], [images[0], *(each[0] for each in outputs)], dims):
        assert f'"{name}"' in line and line.endswith(f"dims: {shape} }}")


def test_our_programs_read_a_model_of_triton(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("paddle2onnx")
    flat, folder = exported_detector(tmp_path_factory), tmp_path / "cells"
    with drafted(folder) as draft:
        shutil.copy2(flat / "model.onnx", draft)
        spec = arrange(draft, read_spec(flat).model_copy(update={"paddle": None}))
        write_spec(draft, spec)
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == spec.file_names() == {"infer.yml", "config.pbtxt", "1/model.onnx"}
    for found, expected in zip(
        ExportedPredictor(folder, ONNX)(pictures(2)), ExportedPredictor(flat, ONNX)(pictures(2))
    ):
        np.testing.assert_array_equal(found, expected)
    assert Predictor(folder, "onnx").identity["sha256"] == spec.sha256["model.onnx"]
    (folder / "1" / "model.onnx").write_bytes(b"another")
    with pytest.raises(PredictorError, match="SHA-256"):
        Predictor(folder, "onnx")
