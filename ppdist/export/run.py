"""Export run: weights, checked on the data of their config."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ppdist.common.errors import DataError, UserError
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.export import ExportOptions
from ppdist.data.datasets.build import read_split
from ppdist.export.export import (
    ExportReport,
    Pictures,
    export_model,
    readable,
    spread,
)
from ppdist.export.spec import InferenceSpec, LineageSection, describe, validation_set
from ppdist.metrics.run import read_run
from ppdist.models.base import ImageModel
from ppdist.models.model_card import names_for, normalisation_of, read_card_or_warn
from ppdist.models.weights import checkpoint_of, load_all_weights
from ppdist.models.zoo import local_weights
from ppdist.runtime.predictor import digest

SAMPLES = 2  # validation images that take part in the check, when they are there


def export_weights(
    config: ExperimentConfig,
    model: ImageModel,
    weights: Path,
    out: Path,
    options: ExportOptions,
    warn: Callable[[str], None],
    class_names: tuple[str, ...] = (),
) -> ExportReport:
    """Exports the model with these weights and its infer.yml into a folder.

    See `export_model`.  It runs on the device that was set before, which should be the CPU.

    Args:
        model: of this config, which takes the weights.
        warn: told of the weights' licence, of images that cannot be read, and how far a training
            split is limited.
        class_names: in place of those of the weights and the data; (): theirs.
    Raises: ExportError: the model cannot be exported, or a file does not compute what it does.
        DataError: int8 without a readable training image.  WeightsError: they do not fit.
    """
    card = read_card_or_warn(weights, warn)
    dataset = validation_set(config, warn, card)
    spec = describe(config, dataset, card)
    names = None if class_names else names_for(weights, spec.class_names)
    if class_note := load_all_weights(model, weights, names):
        warn(f"{weights}: {class_note}")
    spec = spec.model_copy(update={"lineage": lineage_of(weights)})
    if class_names:
        spec = spec.model_copy(update={"class_names": class_names})
    takes = {
        "dynamic_batch": not options.fixed_batch,
        "dynamic_size": not options.fixed_size,
        "normalised": normalisation_of(model) if options.normalised_input else None,
    }
    spec = spec.model_copy(update={"input": spec.input.model_copy(update=takes)})
    records = readable(dataset.records, SAMPLES, warn, dataset.opener) if dataset else []
    samples = list(Pictures(records, spec, dataset.opener)) if dataset else []
    calibration = _calibration(config, options.calibration, spec, warn) if options.int8 else ()
    return export_model(
        model, out, spec, options.formats, options.nms, samples, calibration, dataset,
        options.int8_loss,
    )  # fmt: skip


def lineage_of(weights: Path) -> LineageSection:
    """The weights, and their run as far as its files say."""
    found = checkpoint_of(local_weights(weights)).resolve()
    known = digest(found / "manifest.json" if found.is_dir() else found)
    step = re.fullmatch(r"step-(\d+)", found.name)
    if not found.is_dir() or step is None:
        return LineageSection(weights=known)
    folder, commit = found.parents[1], None
    with suppress(UserError):  # a checkpoint that was copied out of its run
        commit = read_run(folder, ["environment.json"]).environment.get("git_commit")
    return LineageSection(
        weights=known, run=folder.name, step=int(step[1]), commit=str(commit or "")
    )


def _calibration(
    config: ExperimentConfig, count: int, spec: InferenceSpec, warn: Callable[[str], None]
) -> Pictures:
    """Calibration images from the training split.

    The validation split measures accuracy, so it must not be used for tuning.
    """
    dataset = read_split(config.data, "train", config.model.num_classes)
    if dataset.limited:
        warn(f"calibration: {dataset.limited}")
    records = readable(spread(dataset.records), count, warn, dataset.opener)
    if not records:
        raise DataError(
            "no image of the training set is readable",
            code="no_good_image",
            where=f"--int8: {dataset.source}",
        )
    return Pictures(records, spec, dataset.opener)
