"""Continuation of a run: its checkpoint, its settings, and a note for the next attempt."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ppdist.common import files
from ppdist.common.addresses import work_folder
from ppdist.common.errors import CheckpointError, ConfigError
from ppdist.common.job import read_note, write_note
from ppdist.common.manifest import MANIFEST, follow_pointer
from ppdist.common.records import MetricRecords, read_metrics
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.parse import parse_config
from ppdist.distributed import comm

AUTO = "auto"  # the word after --resume; a folder of this name is ./auto
_NOTE_FILE = "epochs"  # in the folder of a job


@dataclass(frozen=True)
class Continuation:
    """The checkpoint a run resumes from (`--resume`), and the changes that are allowed.

    source: a checkpoint, or an output_dir for its newest valid one; None: a new run; AUTO: its own
        output_dir if it holds checkpoints, valid or not, else a new run.
    changed: allow changes to settings that affect training, too (`--resume-changed`).
    extends: the run is now longer than planned, so the patience of early stopping is reset.
    """

    source: Path | str | None = None
    changed: bool = False
    extends: bool = False


ANEW = Continuation()


def config_of_run(
    run: Path, epochs: str | None, overrides: Sequence[str], steps: str | None = None
) -> tuple[ExperimentConfig, bool]:
    """Reads the configuration of a run to resume, with other epochs or steps if requested.

    Args:
        run: output_dir of the run, or a checkpoint in it.
        epochs: "150": length of the whole run; "+50": 50 more than planned or, if early stopping
            ended the run, 50 more than were trained; None: as planned.
        overrides: -o items.
        steps: the same as `epochs`, for a run whose length is given in steps.
    Returns: the configuration; True if the run now is longer than planned.
    Raises: CheckpointError: the run has no checkpoint.  ConfigError: the run has already reached
        the requested length, or its length is given in the other unit.
    """
    is_checkpoint = (run / MANIFEST).exists()
    checkpoint = run if is_checkpoint else follow_pointer(run / "checkpoints" / "last")
    file = checkpoint / "config.yml"
    if not file.is_file():
        raise CheckpointError(
            "found no checkpoint of a run",
            code="checkpoint_missing",
            where=f"--resume {run}",
            fix="give the output_dir of a training; to start one, use DATA with --model, or -c",
        )
    # Resolved, because the path may be one of the links `last` and `best`.
    output_dir = run if checkpoint != run else run.resolve().parents[1]
    # The recorded output_dir is wrong if the run was moved, or written relative to another folder.
    run_overrides = [f"output_dir={json.dumps(_place_of(output_dir))}"]
    planned_config = parse_config(file, [*run_overrides, *overrides], ExperimentConfig)
    request, unit = (epochs, "epochs") if steps is None else (steps, "steps")
    if request is None:
        return planned_config, False
    planned = planned_config.train
    _require_unit(unit, "epochs" if planned.steps is None else "steps", request)
    # Only the length is read here; `find_start` checks the checkpoint.
    state = json.loads(files.text_of(checkpoint / "state.json"))
    done = float(state["epoch" if unit == "epochs" else "step"])
    planned_length = planned.epochs if planned.steps is None else planned.steps
    total = _count_total(request, done if _has_stopped_early(output_dir) else planned_length)
    if total <= done:
        raise ConfigError(
            f"the run already has {done:.12g} {unit}",
            code="bad_value",
            where=f"--{unit} {request}",
            fix=f"use --{unit} +N to add {unit}, or a total above {done:.12g}",
        )
    run_overrides += [f"train.{unit}={total:.12g}", "train.max_steps=null"]
    config = parse_config(file, [*run_overrides, *overrides], ExperimentConfig)
    return config, total != planned_length


def _require_unit(unit: str, planned_unit: str, request: str) -> None:
    """Checks that the new length has the same unit (epochs or steps) as the planned length.

    Raises: ConfigError: the units differ.
    """
    if unit != planned_unit:
        raise ConfigError(
            f"the length of this run is in {planned_unit} (train.{planned_unit})",
            code="options_conflict",
            where=f"--{unit} {request}",
            fix=f"use --{planned_unit}: a total, or +N more",
        )


def _place_of(output_dir: Path) -> str:
    """Returns the folder, or the address in a store to which its run is uploaded."""
    note = files.read_json(output_dir / "store.json")
    url = note.get("url") if isinstance(note, dict) else None
    is_its_own = isinstance(url, str) and work_folder(url).resolve() == output_dir.resolve()
    return str(url if is_its_own else output_dir)


def _has_stopped_early(output_dir: Path) -> bool:
    with suppress(OSError):
        records = MetricRecords.of(read_metrics(output_dir / "metrics.jsonl"))
        return records.finished == "early_stopping"
    return False


def _count_total(request: str, base: float) -> float:
    """Returns the length of the whole run.

    A job restarted by fleetrun reads the same `+N` and must not add it again, so the first attempt
    leaves a note.

    Args:
        request: "150" or "+50".
        base: the length that `+N` is added to.
    """
    if not request.startswith("+"):
        return float(request)
    total = math.ceil(base) + float(request)
    noted_total = read_note(_NOTE_FILE)
    if noted_total is not None:
        return float(noted_total)
    if comm.local_rank() == 0:  # each host has a folder of its own
        write_note(_NOTE_FILE, total)
    return total
