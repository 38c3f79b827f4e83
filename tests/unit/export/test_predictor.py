"""Runtimes of exported models: options, what they compute, how their speed is measured."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from pydantic import ValidationError

from ppdist.common.errors import ExportError
from ppdist.common.opener import DISK
from ppdist.config.runtime import RuntimeOptions
from ppdist.export.export import deployment_copy
from ppdist.export.predictor import (
    EagerPredictor,
    ExportedPredictor,
    graph_input,
    open_graph,
)
from ppdist.export.spec import InferenceSpec, read_spec, write_spec
from ppdist.lab.benchmark import latency
from ppdist.lab.benchmark.latency import make_predictors, measure_predictors, sample_images
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.runtime.predictor import has_bfloat16, import_openvino, onnx_providers
from tests.errors import raises
from tests.forked import run_here, succeeded
from tests.unit.export.tiny import (
    FORMATS,
    NMS,
    SIZE,
    assert_same_boxes,
    exported_detector,
    pictures,
    tiny_model,
    tiny_spec,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model() -> PPYOLOE:
    return tiny_model()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_detector(tmp_path_factory)


def variants() -> list[Any]:
    onnx = pytest.mark.skipif("onnx" not in FORMATS, reason="needs paddle2onnx and onnxruntime")
    openvino = pytest.mark.skipif("openvino" not in FORMATS, reason="needs ppdist[onnx,openvino]")
    return [
        # By default test_export.py has Paddle's.
        pytest.param({"threads": 2}, id="oneDNN", marks=pytest.mark.slow),
        pytest.param({"onednn": False, "threads": 2}, id="without oneDNN", marks=pytest.mark.slow),
        pytest.param({"backend": "onnx"}, id="ONNX Runtime", marks=onnx),
        pytest.param({"backend": "onnx", "threads": 2, "spinning": False}, id="asleep", marks=onnx),
        pytest.param({"backend": "openvino", "threads": 2}, id="OpenVINO", marks=openvino),
    ]


@pytest.mark.parametrize("options", variants())
def test_every_runtime_keeps_the_boxes_of_eager(
    model: PPYOLOE, exported: Path, options: dict[str, Any]
) -> None:
    predict = ExportedPredictor(exported, RuntimeOptions(**options))
    eager = EagerPredictor(deployment_copy(model), NMS)
    for images in (pictures(1), pictures(3), pictures(1, 96, 64)):
        assert_same_boxes(predict(images), eager(images))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "openvino", "device": "gpu"}, "backend openvino needs device cpu"),
        ({"precision": "int8"}, "precision int8 does not go here: .*quantised ONNX file"),
        ({"precision": "bfloat16", "onednn": False}, "bfloat16: OpenVINO, or Paddle with"),
        ({"threads": 0}, "greater than or equal to 1"),
        ({"memory_optim": True}, "Extra inputs are not permitted"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RuntimeOptions(**options)


def test_each_option_arrives_at_paddle_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card, too, where nothing can be run here."""
    calls: list[tuple[Any, ...]] = []

    class Config:
        def __init__(self, *files: str) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda *values: calls.append((name, *values))

    predictor = SimpleNamespace(get_input_names=lambda: ["x"], get_output_names=lambda: ["y"])
    kinds = SimpleNamespace(Float32="single")
    inference = SimpleNamespace(
        Config=Config, create_predictor=lambda config: predictor, PrecisionType=kinds
    )
    monkeypatch.setattr(paddle, "inference", inference)

    def set_by(**options: Any) -> list[tuple[Any, ...]]:
        calls.clear()
        open_graph([Path("a"), Path("b")], RuntimeOptions(**options))
        return calls[1:]  # without the one that silences it

    cpu = [("disable_gpu",), ("set_cpu_math_library_num_threads", 3)]
    assert set_by(threads=3) == [*cpu, ("enable_onednn",)]
    assert set_by(threads=3, onednn=False) == [*cpu, ("disable_onednn",)]
    assert set_by(precision="bfloat16")[-1] == ("enable_onednn_bfloat16",)
    assert set_by(device="gpu") == [("enable_use_gpu", 256, 0, "single")]


def test_onnx_runtime_gets_best_kernels_first() -> None:
    assert onnx_providers("cpu") == ["CPUExecutionProvider"]
    assert onnx_providers("gpu") == ["CUDAExecutionProvider", "CPUExecutionProvider"]


def test_onnx_runtime_reports_no_gpu_or_broken_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    file = tmp_path / "model.onnx"
    file.write_bytes(b"no model")
    with raises("runtime_load_failed", "model.onnx"):
        open_graph([file], RuntimeOptions(backend="onnx"))
    with raises("package_build", "CUDAExecutionProvider"):
        open_graph([file], RuntimeOptions(backend="onnx", device="gpu"))


def needs_openvino() -> Any:
    """Not importorskip, which would let it report to Google."""
    try:
        return import_openvino()
    except ImportError:
        pytest.skip("needs ppdist[openvino]")


def test_openvino_is_imported_without_its_telemetry() -> None:
    """It came before: whoever uses it for other things still has it."""
    openvino = needs_openvino()
    told = sys.modules["openvino.tools.ovc.telemetry_utils"]
    assert openvino.__name__ == "openvino"
    assert told.tm.__name__ == "openvino.tools.ovc.telemetry_stub"
    assert sys.modules.get("openvino_telemetry", "absent") is not None


