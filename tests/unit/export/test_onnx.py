"""ONNX files: what they compute, the suppression inside them, a converter that fails."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

import ppdist
from ppdist.common.errors import ExportError
from ppdist.common.manifest import CARD_NOTE
from ppdist.config.evaluate import NMSConfig
from ppdist.config.runtime import RuntimeOptions
from ppdist.export import export as export_graph
from ppdist.export.export import deployment_copy, export_model
from ppdist.export.onnx import append_nms
from ppdist.export.predictor import (
    EagerPredictor,
    ExportedPredictor,
    open_graph,
    split_rows,
    suppress,
)
from ppdist.export.spec import read_spec
from ppdist.export.verify import compare_rows, eager_outputs, load_openvino
from ppdist.models.model_card import ModelCard, read_card
from tests.errors import raises
from tests.unit.export.tiny import (
    NMS,
    assert_same_boxes,
    classifier_spec,
    exported_detector,
    pictures,
    probabilities_of,
    tiny_classifier,
    tiny_model,
    tiny_spec,
)

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
ONNX = RuntimeOptions(backend="onnx")
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def converter() -> None:
    pytest.importorskip("paddle2onnx")


@pytest.fixture(scope="module")
def with_nms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("paddle2onnx")
    return exported_detector(tmp_path_factory)


def test_the_model_card_travels_in_the_file(with_nms: Path) -> None:
    there = {each.key: each.value for each in onnx.load(with_nms / "model.onnx").metadata_props}
    found = ModelCard.model_validate_json(there[CARD_NOTE])
    spec = read_spec(with_nms)
    assert found.class_names == spec.class_names == ("red", "green", "blue")
    assert found.image_size == spec.input.size and found.nms == NMS
    assert found == read_card(with_nms).model_copy(update={"made_with": found.made_with})


def axes_of(file: Path) -> list[list[str | int]]:
    """Of the input and the outputs."""
    graph = onnx.load(str(file)).graph
    shapes = [value.type.tensor_type.shape for value in (*graph.input, *graph.output)]
    return [[axis.dim_param or axis.dim_value for axis in shape.dim] for shape in shapes]


def test_the_file_names_its_axes_and_ppdist(with_nms: Path) -> None:
    images = ["batch", 3, "height", "width"]
    assert axes_of(with_nms / "model.onnx") == [images, ["rows", 6], ["batch"]]
    model = onnx.load(str(with_nms / "model.onnx"))
    assert (model.producer_name, model.producer_version) == ("ppdist", ppdist.__version__)


# Of all that TensorRT's parser lists (onnx-tensorrt, docs/operators.md, TensorRT 10.15), what a
# suppression needs; it wants TopK sorted and computes float64 in float32.
LISTED = {
    "ArgMax", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Flatten", "Gather", "GatherND",
    "Greater", "Identity", "If", "Min", "Mod", "NonMaxSuppression", "NonZero", "Range", "ReduceMax",
    "ReduceSum", "Reshape", "ScatterElements", "ScatterND", "Shape", "Split", "Squeeze", "TopK",
    "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


@pytest.mark.parametrize("agnostic", [False, True])
@pytest.mark.parametrize("iou_threshold", [0.5, None])
def test_the_suppression_uses_what_tensorrt_lists(
    tmp_path: Path, iou_threshold: float | None, agnostic: bool
) -> None:
    nms = NMSConfig(iou_threshold=iou_threshold, multi_label=False, class_agnostic=agnostic)
    append_nms(raw_model(tmp_path / "raw.onnx", 4), tmp_path / "kept.onnx", nms)
    graphs = [onnx.load(str(tmp_path / "kept.onnx")).graph]
    for graph in graphs:
        graphs += [each.g for node in graph.node for each in node.attribute if each.HasField("g")]
    assert len(graphs) == (1 if iou_threshold is None else 3)
    nodes = [node for graph in graphs for node in graph.node]
    assert {node.op_type for node in nodes} <= LISTED
    cast_to = [each.i for node in nodes for each in node.attribute if each.name == "to"]
    assert onnx.TensorProto.DOUBLE not in cast_to
    named = {each.name for node in nodes if node.op_type == "TopK" for each in node.attribute}
    assert "sorted" not in named  # it is by itself


def raw_model(file: Path, classes: int) -> Path:
    """An ONNX model that takes [B, N, C + 4] and gives scores [B, N, C] and boxes [B, N, 4]."""
    from onnx import TensorProto, helper

    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Split", ["images", "sizes"], ["scores", "boxes"], axis=2)],
        "raw",
        [info("images", TensorProto.FLOAT, ["B", "N", classes + 4])],
        [
            info("scores", TensorProto.FLOAT, ["B", "N", classes]),
            info("boxes", TensorProto.FLOAT, ["B", "N", 4]),
        ],
        [helper.make_tensor("sizes", TensorProto.INT64, [2], [classes, 4])],
    )
    opsets = [helper.make_opsetid("", export_graph.ONNX_OPSET)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(file))
    return file


def predictions(batch: int, count: int, classes: int, steps: int = 0) -> np.ndarray:
    """Crowded random boxes and scores side by side; steps: scores are multiples of 1 / steps."""
    rng = np.random.default_rng(3)
    corner, size = rng.uniform(0, 60, (batch, count, 2)), rng.uniform(10, 40, (batch, count, 2))
    scores = rng.uniform(0, 1, (batch, count, classes)) ** 3
    if steps:
        scores = np.round(scores * steps) / steps
    return np.concatenate([scores, corner, corner + size], axis=2).astype(np.float32)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "nms",
    [
        NMSConfig(score_threshold=0.05, iou_threshold=0.5),
        NMSConfig(score_threshold=0.05, iou_threshold=0.5, multi_label=False),
        NMSConfig(score_threshold=0.0, iou_threshold=0.6, candidates=20),
        NMSConfig(score_threshold=0.0, iou_threshold=0.9, candidates=50, keep=30),
        NMSConfig(score_threshold=1.0),
        NMSConfig(score_threshold=0.2, iou_threshold=0.0, keep=1),
        NMSConfig(score_threshold=0.2, iou_threshold=1.0),
        NMSConfig(score_threshold=0.2, iou_threshold=None, keep=1000),  # more than there are
        NMSConfig(score_threshold=0.05, iou_threshold=None, keep=30, multi_label=False),
        NMSConfig(score_threshold=0.05, iou_threshold=0.5, class_agnostic=True),
        NMSConfig(score_threshold=0.0, candidates=50, keep=30, class_agnostic=True),
    ],
    ids=[
        "usual",
        "one label",
        "few candidates",
        "full",
        "nothing",
        "best one",
        "no overlap",
        "no suppression",
        "no suppression, one label",
        "agnostic",
        "agnostic, few candidates",
    ],
)
def test_onnx_nms_keeps_rows_of_paddle(tmp_path: Path, nms: NMSConfig, batch: int) -> None:
    append_nms(raw_model(tmp_path / "raw.onnx", 4), tmp_path / "kept.onnx", nms)
    graph = open_graph([tmp_path / "kept.onnx"], ONNX)
    assert graph.output_names == ("rows", "count")
    both = predictions(batch, 200, 4)
    rows_R6, count_B = graph(both)
    assert rows_R6.dtype == np.float32 and count_B.dtype == np.int32
    expected = suppress(paddle.to_tensor(both[..., :4]), paddle.to_tensor(both[..., 4:]), nms)
    assert count_B.tolist() == [len(true_R6) for true_R6 in expected]
    for got_R6, true_R6 in zip(split_rows(rows_R6, count_B), expected, strict=True):
        best_first = true_R6[np.argsort(-true_R6[:, 1], kind="stable")]
        np.testing.assert_array_equal(got_R6, best_first)


@pytest.mark.parametrize("candidates", [20, 1000])
def test_onnx_breaks_score_ties_as_paddle(tmp_path: Path, candidates: int) -> None:
    nms = NMSConfig(score_threshold=0.05, iou_threshold=0.6, candidates=candidates, keep=25)
    append_nms(raw_model(tmp_path / "raw.onnx", 4), tmp_path / "kept.onnx", nms)
    both = predictions(2, 200, 4, steps=20)
    rows_R6, count_B = open_graph([tmp_path / "kept.onnx"], ONNX)(both)
    expected = suppress(paddle.to_tensor(both[..., :4]), paddle.to_tensor(both[..., 4:]), nms)
    for got_R6, true_R6 in zip(split_rows(rows_R6, count_B), expected, strict=True):
        best_first = true_R6[np.argsort(-true_R6[:, 1], kind="stable")]
        np.testing.assert_array_equal(got_R6, best_first)


def test_one_image_of_a_batch_may_have_no_rows(tmp_path: Path) -> None:
    append_nms(raw_model(tmp_path / "raw.onnx", 4), tmp_path / "kept.onnx", NMS)
    both = predictions(3, 200, 4)
    both[1, :, :4] = 0
    _, count_B = open_graph([tmp_path / "kept.onnx"], ONNX)(both)
    assert count_B[1] == 0 and count_B[0] > 0 and count_B[2] > 0


def assert_boxes_of_eager(directory: Path) -> None:
    exported = ExportedPredictor(directory, ONNX)
    eager = EagerPredictor(deployment_copy(tiny_model()), NMS)
    for images in (pictures(1), pictures(3), pictures(2, 96, 64)):
        assert_same_boxes(exported(images), eager(images))


def test_onnx_keeps_eager_boxes_at_other_shapes(with_nms: Path) -> None:
    section = read_spec(with_nms).onnx
    assert section is not None
    assert [output.name for output in section.outputs] == ["rows", "count"]
    assert_boxes_of_eager(with_nms)


def test_graph_has_no_batch_norms_and_no_pixel_scale(with_nms: Path) -> None:
    nodes = onnx.load(str(with_nms / "model.onnx")).graph.node
    assert "BatchNormalization" not in {node.op_type for node in nodes}
    assert [node.op_type for node in nodes if "images" in node.input] == ["Conv"]


@pytest.mark.slow
def test_onnx_without_nms_gives_scores_and_boxes(tmp_path: Path, converter: None) -> None:
    report = export_model(tiny_model(), tmp_path / "model", tiny_spec(), ("onnx",), False)
    assert report.spec.onnx is not None
    assert [output.name for output in report.spec.onnx.outputs] == ["scores", "boxes"]
    _, scores, boxes = axes_of(tmp_path / "model" / "model.onnx")
    assert scores == ["batch", "predictions", 3] and boxes == ["batch", "predictions", 4]
    assert_boxes_of_eager(tmp_path / "model")


@pytest.mark.slow
def test_onnx_classifier_equals_eager_probabilities(tmp_path: Path, converter: None) -> None:
    model = tiny_classifier()
    report = export_model(model, tmp_path / "model", classifier_spec(), ("paddle", "onnx"))
    assert set(report.agreement) == {"paddle", "onnx", *["openvino"] * bool(find_spec("openvino"))}
    assert all(found.box is None for found in report.agreement.values())
    images = pictures(3, 96, 64)
    (found_BC,) = open_graph([report.directory / "model.onnx"], ONNX)(images)
    np.testing.assert_allclose(found_BC, probabilities_of(model, images), atol=1e-4)


def test_without_its_packages_onnx_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_graph, "find_spec", lambda name: None)
    with raises("package_missing", "paddle2onnx"):
        export_model(tiny_model(), tmp_path / "model", tiny_spec(), ("paddle", "onnx"))


def test_openvino_is_left_out_or_ends_the_export(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first where nobody asked for it: the ONNX file is good in ONNX Runtime."""
    refused: dict[str, str] = {}
    with export_graph._openvino_required(False, refused, "openvino"):
        raise ExportError(
            "OpenVINO does not compute what the model computes", code="export_differs"
        )
    assert "OpenVINO does not compute" in caplog.text
    assert set(refused) == {"openvino"}
    with raises("export_differs"), export_graph._openvino_required(True, {}, "openvino"):
        raise ExportError("the same", code="export_differs")
    monkeypatch.setattr(export_graph, "find_spec", lambda name: None)
    with raises("package_missing"):
        export_model(tiny_model(), Path("model"), tiny_spec(), ("openvino",))


