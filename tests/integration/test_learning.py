"""A detector learns: a few generated images by heart, through the whole road of a training run."""

import pytest

from ppdist.config.experiment import ExperimentConfig, load_config
from ppdist.config.parse import parse_config
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm
from ppdist.engine.build import build_training
from tests.errors import raises
from tests.project import write_config
from tests.unit.data.classified import CONFIG as CLASSIFIER
from tests.unit.engine.runs import records

# 8 images a step; the first two take 38 and 40 s of one core of an Intel Xeon at 2.8 GHz, D-FINE
# some minutes.
CONFIG = """
data: {augment: {distort: 0, expand: 0, crop: 0, flip: 0, random_interpolation: false}}
model: {image_size: [96, 96]}
train: {batch_size_per_card: 8, clip_norm: 10.0, ema: {decay: 0.9}}
optimizer: {name: adamw, weight_decay: 0.0}
schedule: {warmup_epochs: 2}
evaluate: {every_epochs: 50}
checkpoint: {every_epochs: 300}
log: {visualdl: false}
"""
DETECTORS = {  # model, steps, learning rate, options
    "ppyoloe": (
        {"name": "ppyoloe", "variant": "plus", "depth_multiple": 0.33, "width_multiple": 0.25},
        150,  # not 100, where a processor with AVX-512, which rounds otherwise, comes to 0.88
        0.005,
        ["loss.static_assigner_epochs=10"],
    ),
    # Longer: its running statistics forget 3 % a step, so they need a hundred to settle.
    "yolov5": ({"name": "yolov5", "size": "n"}, 200, 0.01, []),
    "dfine": (
        {"name": "rtdetr", "variant": "dfine", "size": "n", "queries": 30},
        150,
        0.0005,
        [],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("detector", DETECTORS)
def test_eight_images_are_learned_by_heart(detector, tmp_path):
    make_shapes(tmp_path / "data", train=8, val=1, size=96, seed=0)
    model, epochs, lr, options = DETECTORS[detector]
    options = [*options, f"train.epochs={epochs}", f"optimizer.lr={lr}"]
    config = load_config(write_config(tmp_path, CONFIG, model, val="train"), options)
    comm.init("cpu", config.distributed)
    out = tmp_path / "out"
    experiment = build_training(config, output_dir=out, evaluate=True, command=[])
    with experiment.log:
        assert experiment.trainer.fit() == 0
    scores = [record for record in records(out) if "mAP" in record]
    assert [record["step"] for record in scores] == list(range(50, epochs + 1, 50))
    assert scores[-1]["mAP"] > 0.9
    assert scores[-1]["mAP"] > scores[0]["mAP"]
    best = max(scores, key=lambda record: record["mAP"])
    assert (out / "checkpoints" / "best").resolve().name == f"step-{best['step']:08d}"


@pytest.mark.parametrize("change", ["data.format=coco", "model.name=yolov5"])
def test_classifier_needs_classes_and_detector_boxes(change, tmp_path):
    file = tmp_path / "mixed.yml"
    text = CLASSIFIER.format(root=tmp_path)
    if change == "model.name=yolov5":
        text = text.replace("yolov5_cls", "yolov5")
    file.write_text(text)
    overrides = [change] if change.startswith("data") else []
    with raises("bad_value"):
        parse_config(file, overrides, ExperimentConfig)