def test_openvino_reports_a_broken_file_or_its_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_openvino()
    file = tmp_path / "model.onnx"
    file.write_bytes(b"no model")
    with raises("runtime_load_failed", "model.onnx"):
        open_graph([file], RuntimeOptions(backend="openvino"))
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setattr("ppdist.runtime.predictor.openvino_core", import_openvino)
    with raises("package_missing"):
        open_graph([file], RuntimeOptions(backend="openvino"))


def test_openvino_computes_in_what_was_asked_for(exported: Path, caplog: Any) -> None:
    """Its own default is bfloat16 where a processor has it; where none has, that is said."""
    openvino = needs_openvino()
    read = "INFERENCE_PRECISION_HINT"

    def compiled(precision: Any) -> Any:
        options = RuntimeOptions(backend="openvino", precision=precision)
        graph = open_graph([exported / "model.onnx"], options)
        return graph._find_request((1, 3, *SIZE)).get_compiled_model().get_property(read)

    assert compiled("float32") == openvino.Type.f32
    with caplog.at_level("WARNING", logger="ppdist"):
        assert (compiled("bfloat16") == openvino.Type.bf16) == has_bfloat16()
    assert ("no bfloat16" in caplog.text) != has_bfloat16()


def test_without_onnx_runtime_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with raises("package_missing"):
        open_graph([Path("model.onnx")], RuntimeOptions(backend="onnx"))


def test_export_without_wanted_file_says_remedy(tmp_path: Path) -> None:
    write_spec(tmp_path, tiny_spec())
    for options, message in (
        ({}, "no Paddle model; export with --format paddle$"),
        ({"backend": "onnx"}, "no ONNX model; export with --format onnx$"),
        ({"backend": "onnx", "precision": "int8"}, "no int8 ONNX .* --format onnx --int8$"),
    ):
        with pytest.raises(ExportError, match=message) as error:
            ExportedPredictor(tmp_path, RuntimeOptions(**options))
        assert error.value.code == "export_lacks_format"


def test_a_graph_that_takes_normalised_pixels_gets_them() -> None:
    spec = tiny_spec(normalised={"mean": (0.5, 0.25, 0.0), "std": (0.5, 1.0, 0.25)})
    images = np.full((2, 3, 4, 4), 255, np.float32)
    found = graph_input(images, spec)
    assert found.dtype == np.float32 and found.shape == images.shape
    assert found[1, :, 2, 3].tolist() == [1.0, 0.75, 4.0]
    assert graph_input(images, tiny_spec()) is images


def made_up(seconds: float, now: list[float], rows: np.ndarray) -> Any:
    def predict(images: np.ndarray) -> list[np.ndarray]:
        now[0] += seconds * len(images)
        return [rows] * len(images)

    return predict


@pytest.mark.slow
def test_predictors_are_interleaved_against_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(latency.time, "sleep", lambda seconds: order.append(seconds))
    box = np.float32([[0, 0.9, 1, 1, 9, 9]])
    moved = box + np.float32([0, 0, 3, 3, 3, 3])
    predictors = {
        "slow": made_up(0.04, now, box),
        "fast": made_up(0.01, now, box),
        "wrong": made_up(0.02, now, moved),
        "half, bfloat16": made_up(0.03, now, moved),
    }
    report = measure_predictors(
        predictors, tiny_spec(), sample_images(None)[:3], batch=2, threads=1, rounds=4
    )
    assert len(order) == 16 and len({*order}) == 1  # before each predictor
    found = report["predictors"]
    assert found["slow"]["median_ms"] == pytest.approx(80)
    assert found["slow"]["images_per_second"] == pytest.approx(25)
    assert [found[name]["ratio"] for name in predictors] == (pytest.approx([1, 0.25, 0.5, 0.75]))
    assert (report["batch"], report["image_size"], report["pictures"]) == (2, list(SIZE), 3)


@pytest.mark.slow
def test_every_form_of_an_export_is_measured(model: PPYOLOE, exported: Path) -> None:
    spec: InferenceSpec = read_spec(exported)
    names = ["eager", "Paddle Inference", "Paddle Inference, oneDNN"]
    if paddle.base.core.supports_bfloat16_fast_performance():
        names.append(f"{names[-1]}, bfloat16")
    if spec.onnx is not None:
        names.append("ONNX Runtime")
        if find_spec("openvino"):
            names += ["OpenVINO", *["OpenVINO, bfloat16"] * has_bfloat16()]
    predictors = make_predictors(deployment_copy(model), exported, spec, threads=1)
    assert list(predictors) == names
    assert list(make_predictors(None, exported, spec, threads=1)) == names[1:]
    report = measure_predictors(
        predictors, spec, sample_images(None)[:2], batch=1, threads=1, rounds=2
    )
    for name, found in report["predictors"].items():
        assert 0 < found["median_ms"] <= found["p95_ms"], name


def test_pictures_are_those_that_can_be_read(tmp_path: Path) -> None:
    with raises("no_good_image", "gone.jpg"):
        record = SimpleNamespace(path=tmp_path / "gone.jpg")
        sample_images(SimpleNamespace(records=[record], opener=DISK))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_tool_measures_an_export_without_a_config(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "_PAUSE_SECONDS", 0.0)
    printed = succeeded(run_here("benchmark", "infer", "--model", exported, "--repeats", "1"))
    result = json.loads(printed)["result"]
    assert result["predictors"]["Paddle Inference"]["ratio"] == 1
