"""deploy/cpp, built here, finds the boxes that deploy/python and the weights themselves find.

What it is built with is gathered by tests/deploy/cpp_requirements.py, as `make test-all` does.
"""

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from ppdist.config.data import Resize
from ppdist.config.preprocess import resize_section
from ppdist.data.image import read_image
from ppdist.export.export import export_model
from ppdist.export.verify import unexplained_rows
from ppdist.models.model_card import normalisation_of
from ppdist.predict.model import EagerGraph, make_loaded
from tests.deploy.cpp_requirements import has_onnxruntime, missing_programs, onnxruntime_root
from tests.unit.export.tiny import (
    NMS,
    SIZE,
    classifier_spec,
    tiny_classifier,
    tiny_model,
    tiny_spec,
)

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "deploy" / "python"))
Predictor: Any = importlib.import_module("predictor").Predictor

GATHER = "run python -m tests.deploy.cpp_requirements"
HAS_PYTHON = all(importlib.util.find_spec(name) for name in ("paddle2onnx", "onnxruntime"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_programs()), reason="needs cmake and a C++ compiler"),
    pytest.mark.skipif(not has_onnxruntime(), reason=f"needs ONNX Runtime's headers: {GATHER}"),
    pytest.mark.skipif(not HAS_PYTHON, reason="needs pip install 'ppdist[onnx]'"),
]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
# Output is rounded to five decimals.
SCORE, PIXELS = 2e-5, 1e-3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the program, built for this module."""
    build = tmp_path_factory.mktemp("build")
    source = str(REPOSITORY / "deploy" / "cpp")
    configure = ["cmake", "-S", source, "-B", str(build), "-DCMAKE_CXX_FLAGS=-Werror"]
    if root := onnxruntime_root():
        configure.append(f"-DONNXRUNTIME_ROOT={root}")
    for command in (configure, ["cmake", "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if absent := re.search(r"configuration file provided by \"(\w+)\"", done.stderr):
            pytest.skip(f"needs {absent[1]}: {GATHER}")
        assert done.returncode == 0, done.stdout + done.stderr

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        words = [str(build / "predict"), *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)

    return run


@pytest.fixture(autouse=True)
def same_cubic_interpolation() -> Iterator[None]:
    """Intel's, in OpenCV's wheels, rounds some pixels otherwise than a distribution's OpenCV."""
    cv2.ipp.setUseIPP(False)
    yield
    cv2.ipp.setUseIPP(True)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty images of many shapes and kinds."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "更多").mkdir()
    rng = np.random.default_rng(7)

    def picture(height: int, width: int) -> np.ndarray:
        small = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
        return np.ascontiguousarray(small.repeat(8, 0).repeat(8, 1)[:height, :width])

    for i, shape in enumerate(((64, 96), (40, 200), (200, 40), (33, 50), (1, 7), (480, 640))):
        Image.fromarray(picture(*shape)).save(folder / f"{i}.png")
    for i in range(8):
        Image.fromarray(picture(70 + i, 100)).save(folder / "更多" / f"{i}.jpg", quality=80)
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.fromarray(picture(60, 90)).save(folder / "turned.jpg", exif=exif)
    Image.fromarray(picture(50, 60)[..., 0]).save(folder / "grey.png")
    cv2.imwrite(str(folder / "deep.png"), picture(50, 60).astype(np.uint16) * 257)
    Image.fromarray(np.dstack([picture(70, 64), picture(70, 64)[..., 0]])).save(
        folder / "alpha.png"
    )
    Image.fromarray(picture(64, 64)).save(folder / "web.webp", lossless=True)
    Image.fromarray(picture(64, 96)).save(folder / "raw.BMP")
    return folder


