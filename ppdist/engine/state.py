"""What a checkpoint holds of a training run: taken from it, and given back to it.

What may differ between the configuration of a run and that with which it goes on.

A key that is in neither table below changes what is learned from here on: rates, phases, order of
images, losses.  A run goes on with another value of such a key only when it is told to.

Where a run goes on: which checkpoint, whether it fits, and how every rank gets it.

Rank 0 alone reads and writes checkpoints; the others receive what it has read.  So output_dir need
not be on a file system that hosts share, and `--resume` means what it means on rank 0's host.

A run has an id, drawn where it begins and handed on by its checkpoints.  Once the folder of its
checkpoints holds none of other runs, the id is noted with the job on every host (see
`process.JOB_DIR_VARIABLE`).  By that an attempt which fleetrun starts anew tells the checkpoints of
its own job from those that an earlier run has left in the same output_dir.
"""

import json
import logging
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle

from ppdist.common.errors import CheckpointError, ConfigError
from ppdist.common.logging import RunLog
from ppdist.common.process import JOB_DIR_VARIABLE
from ppdist.config.base import Section, parse_config
from ppdist.data.types import DetectionSet
from ppdist.distributed import comm
from ppdist.engine.checkpoint import (
    Checkpoint,
    Snapshot,
    holds_any,
    newest_valid,
    path_of,
    read_checkpoint,
    set_aside,
    unpacked,
)
from ppdist.engine.data import ClassScores, fingerprint
from ppdist.engine.distillation import Distillation
from ppdist.engine.early_stopping import LossCurves, Standing
from ppdist.engine.preflight import flattened
from ppdist.engine.schedule_setup import ScheduleSetup
from ppdist.engine.train_step import TrainStep
from ppdist.models.weights import digest_of_weights
from ppdist.optim.optimizer import load_optimizer_arrays, of_trained, optimizer_arrays


@dataclass
class Run:
    """What stays of a run from checkpoint to checkpoint, and tells it from others."""

    id: str  # drawn where it began
    images: int  # in the training set
    data: str  # a fingerprint of it
    schedule_steps: int
    bad_images: dict[int, str] = field(default_factory=dict)  # position in the set -> why
    teacher: str | None = None  # a fingerprint of its weights

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Run | None":
        """That of a checkpoint's state; None: the checkpoint is older than runs with an id."""
        if not state.get("run"):
            return None
        run = cls(**state["run"])
        run.bad_images = {int(index): why for index, why in run.bad_images.items()}
        return run


@dataclass
class TrainState:
    """Where the run is; what stands before `stop` goes into checkpoints."""

    step: int = 0
    best: float = -math.inf
    best_step: int = 0
    bad_steps: int = 0  # in a row
    evaluated_step: int = 0
    class_scores: ClassScores | None = None  # by the last evaluation
    run: Run | None = None
    returns: int = 0  # to earlier weights, each for half the learning rate; see engine/recovery.py
    most_images: int | None = None  # of a micro-batch, once a rank had no memory for all of it
    standing: Standing | None = None  # with early_stopping, since the first evaluation
    losses: LossCurves = field(default_factory=LossCurves)
    stop: bool = False  # this process was asked to stop

    def go_back_to(self, earlier: "TrainState") -> None:
        """Takes on where the run was; keeps what it has learned about itself since."""
        self.step, self.bad_steps = earlier.step, 0
        self.best, self.best_step = earlier.best, earlier.best_step
        self.evaluated_step, self.class_scores = earlier.evaluated_step, earlier.class_scores
        self.standing, self.losses = earlier.standing, earlier.losses


