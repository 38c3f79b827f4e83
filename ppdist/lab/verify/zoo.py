"""Evaluates published weights and compares them with their published figures.

Each file is evaluated as its publisher did (models/zoo.yml has the protocols), so a difference
comes from the code: our layers, resizing, suppression and metrics compared to theirs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppdist.common.errors import UserError
from ppdist.config.experiment import ExperimentConfig, load_config
from ppdist.config.shipped import find_config
from ppdist.data.datasets.build import read_split
from ppdist.distributed import comm
from ppdist.engine.build import build_evaluator, build_model, speed_up_cpu
from ppdist.engine.preflight import fetch_on_all_ranks
from ppdist.metrics.analysis import analyse
from ppdist.models.model_card import names_for
from ppdist.models.weights import load_all_weights
from ppdist.models.zoo import (
    PublishedWeights,
    is_here,
    zoo,
)
from ppdist.models.zoo import published as published_weights

TOLERANCE = 0.3  # points, 0..100: figures are rounded to 0.1, and runs of one model differ by 0.2
PASS, FAIL, NOT_COMPARED, NOT_RUN = "PASS", "FAIL", "NOT COMPARED", "NOT RUN"


@dataclass(frozen=True)
class Row:
    """The result of one weight file.

    measured, published: values of `metric`, 0..100; None if not measured or not published.
    protocol: how both are measured.  verdict: PASS, FAIL, NOT COMPARED or NOT RUN; `why` is the
    reason for the last two.
    """

    name: str
    weights: str
    verdict: str
    why: str = ""
    metric: str = ""
    measured: float | None = None
    published: float | None = None
    protocol: str = ""
    images: int | None = None
    licence: str = ""


def verify_zoo(sources: Sequence[str], overrides: Sequence[str]) -> Iterator[Row]:
    """Evaluates published weights, one row after the other.  Collective.

    A file that cannot be evaluated does not affect the others.

    Args:
        sources: names in the zoo, files with published names, or folders of such files.
        overrides: items of -o, such as the location of the data, applied after the protocol's.
    """
    for weights in _expand_folders(sources):
        entry = published_weights(weights)
        if entry is None:
            yield Row("", weights, NOT_RUN, "not the name of a published file")
        elif entry.protocol is None:
            yield Row(entry.name, weights, NOT_RUN, "a backbone alone: no figure is published")
        else:
            try:
                yield _measure_row(entry, weights, overrides)
            except UserError as error:
                yield Row(entry.name, weights, NOT_RUN, f"{error}")


def _expand_folders(sources: Sequence[str]) -> Iterator[str]:
    """Yields the files in folders, ordered by name; yields anything else unchanged."""
    for weights in sources:
        if Path(weights).is_dir():
            yield from (f"{path}" for path in sorted(Path(weights).iterdir()) if path.is_file())
        else:
            yield weights


def protocol_config(entry: PublishedWeights, overrides: Sequence[str]) -> ExperimentConfig:
    """Builds the config that evaluates published weights as their publisher did.

    Raises: ConfigError: an item of `overrides` is wrong.
    """
    protocol_overrides = entry.protocol.overrides if entry.protocol else ()
    all_overrides = [*entry.overrides, *protocol_overrides, *overrides]
    return load_config(find_config(entry.config), all_overrides)


def _measure_row(entry: PublishedWeights, weights: str, overrides: Sequence[str]) -> Row:
    """Evaluates one file and compares its score with the published one."""
    protocol, metric = entry.protocol, entry.metric
    assert protocol is not None and metric is not None
    config = protocol_config(entry, overrides)
    model = build_model(config)
    fetch_on_all_ranks(weights)
    dataset = comm.run_on_all_ranks(
        lambda: read_split(config.data, "val", config.model.num_classes)
    )
    names = comm.run_on_all_ranks(lambda: names_for(weights, dataset.class_names))
    comm.run_on_all_ranks(lambda: load_all_weights(model, Path(weights), names))
    evaluator = build_evaluator(config, dataset, model)
    speed_up_cpu(config, [model])
    predictions: Any = evaluator.predict(model)  # boxes, or a ranking of classes

    def measure() -> float:
        max_detections, metrics = config.evaluate.max_detections, evaluator.measure(predictions)
        if metric not in metrics:  # VOC metrics, which training does not compute
            metrics = analyse(evaluator.scored, predictions, None, max_detections)["metrics"]
        return round(100 * metrics[metric], 2)

    measured, images = comm.run_on_main(measure), len(dataset.records)
    protocol_keys = {override.partition("=")[0] for override in protocol.overrides}
    override_keys = sorted({override.partition("=")[0] for override in overrides})
    changed = [key for key in override_keys if key in protocol_keys or key.startswith("model.")]
    reason = ""
    if images != protocol.images:
        reason = f"{images} images, {protocol.dataset} has {protocol.images or 'another number'}"
    elif changed:
        reason = f"another protocol: -o {' '.join(changed)}"
    is_near = abs(measured - (entry.published or 0)) <= TOLERANCE
    return Row(
        name=entry.name,
        weights=weights,
        verdict=NOT_COMPARED if reason else PASS if is_near else FAIL,
        why=reason,
        metric=metric,
        measured=measured,
        published=entry.published,
        protocol=f"{protocol.dataset}: {protocol.about}",
        images=images,
        licence=entry.source.licence,
    )


def format_row(row: Row) -> str:
    """Formats a row for the terminal."""
    if row.measured is None:
        return f"{row.verdict:12}  {row.name or row.weights}: {row.why}"
    text = f"{row.verdict:12}  {row.name:28}  {row.metric} {row.measured:5.1f}"
    text += f"  published {row.published:5.1f}  {row.licence}  ({row.protocol})"
    return f"{text}; {row.why}" if row.why else text


# --- listing --------------------------------------------------------------------------------------


def format_listing() -> str:
    """Formats a list of all published names for the terminal, and which files are on this host."""
    lines = [f"{'name':30} {'params M':>8}  {'licence':10} {'published':20} here"]
    for entry in zoo().values():
        parameters, figure = number_or_dash(entry.parameters), published_figure(entry)
        availability = "yes" if is_here(entry) else "no"
        lines.append(
            f"{entry.name:30} {parameters:>8}  {entry.source.licence:10} {figure:20} {availability}"
        )
    return "\n".join(lines)


def number_or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def published_figure(entry: PublishedWeights) -> str:
    return "-" if entry.published is None else f"{entry.metric} {entry.published:.1f}"