@pytest.mark.slow
def test_rows_in_openvino_are_compared_with_eager(with_nms: Path) -> None:
    if find_spec("openvino") is None:
        pytest.skip("needs ppdist[openvino]")
    images = [pictures(2)]
    expected = eager_outputs(deployment_copy(tiny_model()), images)
    kept = load_openvino(with_nms / "model.onnx")
    found = compare_rows(kept, images, expected, NMS)
    assert found.score < 1e-5 and found.boxes > 0
    section = read_spec(with_nms).openvino
    assert section is not None and section.files == ("model.onnx",)
    with raises("export_differs"):
        compare_rows(kept, images, [(scores / 2, boxes) for scores, boxes in expected], NMS)


def test_int8_needs_one_more_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_graph, "find_spec", lambda name: name != "ml_dtypes" or None)
    export_graph.require_onnx(int8=False)
    with raises("package_missing", "ml_dtypes"):
        export_graph.require_onnx(int8=True)


def test_full_disk_is_blamed_before_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.pdiparams").write_bytes(bytes(2_000_000))
    monkeypatch.setattr(
        export_graph.shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000)
    )
    message = "the disk of --out has 3 MB left, but making the ONNX model takes 4 MB; make room"
    with pytest.raises(ExportError, match=message) as error:
        export_graph.convert_to_onnx(tmp_path, tmp_path / "model.onnx", ["scores", "boxes"])
    assert error.value.code == "disk_full"