def capture_state(step: TrainStep, progress: TrainState, derived: ScheduleSetup) -> Snapshot:
    """Every rank calls it; what rank 0 does not know alone is brought together."""
    optimizer = optimizer_arrays(step.optimizer, step.model)
    groups = {
        "model": {key: _array(value) for key, value in step.model.state_dict().items()},
        "optimizer": optimizer if step.sharding is None else step.sharding.whole(optimizer),
    }
    residuals = step.averaging.state()
    if residuals:
        groups["averaging"] = residuals
    if step.ema is not None:
        groups["ema"] = step.ema.state()
    state = {
        "step": progress.step,
        "epoch": progress.step / derived.steps_per_epoch,
        "total_batch": derived.total_batch,
        "batch_size_per_card": derived.batch_size_per_card,
        "world": derived.world,
        "bucket_mb": comm.bucket_mb(),
        "best": progress.best if math.isfinite(progress.best) else None,
        "best_step": progress.best_step,
        "bad_steps": progress.bad_steps,
        "evaluated_step": progress.evaluated_step,
        "class_scores": progress.class_scores,
        "run": None if progress.run is None else asdict(progress.run),
        "returns": progress.returns,
        "most_images": progress.most_images,
        "standing": None if progress.standing is None else asdict(progress.standing),
        "losses": asdict(progress.losses),
        "ema_updates": step.ema.updates if step.ema is not None else 0,
        "scaler": _plain(step.scaler.state_dict()),
    }
    return Snapshot(progress.step, _apart(groups), state)


def restore_state(saved: Snapshot, step: TrainStep) -> tuple[TrainState, str]:
    """Gives a run what was taken from one with as many images in a step; every rank calls it.

    Returns: where the run is now; a warning, if something was lost or begun on the way.
    Raises: CheckpointError: it belongs to a model of another shape, or is not whole.
    """
    state = saved.state
    groups = _together(saved, step.distillation)
    arrays = groups["model"] or {}
    live = {key: list(value.shape) for key, value in step.model.state_dict().items()}
    there = {key: list(value.shape) for key, value in arrays.items()}
    if live != there:
        odd = sorted(key for key in live | there if live.get(key) != there.get(key))
        raise CheckpointError(
            f"the model of the checkpoint is another one: {odd[0]} is "
            f"{there.get(odd[0], 'absent')} there and {live.get(odd[0], 'absent')} here",
            code="checkpoint_of_other_config",
            fix="resume with the configuration the run was started with",
        )
    optimizer_state = groups["optimizer"]
    if optimizer_state is None:
        raise CheckpointError(
            f"the checkpoint of step {state['step']} has no optimizer.safetensors, without which "
            "the run cannot go on as it was",
            code="checkpoint_without_optimizer",
            fix="begin a new one with its weights: model.pretrained=PATH",
        )
    copy_into(step.model.state_dict(), arrays)
    optimizer_state, begun = of_trained(step.optimizer, step.model, optimizer_state)
    if step.sharding is not None:
        optimizer_state = step.sharding.mine(optimizer_state)
    load_optimizer_arrays(step.optimizer, step.model, optimizer_state)
    lost = step.averaging.load(saved.arrays("averaging") or {})
    if step.ema is not None:  # without an average in it, a new one starts at its weights
        step.ema.load(groups["ema"] or arrays, state["ema_updates"])
    if state["scaler"]:
        step.scaler.load_state_dict(state["scaler"])
    progress = TrainState(
        step=state["step"],
        best=-math.inf if state["best"] is None else state["best"],
        best_step=state["best_step"],
        bad_steps=state["bad_steps"],
        # Absent in checkpoints before there were these:
        evaluated_step=state.get("evaluated_step", state["step"]),
        class_scores=state.get("class_scores"),
        run=Run.of(state),
        returns=state.get("returns", 0),
        most_images=state.get("most_images"),
        standing=Standing(**state["standing"]) if state.get("standing") else None,
        losses=LossCurves(**state.get("losses", {})),
    )
    return progress, "; ".join(filter(None, [begun, lost]))


_Groups = dict[str, dict[str, np.ndarray]]
_OWN = "distillation."  # of the student's sublayer that only a teacher's lessons need


def _apart(groups: _Groups) -> _Groups:
    """What only distillation needs in a group of its own, `<group>/<key>`, so that weights and
    average are those of a model that was never taught, and its optimizer's state, too."""
    own: dict[str, np.ndarray] = {}
    kept: _Groups = {}
    for name in ("model", "optimizer", "ema"):
        for key, array in groups.get(name, {}).items():
            if key.startswith(_OWN):
                own[f"{name}/{key}"] = array
            else:
                kept.setdefault(name, {})[key] = array
    return groups | kept | ({"distillation": own} if own else {})


