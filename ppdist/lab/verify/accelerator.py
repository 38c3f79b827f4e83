"""Verifies that this machine's cards train correctly, in three parts.

    equivalence   some steps on all ranks and on one card; with a single card, on it and on the CPU
    speed         images per second on all ranks and on one card; losses must be finite
    resume        a run that is resumed halfway, and an uninterrupted run

Each part ends with one of three verdicts:

    PASS      the comparison was made, and every difference is within its tolerance
    FAIL      a difference is not
    NOT RUN   nothing could be compared here; with the reason, and what was measured anyway

All of this runs on the ranks that fleetrun has started.  What one card does alone runs in a process
beside rank 0, while the other ranks wait.
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ppdist.common.errors import ConfigError, LaunchError
from ppdist.common.files import make_folder, write_json
from ppdist.common.job import JOB_DIR_VARIABLE
from ppdist.config.experiment import ExperimentConfig, load_config
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm, device
from ppdist.engine.build import build_training
from ppdist.engine.continuation import ANEW, Continuation
from ppdist.lab.benchmark.step import describe_machine, measure_training
from ppdist.lab.verify import dp_equivalence

Report = dict[str, Any]
Checkpoint = dict[str, np.ndarray]
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
JSON_NAME = "accelerator.json"

_STEPS, _STEPS_WITH_CPU = 6, 3  # of equivalence; on a CPU a large model takes seconds per image
_NOISE_ALLOWED = 10.0  # times the difference of two uninterrupted runs
# The model used without a configuration.  A YOLOv5 of this size amplifies rounding errors a hundred
# times as much, so it would prove less.
_BUILT_IN, _IMAGES, _SIDE = "demo", 96, 160


@dataclass
class Result:
    """The result of a part.

    The verdict is FAIL if there is any problem, else NOT RUN if there is a reason, else PASS.
    """

    measured: Report = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    not_run: str = ""

    @property
    def verdict(self) -> str:
        return FAIL if self.problems else NOT_RUN if self.not_run else PASS


@dataclass(frozen=True)
class Proof:
    """The input of all parts.

    Attributes:
        source: configuration file, or the name of a shipped one; overrides: items of -o.
        work: a folder that is deleted at the end.
        command: returns the words that start one of our commands, such as `verify`.
        steps: number of steps that measure speed, and number of steps of the resumed run.
        efficiency: minimum speed of N cards, as a fraction of N times the speed of one card.
    """

    source: str
    overrides: Sequence[str]
    work: Path
    command: Callable[[str], list[str]]
    steps: int
    efficiency: float

    def config(self, *overrides: str) -> ExperimentConfig:
        """Loads the configuration.  Collective."""
        return comm.run_on_all_ranks(
            lambda: load_config(self.source, [*self.overrides, *overrides])
        )

    def words(self, command: str, kind: str, *overrides: str) -> list[str]:
        """Builds the command line of one of our commands, with this configuration."""
        override_options = (
            ["-o", *self.overrides, *overrides] if self.overrides or overrides else []
        )
        return [*self.command(command), kind, "-c", self.source, *override_options]


def verify_accelerator(
    config_file: str | None,
    overrides: Sequence[str],
    out: Path,
    command: Callable[[str], list[str]],
    *,
    steps: int,
    efficiency: float,
) -> Report:
    """Runs all parts in order, prints a line for each, and writes a JSON file.  Collective.

    Args:
        config_file: None uses a small model and generated images.  See `Proof` for the other
            arguments.
        out: output folder, the same path on every host.
    Raises: UserError, on every rank: the configuration, its data or the card cannot be used.
    """
    work, results, seconds = out / "work", dict[str, Result](), dict[str, float]()
    built_in = [f"data.root={work / 'data'}", "train.sync_bn=true"] if config_file is None else []

    def prepare() -> None:
        if comm.local_rank() == 0:
            make_folder(work)
            if built_in:
                make_shapes(work / "data", train=_IMAGES, val=2, size=_SIDE, seed=0)

    with ExitStack() as undo:
        if comm.local_rank() == 0:
            undo.callback(shutil.rmtree, work, ignore_errors=True)
        comm.run_on_all_ranks(prepare)
        items = [*built_in, *overrides]
        proof = Proof(config_file or _BUILT_IN, items, work, command, steps, efficiency)
        config = proof.config()
        comm.init(config.device, config.distributed)
        for name, part in PARTS.items():
            began = time.monotonic()
            try:
                results[name] = part(proof)
            except LaunchError as error:  # in the process beside rank 0; raised on every rank
                results[name] = Result(problems=[f"{error}"])
            device.release_memory()
            seconds[name] = time.monotonic() - began
            if comm.is_main():
                print(format_result(name, results[name]), flush=True)
    report = {
        "machine": describe_machine() | {"hosts": comm.all_gather_object(comm.host())},
        "config": config_file or "built in",
        "overrides": list(overrides),
        "parts": {
            name: {"verdict": result.verdict, "seconds": seconds[name]} | asdict(result)
            for name, result in results.items()
        },
    }
    comm.run_on_main(lambda: write_json(out / JSON_NAME, report, indent=1))
    return report


# Equivalence


def equivalence(proof: Proof) -> Result:
    """Trains in float32 with partial last steps, on all ranks and then alone.  Collective."""
    on_cpu = comm.world_size() == 1
    if on_cpu and not device.on_accelerator():
        return Result(not_run="one rank of a CPU: there is nothing to compare it with")
    config = proof.config()
    try:
        dp_equivalence.require_comparable(config)
    except ConfigError as error:
        return Result(not_run=f"{error}")
    total = config.train.micro_batches(comm.world_size()).total_batch
    # Rounding errors are smallest in float32, without warm-up the weights change immediately, and
    # the limit makes the last step of an epoch partial.
    exact = (
        *("train.amp.enabled=false", "distributed.gradient_dtype=float32"),
        *("schedule.warmup_epochs=0", "train.epochs=4", "log.visualdl=false"),
        f"data.train.limit={2 * total + max(1, total // 2)}",
    )
    command = proof.words("verify", "equivalence", *exact)
    steps = _STEPS_WITH_CPU if on_cpu else _STEPS
    report = dp_equivalence.verify_ranks(proof.config(*exact), steps, command, on_cpu=on_cpu)
    return judge_equivalence(report)


def judge_equivalence(report: Report) -> Result:
    """Judges equivalence from the report of `dp_equivalence.verify_ranks`."""
    verdict = dp_equivalence.verdict(report)
    result = Result({"report": report})
    if verdict == FAIL:
        far = [row["name"] for row in report["measured"] if not row["passed"]]
        result.problems = [f"too far off: {', '.join(far) or 'weights of some ranks'}"]
    elif verdict != PASS:
        result.not_run = f"{verdict}: no step could have told right from wrong"
    return result


# Speed


def speed(proof: Proof) -> Result:
    """Measures images per second on all ranks, then on one card.  Collective."""
    warmup = max(1, proof.steps // 4)
    config, scratch = proof.config(), proof.work / "speed"
    training = measure_training(config, steps=proof.steps, warmup=warmup, scratch=scratch)
    rates = {comm.world_size(): training["images_per_second"]}
    if comm.world_size() > 1:
        file = proof.work / "alone.json"
        words = proof.words("benchmark", "train")
        words += ["--steps", f"{proof.steps}", "--warmup", f"{warmup}", "--json", f"{file}"]

        def measure_alone() -> float:
            dp_equivalence.run_alone(words)
            report = json.loads(file.read_text(encoding="utf-8"))
            return report["result"]["images_per_second"]

        device.release_memory()  # the process beside rank 0 needs the same card
        rates[1] = comm.run_on_main(measure_alone)
    result = judge_speed(rates, proof.efficiency, device.on_accelerator())
    if not all(map(math.isfinite, training["losses"])):
        result.problems.append("losses are not finite")
    amp = config.train.amp  # float16 may skip steps while it adjusts its loss scale
    if training["skipped_steps"] and not (amp.enabled and amp.dtype == "float16"):
        result.problems.append(f"{training['skipped_steps']} steps were not applied")
    return result


def judge_speed(rates: Mapping[int, float], minimum: float, on_cards: bool) -> Result:
    """Judges the speed.

    Args: rates: images per second over all ranks, by number of ranks; must include 1 rank.
    """
    world = max(rates)
    share = rates[world] / rates[1] / world
    result = Result({"images_per_second": dict(rates), "efficiency": share})
    if world == 1:
        result.not_run = "one rank only: measured, with nothing to compare"
    elif not on_cards:
        result.not_run = "ranks of a CPU share its cores: measured, not judged"
    elif not share >= minimum:
        result.problems = [
            f"{world} cards: {share:.0%} of {world} times the rate of one, asked for {minimum:.0%}"
        ]
    return result


# Resume


def resume(proof: Proof) -> Result:
    """Checks that a resumed run ends with the same weights as an uninterrupted one.  Collective.

    If the two are not equal bit for bit, a second uninterrupted run shows how far identical runs
    differ on this device, where partial sums may be added in any order.
    """
    os.environ.pop(JOB_DIR_VARIABLE, None)  # these runs are not restarts of one job
    half = max(1, proof.steps // 2)
    epochs = max(2 * half, proof.config().train.epochs)  # at least one step per epoch
    config = proof.config(
        *(f"train.max_steps={2 * half}", f"train.epochs={epochs}", "checkpoint.keep=3"),
        *(f"checkpoint.every_steps={half}", "log.visualdl=false", "log.images=0"),
    )

    def train(name: str, start: Continuation = ANEW) -> float:
        """Trains into a folder; returns the relative difference from the first run's result."""
        with redirect_stdout(sys.stderr):
            experiment = build_training(
                config, output_dir=proof.work / name, evaluate=False, command=["verify"],
                resume=start,
            )  # fmt: skip
            with experiment.log:
                experiment.trainer.fit()
        return comm.run_on_main(
            lambda: relative_difference(*(_checkpoint(proof.work / run) for run in (name, "whole")))
        )

    train("whole")
    middle = proof.work / "whole" / "checkpoints" / f"step-{half:08d}"
    resumed = train("resumed", Continuation(middle))
    return judge_resume(resumed, train("again") if resumed else 0.0)


