"""TrainState: everything a run resumes from, captured, restored, compared.

    fit:      capture_state -> checkpoint
    --resume: find_start -> validate_resume -> prepare_output_dir -> restore_state

Only rank 0 reads and writes checkpoints, and broadcasts what it has read.  So output_dir need not
be on a shared file system, and `--resume` refers to rank 0's host, the first of --ips.

A run has a random id, kept in its checkpoints.  Once its checkpoint folder holds no other run's,
every host records the id with the job (see `job.JOB_DIR_VARIABLE`).  So an attempt restarted by
fleetrun can tell its own job's checkpoints from those of an earlier run in the same output_dir.
Rank 0's host also records the last saved step, so that the run does not start over if the file
system of its checkpoints is briefly unavailable.
"""

import json
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from pydantic import BaseModel, Field, field_serializer, field_validator

from ppdist.common.drafts import remove_drafts
from ppdist.common.errors import CheckpointError, ConfigError, StorageError
from ppdist.common.files import require_no_link
from ppdist.common.job import RUN_NOTE
from ppdist.common.run_log import RunLog
from ppdist.config.parse import flattened, on_resume, parse_config
from ppdist.config.section import OnResume, Section
from ppdist.config.train import MicroBatches, TrainConfig
from ppdist.data.types import DetectionSet
from ppdist.distributed import comm
from ppdist.engine.checkpoint import (
    DRAFTS_OF_A_RUN,
    Checkpoint,
    Snapshot,
    newest_step,
    newest_valid,
    path_of,
    read_checkpoint,
    set_aside,
    set_run_aside,
    unpacked,
)
from ppdist.engine.continuation import AUTO, Continuation, read_note, write_note
from ppdist.engine.data import fingerprint
from ppdist.engine.early_stopping import EarlyStoppingState, LossCurves
from ppdist.engine.output_dirs import OutputDirs
from ppdist.engine.preflight import digest_of_package
from ppdist.engine.schedule_setup import ScheduleSetup, extension_note
from ppdist.engine.step_sums import StepSums
from ppdist.engine.train_step import TrainStep
from ppdist.models.weights import digest_of_weights
from ppdist.storage.retry import unavailable

_LOGGER = logging.getLogger("ppdist")
_CHUNK = 16 << 20  # bytes per message: gloo times out after 30 s
_LR_FACTOR = 0.5  # of each rollback
_OWN = "distillation."  # key prefix of the student's sublayer used only by distillation
_Groups = dict[str, dict[str, np.ndarray]]


class Run(BaseModel, extra="forbid"):
    """Identity of a run, the same in all of its checkpoints."""

    id: str = ""  # drawn at its start
    images: int  # in the training set
    data: str  # fingerprint of its annotations
    pixels: str = ""  # of its images, as far as they were checked; "": not known
    schedule_steps: int
    bad_images: dict[int, str] = {}  # position in the set -> why
    teacher: str | None = None  # fingerprint of its weights


class TrainState(BaseModel, populate_by_name=True):
    """Position of a run, saved in state.json of its checkpoints.

    Some fields have other names there (alias): renaming one would lose older checkpoints.
    """

    step: int = Field(default=0, ge=0)
    best: float = -math.inf  # null in JSON
    best_step: int = Field(default=0, ge=0)
    bad_steps: int = 0  # in a row
    evaluated_step: int = 0
    class_scores: list[float | None] | None = None  # from the last evaluation
    best_f1_threshold: float | None = Field(default=None, ge=0, le=1)  # ditto
    run: Run | None = None  # None: the checkpoint predates run ids
    # Each halves the learning rate; see `lr_factor`.
    rollbacks: int = Field(default=0, alias="returns")
    # Images; set once a rank ran out of memory for a whole micro-batch.
    max_micro_batch: int | None = Field(default=None, gt=0, alias="most_images")
    # None: not configured, or no evaluation yet.
    early_stopping: EarlyStoppingState | None = Field(default=None, alias="standing")
    losses: LossCurves = Field(default_factory=LossCurves)
    # Of the epoch, and of the steps since the last record; None: the checkpoint predates them.
    epoch_sums: StepSums | None = None
    record_sums: StepSums | None = None

    @property
    def lr_factor(self) -> float:
        """Factor of the learning rate after the rollbacks so far."""
        return _LR_FACTOR**self.rollbacks

    @field_validator("best", mode="before")
    @classmethod
    def _best_of_json(cls, value: Any) -> Any:
        return -math.inf if value is None else value

    @field_serializer("best")
    def _json_of_best(self, value: float) -> float | None:
        return value if math.isfinite(value) else None

    def roll_back_to(self, earlier: "TrainState") -> None:
        """Returns to an earlier state; keeps rollbacks, micro-batch and identity."""
        for name in TrainState.model_fields.keys() - _KEPT_IN_ROLLBACK:
            setattr(self, name, getattr(earlier, name))
        self.bad_steps = 0