def _together(
    saved: Snapshot, distillation: Distillation | None
) -> dict[str, dict[str, np.ndarray] | None]:
    """The groups as they were before `_apart`; without a teacher, without what it needs.

    Raises: CheckpointError: there is a teacher now whose adapters the checkpoint lacks.
    """
    groups = {name: saved.arrays(name) for name in ("model", "optimizer", "ema")}
    if distillation is None or not distillation.adapts:
        return groups
    own = saved.arrays("distillation")
    if own is None:
        raise CheckpointError(
            f"the checkpoint of step {saved.state['step']} has no distillation.safetensors, which "
            "distill.features needs: it was trained without",
            code="checkpoint_without_distillation",
            fix=(
                "set distill.features: null, or begin a new run with its weights: "
                "model.pretrained=PATH"
            ),
        )
    for entry, array in own.items():
        name, _, key = entry.partition("/")
        there = groups[name]
        if there is not None:  # there may be no average
            groups[name] = there | {key: array}
    return groups


def copy_into(targets: dict[str, paddle.Tensor], sources: Mapping[str, Any]) -> None:
    """Overwrites tensors by arrays or tensors of the same keys and shapes, keeping their dtype."""
    for key, target in targets.items():
        source = sources[key]
        if not isinstance(source, paddle.Tensor):
            source = paddle.to_tensor(source)
        paddle.assign(source.astype(target.dtype), target)


def _array(tensor: paddle.Tensor) -> np.ndarray:
    """A float32 array of a tensor of low precision (numpy has no bfloat16), else one of its own."""
    low = tensor.dtype in (paddle.float16, paddle.bfloat16)
    return (tensor.astype("float32") if low else tensor).numpy()


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """GradScaler state as JSON holds it."""
    return {
        key: value.tolist() if hasattr(value, "tolist") else value for key, value in state.items()
    }


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
        if by_scores and _listed_config_changes(key, _BY_SCORES):
            found.learned.append(change)
        elif _listed_config_changes(key, tuple(FREE)):
            found.free.append(change)
        elif _listed_config_changes(key, tuple(SCORES)):
            found.scores.append(change)
        else:
            found.learned.append(change)
    return found


def _listed_config_changes(key: str, names: Sequence[str]) -> bool:
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


_LOGGER = logging.getLogger("ppdist")
AUTO = "auto"  # the word after --resume; a folder of this name is ./auto
_CHUNK = 16 << 20  # bytes of a message: gloo gives up on one that takes 30 s
_NOTE = "run.json"


@dataclass
class Start:
    """Where a run begins: anew, or after the step of a checkpoint.  The same on every rank."""

    job: str | None  # id of the run that earlier attempts of this job have begun
    snapshot: Snapshot | None = None  # None: anew
    path: Path | None = None  # of the checkpoint, on rank 0's host
    own: bool = False  # it lies in this run's output_dir
    rescored: str = ""  # settings by which the best so far was measured otherwise than it will be
    notes: list[str] = field(default_factory=list)  # for the log
    warnings: list[str] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        """Optimizer steps that this run has done; None: it begins only now."""
        if self.snapshot is not None:
            return self.snapshot.step
        return None if self.job is None else 0


def find_start(asked: Path | str | None, output_dir: Path, config: Any, changed: bool) -> Start:
    """Every rank calls it.

    An attempt that fleetrun starts anew goes on from the newest whole checkpoint that the job has
    written, whatever the command says; before there is one, and otherwise, the command holds.

    Args:
        asked: a checkpoint, or an output_dir for its newest whole one; None: begin anew; "auto":
            output_dir where that holds checkpoints, whole or not, and else anew.
        config: the ExperimentConfig of this run.
        changed: go on also with settings that change what is learned (`--resume-changed`).
    Raises: CheckpointError on rank 0, UserError on the others: there is none, it is damaged, or
        it was trained with other settings.
    """
    held: dict[str, bytes] = {}
    job = job_run()
    folder = output_dir / "checkpoints"

    def look() -> dict[str, Any] | None:
        found, passed_over = _of_job(job, folder)
        if found is None and asked is not None and (asked != AUTO or holds_any(folder)):
            found, passed_over = _asked_for(output_dir if asked == AUTO else Path(asked))
        if found is None:
            return None
        by_scores = config.data.sampling.name == "difficulty"
        differing = require_same(found.path, config, by_scores, changed)
        for name, data in found.files.items():
            if name.endswith(".safetensors"):
                held[Path(name).stem] = data
        return {
            "path": f"{found.path}",
            "state": found.state,
            "own": found.path.resolve().parent == folder.resolve(),
            "sizes": {name: len(data) for name, data in held.items()},
            "rescored": "; ".join(map(str, differing.scores)),
            "notes": _notes(differing, found),
            "warnings": [f"passed over: {reason}" for reason in passed_over] + _warnings(differing),
        }

    head = comm.run_on_main(look)
    if head is None:
        return Start(job)
    state = head["state"]
    if state["world"] == comm.world_size():
        comm.resume_bucket(state.get("bucket_mb"))
    path = Path(head["path"])
    groups = {
        name: unpacked(_received(held.pop(name, b""), size), path / f"{name}.safetensors")
        for name, size in head["sizes"].items()
    }
    return Start(
        job=job,
        snapshot=Snapshot(state["step"], groups, state),
        path=path,
        own=head["own"],
        rescored=head["rescored"],
        notes=head["notes"],
        warnings=head["warnings"],
    )


