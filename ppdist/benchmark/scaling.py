"""Scaling: training and evaluation on several numbers of processes.

What training loses goes to the machine, to communication and to waiting.  Every measurement is a
run of ppdist benchmark.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ppdist.benchmark.interleaved import Group, interleave
from ppdist.common.child import DISCARD, start_here
from ppdist.common.errors import LaunchError
from ppdist.distributed import device

Report = dict[str, Any]
# By the number of processes: what one run on so many found, and what each of so many runs did.
Round = tuple[dict[int, Report], dict[int, list[Report]]]


def measure_scaling(
    launcher: Sequence[str],
    script: Sequence[str],
    *,
    counts: Sequence[int],
    rounds: int,
    slice_seconds: float,
) -> Report:
    """Training speed on several numbers of processes, measured at once, `rounds` times.

    As many processes that know nothing of one another are measured, too: what they lose is the
    machine's doing (memory, caches, clock), the rest is communication and waiting.  On CPU all of
    these groups are interleaved (see `interleaved`), and ratios are of one round; on GPUs,
    whose memory is taken also by who is stopped, they run one after another.

    Args:
        launcher: command of fleetrun without its options.
        script: `ppdist benchmark train ...` without --json.
        slice_seconds: of a time slice.
    Returns: for each count images_per_second of all ranks, speed_up and efficiency against the
        first count, medians of rounds; for more processes than one also `_communication`.  On CPU
        every process has one thread, unless OMP_NUM_THREADS says otherwise.
    Raises: LaunchError: a run failed; its stderr went to ours.
    """
    found: list[Round] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(_round(launcher, script, counts, Path(folder), slice_seconds))
    first = counts[0]
    report: Report = {}
    for count in counts:
        rates = [each[count]["images_per_second"] for each, _ in found]
        speed_ups = [
            rate / each[first]["images_per_second"] for rate, (each, _) in zip(rates, found)
        ]
        report[str(count)] = {
            "images_per_second": median(rates),
            "of_rounds": rates,
            "speed_up": median(speed_ups),
            "efficiency": median(speed_ups) * first / count,
            "efficiency_of_rounds": [each * first / count for each in speed_ups],
            "last_round": found[-1][0][count]["result"],
        }
        if count > 1:
            report[str(count)] |= _communication(found, first, count)
    return report


def _round(
    launcher: Sequence[str],
    script: Sequence[str],
    counts: Sequence[int],
    folder: Path,
    slice_seconds: float,
) -> Round:
    """Results of one round by number of processes.

    For each number: one run over all processes, and as many single runs as there are
    processes.  Their files are in the folder.
    """
    groups: list[Group] = []
    files_apart: dict[int, list[Path]] = {}
    for count in counts:
        logs = ["--log_dir", str(folder / f"log{count}")]
        command = [*launcher, *_cards(count), *logs, *script]
        command += ["--json", str(folder / f"together{count}.json")]
        groups.append(Group([command], [_environment()], folder / f"slices{count}", count))
        if count > 1:
            files = [folder / f"apart{count}-{number}.json" for number in range(count)]
            files_apart[count] = files
            groups.append(_apart(script, files, folder / f"slices-apart{count}"))
    for those in [[each] for each in groups] if _has_cards() else [groups]:
        interleave(those, slice_seconds)
    together = {count: _result(folder / f"together{count}.json") for count in counts}
    return together, {count: [*map(_result, files)] for count, files in files_apart.items()}


def _apart(script: Sequence[str], files: Sequence[Path], folder: Path) -> Group:
    """Runs the same program several times at once, independently."""
    commands, environments = [], []
    for number, file in enumerate(files):
        card = {"CUDA_VISIBLE_DEVICES": str(number)} if _has_cards() else {}
        commands.append([sys.executable, *script, "--json", str(file)])
        environments.append(_environment() | card)
    return Group(commands, environments, folder)


def _result(file: Path) -> Report:
    """The first variant of a run, with its full report as `result`."""
    report = json.loads(file.read_text(encoding="utf-8"))["result"]
    return next(iter(report["variants"].values())) | {"result": report}


def _communication(found: Sequence[Round], first: int, count: int) -> Report:
    """What several processes lose, and to what.

    Returns: machine_limit: efficiency of the processes that do not communicate;
        efficiency_of_limit: ours against theirs; all_reduce_seconds: of all gradients alone;
        exposed_seconds: by how much a step is longer than without communication, with the wait for
        slower ranks; hidden_share: how much of the all-reduce alone does not show in the step.
    """
    limits, shares, exposures, steps, alone = [], [], [], [], []
    for together, apart in found:
        ours, theirs = together[count], apart[count]
        rate = sum(each["images_per_second"] for each in theirs)
        limits.append(rate / together[first]["images_per_second"] * first / count)
        shares.append(ours["images_per_second"] / rate)
        steps.append(ours["step_seconds"])
        exposures.append(steps[-1] - median(each["step_seconds"] for each in theirs))
        alone.append(ours["result"]["gradient_all_reduce_seconds"])
    exposed = max(0.0, median(exposures))
    return {
        "machine_limit": median(limits),
        "efficiency_of_limit": median(shares),
        "all_reduce_seconds": median(alone),
        "exposed_seconds": exposed,
        "exposed_share_of_step": exposed / median(steps),
        "hidden_share": max(0.0, 1.0 - exposed / median(alone)),
        "sent_bytes_per_step": found[-1][0][count]["sent_bytes_per_step"],
    }


def compare_counts(
    launcher: Sequence[str], script: Sequence[str], *, counts: Sequence[int], rounds: int
) -> Report:
    """The same evaluation on several numbers of processes, interleaved, `rounds` times each.

    On CPU every process has one thread, unless OMP_NUM_THREADS says otherwise.

    Args:
        launcher: command of fleetrun without its options.
        script: `ppdist benchmark eval ...` without --json.
    Returns: for each count the seconds of every round and their median, `of_first`: the median over
        rounds of its seconds as a part of the first count's, the last round's `parts`; and whether
        all `metrics` (but for losses, which are sums in another order) were the same to the last
        digit.
    Raises: LaunchError: a run failed; its stderr went to ours.
    """
    found: dict[int, list[Report]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            report = launch(launcher, script, count, environment=_environment())
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


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1"} | os.environ


def _has_cards() -> bool:
    return "gpu" in device.accelerators()


def _cards(count: int) -> list[str]:
    """Fleetrun options for `count` processes on this machine.

    One per card, if it has any.
    """
    if not _has_cards():
        return ["--nproc_per_node", str(count)]
    return ["--selected_gpus", f"0-{count - 1}" if count > 1 else "0"]


def launch(
    launcher: Sequence[str],
    script: Sequence[str],
    count: int,
    *,
    environment: Mapping[str, str],
) -> Any:
    """Runs a tool on `count` processes through fleetrun; returns its report.

    Args:
        launcher: command of fleetrun without its options.
        script: the command of the tool, which writes its report where --json says.
    Raises: LaunchError: it ended without; what it said went to our stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [*launcher, *_cards(count), "--log_dir", f"{folder}/log", *script]
        command += ["--json", str(file)]
        code = start_here(command, stdout=DISCARD, env=environment).wait()
        if code or not file.exists():
            raise LaunchError(
                f"the run on {count} processes ended with exit code {code}: {' '.join(command)}",
                code="run_failed",
            )
        return json.loads(file.read_text(encoding="utf-8"))