_KEPT_IN_ROLLBACK = {"rollbacks", "max_micro_batch", "run"}


class _SavedState(TrainState):
    """state.json: a TrainState, and facts about the attempt that wrote it."""

    epoch: float | None = None
    total_batch: int = Field(gt=0)
    batch_size_per_card: int | None = Field(default=None, gt=0)
    # None: of earlier versions, see `_with_micro_batches`.
    micro_batch: int | None = Field(default=None, gt=0)
    sync_bn: bool | None = None
    world: int = Field(gt=0)
    bucket_mb: int | None = None  # of earlier versions
    ema_updates: int = 0
    ema_restarted: int | None = None
    scaler: dict[str, Any]
    code: str | None = None


def capture_state(step: TrainStep, state: TrainState, schedule: ScheduleSetup) -> Snapshot:
    """A copy of everything a run resumes from.  Collective."""
    groups = {
        "model": {key: _array(value) for key, value in step.model.state_dict().items()},
        "optimizer": step.optimizer.state(),
    }
    residuals = step.exchange.state()
    if residuals:
        groups["averaging"] = residuals
    about = {
        "epoch": state.step / schedule.steps_per_epoch,
        **_made_of(schedule),
        "scaler": step.precision.state(),
        "code": digest_of_package(),
    }
    for policy in step.policies:
        arrays, facts = policy.state()
        groups |= arrays
        about |= facts
    saved = _SavedState(**{**dict(state), **about}).model_dump(mode="json", by_alias=True)
    return Snapshot(state.step, _without_distillation(groups), saved)


def _made_of(schedule: ScheduleSetup) -> dict[str, Any]:
    """What steps are made of; see `resumed_micro_batches`."""
    return {
        "total_batch": schedule.total_batch,
        "batch_size_per_card": schedule.batch_size_per_card,
        "micro_batch": schedule.batches.images,
        "sync_bn": schedule.batches.spread,
        "world": schedule.world,
    }


def restore_state(saved: Snapshot, step: TrainStep) -> tuple[TrainState, str]:
    """Restores a run from a checkpoint.  Collective.

    The checkpoint must have the same total batch.
    Returns: the restored state; a warning, if something was lost or reset.
    Raises: CheckpointError: its model has other shapes, or it is incomplete.
    """
    state = saved.state
    adapters = getattr(step.model, "distillation", None)
    groups = _with_distillation(saved, adapters is not None and bool(adapters.parameters()))
    arrays = groups["model"] or {}
    live = {key: list(value.shape) for key, value in step.model.state_dict().items()}
    there = {key: list(value.shape) for key, value in arrays.items()}
    if live != there:
        odd = sorted(key for key in live | there if live.get(key) != there.get(key))
        raise CheckpointError(
            f"the checkpoint does not fit this model: {odd[0]} has shape "
            f"{there.get(odd[0], 'absent')} there and {live.get(odd[0], 'absent')} here",
            code="checkpoint_of_other_config",
            fix="resume with the configuration the run was started with",
        )
    optimizer_state = groups["optimizer"]
    if optimizer_state is None:
        raise CheckpointError(
            f"the checkpoint of step {state['step']} has no optimizer.safetensors, so the run "
            "cannot resume",
            code="checkpoint_without_optimizer",
            fix="start a new run with its weights: model.pretrained=PATH",
        )
    copy_into(step.model.state_dict(), arrays)
    begun = step.optimizer.load(optimizer_state)
    lost = step.exchange.load(saved.groups.get("averaging") or {})
    for policy in step.policies:
        policy.load(groups, state)
    step.precision.load(state["scaler"])
    step.statistics.forget()
    # Older versions did not record evaluations; without this, one would be repeated.
    restored = _SavedState.model_validate({"evaluated_step": saved.step} | state)
    return restored, "; ".join(filter(None, [begun, lost]))