def _asked_for(asked: Path) -> tuple[Checkpoint, list[str]]:
    """The checkpoint `--resume` means, and why newer ones were passed over."""
    if (asked / "manifest.json").exists():
        return read_checkpoint(asked.resolve()), []
    checkpoint, reasons = newest_valid(asked / "checkpoints")
    if checkpoint is not None:
        return checkpoint, reasons
    found = f"; passed over: {'; '.join(reasons)}" if reasons else ""
    where = f" on rank 0's host {comm.host()}" if comm.world_size() > comm.local_size() else ""
    raise CheckpointError(
        f"no checkpoint in {asked / 'checkpoints'}{where}{found}",
        code="checkpoint_missing",
        where="--resume",
        fix="give --resume a checkpoint directory, or leave it out to start anew",
    )


def _of_job(run: str | None, folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a run, and why newer ones were passed over."""
    if run is None:
        return None, []
    checkpoint, reasons = newest_valid(folder)
    of = None if checkpoint is None else Run.of(checkpoint.state)
    return (checkpoint, reasons) if of is not None and of.id == run else (None, [])


def _notes(found: Changes, checkpoint: Checkpoint) -> list[str]:
    notes, world = [], checkpoint.state["world"]
    if world != comm.world_size():
        notes.append(f"ranks: {world} then, {comm.world_size()} now; each step has the same images")
    if found.free:
        notes.append(f"other settings, which teach it nothing else: {_listed(found.free)}")
    return notes


def _warnings(found: Changes) -> list[str]:
    warnings = []
    if found.learned:
        warnings.append(f"--resume-changed: from here on it is another: {_listed(found.learned)}")
    if found.scores:
        warnings.append(
            f"scores are measured otherwise ({_listed(found.scores)}): best begins anew"
        )
    return warnings


def _listed(found: Sequence[Change]) -> str:
    return "; ".join(map(str, found))


def _received(data: bytes, size: int) -> bytes:
    """A file that rank 0 holds; every rank calls it."""
    if comm.world_size() > 1:
        comm.barrier()  # each takes its time to unpack the file before, and gloo only 30 s
        parts = []
        for first in range(0, size, _CHUNK):
            part = np.zeros(min(_CHUNK, size - first), np.uint8)
            if comm.is_main():
                part[:] = np.frombuffer(data, np.uint8, len(part), first)
            tensor = paddle.to_tensor(part)
            comm.broadcast_tensors([tensor], 0)
            if not comm.is_main():
                parts.append(tensor.numpy().tobytes())
        data = data or b"".join(parts)
    return data


def settle_run(
    start: Start, derived: ScheduleSetup, train_set: DetectionSet, config: Any, changed: bool
) -> Run:
    """What is to stay of this run, after a look whether the steps of the checkpoint are its steps;
    every rank calls it.

    Args: config, changed: see `find_start`.
    Raises: CheckpointError: another number of images in a step, or other images or another teacher
        and not `changed`.
    """
    images, data = len(train_set.records), fingerprint(train_set, config.data.root)
    now, before = Run("", images, data, derived.schedule_steps), None
    if config.distill is not None:
        now.teacher = digest_of_weights(Path(config.distill.teacher))
    if start.snapshot is not None:
        _require_steps(start, start.snapshot.state["total_batch"], derived.total_batch)
        before = Run.of(start.snapshot.state)
    if before is None:  # it begins, or was written before runs had an id
        now.id = comm.run_on_main(lambda: uuid.uuid4().hex)
        return now
    now.id, now.bad_images = before.id, before.bad_images
    if before.data != data:
        same = " (others)" if before.images == images else ""
        text = f"another training set: {before.images} images then, {images}{same} now"
        if not changed:
            raise CheckpointError(
                f"it was trained on {text}",
                code="checkpoint_of_other_data",
                where=f"{start.path}",
                fix=(
                    "give data.train the same files, or add --resume-changed: epochs then are "
                    "those of the new set, in an order of its own"
                ),
            )
        start.warnings.append(f"--resume-changed: {text}")
        now.bad_images = {}
    if before.teacher and now.teacher and before.teacher != now.teacher:
        if not changed:
            raise CheckpointError(
                f"it learned from another teacher than is now in {config.distill.teacher} (a run "
                "goes on, and its best is another one)",
                code="checkpoint_of_other_teacher",
                where=f"{start.path}",
                fix="give distill.teacher the checkpoint folder it was, or add --resume-changed",
            )
        start.warnings.append("--resume-changed: from here on another teacher teaches")
    if before.schedule_steps != derived.schedule_steps:
        start.warnings.append(
            f"the schedule goes on at step {start.step} of {derived.schedule_steps}; it was one of "
            f"{before.schedule_steps}"
        )
    return now


def _require_steps(start: Start, then: int, now: int) -> None:
    """Raises: CheckpointError: a step has another number of images than in the checkpoint."""
    if then != now:
        raise CheckpointError(
            f"its steps are of {then} images, those of this run of {now}",
            code="resume_batch_differs",
            where=f"{start.path}",
            fix=(
                "change train.accumulate_steps or train.batch_size_per_card so that ranks x batch "
                "x micro-steps is the same, or begin a new run with its weights: "
                f"model.pretrained={start.path}"
            ),
        )


def own_folder(output_dir: Path, start: Start, run: Run) -> None:
    """Leaves in the folder of checkpoints this run's alone, and notes that they are; every rank
    calls it.  Raises: CheckpointError: the disk refused.
    """
    folder = output_dir / "checkpoints"
    snapshot = start.snapshot
    kept = snapshot.step if snapshot is not None and start.own else 0

    def clear() -> list[str]:
        aside = set_aside(folder, kept)
        said = [] if snapshot is None or start.rescored else _missing_best(folder, snapshot.state)
        if aside is not None:
            what = "beyond the step resumed from, or damaged," if kept else "of another run"
            said.append(f"checkpoints {what} are now in {aside}")
        return said

    start.warnings += comm.run_on_main(clear)
    note = _note()
    if note is not None:
        try:
            draft = note.with_suffix(".tmp")
            draft.write_text(json.dumps({"id": run.id}), encoding="utf-8")
            draft.replace(note)
        except OSError as error:
            _LOGGER.warning("a restart by fleetrun will begin this run anew: %s", error)


def _missing_best(folder: Path, state: dict[str, Any]) -> list[str]:
    step = state["best_step"]
    if not step or path_of(folder, step).is_dir():
        return []
    return [
        f"the best so far, {state['best']:.4f} after step {step}, is not in {folder}: best appears "
        f"there with the first that is better"
    ]


def tell(start: Start, derived: ScheduleSetup, log: RunLog) -> None:
    """Says where the run goes on, and whether anything is left of it."""
    if start.snapshot is None:
        return
    log.info(f"resumed from {start.path} after step {start.step}")
    for note in start.notes:
        log.info(note)
    if start.snapshot.step >= derived.total_steps:
        log.info(
            f"nothing is left to train: this run ends after step {derived.total_steps} "
            f"(train.max_steps, train.epochs)"
        )


def job_run() -> str | None:
    """The run that earlier attempts of this job have begun, on whichever host; every rank calls
    it.  None: none has come so far, or there is no fleetrun."""
    note = _note()
    mine = _id_in(note) if note is not None else None
    return next((each for each in comm.exchange(mine) if each), None)


def _id_in(note: Path) -> str | None:
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError):  # there is none; it appears whole or not at all
        return None


def _note() -> Path | None:
    """Where the first rank of a host keeps it."""
    folder = os.environ.get(JOB_DIR_VARIABLE)
    first = comm.local_rank() == 0
    return Path(folder) / _NOTE if folder and first and Path(folder).is_dir() else None
