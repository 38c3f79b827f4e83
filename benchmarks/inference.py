"""Measures milliseconds and mAP of exported models in every CPU runtime.

All are measured interleaved.  Each model first learns a few drawn images by
heart, so that mAP means something; their boxes are labelled with 3 of 80 classes, as many as
COCO's, so that the milliseconds are realistic, too.
"""

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppdist.api import train
from ppdist.common import process
from ppdist.config.experiment import ExperimentConfig, load_config
from ppdist.config.parse import parse_plain
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import device
from ppdist.engine.build import build_model
from ppdist.export.export import Pictures, export_model, measure_precision, take_sample
from ppdist.export.predictor import EagerPredictor
from ppdist.export.spec import InferenceSpec, describe
from ppdist.lab.benchmark.latency import make_predictors, measure_predictors, sample_images
from ppdist.models.weights import checkpoint_of, load_weights

MODELS = (  # recipe, learning rate at which it learns the images
    ("yolov5n_300e_coco", 0.01),
    ("yolov5s_300e_coco", 0.01),
    ("ppyoloe_plus_t_auxhead_300e_coco", 0.005),
    ("ppyoloe_plus_s_80e_coco", 0.005),
)
THREADS = (1, 2)
_CLASSES, _LEARNED_SIZE, _MEASURED_SIZE = 80, 96, 640
_IMAGES = 8
_THRESHOLD = 0.25  # of a deployed model: a handful of boxes lie above it, not thousands
_FIRST = "ONNX Runtime"  # the runtime with which the others are compared
_TOO_SLOW = ("Paddle Inference",)  # without oneDNN


def measure_runtimes(scratch: Path, *, steps: int, rounds: int) -> dict[str, Any]:
    """Times all runtimes that are installed on each of MODELS, and evaluates them.

    Args: steps: of training, each with 8 images.  rounds: see `measure_predictors`.
    Returns: the command, the runtimes' versions, and for each model: for each number of threads the
        result of `measure_predictors`, and `mAP` of eager and of each runtime on the same images,
        in the size of training.
    """
    data = scratch / "data"
    make_shapes(data, train=_IMAGES, val=1, size=_LEARNED_SIZE, seed=0)
    _pad_classes(data / "annotations" / "instances_train.json")
    command = f"python -m benchmarks runtimes --steps {steps} --repeats {rounds}"
    report: dict[str, Any] = {"command": command, "versions": versions()}
    for recipe, lr in MODELS:
        report[recipe] = _measure(_config(recipe, data, steps, lr), scratch / recipe, rounds)
        process.say(f"{recipe}: {json.dumps(report[recipe])}")  # the rest may take an hour
    return report


def versions() -> dict[str, str]:
    """Returns the versions of the runtimes that are installed."""
    packages = ("paddlepaddle", "onnxruntime", "openvino")
    return {name: version(name) for name in packages if find_spec(name) or name == packages[0]}


def _measure(config: ExperimentConfig, folder: Path, rounds: int) -> dict[str, Any]:
    weights = checkpoint_of(train(config.model_copy(update={"output_dir": str(folder / "run")})))
    dataset = read_split(config.data, "val", config.model.num_classes)
    exported = folder / "export"
    with device.on_cpu():
        model: Any = build_model(config)
        load_weights(model, weights)
        spec = describe(config, dataset)
        report = export_model(
            model, exported, spec, ("paddle", "onnx"),
            calibration=list(Pictures(dataset.records, spec)),
            int8_loss=1,  # what it costs is measured here
        )  # fmt: skip
        spec = report.spec
        assert spec.nms is not None
        sample = take_sample(dataset, EagerPredictor(model, spec.nms), spec)
        assert sample is not None
        accuracy = {"eager": sample.mAP}
        for name, predict in make_predictors(None, exported, spec, 1).items():
            accuracy[name] = measure_precision(sample, predict, spec)
        large = _at_size(spec, _MEASURED_SIZE)
        timings = {}
        for threads in THREADS:
            predictors = make_predictors(None, exported, spec, threads)
            ordered = {_FIRST: predictors.pop(_FIRST), **predictors}
            for name in _TOO_SLOW:
                ordered.pop(name, None)
            timings[f"threads {threads}"] = measure_predictors(
                ordered, large, sample_images(None), batch=1, threads=threads, rounds=rounds
            )
    return {"mAP": accuracy, **timings}


def _at_size(spec: InferenceSpec, side: int) -> InferenceSpec:
    """Changes a spec to square inputs of that side in pixels, and to `at_threshold`."""
    size = spec.input.model_copy(update={"size": (side, side)})
    return at_threshold(spec.model_copy(update={"input": size}))


def at_threshold(spec: InferenceSpec) -> InferenceSpec:
    """Changes the score threshold of a spec to that of a deployed model."""
    assert spec.nms is not None
    return spec.model_copy(
        update={"nms": spec.nms.model_copy(update={"score_threshold": _THRESHOLD})}
    )


def _config(recipe: str, data: Path, steps: int, lr: float) -> ExperimentConfig:
    """Makes the config of a recipe that learns the training images by heart."""
    images = {"images": "images", "annotations": "annotations/instances_train.json"}
    tree = load_config(recipe).model_dump(mode="json")
    tree["data"] |= {"root": str(data), "train": images, "val": images, "workers": 0}
    tree["data"]["augment"] = {
        "distort": 0, "expand": 0, "crop": 0, "flip": 0, "random_interpolation": False,
    }  # fmt: skip
    tree["model"] |= {"num_classes": _CLASSES, "image_size": [_LEARNED_SIZE, _LEARNED_SIZE]}
    tree["model"]["pretrained"] = None
    tree["train"] = {
        "epochs": steps, "batch_size_per_card": 8, "clip_norm": 10.0,
        "ema": {"decay": 0.9},
    }  # fmt: skip
    tree["nms"]["score_threshold"] = _THRESHOLD
    tree["optimizer"] = {"name": "adamw", "lr": lr, "weight_decay": 0.0}
    tree["schedule"] = {"warmup_epochs": 2}
    tree["evaluate"] = {"every_epochs": 1000}
    tree["checkpoint"] = {"every_epochs": 1000}
    tree["log"] = {"visualdl": False}
    if tree["model"]["name"] == "ppyoloe":
        tree["loss"]["static_assigner_epochs"] = 10
    return parse_plain(tree, recipe, (), ExperimentConfig)


def _pad_classes(file: Path) -> None:
    """Gives the set as many classes as COCO has; no object has one of the new classes."""
    content = json.loads(file.read_text(encoding="utf-8"))
    first = len(content["categories"])
    content["categories"] += [
        {"id": number, "name": f"class {number}"} for number in range(first + 1, _CLASSES + 1)
    ]
    file.write_text(json.dumps(content), encoding="utf-8")