def _without_distillation(groups: _Groups) -> _Groups:
    """Moves arrays used only by distillation into their own group, as `<group>/<key>`.

    The other groups then equal those of a model without a teacher.
    """
    own: dict[str, np.ndarray] = {}
    kept: _Groups = {}
    for name in ("model", "optimizer", "ema"):
        for key, array in groups.get(name, {}).items():
            if key.startswith(_OWN):
                own[f"{name}/{key}"] = array
            else:
                kept.setdefault(name, {})[key] = array
    return groups | kept | ({"distillation": own} if own else {})


def _with_distillation(saved: Snapshot, adapts: bool) -> dict[str, dict[str, np.ndarray] | None]:
    """Undoes `_without_distillation`; without a teacher, omits its group.

    Args: adapts: the model has adapters that learn.
    Raises: CheckpointError: the checkpoint lacks the adapters of the current teacher.
    """
    groups = {name: saved.groups.get(name) for name in ("model", "optimizer", "ema")}
    if not adapts:
        return groups
    own = saved.groups.get("distillation")
    if own is None:
        raise CheckpointError(
            f"the checkpoint of step {saved.state['step']} was trained without distill.features: "
            "it has no distillation.safetensors",
            code="checkpoint_without_distillation",
            fix=(
                "set distill.features: null, or start a new run with its weights: "
                "model.pretrained=PATH"
            ),
        )
    for entry, array in own.items():
        name, _, key = entry.partition("/")
        there = groups[name]
        if there is not None:  # there may be no EMA
            groups[name] = there | {key: array}
    return groups


def copy_into(targets: dict[str, paddle.Tensor], sources: Mapping[str, Any]) -> None:
    """Overwrites tensors with arrays or tensors of the same keys; keeps dtypes."""
    for key, target in targets.items():
        source = sources[key]
        if not isinstance(source, paddle.Tensor):
            source = paddle.to_tensor(source)
        paddle.assign(source.astype(target.dtype), target)


def _array(tensor: paddle.Tensor) -> np.ndarray:
    """Converts to numpy; low precision becomes float32, as numpy has no bfloat16."""
    low = tensor.dtype in (paddle.float16, paddle.bfloat16)
    return (tensor.astype("float32") if low else tensor).numpy()


class Change(NamedTuple):
    """A changed key, and both values as JSON; `absent` if missing."""

    key: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.then} then, {self.now} now"


@dataclass
class Changes:
    """Keys that differ from a checkpoint, by consequence."""

    free: list[Change] = field(default_factory=list)  # none
    scores: list[Change] = field(default_factory=list)  # scores are no longer comparable
    learned: list[Change] = field(default_factory=list)  # training changes
    step: list[Change] = field(default_factory=list)  # by the micro-batches that come of them