def lines_of(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def as_rows(line: dict[str, Any], names: tuple[str, ...]) -> np.ndarray:
    rows = [[names.index(o["class"]), o["score"], *o["box"]] for o in line["objects"]]
    return np.array(rows, np.float32).reshape(-1, 6)


def in_input(rows_R6: np.ndarray, scale: float) -> np.ndarray:
    """Rows with boxes of an image, in pixels of the input."""
    return np.concatenate([rows_R6[:, :2], rows_R6[:, 2:] / scale], axis=1, dtype=np.float32)


@pytest.mark.parametrize("normalised", [False, True], ids=["raw", "normalised"])
@pytest.mark.parametrize("nms_in_graph", [True, False], ids=["with NMS", "without NMS"])
@pytest.mark.parametrize("agnostic", [False, True], ids=["each class", "agnostic"])
def test_cpp_boxes_equal_python_and_eager_on_twenty_images(
    run: Run, photos: Path, tmp_path: Path, nms_in_graph: bool, normalised: bool, agnostic: bool
) -> None:
    nms = NMS.model_copy(update={"iou_threshold": 0.3, "class_agnostic": agnostic})
    stretched: Resize = "stretch" if nms_in_graph else "stretch_antialiased"
    resize = resize_section("letterbox" if normalised else stretched)
    model = tiny_model()
    spec = tiny_spec().model_copy(update={"resize": resize, "nms": nms})
    section = tiny_spec(normalised=normalisation_of(model) if normalised else None).input
    described = spec.model_copy(update={"input": section})
    export_model(model, tmp_path / "m", described, formats=("onnx",), nms_in_graph=nms_in_graph)
    lines = lines_of(run("--model", tmp_path / "m", "--source", photos, "--threshold", 0))
    assert len(lines) == 20
    predict = Predictor(tmp_path / "m", "onnx")
    per_class = nms.model_copy(update={"class_agnostic": False})
    eager, eager_per_class = (
        make_loaded(spec, EagerGraph(model, x), True) for x in (nms, per_class)
    )
    found = suppressed = 0
    for line in lines:
        image_HW3 = read_image(photos / line["file"])
        assert (line["height"], line["width"]) == image_HW3.shape[:2]
        got_R6 = as_rows(line, predict.class_names)
        (expected_R6,) = predict([image_HW3])
        assert got_R6.shape == expected_R6.shape
        np.testing.assert_array_equal(got_R6[:, 0], expected_R6[:, 0])
        np.testing.assert_allclose(got_R6[:, 1], expected_R6[:, 1], atol=SCORE)
        np.testing.assert_allclose(got_R6[:, 2:], expected_R6[:, 2:], atol=PIXELS)
        eager_R6 = eager([image_HW3])[0]
        # Its tolerance is in pixels of the input, which a large image has several times.
        scale = max(1.0, *np.divide(image_HW3.shape[:2], SIZE))
        assert unexplained_rows(in_input(got_R6, scale), in_input(eager_R6, scale), nms) == 0
        found += len(got_R6)
        suppressed += len(eager_per_class([image_HW3])[0]) - len(got_R6)
    assert found >= 20 and (suppressed > 0 or not agnostic)


def test_a_classifier_gives_the_five_surest_classes(run: Run, photos: Path, tmp_path: Path) -> None:
    export_model(tiny_classifier(), tmp_path / "m", classifier_spec(), formats=("onnx",))
    predict = Predictor(tmp_path / "m", "onnx")
    for line in lines_of(run("--model", tmp_path / "m", "--source", photos, "--threads", 2)):
        (probabilities_C,) = predict([read_image(photos / line["file"])])
        order = np.argsort(-probabilities_C, kind="stable")[:5]
        assert [best["class"] for best in line["best"]] == [predict.class_names[i] for i in order]
        scores = [best["score"] for best in line["best"]]
        np.testing.assert_allclose(scores, probabilities_C[order], atol=SCORE)


def test_cpp_draws_images_and_reports_one_message(run: Run, photos: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    export_model(tiny_model(), model, tiny_spec(), formats=("onnx",))
    file = photos / "0.png"
    drawn = run("--model", model, "--source", file, "--out", tmp_path / "out", "--threshold", 0.1)
    assert lines_of(drawn)[0]["objects"]
    shutil.copytree(photos / "更多", tmp_path / "own")
    for _ in range(2):  # the pictures of the first time are not looked at
        own = ("--source", tmp_path / "own", "--out", tmp_path / "own" / "out")
        assert len(lines_of(run("--model", model, *own))) == 8
    assert (told := run("--help")).returncode == 0 and told.stdout.startswith("usage: predict ")
    assert (read_image(tmp_path / "out" / "0.png") != read_image(file)).any()

    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        (("--model", tmp_path / "empty", "--source", file), "is not an exported model"),
        (("--model", model, "--source", tmp_path / "absent"), "no such file or folder"),
        (("--model", model, "--source", tmp_path / "empty"), "no image in this folder"),
        (("--model", model, "--source", tmp_path / "text.jpg"), "no image could be read"),
        (("--model", model, "--source", file, "--threads", 0), "threads is 0: expected 1 or more"),
        (("--model", model, "--source", file, "--threads", "two"), "two: expected a number"),
        (("--model", model, "--source", file, "--int8"), "holds no INT8 model"),
        (("--model", model, "--source", file, "--out", photos), "could be overwritten"),
        (("--model", model, "--source", photos / "更多", "--out", photos), "could be overwritten"),
        (("--model", model, "--source", file, "--threshold", 7), "7.000000: expected 0..1"),
        (("--model", model, "--fast"), "--fast: not an option"),
        (("--model",), "--model: a value is missing"),
    ):
        done = run(*arguments)
        assert done.returncode == 2 and said in done.stderr, (arguments, done.stderr)

    spec = json.loads((model / "infer.yml").read_text(encoding="utf-8"))
    spec["sha256"]["model.onnx"] = "0" * 64
    (model / "infer.yml").write_text(json.dumps(spec), encoding="utf-8")
    done = run("--model", model, "--source", file)
    assert done.returncode == 2 and "describes another model.onnx" in done.stderr
    del spec["sha256"], spec["resize"]["mode"]
    (model / "infer.yml").write_text(json.dumps(spec), encoding="utf-8")
    done = run("--model", model, "--source", file)
    assert done.returncode == 2 and "'mode'" in done.stderr
    (model / "model.onnx").unlink()
    (model / "infer.yml").write_text("version: 1", encoding="utf-8")
    assert run("--model", model, "--source", file).returncode == 2
