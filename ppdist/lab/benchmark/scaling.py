"""Measures how training scales with the number of processes, by runs of ppdist benchmark."""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ppdist.common.child import DISCARD, start_here
from ppdist.common.errors import LaunchError
from ppdist.distributed import device

Report = dict[str, Any]


def measure_scaling(
    launcher: Sequence[str], script: Sequence[str], *, counts: Sequence[int], rounds: int
) -> Report:
    """Measures training speed with each number of processes, once per round.

    Ratios are computed within a round, because the speed of a shared machine changes within
    minutes.

    Args:
        launcher: command of fleetrun without its options.
        script: `ppdist benchmark train ...` without --json.
    Returns: for each count, medians over the rounds of images_per_second of all ranks and of
        speed_up and efficiency relative to the first count, and the report of the last round.  On
        the CPU every process has one thread, unless OMP_NUM_THREADS is set.
    Raises: LaunchError: a run failed; its stderr was written to ours.
    """
    rounds_reports = [
        {count: run_training(launcher, script, count) for count in counts} for _ in range(rounds)
    ]
    first = counts[0]
    report: Report = {}
    for count in counts:
        rates = [reports[count]["images_per_second"] for reports in rounds_reports]
        # Ratios within a round: the load of the machine was about the same for both runs.
        speed_ups = [
            rate / reports[first]["images_per_second"]
            for rate, reports in zip(rates, rounds_reports)
        ]
        report[str(count)] = {
            "images_per_second": median(rates),
            "of_rounds": rates,
            "speed_up": median(speed_ups),
            "efficiency": median(speed_ups) * first / count,
            "last_round": rounds_reports[-1][count],
        }
    return report


def run_training(launcher: Sequence[str], script: Sequence[str], count: int) -> Report:
    """Runs `ppdist benchmark train` on `count` processes through fleetrun; returns its result.

    Raises: LaunchError: the run ended without a result; its messages were written to our stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [*launcher, *_placement_options(count), "--log_dir", f"{folder}/log", *script]
        command += ["--json", str(file)]
        # Processes with several threads each would compete for the same cores.
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        code = start_here(command, stdout=DISCARD, env=environment).wait()
        if code or not file.exists():
            raise LaunchError(
                f"the run on {count} processes ended with exit code {code}: {' '.join(command)}",
                code="run_failed",
            )
        result: Report = json.loads(file.read_text(encoding="utf-8"))["result"]
        return result


def _placement_options(count: int) -> list[str]:
    """Returns the fleetrun options for `count` processes on this machine, one per card if it has
    any.
    """
    if "gpu" not in device.accelerators():
        return ["--nproc_per_node", str(count)]
    return ["--selected_gpus", f"0-{count - 1}" if count > 1 else "0"]