def changes(then: Section, now: Section, by_scores: bool) -> Changes:
    """Compares two configurations key by key.

    Args: by_scores: the order of images follows the scores of evaluations.
    """
    found = Changes()
    before, after = flattened(then), flattened(now)
    for key in sorted(before | after):
        values = [json.dumps(each[key]) if key in each else "absent" for each in (before, after)]
        if values[0] == values[1]:
            continue
        note = on_resume(now, key) or on_resume(then, key)
        if note is OnResume.STEP:
            kind = found.step
        elif note is None or (by_scores and note is not OnResume.FREE):
            kind = found.learned
        else:
            kind = found.scores if note is OnResume.SCORES else found.free
        kind.append(Change(key, *values))
    return found


def require_same_settings(
    checkpoint: Path, config: Section, by_scores: bool, asked: Continuation
) -> Changes:
    """Compares the configuration with that of a checkpoint.

    Args: by_scores: see `changes`.
    Raises: CheckpointError: keys that affect training differ; it lists them.
    """
    file = checkpoint / "config.yml"
    try:
        then = parse_config(file, (), type(config))
    except ConfigError as error:
        if asked.changed:
            return Changes(learned=[Change("(all keys)", "not of this version", "as they are")])
        raise CheckpointError(
            f"--resume: {file} cannot be compared with the current configuration, because another "
            f"version wrote it: {error}",
            code="config_of_other_version",
            fix="add --resume-changed to resume with the current one",
        ) from error
    found = changes(then, config, by_scores)
    if asked.extends:
        found.learned = [each for each in found.learned if each.key != "train.epochs"]
    if found.learned and not asked.changed:
        lines = "\n".join(f"  {change}" for change in found.learned)
        raise CheckpointError(
            f"--resume: {checkpoint} was trained with other settings that affect training:\n"
            f"{lines}\n"
            f"restore the old values ({file}), or add --resume-changed: the run then continues at "
            "the same step with all new values, and the learning rate jumps if the schedule has "
            "another length; to change only the epochs: `ppdist train --resume RUN --epochs N`",
            code="config_changed",
        )
    return found


@dataclass
class Start:
    """Where a run starts; the same on every rank."""

    asked: Continuation
    job: str | None  # id of the run that earlier attempts of this job started
    folder: Path  # of the run's checkpoints
    dirs: OutputDirs
    snapshot: Snapshot | None = None  # None: a new run
    path: Path | None = None  # of the checkpoint, on rank 0's host
    own: bool = False  # it lies in `folder`
    rescored: str = ""  # changed settings that make the best score so far incomparable
    of_step: list[Change] = field(default_factory=list)  # changed settings, see OnResume.STEP
    notes: list[str] = field(default_factory=list)  # for the log
    warnings: list[str] = field(default_factory=list)
    begun: dict[str, Any] = field(default_factory=dict)  # see `made_of`; by an attempt of the job

    @property
    def made_of(self) -> Mapping[str, Any]:
        """What steps were made of until now; {}: a new job.

        Also known if nothing was saved.
        """
        return self.begun if self.snapshot is None else self.snapshot.state

    @property
    def step(self) -> int | None:
        """Optimizer steps done so far; None: a new run."""
        if self.snapshot is not None:
            return self.snapshot.step
        return None if self.job is None else 0


