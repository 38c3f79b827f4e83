"""deploy/python alone finds in images what ppdist finds."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import paddle
import pytest

from ppdist import Detector
from ppdist.config.evaluate import NMSConfig
from ppdist.config.preprocess import resize_section
from ppdist.export.export import deployment_copy
from ppdist.export.predictor import (
    EagerPredictor,
    ExportedPredictor,
    detect,
    prepare,
    prepare_centre,
    split_rows,
)
from ppdist.export.spec import read_spec, write_spec
from ppdist.export.verify import unexplained_rows
from ppdist.losses.nms import multiclass_nms
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.predict.model import load_export
from tests.deploy.python_folder import (
    FOLDER,
    RUNTIME,
    Predictor,
    PredictorError,
    predictor,
    run_file,
)
from tests.errors import raises
from tests.media import picture
from tests.unit.export.tiny import (
    FORMATS,
    NMS,
    SIZE,
    classifier_spec,
    exported_classifier,
    exported_detector,
    probabilities_of,
    tiny_classifier,
    tiny_model,
    tiny_spec,
)

SHAPES = ((64, 96), (40, 200), (200, 40), (33, 50), (70, 100), (1, 7))
needs_onnx = pytest.mark.skipif(
    "onnx" not in FORMATS, reason="needs paddle2onnx and onnxruntime: pip install 'ppdist[onnx]'"
)
needs_openvino = pytest.mark.skipif(
    "openvino" not in FORMATS, reason="pip install 'ppdist[onnx,openvino]'"
)
BACKENDS = [
    "paddle",
    pytest.param("onnx", marks=needs_onnx),
    pytest.param("openvino", marks=needs_openvino),
]
Exported = Callable[..., Path]


@pytest.fixture(scope="module")
def model() -> PPYOLOE:
    return tiny_model()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return partial(exported_detector, tmp_path_factory)


@pytest.fixture(scope="module")
def ready(exported: Exported) -> Any:
    """A Predictor for tests in which no graph runs."""
    return Predictor(exported(), "paddle")


def assert_same_rows(got_R6: np.ndarray, expected_R6: np.ndarray, nms: NMSConfig = NMS) -> None:
    assert got_R6.dtype == np.float32 and got_R6.shape[1] == 6
    assert unexplained_rows(got_R6, expected_R6, nms) == 0
    assert abs(len(got_R6) - len(expected_R6)) <= 1
    assert (np.diff(got_R6[:, 1]) <= 0).all()


def test_the_threshold_of_an_export_is_that_of_its_best_f1(ready: Any) -> None:
    known = {**ready.spec, "best_f1_threshold": 0.41}
    assert [predictor.default_threshold(spec)[0] for spec in (known, ready.spec)] == [0.41, 0.25]
    least = ready.spec["nms"]["score_threshold"]
    assert predictor.lost_below(ready.spec, least) == ""
    assert "nms.score_threshold" in predictor.lost_below(ready.spec, least / 2)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param(Predictor, "onnx", marks=needs_onnx),
        pytest.param(Predictor, "openvino", marks=needs_openvino),
        (load_export, "paddle"),
        pytest.param(Predictor, "paddle", marks=pytest.mark.slow),
    ],
)
def test_threads_of_one_model_get_their_own_boxes(
    exported: Exported, kind: Any, backend: Any
) -> None:
    predict = kind(exported(), backend)
    images = [picture(*shape) for shape in SHAPES[:4]]
    alone = [predict([image])[0] for image in images]
    with ThreadPoolExecutor(len(images)) as threads:
        found = list(threads.map(lambda call: predict([images[call % 4]])[0], range(40)))
    wrong = [
        call
        for call, got_R6 in enumerate(found)
        if got_R6.shape != alone[call % 4].shape or not np.allclose(got_R6, alone[call % 4], 0, 0.1)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("resize", "nms_in_graph"),
    [
        ("stretch", True),
        pytest.param("letterbox", False, marks=pytest.mark.slow),
        pytest.param("letterbox", True, marks=pytest.mark.slow),
        pytest.param("stretch", False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_shapes_in_one_batch_give_eager_boxes(
    model: PPYOLOE, exported: Exported, backend: str, resize: Any, nms_in_graph: bool
) -> None:
    predict = Predictor(exported(nms_in_graph), backend)
    predict.spec["resize"] = resize_section(resize).model_dump(mode="json")
    assert (predict.backend, predict.class_names) == (backend, ("red", "green", "blue"))
    images = [picture(*shape) for shape in SHAPES]
    eager = EagerPredictor(deployment_copy(model), NMS)
    found = predict(images)
    assert sum(map(len, found)) >= 10
    for image_HW3, got_R6 in zip(images, found):
        assert_same_rows(got_R6, detect(eager, image_HW3, SIZE, resize))
        height, width = image_HW3.shape[:2]
        assert (got_R6[:, 2:] >= 0).all()
        assert (got_R6[:, 2:] <= np.array([width, height, width, height])).all()
    assert predict([]) == []


def test_letterbox_boxes_map_back_to_image(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ready.spec, "resize", {"mode": "letterbox"})
    # An image of 60 x 120 fills the input's columns 32 to 64, at 8/15 of its size.
    rows_R6 = np.array([[1, 0.5, 40, 16, 56, 48], [0, 0.9, 32, 0, 70, 64]], np.float32)
    (found,) = ready.finish((rows_R6, np.array([2])), [(120, 60)])
    want = [[0, 0.9, 0, 0, 60, 120], [1, 0.5, 15, 30, 45, 90]]
    np.testing.assert_allclose(found, want, atol=1e-4)


@pytest.mark.parametrize(
    "nms_in_graph",
    [
        pytest.param(True, id="with NMS"),
        pytest.param(False, id="without NMS", marks=pytest.mark.slow),  # an export of its own
    ],
)
def test_batch_one_graph_runs_batch_image_by_image(exported: Exported, nms_in_graph: bool) -> None:
    images = [picture(50, 70, seed) for seed in range(3)]
    predict = Predictor(exported(nms_in_graph), "paddle")
    expected = predict(images)
    predict.spec["input"]["dynamic_batch"] = False
    for one, other in zip(predict(images), expected, strict=True):
        assert_same_rows(one, other)


@pytest.mark.parametrize("nms_in_graph", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_images_without_objects_give_no_rows(exported: Exported, nms_in_graph: bool) -> None:
    no_rows = np.zeros((0, 6), np.float32), np.zeros(2, np.int32)
    nothing = np.zeros((2, 5, 3), np.float32), np.zeros((2, 5, 4), np.float32)
    predict = Predictor(exported(nms_in_graph))
    found = predict.finish(no_rows if nms_in_graph else nothing, [(9, 9), (8, 8)])
    assert [rows_R6.shape for rows_R6 in found] == [(0, 6), (0, 6)]


@pytest.mark.parametrize("mode", ["stretch", "stretch_antialiased", "letterbox", "centre_crop"])
def test_input_pixels_equal_those_of_evaluation(
    ready: Any, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    crop = classifier_spec().resize
    section = crop if mode == "centre_crop" else resize_section(mode)
    monkeypatch.setitem(ready.spec, "resize", section.model_dump(mode="json"))
    for height, width in (*SHAPES, (97, 64), (641, 427)):
        image_HW3 = picture(height, width)
        expected_3HW = (
            prepare_centre(image_HW3, SIZE)
            if mode == "centre_crop"
            else prepare(image_HW3, SIZE, mode)
        )
        (found_3HW,) = ready.prepare([image_HW3])
        np.testing.assert_array_equal(found_3HW, expected_3HW)


def test_pixels_are_normalised_where_the_graph_wants_it(
    ready: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_B3HW = ready.prepare([picture(30, 40)])
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    monkeypatch.setitem(ready.spec["input"], "normalised", {"mean": mean, "std": std})
    expected = (plain_B3HW / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    np.testing.assert_allclose(ready.prepare([picture(30, 40)]), expected, atol=1e-6)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_classifier(tmp_path_factory)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_classifier_gives_the_probabilities_of_eager(classifier: Path, backend: Any) -> None:
    images = [picture(*shape) for shape in SHAPES]
    found = Predictor(classifier, backend)(images)
    model = deployment_copy(tiny_classifier())
    for image_HW3, got_C in zip(images, found, strict=True):
        expected_1C = probabilities_of(model, prepare_centre(image_HW3, SIZE)[None])
        np.testing.assert_allclose(got_C, expected_1C[0], atol=1e-4)


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize(
    "limits",
    [{}, {"candidates": 20}, {"keep": 7}, {"iou_threshold": 0.0}, {"iou_threshold": 1.0},
     {"score_threshold": 1.0}, {"iou_threshold": None}, {"iou_threshold": None, "keep": 7},
     {"class_agnostic": True}, {"class_agnostic": True, "candidates": 20},
     {"class_agnostic": True, "iou_threshold": None, "keep": 7}],
    ids=str,
)  # fmt: skip
def test_nms_keeps_exactly_paddle_rows(limits: dict[str, Any], multi_label: bool) -> None:
    nms = NMSConfig(**{"score_threshold": 0.25, "multi_label": multi_label, **limits})
    rng = np.random.default_rng(3)
    corners = rng.uniform(0, 60, (2, 200, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(0, 40, (2, 200, 2))], 2)
    boxes[:, :40] = boxes[:, 40:80]  # the same box twice,
    boxes[:, 80:90, 2:] = boxes[:, 80:90, :2]  # none at all,
    scores = (rng.integers(0, 50, (2, 200, 4)) / 50).astype(np.float32)  # and scores that are ties
    if nms.iou_threshold is None:  # of which nothing decides then
        scores = rng.permutation(1600).reshape(2, 200, 4).astype(np.float32) / 1600
    boxes = boxes.astype(np.float32)
    rows_R6, count_B = multiclass_nms(paddle.to_tensor(scores), paddle.to_tensor(boxes), nms)
    expected = split_rows(rows_R6.numpy(), count_B.numpy())
    for image in range(2):
        found_R6 = predictor.suppress(scores[image], boxes[image], nms.model_dump())
        best_first_R6 = expected[image][np.argsort(-expected[image][:, 1], kind="stable")]
        np.testing.assert_array_equal(found_R6, best_first_R6)


def cut_unnoticed(folder: Path) -> None:
    """A file that was changed on purpose: its digest is taken out."""
    spec = json.loads((folder / "infer.yml").read_text(encoding="utf-8"))
    del spec["sha256"]["model.json"]
    (folder / "infer.yml").write_text(json.dumps(spec), encoding="utf-8")
    (folder / "model.json").write_text("{}")


def test_every_predictor_refuses_a_file_of_another_export(
    exported: Exported, tmp_path: Path
) -> None:
    for file in exported().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spec = read_spec(tmp_path)
    assert set(spec.sha256) == {path.name for path in tmp_path.iterdir()} - {"infer.yml"}
    assert Predictor(tmp_path, "paddle").identity["sha256"] == spec.sha256["model.pdiparams"]
    with (tmp_path / "model.pdiparams").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(PredictorError, match="SHA-256 differs"):
        Predictor(tmp_path, "paddle")
    with raises("export_altered"):
        ExportedPredictor(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "infer.yml").write_text("version: 1\n"), "not JSON"),
        (lambda folder: (folder / "infer.yml").write_text('{"version": 2}'), "knows version 1"),
        (
            lambda folder: (folder / "infer.yml").write_text('{"version": 1}'),
            "resize, task missing",
        ),
        (lambda folder: (folder / "model.pdiparams").unlink(), "pdiparams: named by infer.yml but"),
        (lambda folder: (folder / "model.json").write_text("{}"), "model.json: not the file that "),
        (cut_unnoticed, "model.json: Paddle cannot load"),
    ],
)
def test_a_damaged_export_is_named(
    exported: Exported, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in exported().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    damage(folder)
    with pytest.raises(PredictorError, match=message):
        Predictor(folder, "paddle")


def test_export_without_requested_model_is_named(tmp_path: Path) -> None:
    write_spec(tmp_path, tiny_spec())
    with pytest.raises(PredictorError, match=r"holds no onnx model; export .*onnx$"):
        Predictor(tmp_path, "onnx")
    with pytest.raises(PredictorError, match=r"holds no onnx model; .*; holds no paddle model; "):
        Predictor(tmp_path)
    with pytest.raises(PredictorError, match=r"holds no int8 model; export with"):
        Predictor(tmp_path, int8=True)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"backend": "tflite"}, "backend 'tflite': expected auto, openvino, onnx, "),
        ({"device": "tpu"}, "device 'tpu': expected cpu or gpu"),
        ({"backend": "paddle", "int8": True}, "an int8 model runs in ONNX Runtime or"),
        ({"backend": "tensorrt"}, "backend 'tensorrt': expected auto"),
        ({"backend": "openvino", "device": "gpu"}, "OpenVINO runs on the CPU only"),
        ({"backend": "onnx", "bfloat16": True}, "bfloat16 is for OpenVINO"),
        ({"int8": True, "bfloat16": True}, "int8 and bfloat16: choose one"),
    ],
)
def test_a_runtime_that_there_is_not_is_named(
    exported: Exported, choice: dict[str, Any], message: str
) -> None:
    with pytest.raises(PredictorError, match=message):
        Predictor(exported(), **choice)


def test_a_forced_runtime_says_what_the_export_found_of_it() -> None:
    spec: dict[str, Any] = {"openvino": {"files": ["model.onnx"]}, "openvino_int8": None}
    assert predictor.doubt_about(spec, "openvino", "float32") == ""
    assert predictor.doubt_about(spec, "onnx", "int8") == ""
    assert "did not check" in predictor.doubt_about(spec, "openvino", "int8")
    spec["refused"] = {"openvino_int8": "mAP is 0.08"}
    found = predictor.doubt_about(spec, "openvino", "int8")
    assert "wrong in OpenVINO" in found and "mAP is 0.08" in found


def test_auto_takes_the_fastest_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order is that of docs/dev/performance.md."""
    there = {"onnxruntime", "openvino", "paddle"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    names = ("paddle", "onnx", "onnx_int8", "openvino", "openvino_int8")
    spec: dict[str, Any] = {name: {"files": [name]} for name in names}

    def chosen(kind: str = "float32", backend: str = "auto") -> str:
        return predictor.chosen_backend(spec, backend, "cpu", kind)

    assert [chosen(kind) for kind in ("float32", "int8", "bfloat16")] == [
        "onnx", "openvino", "openvino",
    ]  # fmt: skip
    there.remove("onnxruntime")
    assert chosen() == "openvino"
    spec["openvino"] = spec["openvino_int8"] = None
    assert chosen() == "paddle"
    assert chosen(backend="openvino") == "openvino"  # unchecked, as it was asked for
    there.remove("paddle")
    with pytest.raises(PredictorError, match="was not checked in OpenVINO: export where it is"):
        chosen()
    assert chosen("int8", "openvino") == "openvino"
    with pytest.raises(PredictorError, match="pip install onnxruntime"):
        chosen("int8")


@pytest.mark.slow
@needs_openvino
def test_signals_are_heard_after_models_of_openvino_end(exported: Exported) -> None:
    code = (
        "import gc, os, signal, sys; from predictor import Predictor\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('heard'))\n"
        "models = [Predictor(sys.argv[1], 'openvino') for _ in range(2)]\n"
        "while models: del models[0]; gc.collect(); os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    command = [sys.executable, "-c", code, str(exported())]
    ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (0, "heard\n" * 2), ended.stderr


@pytest.mark.slow
@needs_openvino
def test_what_runs_the_model_is_told(exported: Exported) -> None:
    folder = exported()
    told = [Predictor(folder, threads=2).runtime, Predictor(folder, "openvino").runtime]
    assert [text.split(", ")[0::2] for text in told] == [
        ["ONNX Runtime", "threads: 2"], ["OpenVINO", "threads: 1"],
    ]  # fmt: skip
    with raises("options_conflict"):
        Detector(folder / "own.xml")


def test_a_package_that_is_not_installed_is_named(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PredictorError, match="needs paddle, which is not installed: pip install p"):
        Predictor(exported(), "paddle")


@pytest.mark.parametrize(
    ("image", "shown"),
    [
        (np.zeros((4, 5), np.uint8), r"uint8 \[4, 5\]"),
        (np.zeros((4, 5, 4), np.uint8), r"uint8 \[4, 5, 4\]"),
        (np.zeros((4, 0, 3), np.uint8), r"uint8 \[4, 0, 3\]"),
        (np.zeros((4, 5, 3), np.float32), r"float32 \[4, 5, 3\]"),
        ("a.jpg", r"str \[\]"),
    ],
)
def test_what_is_no_image_is_named(ready: Any, image: Any, shown: str) -> None:
    with pytest.raises(PredictorError, match=f"image 1: {shown}; expected uint8"):
        ready([picture(8, 8), image])


def imported(file: Path) -> set[str]:
    """The top-level names that a module imports anywhere in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
    return {name.split(".")[0] for name in names}


def test_only_numpy_opencv_and_runtime_are_imported() -> None:
    beside = {file.stem for file in RUNTIME.glob("*.py")}
    allowed = (
        beside | {"cv2", "numpy", "onnxruntime", "paddle", "simplejpeg"} | sys.stdlib_module_names
    )
    for file in RUNTIME.glob("*.py"):
        assert imported(file) <= allowed, file
    wanted = [line for line in (FOLDER / "requirements.txt").read_text().splitlines() if line]
    named = {line.lstrip("# ").split(">=")[0] for line in wanted if ">=" in line}
    assert named == {
        "numpy", "opencv-python-headless", "onnxruntime", "openvino", "paddlepaddle", "simplejpeg",
    }  # fmt: skip


@needs_onnx
def test_predictor_py_runs_without_paddle_and_ppdist(exported: Exported, tmp_path: Path) -> None:
    """The one file is copied away, and other packages are made impossible to import."""
    model = exported()
    (tmp_path / "predictor.py").write_bytes((RUNTIME / "predictor.py").read_bytes())
    code = (
        "import sys\n"
        "for name in ('paddle', 'ppdist', 'yaml', 'pydantic', 'PIL'): sys.modules[name] = None\n"
        "import numpy as np\n"
        "from predictor import Predictor\n"
        "image = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)\n"
        f"print(Predictor({str(model)!r})([image, image])[1].shape[1])\n"
    )
    done = run_file("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


@pytest.mark.slow
@needs_onnx
def test_its_wheel_runs_without_ppdist(exported: Exported, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "70.1")  # builds wheels without another package
    shutil.copytree(FOLDER, tmp_path / "python")  # with what it links to
    built = run_file("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index",
                     "--wheel-dir", tmp_path, tmp_path / "python")  # fmt: skip
    (wheel,) = tmp_path.glob("ppdist_runtime-*-py3-none-any.whl")
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "installed")
    cv2.imwrite(str(tmp_path / "a.png"), picture(60, 80))
    code = (
        "import sys\n"
        "for name in ('paddle', 'ppdist', 'yaml', 'pydantic', 'PIL'): sys.modules[name] = None\n"
        "import cv2\n"
        "from ppdist_runtime.predictor import Predictor\n"
        f"print(Predictor({str(exported())!r})([cv2.imread('../a.png')])[0].shape[1])\n"
    )
    done = run_file("-c", code, cwd=tmp_path / "installed")
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr
