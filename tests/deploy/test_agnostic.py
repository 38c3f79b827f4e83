"""Class-agnostic suppression: one meaning in eager, every runtime, the service, old exports."""

import json
from pathlib import Path

import numpy as np
import pytest

from ppdist.export.export import export_model
from ppdist.predict.model import EagerGraph, load_export, make_loaded, with_suppression
from ppdist.runtime.predictor import Predictor
from tests.deploy.fake_model import encoded
from tests.deploy.serving_cases import ask, served
from tests.once import for_all_workers
from tests.unit.export.tiny import FORMATS, NMS, assert_same_boxes, tiny_model, tiny_spec

AGNOSTIC = NMS.model_copy(update={"class_agnostic": True, "iou_threshold": 0.3})
PER_CLASS = AGNOSTIC.model_copy(update={"class_agnostic": False})


def image() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (8, 12, 3), np.uint8).repeat(8, 0).repeat(8, 1)


@pytest.fixture(scope="module", params=[True, False], ids=["in the graph", "after it"])
def exported(request, tmp_path_factory) -> Path:
    def make(folder: Path) -> None:
        spec = tiny_spec().model_copy(update={"nms": AGNOSTIC})
        export_model(tiny_model(), folder / "model", spec, FORMATS, request.param)

    return for_all_workers(tmp_path_factory, f"agnostic-{request.param}", make) / "model"


def eager_rows(nms) -> np.ndarray:
    model = tiny_model()
    model.fuse()
    spec = tiny_spec().model_copy(update={"nms": nms})
    return make_loaded(spec, EagerGraph(model, nms), True)([image()])[0]


@pytest.mark.slow
def test_agnostic_boxes_are_those_of_eager_everywhere(exported: Path) -> None:
    expected_R6 = eager_rows(AGNOSTIC)
    assert len(expected_R6) < len(eager_rows(PER_CLASS)), "classes overlap here"
    for backend in FORMATS:
        got_R6 = Predictor(exported, backend)([image()])[0]
        assert_same_boxes([got_R6], [expected_R6])
        assert got_R6[:, 0].tolist() == expected_R6[:, 0].tolist()
        assert_same_boxes([load_export(exported, backend)([image()])[0]], [expected_R6])
    with served(Predictor(exported, "onnx")) as (_, client):
        answer = ask(client, "POST", "/detect?threshold=0", content=encoded(image())).json()
    names = [("red", "green", "blue")[int(label)] for label in expected_R6[:, 0]]
    assert [one["class"] for one in answer["objects"]] == names


def test_the_option_is_the_key() -> None:
    model = tiny_model()
    model.fuse()
    spec = tiny_spec().model_copy(update={"nms": PER_CLASS})
    loaded = make_loaded(spec, EagerGraph(model, PER_CLASS), True)
    (rows_R6,) = with_suppression(loaded, agnostic=True)([image()])
    np.testing.assert_array_equal(rows_R6, eager_rows(AGNOSTIC))


@pytest.mark.slow
def test_an_export_of_an_earlier_version_is_per_class(exported: Path, tmp_path: Path) -> None:
    content = json.loads((exported / "infer.yml").read_text(encoding="utf-8"))
    if content["onnx"]["nms_in_graph"]:
        pytest.skip("its graph decides")
    del content["nms"]["class_agnostic"]
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "infer.yml").write_text(json.dumps(content), encoding="utf-8")
    expected_R6 = eager_rows(PER_CLASS)
    for found_R6 in (
        Predictor(tmp_path, "onnx")([image()])[0],
        load_export(tmp_path, "onnx")([image()])[0],
    ):
        assert_same_boxes([found_R6], [expected_R6])