def find_start(asked: Continuation, dirs: OutputDirs, config: Any) -> Start:
    """Finds and reads the checkpoint to resume from.  Collective.

    An attempt restarted by fleetrun resumes from the newest valid checkpoint of its job, whatever
    the command says; until one exists, the command decides.

    Args: config: the ExperimentConfig of this run.
    Raises: CheckpointError on rank 0, UserError on the others: there is none, it is damaged, or
        it was trained with other settings; with AUTO, the run has checkpoints on a host that is
        not here.
    """
    output_dir = dirs.folder
    held: dict[str, bytes] = {}
    note = _note_of_job()
    job = None if note is None else note.id
    folder = output_dir / "checkpoints"

    def look() -> dict[str, Any] | None:
        found, skipped = _of_job(job, folder)
        if note is not None and _lacks(note, found, folder):
            found, skipped = _wait_for(note, folder, config.distributed.timeout_seconds / 2)
        source = asked.source
        if found is None and source is not None and (source != AUTO or newest_step(folder)):
            found, skipped = _asked_for(output_dir if source == AUTO else Path(source))
        if found is None:
            return None
        try:
            _SavedState.model_validate_json(found.files["state.json"], strict=True)
        except ValueError as error:
            raise CheckpointError(
                f"state.json is malformed: {error}",
                code="checkpoint_damaged",
                where=f"{found.path}",
            ) from error
        by_scores = config.data.sampling.name == "difficulty"
        differing = require_same_settings(found.path, config, by_scores, asked)
        notes, warnings = _told(differing, found, asked)
        for name, data in found.files.items():
            if name.endswith(".safetensors"):
                held[Path(name).stem] = data
        flipped = any(change.key == "train.sync_bn" for change in differing.learned)
        state = _with_micro_batches(found.state, config.train.sync_bn != flipped)
        return {
            "path": f"{found.path}",
            "state": state | ({"standing": None} if asked.extends else {}),
            "own": found.path.resolve().parent == folder.resolve(),
            "sizes": {name: len(data) for name, data in held.items()},
            "rescored": _listed(differing.scores),
            "of_step": differing.step,
            "notes": notes,
            "warnings": [*(f"skipped checkpoint {reason}" for reason in skipped), *warnings],
        }

    head = comm.run_on_main(look)
    if head is None:
        if asked.source == AUTO:
            dirs.require_no_other()
        begun = {} if note is None else note.made_of
        return Start(asked, job, folder, dirs, begun=begun)
    state = head["state"]
    path = Path(head["path"])
    groups = {
        name: unpacked(_broadcast_file(held.pop(name, b""), size), path / f"{name}.safetensors")
        for name, size in head["sizes"].items()
    }
    return Start(
        asked=asked,
        job=job,
        folder=folder,
        dirs=dirs,
        snapshot=Snapshot(state["step"], groups, state),
        path=path,
        own=head["own"],
        rescored=head["rescored"],
        of_step=[Change(*each) for each in head["of_step"]],
        notes=head["notes"],
        warnings=head["warnings"],
    )


def _asked_for(asked: Path) -> tuple[Checkpoint, list[str]]:
    """The checkpoint `--resume` refers to, and why newer ones were skipped."""
    if (asked / "manifest.json").exists():
        return read_checkpoint(asked.resolve()), []
    folder = asked / "checkpoints"
    checkpoint, reasons = newest_valid(folder)
    if checkpoint is not None:
        return checkpoint, reasons
    skipped = f"; skipped: {'; '.join(reasons)}" if reasons else ""
    where = f" on rank 0's host {comm.host()}" if comm.world_size() > comm.local_size() else ""
    raise CheckpointError(
        f"no valid checkpoint in {folder}{where}{skipped}",
        code="checkpoint_missing",
        where="--resume",
        fix="give --resume a checkpoint folder or an output_dir, or omit it to start a new run",
    )


