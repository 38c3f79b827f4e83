"""An exported one-to-one model: the boxes of eager, and no suppression anywhere."""

import importlib
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.config.evaluate import NMSConfig
from ppdist.config.model import PPYOLOEConfig
from ppdist.config.runtime import RuntimeOptions
from ppdist.export.export import deployment_copy, export_model
from ppdist.export.predictor import EagerPredictor, ExportedPredictor, prepare
from ppdist.export.spec import read_spec
from ppdist.models.ppyoloe import PPYOLOE
from tests.unit.export.tiny import FORMATS, assert_same_boxes, pictures, tiny_model, tiny_spec

BACKENDS = [
    "paddle",
    pytest.param(
        "onnx", marks=pytest.mark.skipif("onnx" not in FORMATS, reason="pip install ppdist[onnx]")
    ),
]
NO_NMS = NMSConfig(score_threshold=0.1, iou_threshold=None, keep=40)
DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "python"


class OneToOne(PPYOLOE):
    def __init__(self, config: PPYOLOEConfig) -> None:
        super().__init__(config.model_copy(update={"one_to_one": True}))


@pytest.fixture(scope="module")
def model() -> PPYOLOE:
    made = tiny_model(OneToOne)
    state = made.state_dict()
    for key, value in state.items():
        if key.startswith("one_to_one_head.pred"):  # what the other head says, and a little more
            first = state[key.replace("one_to_one_head.", "yolo_head.")]
            value.set_value(first + 0.02 * paddle.randn(first.shape))
    return made


IN_GRAPH = [
    pytest.param(True, id="rows", marks=pytest.mark.slow),
    pytest.param(False, id="scores and boxes", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=IN_GRAPH)
def exported(model: PPYOLOE, request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    spec = tiny_spec().model_copy(update={"nms": NO_NMS})
    export_model(model, folder, spec, FORMATS, nms_in_graph=request.param)
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_exported_model_keeps_the_boxes_of_eager(
    model: PPYOLOE, exported: Path, backend: str
) -> None:
    assert read_spec(exported).nms == NO_NMS
    found = ExportedPredictor(exported, RuntimeOptions(backend=backend))
    eager = EagerPredictor(deployment_copy(model), NO_NMS)
    every = EagerPredictor(deployment_copy(model), NO_NMS.model_copy(update={"keep": 400}))
    suppressing = {"keep": 400, "iou_threshold": 0.1}
    fewer = EagerPredictor(deployment_copy(model), NO_NMS.model_copy(update=suppressing))
    for images in (pictures(1), pictures(3), pictures(2, 96, 64)):
        expected = eager(images)
        assert_same_boxes(found(images), expected)
        assert sum(map(len, fewer(images))) < sum(map(len, every(images)))  # some do overlap


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_predictor_of_deploy_keeps_them_too(
    model: PPYOLOE, exported: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DEPLOY))
    predictor = sys.modules.get("predictor") or importlib.import_module("predictor")
    image_HW3 = pictures(1)[0].transpose(1, 2, 0).astype(np.uint8)
    (got_R6,) = predictor.Predictor(exported, backend)([image_HW3])
    (want_R6,) = EagerPredictor(deployment_copy(model), NO_NMS)(prepare(image_HW3, (64, 96))[None])
    best_first = want_R6[np.argsort(-want_R6[:, 1], kind="stable")]
    best_first[:, 2:] = best_first[:, 2:].clip(0, [96, 64, 96, 64])
    assert len(got_R6) >= 5
    assert_same_boxes([got_R6], [best_first])
