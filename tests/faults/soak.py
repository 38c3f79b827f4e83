"""Many faults, one after the other: does the run always end as if nothing had happened?

Both rounds below go on when a job ends otherwise than promised; it is in `failures` then, and its
folder stays as it is.
"""

import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.scenario import RANKS, FaultScenario, first_difference

_JOB_SECONDS = 3600.0  # a bound against hanging
# After these the weights must be those of the undisturbed run.  Others change what is learned on
# purpose: a step is left out (nan, poison), sums are rounded otherwise (oom), or some steps were
# made with a wrong weight (flip).
_HARMLESS = (
    "kill", "segv", "abort", "exception", "exit0", "stop", "hang", "hang-gil", "skip-collective",
    "slow=0.2", "clock=600", "disk-full=2", "loader-kill",
)  # fmt: skip
_WRITES = ("disk-full=2",)  # those that strike rank 0 or nobody
_FAULTS_PER_JOB = 5
# Half an hour holds few jobs if each rank that hangs is waited for 60 s.
_SOAKED = ("data.workers=1", "distributed.hang_seconds=10")


def kills(folder: Path, points: int, per_job: int, seed: int) -> dict[str, Any]:
    """SIGKILL at random (rank, step) points, under fleetrun --max_restart.

    Args: per_job: how many of the points strike one job, one after the other.
    """
    scenario, draw = FaultScenario(folder), random.Random(seed)
    _run_undisturbed(scenario)
    report = _Report()
    for number, first in enumerate(range(0, points, per_job)):
        steps = sorted(draw.sample(range(1, scenario.steps + 1), min(per_job, points - first)))
        report.add(scenario, f"kills-{number}", [f"kill@rank{_rank(draw)}:step{s}" for s in steps])
    title = f"SIGKILL at {points} random points"
    return {"title": title, "steps_of_a_job": scenario.steps, **report.summary()}


def soak(folder: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Random faults of random kinds, in job after job, until the time is over."""
    scenario, draw = FaultScenario(folder), random.Random(seed)
    began = time.monotonic()
    _run_undisturbed(scenario)
    report, number = _Report(), 0
    while time.monotonic() - began < 60 * minutes:
        faults = []
        for step in sorted(draw.sample(range(1, scenario.steps + 1), _FAULTS_PER_JOB)):
            kind = draw.choice(_HARMLESS)
            rank = 0 if kind in _WRITES else _rank(draw)
            faults.append(f"{kind}@rank{rank}:step{step}")
        report.add(scenario, f"soak-{number}", faults, _SOAKED)
        number += 1
    title = f"Random faults for {(time.monotonic() - began) / 60:.0f} minutes"
    return {"title": title, "jobs": number, "steps_of_a_job": scenario.steps, **report.summary()}


def _run_undisturbed(scenario: FaultScenario) -> None:
    """What the others are compared with.  Raises: RuntimeError: it fails without any fault."""
    job = scenario.run("undisturbed", seconds=_JOB_SECONDS)
    if job.process.returncode:
        raise RuntimeError(
            f"the job without faults ended with code {job.process.returncode}:\n{job.text}"
        )


class _Report:
    """What came of the jobs so far."""

    def __init__(self) -> None:
        self.strikes, self.survived = 0, 0
        self.recovered: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def add(
        self,
        scenario: FaultScenario,
        name: str,
        faults: Sequence[str],
        overrides: Sequence[str] = (),
    ) -> None:
        """Runs one job under faults, each of which may end an attempt."""
        text, launch = ",".join(faults), ["--max_restart", str(len(faults))]
        try:
            job = scenario.run(name, text, launch=launch, overrides=overrides, seconds=_JOB_SECONDS)
        except TimeoutError as error:
            self.failures.append(f"{text}: {error}")
            return
        code, struck = job.process.returncode, len(job.struck())
        differs = "" if code else first_difference(scenario.folder / "undisturbed", job.output_dir)
        wrong = [
            f"exit code {code}" if code else "",
            f"other weights, first in {differs}" if differs else "",
            f"{len(faults) - struck} of them did not strike" if struck < len(faults) else "",
        ]
        said = ", ".join(part for part in wrong if part)
        print(f"{name}: {text}: {said or 'as undisturbed'}", file=sys.stderr, flush=True)
        self.strikes += struck
        self.survived += 0 if said else struck
        self.recovered += job.recoveries()
        if said:
            job.output_dir.with_suffix(".txt").write_text(job.text, encoding="utf-8")
            self.failures.append(f"{text}: {said}; see {job.output_dir}.txt")

    def summary(self) -> dict[str, Any]:
        """For JSON; without a restart there is no time of one."""
        seconds = [each["seconds"] for each in self.recovered]
        lost = [each["steps_lost"] for each in self.recovered]
        times = {
            "recovery_seconds_median": round(statistics.median(seconds), 1),
            "recovery_seconds_worst": round(max(seconds), 1),
            "steps_lost_median": statistics.median(lost),
            "steps_lost_worst": max(lost),
        } if seconds else {}  # fmt: skip
        counts = {"struck": self.strikes, "survived": self.survived, "restarts": len(seconds)}
        return {**counts, **times, "failures": self.failures}


def machine() -> str:
    """Where a figure was measured."""
    return f"{len(os.sched_getaffinity(0))} CPU cores ({platform.machine()}), gloo"


def _rank(draw: random.Random) -> int:
    return draw.randrange(RANKS)
