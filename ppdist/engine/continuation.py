"""What a run resumes from, its settings, notes for the next attempt."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ppdist.common import files
from ppdist.common.errors import CheckpointError, ConfigError
from ppdist.common.job import read_note, write_note
from ppdist.common.records import MetricRecords, read_metrics
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.parse import parse_config
from ppdist.distributed import comm

AUTO = "auto"  # the word after --resume; a folder of this name is ./auto
_NOTE_FILE = "epochs"  # in the folder of a job


@dataclass(frozen=True)
class Continuation:
    """What a run resumes from (`--resume`), and what may differ from then.

    source: a checkpoint, or an output_dir for its newest valid one; None: a new run; AUTO: its own
        output_dir if it holds checkpoints, valid or not, else a new run.
    changed: also settings that affect training (`--resume-changed`).
    extends: it has more epochs than it was planned for; patience is reset.
    """

    source: Path | str | None = None
    changed: bool = False
    extends: bool = False


ANEW = Continuation()


def config_of_run(
    run: Path, epochs: str | None, overrides: Sequence[str]
) -> tuple[ExperimentConfig, bool]:
    """Configuration of a run to resume, with other epochs if requested.

    Args:
        run: its output_dir, or a checkpoint in it.
        epochs: "150": of the whole run; "+50": more than planned, or, where early stopping ended
            the run, more than were trained; None: as planned.
        overrides: -o items.
    Returns: with it, whether the run now has more epochs than planned.
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
        return planned, False
    state = json.loads(files.text_of(checkpoint / "state.json"))
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
    return config, total != planned.train.epochs


def _stopped_early(output_dir: Path) -> bool:
    with suppress(OSError):
        found = MetricRecords.of(read_metrics(output_dir / "metrics.jsonl"))
        return found.finished == "early_stopping"
    return False


def _total(asked: str, base: float) -> float:
    """The epochs of the whole run.

    A job restarted by fleetrun reads the same `+N`, and must not add it again.
    """
    if not asked.startswith("+"):
        return float(asked)
    total = math.ceil(base) + float(asked)
    noted = read_note(_NOTE_FILE)
    if noted is not None:
        return float(noted)
    if comm.local_rank() == 0:  # each host has a folder of its own
        write_note(_NOTE_FILE, total)
    return total