def _of_job(run: str | None, folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Newest valid checkpoint of a run, and why newer ones were skipped."""
    if run is None:
        return None, []
    checkpoint, reasons = newest_valid(folder)
    of = (checkpoint.state.get("run") or {}) if checkpoint is not None else {}
    return (checkpoint, reasons) if of.get("id") == run else (None, [])


def _lacks(note: "JobNote", found: Checkpoint | None, folder: Path) -> bool:
    """Whether a job's newest checkpoint is missing altogether, not just damaged.

    It may be on another disk than the one that was found.
    """
    if found is not None and found.state["step"] >= note.saved:
        return False
    return note.saved > 0 and not path_of(folder, note.saved).is_dir()


def _wait_for(note: "JobNote", folder: Path, seconds: float) -> tuple[Checkpoint, list[str]]:
    """Waits for the newest valid checkpoint of a job.

    Its file system may mount late.

    Returns: an older one, if the newest does not appear within `seconds`.
    Raises: CheckpointError: none appears.
    """
    expected = f"the checkpoint of step {note.saved} that an earlier attempt of this job wrote"
    found: Checkpoint | None = None
    skipped: list[str] = []

    def look() -> None:
        nonlocal found, skipped
        found, skipped = _of_job(note.id, folder)
        if _lacks(note, found, folder):
            raise unavailable(f"{expected} is not there", f"{folder}")

    late = []
    try:
        comm.once_there(look, seconds)
    except StorageError:
        why = "which an earlier attempt of this job wrote: it is not there after"
        late = [f"of step {note.saved} in {folder}, {why} {seconds:.0f} s"]
    if found is not None:
        return found, [*skipped, *late]
    raise CheckpointError(
        f"found neither {expected} nor an older one after {seconds:.0f} s",
        code="checkpoint_unreachable",
        where=f"{folder}",
        fix="check that its file system is mounted, then rerun with --resume",
    )


def _told(changed: Changes, found: Checkpoint, asked: Continuation) -> tuple[list[str], list[str]]:
    """Notes and warnings about differences from a checkpoint."""
    notes, warnings = list[str](), list[str]()
    if changed.free:
        notes.append(f"changed settings that do not affect training: {_listed(changed.free)}")
    if changed.learned:
        warnings.append(
            f"--resume-changed: changed settings that affect training: {_listed(changed.learned)}"
        )
    if changed.scores:
        warnings.append(
            f"scores are no longer comparable ({_listed(changed.scores)}): best is reset"
        )
    code = digest_of_package()
    if not asked.changed and found.state.get("code", code) != code:  # older ones have no digest
        warnings.append(
            f"{found.path} was written by another version of ppdist: results may differ in the "
            f"last digits from here on (--resume-changed silences this)"
        )
    return notes, warnings


def _listed(found: Sequence[Change]) -> str:
    return "; ".join(map(str, found))


def _broadcast_file(data: bytes, size: int) -> bytes:
    """Broadcasts the content of a file from rank 0.  Collective."""
    if comm.world_size() > 1:
        comm.barrier()  # ranks may still unpack the previous file, and gloo waits only 30 s
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


def _with_micro_batches(state: dict[str, Any], sync_bn: bool) -> dict[str, Any]:
    """A checkpoint's state with its micro-batches, which older versions did not record."""
    batch = state.get("batch_size_per_card") or state["total_batch"] // state["world"]
    group = batch * state["world"] if sync_bn else batch
    known = {key: value for key, value in state.items() if value is not None}
    return {"batch_size_per_card": batch, "micro_batch": group, "sync_bn": sync_bn} | known


def resumed_micro_batches(start: Start, train: TrainConfig, follows: bool) -> MicroBatches:
    """Micro-batches of a resumed run: those it had, on any ranks.

    Others only where the configuration, compared with that of the checkpoint, asks for them.

    Args:
        train: of this run, with a number for its batch.
        follows: the number follows from memory or from the data, so it asks for nothing.
    Raises: CheckpointError: it has others, without `start.asked.changed`; ConfigError: they are not
        to be had.
    """
    state, world = start.made_of, comm.world_size()
    then = MicroBatches(state["total_batch"], state["micro_batch"], state["sync_bn"])
    typed = [] if follows else [change.key.rpartition(".")[2] for change in start.of_step]
    total = train.total_batch or then.total_batch
    if train.total_batch is None and {"batch_size_per_card", "accumulate_steps"} & {*typed}:
        total = world * train.images_per_card * train.accumulate_steps
    now = replace(then, total_batch=total)
    if "batch_size_per_card" in typed or train.sync_bn != then.spread or total % then.images:
        now = train.model_copy(update={"total_batch": total}).micro_batches(world)
    if (now.total_batch, now.images) == (then.total_batch, then.images):
        if world != state["world"]:
            start.notes.append(
                f"ranks: {state['world']} then, {world} now; each step has the same images and "
                f"micro-batches: {now.told(world)}"
            )
        if typed:
            same = "changed settings that do not affect training, as the micro-batches stay"
            start.notes.append(f"{same}: {_listed(start.of_step)}")
        return now
    becomes = []
    if now.total_batch != then.total_batch:
        becomes.append("the learning rate follows, and epochs are counted in steps of that size")
    if now.images != then.images:
        becomes.append(
            f"batch norm normalises over {now.images} instead of {then.images} images at a time, "
            f"so losses and gradients jump"
        )
    what = (
        f"its steps have {then.told(state['world'])}; those of this run have {now.told(world)}: "
        f"{'; '.join(becomes)}"
    )
    if not start.asked.changed:
        raise CheckpointError(
            what,
            code="resume_batch_differs",
            where=f"{start.path}",
            fix=(
                "leave train.total_batch, batch_size_per_card and accumulate_steps as they were, "
                "on any number of ranks, or add --resume-changed"
            ),
        )
    start.warnings.append(f"--resume-changed: {what}")
    return now


def validate_resume(
    start: Start, schedule: ScheduleSetup, train_set: DetectionSet, config: Any, pixels: str
) -> Run:
    """Checks that the checkpoint fits; returns the identity of this run.  Collective.

    Args: config: the ExperimentConfig of this run.  pixels: as in Run.
    Raises: CheckpointError: without `start.asked.changed`, other images or another teacher.
    """
    images, data = len(train_set.records), fingerprint(train_set, config.data.root)
    now, before = Run(images=images, data=data, schedule_steps=schedule.schedule_steps), None
    now.pixels = pixels
    if config.distill is not None:
        now.teacher = digest_of_weights(Path(config.distill.teacher))
    if start.snapshot is not None:
        before = _SavedState.model_validate(start.snapshot.state).run
    if before is None:  # a new run, or its checkpoint predates run ids
        now.id = comm.run_on_main(lambda: uuid.uuid4().hex)
        return now
    now.id, now.bad_images = before.id, before.bad_images
    if before.data != data:
        same = " (other ones)" if before.images == images else ""
        text = f"another training set: {before.images} images then, {images}{same} now"
        if not start.asked.changed:
            raise CheckpointError(
                f"it was trained on {text}",
                code="checkpoint_of_other_data",
                where=f"{start.path}",
                fix=(
                    "give data.train the same files, or add --resume-changed: epochs are then "
                    "those of the new set, in another order"
                ),
            )
        start.warnings.append(f"--resume-changed: {text}")
        now.bad_images = {}
    elif before.pixels.split()[:1] == pixels.split()[:1] and before.pixels != pixels:
        start.warnings.append(
            "image files of the training set have changed since the checkpoint: training continues "
            "with the new ones; start a new run if that was not intended"
        )
    now.pixels = pixels or before.pixels
    if before.teacher and now.teacher and before.teacher != now.teacher:
        if not start.asked.changed:
            raise CheckpointError(
                f"its teacher was not the one now in {config.distill.teacher} (the best "
                "checkpoint of a run in progress changes)",
                code="checkpoint_of_other_teacher",
                where=f"{start.path}",
                fix="set distill.teacher to the original checkpoint, or add --resume-changed",
            )
        start.warnings.append("--resume-changed: training continues with another teacher")
    if before.schedule_steps != schedule.schedule_steps and start.asked.extends:
        start.notes.append(extension_note(schedule, before.schedule_steps, start.step or 0))
    elif before.schedule_steps != schedule.schedule_steps:
        start.warnings.append(
            f"the schedule continues at step {start.step} of {schedule.schedule_steps}; it had "
            f"{before.schedule_steps} steps before"
        )
    return now


def prepare_output_dir(start: Start, run: Run, schedule: ScheduleSetup) -> list[str]:
    """Moves files of other runs out of the run's folder.  Collective.

    In each folder that it writes to, an earlier run moves to `old-N` inside it; checkpoints that
    this run will rewrite move beside their folder.  Then the run's id and its micro-batches are
    recorded with the job.
    Returns: warnings.
    Raises: CheckpointError: an OS error.
    """
    snapshot, dirs, output_dir = start.snapshot, start.dirs, start.dirs.folder
    kept = snapshot.step if snapshot is not None and start.own else 0

    def clear() -> list[str]:
        said = []
        if start.job is None and not start.own:
            if (old := set_run_aside(output_dir)) is not None:
                said.append(f"moved the earlier run in {output_dir} to {old}")
        elif (aside := set_aside(start.folder, kept)) is not None:
            what = "beyond the step resumed from, or damaged," if kept else "of another run"
            said.append(f"moved checkpoints {what} to {aside}")
        best = 0 if snapshot is None or start.rescored else snapshot.state["best_step"]
        if snapshot is not None and best and not path_of(start.folder, best).is_dir():
            said.append(
                f"the best checkpoint so far ({snapshot.state['best']:.4f}, step {best}) is not in "
                f"{start.folder}: best appears there once an evaluation scores higher"
            )
        remove_drafts(output_dir, DRAFTS_OF_A_RUN)
        for name in ("plots", "vdl", "tensorboard", "trackers"):
            require_no_link(output_dir / name)
        if start.folder.is_symlink():
            said.append(f"{start.folder} is a link: checkpoints go to {start.folder.resolve()}")
        return said

    warnings: list[str] = comm.run_on_main(clear)
    if snapshot is None:
        dirs.forget()
    if comm.local_rank() == 0:  # each host has a folder of its own
        try:
            write_note(RUN_NOTE, asdict(JobNote(run.id, kept, _made_of(schedule))))
        except OSError as error:
            _LOGGER.warning("a restart by fleetrun will start this run from scratch: %s", error)
    return warnings


def log_start(start: Start, schedule: ScheduleSetup, log: RunLog, record_every: int) -> None:
    """Logs where the run resumes, and missing records or remaining steps.

    Args: record_every: steps between two records of metrics.jsonl.
    """
    if start.snapshot is not None:
        log.info(f"resumed from {start.path} after step {start.step}")
    for note in start.notes:
        log.info(note)
    if start.snapshot is None:
        return
    if start.own and comm.is_main() and start.snapshot.step - log.recorded_step >= record_every:
        log.warning(
            f"metrics.jsonl has no record of steps {log.recorded_step + 1} to "
            f"{start.snapshot.step}: they were lost on disk; the checkpoint is complete"
        )
    if start.snapshot.step >= schedule.total_steps:
        log.info(
            f"nothing left to train: this run ends after step {schedule.total_steps}; "
            "`ppdist train --resume RUN --epochs +10` extends it (with -c: train.epochs, "
            "train.max_steps)"
        )


@dataclass(frozen=True)
class JobNote:
    """Record that one attempt of a job leaves for the next.

    Attributes:
        id: of the job's run.
        saved: step of its last checkpoint, on rank 0's host; elsewhere that from which the attempt
            began; 0: none yet.
        made_of: what its steps are made of, which hosts that go before its first checkpoint do not
            change.
    """

    id: str
    saved: int = 0
    made_of: dict[str, Any] = field(default_factory=dict)


def _note_of_job() -> JobNote | None:
    """The record of this job on rank 0's host, else the newest of any other.  Collective.

    None: no attempt got that far, or there is no fleetrun.
    """
    own = None if comm.local_rank() else read_note(RUN_NOTE)
    notes_W = [each and JobNote(**each) for each in comm.all_gather_object(own)]
    others = (note for note in notes_W if note)  # whose fleetrun was not started anew
    return notes_W[0] or max(others, key=lambda note: note.saved, default=None)


def note_saved(step: int) -> None:
    """Records for the job, on rank 0's host, that a checkpoint is saved.

    Raises: OSError: the record cannot be replaced.
    """
    if (note := read_note(RUN_NOTE)) is not None:
        write_note(RUN_NOTE, {**note, "saved": step})