def _checkpoint(folder: Path) -> Checkpoint:
    return {
        f"{file.stem}/{key}": array
        for file in (folder / "checkpoints" / "last").glob("*.safetensors")
        for key, array in load_file(file).items()
    }


def relative_difference(first: Checkpoint, second: Checkpoint) -> float:
    """Returns the L2 norm of the difference of two checkpoints, divided by that of the second."""
    if first.keys() != second.keys() or not first:
        raise ValueError(f"the checkpoints hold {len(first)} and {len(second)} tensors")
    wide = {key: array.astype(np.float64) for key, array in second.items()}
    off = sum(float(np.square(first[key] - array).sum()) for key, array in wide.items())
    size = sum(float(np.square(array).sum()) for array in wide.values())
    relative = math.sqrt(off / max(size, 1e-24))
    return relative if math.isfinite(relative) else 1e9  # JSON has no inf or nan


def judge_resume(resumed: float, noise: float) -> Result:
    """Judges the resumed run.

    Args: noise: `relative_difference` of two uninterrupted runs; 0 if `resumed` is 0.
    """
    result = Result({"resumed_off_by": resumed, "uninterrupted_off_by": noise})
    if resumed > _NOISE_ALLOWED * noise:
        result.problems.append(f"off by {resumed:.1e}; two uninterrupted runs by {noise:.1e}")
    return result


PARTS: dict[str, Callable[[Proof], Result]] = {
    "equivalence": equivalence,
    "speed": speed,
    "resume": resume,
}


def format_result(name: str, result: Result) -> str:
    """Formats a result as `PASS     resume` with its problems or reason, and its figures below."""
    reason = "; ".join(result.problems) or result.not_run
    rates = result.measured.get("images_per_second", {})
    below = [f"{rate:.1f} images a second on {ranks}" for ranks, rate in sorted(rates.items())]
    below += (
        dp_equivalence.format_lines(report) if (report := result.measured.get("report")) else []
    )
    title = f"{result.verdict:<8} {name}" + (f": {reason}" if reason else "")
    return "\n".join([title, *(f"  {row}" for row in below)])


def has_failed(report: Report) -> bool:
    """Returns True if any part failed."""
    return any(part["verdict"] == FAIL for part in report["parts"].values())
