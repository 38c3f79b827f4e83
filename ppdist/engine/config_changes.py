"""What may differ between the configuration of a run and that with which it goes on.

A key that is in neither table below changes what is learned from here on: rates, phases, order of
images, losses.  A run goes on with another value of such a key only when it is told to.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ppdist.config.base import Section, parse_config
from ppdist.engine.preflight import flattened
from ppdist.errors import CheckpointError, ConfigError

# A key, or the beginning of several -> why another value teaches the model nothing else.
FREE = {
    "output_dir": "where files lie",
    "device": "rounds otherwise, as another machine may",
    "data.root": "where files lie; the set itself is compared",
    "distill.teacher": "where files lie; the weights themselves are compared",
    "data.cache": "where decoded images are kept; batches are the same",
    "data.cache_dir": "where files lie",
    "data.workers": "batches do not depend on who prepares them",
    "data.worker_timeout_seconds": "when a worker counts as hung",
    "data.check_images": "what is looked at before training",
    "data.bad_images": "what to do about images that nobody could learn from anyway",
    "data.bad_images_limit": "when a run gives up",
    "model.pretrained": "read where a run begins; a checkpoint has weights of its own",
    "model.auto_anchor": "decided where a run begins; a checkpoint holds its anchors",
    "train.max_steps": "where to stop; the schedule spans train.epochs",
    "train.batch_size_per_card": "ranks x batch x micro-steps is compared instead",
    "train.accumulate_steps": "ranks x batch x micro-steps is compared instead",
    "train.total_batch": "ranks x batch x micro-steps is compared instead",
    "train.auto_batch_memory": "looked at where a run begins",
    "train.auto_batch_most": "looked at where a run begins",
    "train.cpu_convolutions": "rounds otherwise",
    "train.bad_steps_limit": "when a run that has diverged goes back",
    "distributed.bucket_mb": "how the same gradients travel",
    "distributed.shard_optimizer": "who holds the same moments",
    "distributed.timeout_seconds": "when a rank counts as lost",
    "distributed.hang_seconds": "when a rank counts as hung",
    "distributed.check_weights_every": "when to look",
    "checkpoint": "when and how many are written",
    "evaluate.batch_size_per_card": "scores do not depend on it",
    "evaluate.every_epochs": "when to look",
    "early_stopping": "when to end",
    "log": "what is said",
}
# What changes how well the same weights score: the best so far cannot be compared any more.  With
# data.sampling: difficulty the order of images goes by scores, and then these keys matter, too.
SCORES = {
    "data.val": "which images score",
    "evaluate.metric": "what the best is",
    "evaluate.rectangular": "the inputs that score",
    "nms": "which boxes score",
}
_BY_SCORES = (*SCORES, "evaluate.every_epochs")


class Change(NamedTuple):
    """One key, and its values as JSON; `absent` where it does not exist."""

    key: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.then} then, {self.now} now"


@dataclass
class Changes:
    """Keys with other values than in a checkpoint, by what follows."""

    free: list[Change] = field(default_factory=list)
    scores: list[Change] = field(default_factory=list)
    learned: list[Change] = field(default_factory=list)


def changes(then: Section, now: Section, by_scores: bool) -> Changes:
    """Compares two configurations key by key.

    Args: by_scores: the order of images goes by the scores of evaluations.
    """
    found = Changes()
    before, after = (dict(flattened("", each.model_dump(mode="json"))) for each in (then, now))
    for key in sorted(before | after):
        values = [json.dumps(each[key]) if key in each else "absent" for each in (before, after)]
        if values[0] == values[1]:
            continue
        change = Change(key, *values)
        if by_scores and _listed(key, _BY_SCORES):
            found.learned.append(change)
        elif _listed(key, tuple(FREE)):
            found.free.append(change)
        elif _listed(key, tuple(SCORES)):
            found.scores.append(change)
        else:
            found.learned.append(change)
    return found


def _listed(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def require_same(checkpoint: Path, config: Section, by_scores: bool, allow: bool) -> Changes:
    """What differs from the configuration in a checkpoint.

    Args:
        by_scores: see `changes`.
        allow: also what changes the training (`--resume-changed`).
    Raises: CheckpointError: keys differ that change what is learned; it lists them.
    """
    file = checkpoint / "config.yml"
    try:
        then = parse_config(file, (), type(config))
    except ConfigError as error:
        if allow:
            return Changes(learned=[Change("(all keys)", "not of this version", "as they are")])
        raise CheckpointError(
            f"--resume: {file} cannot be compared with the present configuration, another version "
            f"wrote it: {error}",
            code="config_of_other_version",
            fix="add --resume-changed to go on with the present one",
        ) from error
    found = changes(then, config, by_scores)
    if found.learned and not allow:
        lines = "\n".join(f"  {change}" for change in found.learned)
        raise CheckpointError(
            f"--resume: {checkpoint} was trained with other settings, which change what is "
            f"learned:\n{lines}\ntake the old values ({file}), or add --resume-changed: the run "
            "then goes on at the same step with the new values of all that is listed, so a "
            "schedule of another length goes on in its middle, at another rate",
            code="config_changed",
        )
    return found