STOPPED = """
import runpy, sys
from ppdist.export import export as export_graph
export_graph._CONVERT = (
    "import os, pathlib, time; pathlib.Path('{pid}').write_text(str(os.getpid())); time.sleep(600)"
)
sys.argv = ["export/export.py", *sys.argv[1:]]
runpy.run_path("tools/export.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_export_leaves_no_folder_or_process(
    tmp_path: Path, converter: None, number: signal.Signals
) -> None:
    pid = tmp_path / "pid"
    paddle.save(tiny_model().state_dict(), str(tmp_path / "weights.pdparams"))
    (tmp_path / "tiny.yml").write_text(
        "data: {format: coco, root: nowhere, train: {images: i, annotations: a}, "
        "val: {images: i, annotations: a}}\n"
        "model: {name: ppyoloe, width_multiple: 0.125, depth_multiple: 0.33, num_classes: 3, "
        "image_size: [64, 96]}\n"
    )
    command = [sys.executable, "-c", STOPPED.replace("{pid}", str(pid))]
    command += ["-c", str(tmp_path / "tiny.yml"), "-w", str(tmp_path / "weights.pdparams")]
    command += ["--out", str(tmp_path / "model"), "--format", "onnx"]
    export = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 300
        while not (pid.is_file() and pid.read_text()) and export.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.1)
        export.send_signal(number)
        _, said = export.communicate(timeout=600)
    finally:
        export.kill()
    assert export.returncode == 128 + number and "Traceback" not in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "pid",
        "tiny.yml",
        "weights.pdparams",
    ]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    ("converter_does", "message"),
    [
        ("import os; os.abort()", "paddle2onnx cannot convert this model: it said nothing"),
        (
            "print('[ERROR] ... Failed to convert PaddlePaddle model: no such operator.'); exit(1)",
            "Failed to convert PaddlePaddle model: no such operator",
        ),
        ("pass", "paddle2onnx cannot convert this model"),
        pytest.param(
            "import time; time.sleep(60)",
            "paddle2onnx did not finish within 2 seconds",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["crashes", "complains", "writes nothing", "hangs"],
)
def test_a_converter_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converter_does: str, message: str
) -> None:
    monkeypatch.setattr(export_graph, "_CONVERT", converter_does)
    (tmp_path / "model.pdiparams").write_bytes(b"weights")
    (tmp_path / "model.json").write_bytes(b"{}")
    if "sleep" in converter_does:
        monkeypatch.setattr(export_graph, "CONVERSION_SECONDS", 2)
    with pytest.raises(ExportError, match=message) as error:
        export_graph.convert_to_onnx(tmp_path, tmp_path / "model.onnx", ["scores", "boxes"])
    hangs = "sleep" in converter_does
    assert error.value.code == ("conversion_timeout" if hangs else "conversion_failed")
