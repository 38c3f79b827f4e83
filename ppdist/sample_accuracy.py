"""COCO's mAP of a model and of its exported files on the same images of the validation set."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ppdist.config.runtime import RuntimeOptions
from ppdist.data.sample import DetectionSet, ImageRecord
from ppdist.errors import DataError, ExportError
from ppdist.infer_spec import InferenceSpec, SampleSection
from ppdist.inference import ExportedPredictor, Predictor, detect
from ppdist.metrics.coco import evaluate_boxes
from ppdist.samples import read_record, spread

SAMPLE_IMAGES, SAMPLE_SECONDS = 100, 60.0
# A score at a threshold may fall on the other side; on few images one box is much.
MAP_TOLERANCE = 0.01


@dataclass(frozen=True)
class Sample:
    """Images with their true boxes, and how well the model does on them before export."""

    dataset: DetectionSet
    mAP: float


def take_sample(
    dataset: DetectionSet,
    predict: Predictor,
    spec: InferenceSpec,
    count: int = SAMPLE_IMAGES,
    seconds: float = SAMPLE_SECONDS,
) -> Sample | None:
    """So many images of a set, spread over it, or as many as the model gets through in the time;
    for one that cannot be read the next is taken.

    Args: predict: the model before export.
    Returns: None: no image can be read, or none of them has an object.
    """
    until = time.monotonic() + seconds
    records: list[ImageRecord] = []
    rows: list[np.ndarray] = []
    for record in spread(dataset.records):
        if len(records) >= count or (records and time.monotonic() > until):
            break
        try:
            image_HW3 = read_record(record)
        except DataError:
            continue
        rows.append(_rows_of(len(records), predict, image_HW3, spec))
        records.append(record)
    taken = replace(dataset, records=records, unreadable={})
    if all(record.crowd_M.all() for record in records):  # also of no objects, or no images
        return None
    return Sample(taken, _precision(taken, rows))


def precision_on(sample: Sample, predict: Predictor, spec: InferenceSpec) -> float:
    """mAP of another form of the model on the same images."""
    rows = [
        _rows_of(place, predict, read_record(record), spec)
        for place, record in enumerate(sample.dataset.records)
    ]
    return _precision(sample.dataset, rows)


def with_accuracy(directory: Path, spec: InferenceSpec, sample: Sample | None) -> InferenceSpec:
    """The description of an export with what each of its files reaches on the sample.

    Args: directory: holds the files and infer.yml.
    Raises: ExportError: a file that is to compute what the model computes has another mAP.
    """
    if sample is None:
        return spec
    options = {
        "paddle": RuntimeOptions(),
        "onnx": RuntimeOptions(backend="onnx"),
        "onnx_int8": RuntimeOptions(backend="onnx", precision="int8"),
    }
    sections = {"paddle": spec.paddle, "onnx": spec.onnx, "onnx_int8": spec.onnx_int8}
    changed = {}
    for name, section in sections.items():
        if section is None:
            continue
        reached = precision_on(sample, ExportedPredictor(directory, options[name]), spec)
        found = SampleSection(images=len(sample.dataset.records), mAP_eager=sample.mAP, mAP=reached)
        if name != "onnx_int8" and abs(reached - sample.mAP) > MAP_TOLERANCE:
            raise ExportError(
                f"mAP {reached:.4f} on {found.images} validation images, eager {sample.mAP:.4f}; "
                "nothing was kept",
                code="export_differs",
                where=str(section.files[0]),
            )
        changed[name] = section.model_copy(update={"sample": found})
    return spec.model_copy(update=changed)


def _rows_of(
    place: int, predict: Predictor, image_HW3: np.ndarray, spec: InferenceSpec
) -> np.ndarray:
    """float32 [R, 7]: (place of the image, class, score, x1, y1, x2, y2), pixels of the image."""
    assert spec.resize.mode != "centre_crop"  # of classifiers
    rows_R6 = detect(predict, image_HW3, spec.input.size, spec.resize.mode)
    return np.concatenate([np.full((len(rows_R6), 1), place, np.float32), rows_R6], axis=1)


def _precision(dataset: DetectionSet, rows: list[np.ndarray]) -> float:
    return evaluate_boxes(dataset, np.concatenate(rows))["mAP"]
