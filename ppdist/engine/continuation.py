"""Continues a run from its folder alone, also beyond its end."""

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ppdist.common.errors import CheckpointError, ConfigError
from ppdist.common.files import replace_file
from ppdist.common.process import JOB_DIR_VARIABLE
from ppdist.common.records import MetricRecords, read_metrics
from ppdist.config import ExperimentConfig
from ppdist.config.base import parse_config
from ppdist.distributed import comm
from ppdist.engine.schedule_setup import ScheduleSetup

_NOTE_FILE = "epochs"  # in the folder of a job


@dataclass(frozen=True)
class Continuation:
    """A run to continue: `--resume RUN [--epochs N|+N]`.

    extends: it has more epochs now than it was planned for.
    """

    config: ExperimentConfig
    output_dir: Path
    extends: bool


def continuation(run: Path, epochs: str | None, overrides: Sequence[str]) -> Continuation:
    """The configuration of a run, with another number of epochs where asked.

    Args:
        run: its output_dir, or a checkpoint in it.
        epochs: "150": of the whole run; "+50": more than planned, or, where early stopping has
            ended it, than were made; None: as planned.
        overrides: -o items.
    Raises: CheckpointError: it has no checkpoint; ConfigError: the epochs are over already.
    """
    checkpoint = run if (run / "manifest.json").exists() else run / "checkpoints" / "last"
    file = checkpoint / "config.yml"
    if not file.is_file():
        raise CheckpointError(
            "found no checkpoint of a run",
            code="checkpoint_missing",
            where=f"--resume {run}",
            fix="give the output_dir of a training; to start one, use DATA with --model, or -c",
        )
    output_dir = run if checkpoint != run else run.resolve().parents[1]
    own = [f"output_dir={json.dumps(str(output_dir))}"]
    planned = parse_config(file, [*own, *overrides], ExperimentConfig)
    if epochs is None:
        return Continuation(planned, output_dir, extends=False)
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    done = float(state["epoch"])
    total = _total(epochs, done if _stopped_early(output_dir) else planned.train.epochs)
    if total <= done:
        raise ConfigError(
            f"the run already has {done:g} epochs",
            code="bad_value",
            where=f"--epochs {epochs}",
            fix=f"use --epochs +N to add epochs, or a total above {done:g}",
        )
    own += [f"train.epochs={total:g}", "train.max_steps=null"]
    config = parse_config(file, [*own, *overrides], ExperimentConfig)
    return Continuation(config, output_dir, extends=total != planned.train.epochs)


def _stopped_early(output_dir: Path) -> bool:
    with suppress(OSError):
        found = MetricRecords.of(read_metrics(output_dir / "metrics.jsonl"))
        return found.finished == "early_stopping"
    return False


def _total(asked: str, base: float) -> float:
    """The epochs of the whole run.

    A job that fleetrun starts anew reads the same `+N`, and must not add it once more.
    """
    if not asked.startswith("+"):
        return float(asked)
    total = math.ceil(base) + float(asked)
    folder = os.environ.get(JOB_DIR_VARIABLE)
    if not folder:
        return total
    note = Path(folder) / _NOTE_FILE
    if note.exists():
        return float(note.read_text(encoding="utf-8"))
    if comm.local_rank() == 0:  # each host has a folder of its own
        replace_file(note, f"{total:g}".encode())
    return total


def told(derived: ScheduleSetup, before_steps: int, step: int) -> str:
    """A line about the schedule of an extended run.

    Args:
        before_steps: of the schedule it had.
        step: optimizer steps made.
    """
    schedule = derived.schedule
    warmup = round(schedule.warmup_steps * before_steps / derived.schedule_steps)
    before = replace(schedule, total_steps=before_steps, warmup_steps=warmup)
    last = before(min(step, before_steps) - 1)
    made, planned = (each / derived.steps_per_epoch for each in (step, derived.schedule_steps))
    return (
        f"continuing from epoch {made:g} to {planned:g} on a schedule over all {planned:g} epochs: "
        f"the learning rate, which had ended at {last:.2g}, is {schedule(step):.2g} now and "
        f"{schedule(derived.schedule_steps - 1):.2g} at the end"
    )
