"""Averages checkpoints into one set of weights with own statistics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppdist.config import ExperimentConfig
from ppdist.data.types import DetectionSet
from ppdist.engine.build import build_evaluator
from ppdist.ensemble.soup import ModelSoup, Tried, greedy, put, uniform
from ppdist.ensemble.statistics import LastEpoch, renew_statistics
from ppdist.models.base import ImageModel


def average(
    config: ExperimentConfig,
    model: ImageModel,
    paths: Sequence[Path],
    *,
    train_set: DetectionSet,
    val_set: DetectionSet | None,
    images: int,
    choose: bool,
) -> dict[str, Any]:
    """Gives the model the average of weights; every rank calls it, and all get the same.

    Args:
        val_set: the average is scored on it; None: it is not.
        images: of the training set for the statistics of batch norm, at most.
        choose: leave out what lowers `evaluate.metric` (the greedy soup); needs a val_set.
    Returns: what was averaged, of what JSON can hold: `averaged`; of several `statistics_images`;
        with `choose` `tried`; with a val_set `metrics`.
    Raises: WeightsError: a file is damaged or of another model.  ConfigError: the batch of the
        training is not known.  See `renew_statistics` for others.
    """
    epoch = LastEpoch(config, train_set, images)
    evaluator = None if val_set is None else build_evaluator(config, val_set, model)
    metric = config.evaluate.metric or ("top1" if model.task == "classify" else "mAP")

    def renew(soup: ModelSoup) -> None:
        put(model, soup.mean())
        if len(soup.paths) > 1:  # one alone has its own
            renew_statistics(model, epoch, frozenset(soup.first) - soup.differs)

    def evaluate() -> dict[str, float]:
        assert evaluator is not None
        return evaluator.evaluate(model)

    tried: list[Tried] = []
    if choose:
        soup, tried = greedy(model, paths, lambda: evaluate()[metric], renew)
    else:
        soup = uniform(model, paths)
    renew(soup)
    report: dict[str, Any] = {"averaged": [str(path) for path in soup.paths]}
    if len(soup.paths) > 1:
        report["statistics_images"] = epoch.images
    if tried:
        report["tried"] = [{**each._asdict(), "path": str(each.path)} for each in tried]
    return report if evaluator is None else {**report, "metrics": evaluate()}
