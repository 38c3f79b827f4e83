"""Training speed on several numbers of processes: what is gained, and what is lost to the machine,
to communication and to waiting.  Every measurement is a run of tools/benchmark.py."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import paddle

from ppdist.errors import LaunchError

Report = dict[str, Any]


def measure_scaling(
    launcher: Sequence[str], script: Sequence[str], *, counts: Sequence[int], rounds: int
) -> Report:
    """Training speed on several numbers of processes, the numbers taken in turns `rounds` times.

    As many processes that know nothing of one another run at once in every round, too: what they
    lose is the machine's doing (memory, caches, clock), the rest is communication and waiting.

    Args:
        launcher: command of fleetrun without its options.
        script: `tools/benchmark.py train ...` without --json.
    Returns: for each count images_per_second of all ranks (median of rounds), and speed_up and
        efficiency against the first count; for more processes than one also `_communication`.  On
        CPU every process has one thread, unless OMP_NUM_THREADS says otherwise.
    Raises: LaunchError: a run failed; its stderr went to ours.
    """
    rates: dict[int, list[float]] = {count: [] for count in counts}
    steps: dict[int, list[float]] = {count: [] for count in counts}
    apart: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    reports: dict[int, Report] = {}
    for _ in range(rounds):
        for count in counts:
            reports[count] = launch(launcher, script, count, environment=_environment())
            result = _first_variant(reports[count])
            rates[count].append(result["images_per_second"])
            steps[count].append(result["step_seconds"])
            if count > 1:
                alone = [_first_variant(each) for each in _launch_apart(script, count)]
                rate = sum(each["images_per_second"] for each in alone)
                apart[count].append((rate, median(each["step_seconds"] for each in alone)))
    base = median(rates[counts[0]])
    found = {}
    for count in counts:
        ideal = base * count / counts[0]
        found[str(count)] = {
            "images_per_second": median(rates[count]),
            "of_rounds": rates[count],
            "speed_up": median(rates[count]) / base,
            "efficiency": median(rates[count]) / ideal,
            "last_round": reports[count]["result"],
        }
        if count > 1:
            found[str(count)] |= _communication(
                rates[count], steps[count], apart[count], ideal, reports[count]["result"]
            )
    return found


def _communication(
    rates: Sequence[float],
    steps: Sequence[float],
    apart: Sequence[tuple[float, float]],
    ideal: float,
    result: Report,
) -> Report:
    """What several processes lose, and to what.

    Args:
        rates, steps: images per second and seconds of a step, of every round.
        apart: the same of as many processes that do not communicate.
        ideal: images per second without any loss.
    Returns: machine_limit: efficiency of the processes that do not communicate;
        efficiency_of_limit: ours against theirs; all_reduce_seconds: of all gradients alone;
        exposed_seconds: by how much a step is longer than without communication, with the wait for
        slower ranks; hidden_share: how much of the all-reduce alone does not show in the step.
    """
    limit = median(rate for rate, _ in apart)
    exposed = max(0.0, median(ours - theirs for ours, (_, theirs) in zip(steps, apart)))
    alone = result["gradient_all_reduce_seconds"]
    return {
        "machine_limit": limit / ideal,
        "efficiency_of_limit": median(ours / theirs for ours, (theirs, _) in zip(rates, apart)),
        "all_reduce_seconds": alone,
        "exposed_seconds": exposed,
        "exposed_share_of_step": exposed / median(steps),
        "hidden_share": max(0.0, 1.0 - exposed / alone),
        "sent_bytes_per_step": _first_variant({"result": result})["sent_bytes_per_step"],
    }


def _first_variant(report: Report) -> Report:
    return next(iter(report["result"]["variants"].values()))


def _has_gpu() -> bool:
    return paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1"} | os.environ


def _cards(count: int) -> list[str]:
    """Options of fleetrun for so many processes on this machine: one a card, where it has any."""
    if not _has_gpu():
        return ["--nproc_per_node", str(count)]
    return ["--selected_gpus", f"0-{count - 1}" if count > 1 else "0"]


def launch(
    launcher: Sequence[str],
    script: Sequence[str],
    count: int,
    *,
    environment: Mapping[str, str],
    verdicts: Collection[int] = (0,),
) -> Any:
    """The report of a tool on `count` processes of this machine, through fleetrun.

    Args:
        launcher: command of fleetrun without its options.
        script: the command of the tool, which writes its report where --json says.
        verdicts: exit codes with which it does.
    Raises: LaunchError: it ended without; what it said went to our stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [
            *launcher,
            *_cards(count),
            "--log_dir",
            f"{folder}/log",
            *script,
            "--json",
            str(file),
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=False)
        if done.returncode not in verdicts or not file.exists():
            raise LaunchError(
                f"the run on {count} processes ended with exit code {done.returncode}: "
                f"{' '.join(command)}"
            )
        return json.loads(file.read_text(encoding="utf-8"))


def _launch_apart(script: Sequence[str], count: int) -> list[Report]:
    """The same program `count` times at once, each a run of its own (cards: not run on a GPU)."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(count)]
        with ExitStack() as started:
            running = []
            for number, file in enumerate(files):
                card = {"CUDA_VISIBLE_DEVICES": str(number)} if _has_gpu() else {}
                command = [sys.executable, *script, "--json", str(file)]
                environment = _environment() | card
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
                running.append(started.enter_context(process))
                started.callback(process.terminate)  # not after its end
            codes = [process.wait() for process in running]
        if any(codes):
            raise LaunchError(
                f"{count} runs of one process at once ended with exit codes {codes}: "
                f"{sys.executable} {' '.join(script)}"
            )
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]
