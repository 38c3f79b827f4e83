"""Time of an evaluation, by part and by number of ranks."""

import os
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from ppdist.benchmark.scaling import launch
from ppdist.benchmark.step import require_detector
from ppdist.data.types import DetectionSet
from ppdist.distributed import comm
from ppdist.engine.build import LOSSES, build_evaluator, build_schedule_setup, speed_up_cpu
from ppdist.engine.evaluator import Evaluator
from ppdist.models.base import Detector

if TYPE_CHECKING:
    from ppdist.config import ExperimentConfig

Report = dict[str, Any]


def measure_evaluation(
    config: "ExperimentConfig", dataset: DetectionSet, model: Detector, repeats: int
) -> Report:
    """An evaluation as training makes it, validation loss included; every rank calls it.

    Workers are started and kernels chosen in one before the first that counts.

    Returns: medians; `parts` are the seconds of each rank, see `Evaluator.clock`; `boxes` of all
        images; `metrics` of the last evaluation.
    Raises: ConfigError: the model is a classifier.
    """
    require_detector(config, "evaluation")
    derived = build_schedule_setup(config, len(dataset.records))
    loss = LOSSES[config.model.name].build(
        config.loss, model, derived.steps_per_written_epoch, derived.reference_batch
    )
    speed_up_cpu(config, [model])
    evaluator = build_evaluator(config, dataset, model, loss=loss)
    assert isinstance(evaluator, Evaluator)
    boxes = len(evaluator.predict(model))
    whole, parts = [], []
    for _ in range(repeats):
        comm.barrier()
        began = time.perf_counter()
        metrics = evaluator.evaluate(model)
        whole.append(time.perf_counter() - began)
        parts.append(comm.all_gather_large_object(evaluator.clock.seconds))
    seconds = median(whole)
    return {
        "images": len(dataset.records),
        "images_per_second": len(dataset.records) / seconds,
        "seconds": seconds,
        "parts": [
            {name: median(each[rank][name] for each in parts) for name in parts[0][rank]}
            for rank in range(comm.world_size())
        ],
        "boxes": boxes,
        "metrics": {name: value for name, value in metrics.items() if name != "eval_seconds"},
    }


def compare_counts(
    launcher: Sequence[str], script: Sequence[str], *, counts: Sequence[int], rounds: int
) -> Report:
    """The same evaluation on several numbers of processes, interleaved, `rounds` times each.

    On CPU every process has one thread, unless OMP_NUM_THREADS says otherwise.

    Args:
        launcher: command of fleetrun without its options.
        script: `tools/benchmark.py eval ...` without --json.
    Returns: for each count the seconds of every round and their median, `of_first`: the median over
        rounds of its seconds as a part of the first count's, the last round's `parts`; and whether
        all `metrics` (but for losses, which are sums in another order) were the same to the last
        digit.
    Raises: LaunchError: a run failed; its stderr went to ours.
    """
    found: dict[int, list[Report]] = {count: [] for count in counts}
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    for _ in range(rounds):
        for count in counts:
            report = launch(launcher, script, count, environment=environment)
            found[count].append(report["result"])
    first = [each["seconds"] for each in found[counts[0]]]
    all_metrics = [_comparable(each["metrics"]) for runs in found.values() for each in runs]
    by_count: Report = {}
    for count, runs in found.items():
        seconds = [each["seconds"] for each in runs]
        by_count[str(count)] = {
            "seconds": median(seconds),
            "of_rounds": seconds,
            "of_first": median(ours / base for ours, base in zip(seconds, first)),
            "parts": runs[-1]["parts"],
            "metrics": runs[-1]["metrics"],
        }
    return {
        "images": found[counts[0]][0]["images"],
        "processes": by_count,
        "metrics_identical": all(each == all_metrics[0] for each in all_metrics),
    }


def _comparable(metrics: Report) -> Report:
    return {name: value for name, value in metrics.items() if not name.startswith("val_loss")}
