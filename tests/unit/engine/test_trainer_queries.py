"""A detector of queries in another package: trained, evaluated and exported as ours are.

It takes the targets in its forward pass, gives dictionaries, has no strides, and needs no
suppression.  tests/integration has that ranks train it like one, and that it resumes.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.evaluate import NMSConfig
from ppdist.config.runtime import RuntimeOptions
from ppdist.cpu.switch import self_check
from ppdist.engine.build import build_model
from ppdist.engine.distillation import DistilledLoss, build_distillation
from ppdist.export.export import deployment_copy, export_model
from ppdist.export.predictor import EagerPredictor, ExportedPredictor
from ppdist.lab.ensemble import tta
from ppdist.models.complexity import complexity
from ppdist.models.weights import load_weights
from tests.errors import raises
from tests.unit.engine.oracle import five_images
from tests.unit.engine.runs import records, run_to_end
from tests.unit.engine.tiny import tiny_config
from tests.unit.export.tiny import FORMATS, assert_same_boxes, pictures, tiny_spec

OWN = (
    "train.batch_size_per_card=4", "train.epochs=3", "log.every_steps=1",
    "checkpoint.every_steps=1", "optimizer.reference_batch_size=8", "optimizer.name=adamw",
)  # fmt: skip

ONNX = (
    pytest.mark.slow,
    pytest.mark.skipif("onnx" not in FORMATS, reason="pip install ppdist[onnx]"),
)


def run(data: Path, output_dir: Path, steps: int, **options) -> None:
    run_to_end(data, output_dir, *OWN, f"train.max_steps={steps}", model="queries", **options)


@pytest.fixture(scope="module")
def trained(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with an evaluation."""
    folder = tmp_path_factory.mktemp("queries")
    run(shapes, folder, 2, evaluate=True)
    return folder


def of(folder: Path, trained: Path | None = None):
    model = build_model(tiny_config(folder, model="queries"))
    if trained is not None:
        load_weights(model, trained / "checkpoints" / "last")
    return model


def test_it_trains_and_is_evaluated(trained) -> None:
    steps = [each for each in records(trained) if "loss_denoising" in each]
    assert [each["step"] for each in steps] == [1, 2]
    (scores,) = [each for each in records(trained) if "val_loss" in each]
    assert math.isfinite(scores["val_loss"]) and "mAP" in scores
    assert "val_loss_denoising" not in scores  # which is measured without targets


@pytest.mark.parametrize("formats", [("paddle",), pytest.param(("paddle", "onnx"), marks=ONNX)])
def test_its_exports_give_the_boxes_of_eager(formats, trained, tmp_path) -> None:
    """With the division of pixels in the convolution that the backbone says is the first."""
    model, best = of(tmp_path, trained), NMSConfig(score_threshold=0.1, iou_threshold=None, keep=9)
    export_model(model, tmp_path / "model", tiny_spec().model_copy(update={"nms": best}), formats)
    eager = EagerPredictor(deployment_copy(model), best)
    for backend in formats:
        found = ExportedPredictor(tmp_path / "model", RuntimeOptions(backend=backend))
        for images in (pictures(1), pictures(3), pictures(2, 96, 64)):
            assert_same_boxes(found(images), eager(images))


def test_what_grows_with_the_image_and_what_does_not_is_counted(tmp_path) -> None:
    model = of(tmp_path)
    counted, size = complexity(model), (640, 320)
    assert counted.operations.of(size) > counted.operations.fixed > 0


def test_onednn_is_checked_with_targets(tmp_path) -> None:
    model = of(tmp_path)
    assert self_check(model, 64) is None
    assert [name for name in model.stages if "." not in name] == ["neck", "head"]


def test_a_teacher_is_refused_where_its_outputs_cannot_be_compared(trained, tmp_path) -> None:
    config = tiny_config(tmp_path, [f"distill={{teacher: {trained}}}"], "queries")
    student = build_model(config)
    distillation = build_distillation(config.distill, config.model, student, 0)
    loss = __import__("queries.model").model.QueriesLoss()
    with raises("teacher_unsuitable", "no loss"):
        DistilledLoss(loss, distillation).begin()
    features = tiny_config(tmp_path, [f"distill={{teacher: {trained}, features: {{}}}}"], "queries")
    with raises("teacher_unsuitable", "no features"):
        build_distillation(features.distill, features.model, student, 0)


def test_its_views_are_suppressed_where_that_is_asked_for(tmp_path, monkeypatch) -> None:
    used = []

    class Sees(tta.Evaluator):
        def __init__(self, dataset, loader, nms, *more, **options):
            super().__init__(dataset, loader, nms, *more, **options)
            used.append(nms.iou_threshold)

        def predict(self, model):
            return np.zeros((0, 7), np.float32)

    monkeypatch.setattr("ppdist.engine.build.Evaluator", Sees)
    config, model = tiny_config(tmp_path, model="queries"), of(tmp_path)
    list(tta.predict_views(config, model, five_images(), [1.0], True, 0.45))
    assert used == [0.45]
