"""Exports weights and checks the files on the data of their config."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ppdist.common.errors import DataError, UserError
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.export import ExportOptions
from ppdist.data.datasets.build import read_split
from ppdist.export.export import (
    ExportReport,
    Pictures,
    export_model,
    select_readable,
    spread_evenly,
)
from ppdist.export.spec import InferenceSpec, LineageSection, describe, validation_set
from ppdist.metrics.run import read_run
from ppdist.models.base import ImageModel
from ppdist.models.model_card import names_for, normalisation_of, read_card_or_warn
from ppdist.models.weights import checkpoint_of, load_all_weights
from ppdist.models.zoo import local_weights
from ppdist.runtime.predictor import digest

SAMPLES = 2  # validation images in the check, if there are any


def export_weights(
    config: ExperimentConfig,
    model: ImageModel,
    weights: Path,
    out: Path,
    options: ExportOptions,
    warn: Callable[[str], None],
    class_names: tuple[str, ...] = (),
) -> ExportReport:
    """Exports the model with these weights, and its infer.yml, to a folder.

    It runs `export_model` on the current device, which should be the CPU.

    Args:
        model: the model of this config, into which the weights are loaded.
        warn: called about the weights' licence, images that cannot be read, and a limited training
            split.
        class_names: class names to use instead of those of the weights and the data, unless empty.
    Raises: ExportError: the model cannot be exported, or a file computes something else.
        DataError: int8 is requested, but no training image is readable. WeightsError: the weights
            do not fit.
    """
    # For a checkpoint, the training run has already reported the licence.
    of_run = checkpoint_of(local_weights(weights)).is_dir()
    card = read_card_or_warn(weights, warn, derives=not of_run)
    dataset = validation_set(config, warn, card)
    spec = describe(config, dataset, card)
    # Class names from the user replace those of the weights, which then need not match the data.
    names = None if class_names else names_for(weights, spec.class_names)
    if class_note := load_all_weights(model, weights, names):
        warn(f"{weights}: {class_note}")
    spec = spec.model_copy(update={"lineage": read_lineage(weights)})
    if class_names:
        spec = spec.model_copy(update={"class_names": class_names})
    input_keys = {
        "dynamic_batch": not options.fixed_batch,
        "dynamic_size": not options.fixed_size,
        "normalised": normalisation_of(model) if options.normalised_input else None,
    }
    spec = spec.model_copy(update={"input": spec.input.model_copy(update=input_keys)})
    records = select_readable(dataset.records, SAMPLES, warn, dataset.opener) if dataset else []
    samples = list(Pictures(records, spec, dataset.opener)) if dataset else []
    calibration = (
        _calibration_images(config, options.calibration, spec, warn) if options.int8 else ()
    )
    report = export_model(
        model, out, spec, options.formats, options.nms, samples, calibration, dataset,
        options.int8_loss,
    )  # fmt: skip
    return replace(report, image=records[0].path if records else "")


def read_lineage(weights: Path) -> LineageSection:
    """Reads the origin of weights: their digest, and what the files of their run record."""
    checkpoint = checkpoint_of(local_weights(weights)).resolve()
    weights_digest = digest(checkpoint / "manifest.json" if checkpoint.is_dir() else checkpoint)
    step = re.fullmatch(r"step-(\d+)", checkpoint.name)
    if not checkpoint.is_dir() or step is None:
        return LineageSection(weights=weights_digest)
    folder, commit = checkpoint.parents[1], None
    with suppress(UserError):  # the checkpoint was copied out of its run
        commit = read_run(folder, ["environment.json"]).environment.get("git_commit")
    return LineageSection(
        weights=weights_digest, run=folder.name, step=int(step[1]), commit=str(commit or "")
    )


def _calibration_images(
    config: ExperimentConfig, count: int, spec: InferenceSpec, warn: Callable[[str], None]
) -> Pictures:
    """Selects calibration images from the training split.

    The validation split measures accuracy, so it must not be used for tuning.
    """
    dataset = read_split(config.data, "train", config.model.num_classes)
    if dataset.limited:
        warn(f"calibration: {dataset.limited}")
    records = select_readable(spread_evenly(dataset.records), count, warn, dataset.opener)
    if not records:
        raise DataError(
            "no image of the training set is readable",
            code="no_good_image",
            where=f"--int8: {dataset.source}",
        )
    return Pictures(records, spec, dataset.opener)
