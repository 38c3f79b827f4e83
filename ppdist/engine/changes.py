"""Changes of settings between a checkpoint and the run that resumes from it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ppdist.common.errors import CheckpointError, ConfigError
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.parse import flattened, on_resume, parse_config
from ppdist.config.section import OnResume, Section
from ppdist.engine.continuation import Continuation


class Change(NamedTuple):
    """A changed key, with its previous and present values as JSON; `absent` stands for no value."""

    key: str
    previous: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.previous} then, {self.now} now"


@dataclass
class Changes:
    """Keys that differ from a checkpoint's, grouped by consequence."""

    free: list[Change] = field(default_factory=list)  # no consequence
    scores: list[Change] = field(default_factory=list)  # scores are no longer comparable
    learned: list[Change] = field(default_factory=list)  # training changes
    step: list[Change] = field(default_factory=list)  # the resulting micro-batches change the step


def changes(previous: Section, now: Section, by_scores: bool) -> Changes:
    """Compares two configurations key by key, and groups the differences by consequence.

    Args: by_scores: True if the order of images depends on evaluation scores, so that settings that
        change scores change training as well.
    """
    result = Changes()
    previous_keys, present_keys = flattened(previous), flattened(now)
    for key in sorted(previous_keys | present_keys):
        # Either version may lack a key: the checkpoint may be older, or of another model.
        values = [
            json.dumps(keys[key]) if key in keys else "absent"
            for keys in (previous_keys, present_keys)
        ]
        if values[0] == values[1]:
            continue
        note = on_resume(now, key) or on_resume(previous, key)
        if note is OnResume.STEP:
            kind = result.step
        elif note is None or (by_scores and note is not OnResume.FREE):
            kind = result.learned
        else:
            kind = result.scores if note is OnResume.SCORES else result.free
        kind.append(Change(key, *values))
    return result


def require_same_settings(
    checkpoint: Path, config: ExperimentConfig, continuation: Continuation
) -> Changes:
    """Checks that a configuration trains in the same way as a checkpoint's.

    Returns: the differences, if they are allowed.
    Raises: CheckpointError: keys that affect training differ; the message lists them.
    """
    file = checkpoint / "config.yml"
    try:
        previous = parse_config(file, (), type(config))
    except ConfigError as error:
        if continuation.changed:
            return Changes(learned=[Change("(all keys)", "not of this version", "as they are")])
        raise CheckpointError(
            f"--resume: {file} cannot be compared with the current configuration, because another "
            f"version wrote it: {error}",
            code="config_of_other_version",
            fix="add --resume-changed to resume with the current one",
        ) from error
    result = changes(previous, config, config.data.sampling.name == "difficulty")
    if continuation.extends:
        length = ("train.epochs", "train.steps")
        result.learned = [change for change in result.learned if change.key not in length]
    if result.learned and not continuation.changed:
        lines = "\n".join(f"  {change}" for change in result.learned)
        raise CheckpointError(
            f"--resume: {checkpoint} was trained with other settings that affect training:\n"
            f"{lines}\n"
            f"restore the old values ({file}), or add --resume-changed: the run then continues at "
            "the same step with all new values, and the learning rate jumps if the schedule has "
            "another length; to change only the length: `ppdist train --resume RUN --epochs N` "
            "(--steps N where the length is in steps)",
            code="config_changed",
        )
    return result


def join_changes(rows: Sequence[Change]) -> str:
    """Joins changes into one line of text."""
    return "; ".join(map(str, rows))
