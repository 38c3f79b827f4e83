"""Resuming: the checkpoint that a run starts from, and the checks that it fits.

    find_start -> resumed_micro_batches -> validate_resume -> prepare_output_dir -> restore_state

Only rank 0 reads and writes checkpoints, and broadcasts their content.  So output_dir need not
be on a shared file system, and `--resume` refers to rank 0's host, the first of --ips.

A run has a random id, kept in its checkpoints.  Once its checkpoint folder holds no other run's,
every host records the id with the job (see `job.JOB_DIR_VARIABLE`).  So an attempt restarted by
fleetrun can tell its own job's checkpoints from those of an earlier run in the same output_dir.
Rank 0's host also records the last saved step, so that the run does not start over if the file
system of its checkpoints is briefly unavailable.
"""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from pydantic import TypeAdapter

from ppdist.common.code_digest import digest_of_package
from ppdist.common.drafts import remove_drafts
from ppdist.common.errors import CheckpointError, StorageError
from ppdist.common.files import require_no_link
from ppdist.common.job import RUN_NOTE, read_note, write_note
from ppdist.common.manifest import MANIFEST
from ppdist.common.retry import unavailable
from ppdist.common.run_log import RunLog
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.train import MicroBatches, TrainConfig
from ppdist.data.types import DetectionSet
from ppdist.distributed import comm
from ppdist.engine.changes import Change, Changes, join_changes, require_same_settings
from ppdist.engine.checkpoint import (
    DRAFTS_OF_A_RUN,
    Checkpoint,
    newest_step,
    newest_valid,
    path_of,
    read_checkpoint,
    set_aside,
    set_run_aside,
    unpack_arrays,
)
from ppdist.engine.continuation import AUTO, Continuation
from ppdist.engine.data import fingerprint
from ppdist.engine.output_dirs import OutputDirs
from ppdist.engine.schedule_setup import ScheduleSetup, extension_note
from ppdist.engine.state import Run, SavedState, Snapshot, ingredients
from ppdist.models.weights import digest_of_weights

_LOGGER = logging.getLogger("ppdist")
_CHUNK = 16 << 20  # bytes per message: gloo times out after 30 s


@dataclass(frozen=True)
class JobNote:
    """The record that one attempt of a job leaves for the next attempt.

    Attributes:
        id: the id of the job's run.
        saved: on rank 0's host, the step of its last checkpoint; on other hosts, the step from
            which the attempt began; 0 if there is none yet.
        made_of: the batch sizes of its steps, see `ingredients`; they are kept even if hosts are
            lost before its first checkpoint.
    """

    id: str
    saved: int = 0
    made_of: dict[str, Any] = field(default_factory=dict)


@dataclass
class Start:
    """The start of a run, new or resumed; the same on every rank."""

    continuation: Continuation
    job: str | None  # id of the run that earlier attempts of this job started
    folder: Path  # the folder of the run's checkpoints
    dirs: OutputDirs
    snapshot: Snapshot | None = None  # None: a new run
    path: Path | None = None  # the path of the checkpoint, on rank 0's host
    in_place: bool = False  # the checkpoint lies in `folder`
    rescored: str = ""  # changed settings that make the best score so far incomparable
    of_step: list[Change] = field(default_factory=list)  # changed settings, see OnResume.STEP
    notes: list[str] = field(default_factory=list)  # for the log
    warnings: list[str] = field(default_factory=list)
    begun: dict[str, Any] = field(default_factory=dict)  # see `made_of`; from the job's note

    @property
    def made_of(self) -> Mapping[str, Any]:
        """Returns the batch sizes of the steps so far, see `ingredients`; {} for a new job.

        Even if nothing was saved, they are known from the note of the job.
        """
        return self.begun if self.snapshot is None else self.snapshot.state

    @property
    def step(self) -> int | None:
        """Returns the number of optimizer steps done so far; None for a new run."""
        if self.snapshot is not None:
            return self.snapshot.step
        return None if self.job is None else 0


class Opened(NamedTuple):
    """A checkpoint that rank 0 has opened, as it is sent to all ranks; fields as in `Start`.

    Attributes:
        state: the content of state.json.
        sizes: size of each group of arrays in bytes.
    """

    path: Path
    state: dict[str, Any]
    sizes: dict[str, int]
    in_place: bool
    rescored: str
    of_step: list[Change]
    notes: list[str]
    warnings: list[str]


_JSON_OF_OPENED = TypeAdapter(Opened)


def find_start(continuation: Continuation, dirs: OutputDirs, config: ExperimentConfig) -> Start:
    """Finds and reads the checkpoint to resume from.  Collective.

    An attempt restarted by fleetrun resumes from the newest valid checkpoint of its job, regardless
    of the command; until such a checkpoint exists, the command decides.

    Raises: CheckpointError on rank 0, UserError on the others: there is none, it is damaged, or
        it was trained with other settings; with AUTO, the run has checkpoints on a host that is
        missing.
    """
    note = _read_job_note()
    job = None if note is None else note.id
    folder = dirs.folder / "checkpoints"
    files: dict[str, bytes] = {}  # rank 0's files, by group

    def open_on_main() -> Any:
        checkpoint, skipped = _read_checkpoint_to_resume(continuation, dirs.folder, note, config)
        if checkpoint is None:
            return None
        for name, content in checkpoint.files.items():
            if name.endswith(".safetensors"):
                files[Path(name).stem] = content
        opened = _open(checkpoint, skipped, folder, continuation, config)
        return _JSON_OF_OPENED.dump_python(opened, mode="json")

    fields = comm.run_on_main(open_on_main)
    if fields is None:
        if continuation.source == AUTO:
            dirs.require_no_other()
        begun = {} if note is None else note.made_of
        return Start(continuation, job, folder, dirs, begun=begun)
    opened = _JSON_OF_OPENED.validate_python(fields)
    # Popped, so that each file's memory is free before the next is unpacked.
    groups = {
        name: unpack_arrays(
            _broadcast_file(files.pop(name, b""), size), opened.path / f"{name}.safetensors"
        )
        for name, size in opened.sizes.items()
    }
    return Start(
        continuation=continuation,
        job=job,
        folder=folder,
        dirs=dirs,
        snapshot=Snapshot(opened.state["step"], groups, opened.state),
        path=opened.path,
        in_place=opened.in_place,
        rescored=opened.rescored,
        of_step=opened.of_step,
        notes=opened.notes,
        warnings=opened.warnings,
    )


def _read_checkpoint_to_resume(
    continuation: Continuation, output_dir: Path, note: JobNote | None, config: ExperimentConfig
) -> tuple[Checkpoint | None, list[str]]:
    """Reads the job's newest checkpoint, else the one that the command names.

    Returns: the checkpoint, or None; the reasons why newer ones were skipped.
    """
    source, folder = continuation.source, output_dir / "checkpoints"
    checkpoint, skipped = _read_newest_of_run(None if note is None else note.id, folder)
    if note is not None and _is_missing(note, checkpoint, folder):
        checkpoint, skipped = _wait_for_checkpoint(
            note, folder, config.distributed.timeout_seconds / 2
        )
    if checkpoint is None and source is not None and (source != AUTO or newest_step(folder)):
        return _read_named_checkpoint(output_dir if source == AUTO else Path(source))
    return checkpoint, skipped


def _open(
    checkpoint: Checkpoint,
    skipped: list[str],
    folder: Path,
    continuation: Continuation,
    config: ExperimentConfig,
) -> Opened:
    """Checks a checkpoint against the configuration of this run.

    Args:
        skipped: reasons why newer checkpoints were skipped.
        folder: the folder of this run's checkpoints.
    """
    try:
        SavedState.model_validate_json(checkpoint.files["state.json"], strict=True)
    except ValueError as error:
        raise CheckpointError(
            f"state.json is malformed: {error}",
            code="checkpoint_damaged",
            where=f"{checkpoint.path}",
        ) from error
    differing = require_same_settings(checkpoint.path, config, continuation)
    notes, warnings = _describe_changes(differing, checkpoint, continuation)
    flipped = any(change.key == "train.sync_bn" for change in differing.learned)
    state = _add_micro_batches(checkpoint.state, config.train.sync_bn != flipped)
    return Opened(
        path=checkpoint.path,
        state=state | ({"standing": None} if continuation.extends else {}),
        sizes={
            Path(name).stem: len(content)
            for name, content in checkpoint.files.items()
            if name.endswith(".safetensors")
        },
        in_place=checkpoint.path.resolve().parent == folder.resolve(),
        rescored=join_changes(differing.scores),
        of_step=differing.step,
        notes=notes,
        warnings=[*(f"skipped checkpoint {reason}" for reason in skipped), *warnings],
    )


def _read_named_checkpoint(source: Path) -> tuple[Checkpoint, list[str]]:
    """Reads the checkpoint that `--resume` refers to; also returns why newer ones were skipped."""
    if (source / MANIFEST).exists():
        return read_checkpoint(source.resolve()), []
    folder = source / "checkpoints"
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


def _read_newest_of_run(run: str | None, folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Reads the newest valid checkpoint of a run; also returns why newer ones were skipped."""
    if run is None:
        return None, []
    checkpoint, reasons = newest_valid(folder)
    writer = (checkpoint.state.get("run") or {}) if checkpoint is not None else {}
    return (checkpoint, reasons) if writer.get("id") == run else (None, [])


def _is_missing(note: JobNote, checkpoint: Checkpoint | None, folder: Path) -> bool:
    """Returns True if a job's newest checkpoint is missing altogether, not just damaged.

    It may be on a disk that is not mounted now.
    """
    if checkpoint is not None and checkpoint.state["step"] >= note.saved:
        return False
    return note.saved > 0 and not path_of(folder, note.saved).is_dir()


def _wait_for_checkpoint(
    note: JobNote, folder: Path, seconds: float
) -> tuple[Checkpoint, list[str]]:
    """Waits for the newest valid checkpoint of a job, whose file system may mount late.

    Returns: the newest checkpoint; an older one, if the newest does not appear within `seconds`.
    Raises: CheckpointError: no checkpoint appears.
    """
    expected = f"the checkpoint of step {note.saved} that an earlier attempt of this job wrote"

    def look() -> tuple[Checkpoint | None, list[str]]:
        checkpoint, skipped = _read_newest_of_run(note.id, folder)
        if _is_missing(note, checkpoint, folder):
            raise unavailable(f"{expected} is not there", f"{folder}")
        return checkpoint, skipped

    late_reasons = []
    try:
        checkpoint, skipped = comm.once_there(look, seconds)
    except StorageError:
        checkpoint, skipped = _read_newest_of_run(note.id, folder)
        cause = "which an earlier attempt of this job wrote: it is not there after"
        late_reasons = [f"of step {note.saved} in {folder}, {cause} {seconds:.0f} s"]
    if checkpoint is not None:
        return checkpoint, [*skipped, *late_reasons]
    raise CheckpointError(
        f"found neither {expected} nor an older one after {seconds:.0f} s",
        code="checkpoint_unreachable",
        where=f"{folder}",
        fix="check that its file system is mounted, then rerun with --resume",
    )


def _describe_changes(
    changed: Changes, checkpoint: Checkpoint, continuation: Continuation
) -> tuple[list[str], list[str]]:
    """Describes how this run differs from a checkpoint.  Returns: notes; warnings."""
    notes, warnings = list[str](), list[str]()
    if changed.free:
        notes.append(f"changed settings that do not affect training: {join_changes(changed.free)}")
    if changed.learned:
        warnings.append(
            f"--resume-changed: changed settings that affect training: "
            f"{join_changes(changed.learned)}"
        )
    if changed.scores:
        warnings.append(
            f"scores are no longer comparable ({join_changes(changed.scores)}): best is reset"
        )
    code = digest_of_package()
    # Older checkpoints have no digest.
    if not continuation.changed and checkpoint.state.get("code", code) != code:
        warnings.append(
            f"{checkpoint.path} was written by another version of ppdist: results may differ in "
            f"the last digits from here on (--resume-changed silences this)"
        )
    return notes, warnings


def _broadcast_file(data: bytes, size: int) -> bytes:
    """Broadcasts the content of a file from rank 0 to all ranks.  Collective."""
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


def _add_micro_batches(state: dict[str, Any], sync_bn: bool) -> dict[str, Any]:
    """Adds to a checkpoint's state the micro-batches, which older versions did not record."""
    batch = state.get("batch_size_per_card") or state["total_batch"] // state["world"]
    group = batch * state["world"] if sync_bn else batch
    recorded = {key: value for key, value in state.items() if value is not None}
    return {"batch_size_per_card": batch, "micro_batch": group, "sync_bn": sync_bn} | recorded


def resumed_micro_batches(start: Start, train: TrainConfig, follows: bool) -> MicroBatches:
    """Returns the micro-batches of a resumed run: the same as before, on any number of ranks.

    They change only if the batch settings differ from those in the checkpoint's configuration.

    Args:
        train: the `train` section of this run, with its batch size as a number.
        follows: whether the number follows from memory or from the data, so that a different number
            is not a change requested by the user.
    Raises: CheckpointError: the micro-batches change, without `continuation.changed`; ConfigError:
        these ranks cannot form such micro-batches.
    """
    state, world = start.made_of, comm.world_size()
    previous = MicroBatches(state["total_batch"], state["micro_batch"], state["sync_bn"])
    typed_keys = [] if follows else [change.key.rpartition(".")[2] for change in start.of_step]
    total = train.total_batch or previous.total_batch
    if train.total_batch is None and {"batch_size_per_card", "accumulate_steps"} & {*typed_keys}:
        total = world * train.images_per_card * train.accumulate_steps
    now = replace(previous, total_batch=total)
    if (
        "batch_size_per_card" in typed_keys
        or train.sync_bn != previous.spread
        or total % previous.images
    ):
        now = train.model_copy(update={"total_batch": total}).micro_batches(world)
    if (now.total_batch, now.images) == (previous.total_batch, previous.images):
        if world != state["world"]:
            start.notes.append(
                f"ranks: {state['world']} then, {world} now; each step has the same images and "
                f"micro-batches: {now.describe(world)}"
            )
        if typed_keys:
            note = "changed settings that do not affect training, as the micro-batches stay"
            start.notes.append(f"{note}: {join_changes(start.of_step)}")
        return now
    becomes = []
    if now.total_batch != previous.total_batch:
        becomes.append("the learning rate follows, and epochs are counted in steps of that size")
    if now.images != previous.images:
        becomes.append(
            f"batch norm normalises over {now.images} instead of {previous.images} images at a "
            f"time, so losses and gradients jump"
        )
    what = (
        f"its steps have {previous.describe(state['world'])}; those of this run have "
        f"{now.describe(world)}: "
        f"{'; '.join(becomes)}"
    )
    if not start.continuation.changed:
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
    start: Start,
    schedule: ScheduleSetup,
    train_set: DetectionSet,
    config: ExperimentConfig,
    pixels: str,
) -> Run:
    """Checks that the checkpoint fits; returns the identity of this run.  Collective.

    Args: pixels: see `Run`.
    Raises: CheckpointError: the images or the teacher differ, without `continuation.changed`.
    """
    images, data = len(train_set.records), fingerprint(train_set, config.data.root)
    run, previous = Run(images=images, data=data, schedule_steps=schedule.schedule_steps), None
    run.pixels = pixels
    teacher = None if config.distill is None else config.distill.teacher
    if teacher is not None:
        run.teacher = digest_of_weights(Path(teacher))
    if start.snapshot is not None:
        previous = SavedState.model_validate(start.snapshot.state).run
    if previous is None:  # a new run, or its checkpoint predates run ids
        run.id = comm.run_on_main(lambda: uuid.uuid4().hex)
        return run
    run.id, run.bad_images = previous.id, previous.bad_images
    if previous.data != data:
        suffix = " (other ones)" if previous.images == images else ""
        text = f"another training set: {previous.images} images then, {images}{suffix} now"
        if not start.continuation.changed:
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
        run.bad_images = {}
    # The first word says how thoroughly images were checked, which decides what the digest covers.
    elif previous.pixels.split()[:1] == pixels.split()[:1] and previous.pixels != pixels:
        start.warnings.append(
            "image files of the training set have changed since the checkpoint: training continues "
            "with the new ones; start a new run if that was not intended"
        )
    run.pixels = pixels or previous.pixels
    if previous.teacher and run.teacher and previous.teacher != run.teacher:
        if not start.continuation.changed:
            raise CheckpointError(
                f"its teacher was not the one now in {teacher} (the best checkpoint "
                "of a run in progress changes)",
                code="checkpoint_of_other_teacher",
                where=f"{start.path}",
                fix="set distill.teacher to the original checkpoint, or add --resume-changed",
            )
        start.warnings.append("--resume-changed: training continues with another teacher")
    if previous.schedule_steps != schedule.schedule_steps and start.continuation.extends:
        start.notes.append(extension_note(schedule, previous.schedule_steps, start.step or 0))
    elif previous.schedule_steps != schedule.schedule_steps:
        start.warnings.append(
            f"the schedule continues at step {start.step} of {schedule.schedule_steps}; it had "
            f"{previous.schedule_steps} steps before"
        )
    return run


def prepare_output_dir(start: Start, run: Run, schedule: ScheduleSetup) -> list[str]:
    """Moves files of other runs out of the run's folder.  Collective.

    In each folder that this run writes to, files of an earlier run move to a subfolder `old-N`;
    checkpoints that this run will rewrite move beside their folder.  Then the run's id and its
    micro-batches are recorded with the job.
    Returns: warnings.
    Raises: CheckpointError: an OS error.
    """
    snapshot, dirs, output_dir = start.snapshot, start.dirs, start.dirs.folder
    resumed_step = snapshot.step if snapshot is not None and start.in_place else 0

    def clear() -> list[str]:
        lines = []
        if start.job is None and not start.in_place:
            if (old_folder := set_run_aside(output_dir)) is not None:
                lines.append(f"moved the earlier run in {output_dir} to {old_folder}")
        elif (aside := set_aside(start.folder, resumed_step)) is not None:
            what = "beyond the step resumed from, or damaged," if resumed_step else "of another run"
            lines.append(f"moved checkpoints {what} to {aside}")
        best = 0 if snapshot is None or start.rescored else snapshot.state["best_step"]
        if snapshot is not None and best and not path_of(start.folder, best).is_dir():
            lines.append(
                f"the best checkpoint so far ({snapshot.state['best']:.4f}, step {best}) is not in "
                f"{start.folder}: best appears there once an evaluation scores higher"
            )
        remove_drafts(output_dir, DRAFTS_OF_A_RUN)
        for name in ("plots", "vdl", "tensorboard", "trackers"):
            require_no_link(output_dir / name)
        if start.folder.is_symlink():
            lines.append(f"{start.folder} is a link: checkpoints go to {start.folder.resolve()}")
        return lines

    warnings: list[str] = comm.run_on_main(clear)
    if snapshot is None:
        dirs.forget()
    if comm.local_rank() == 0:  # each host has a folder of its own
        try:
            write_note(RUN_NOTE, asdict(JobNote(run.id, resumed_step, ingredients(schedule))))
        except OSError as error:
            _LOGGER.warning("a restart by fleetrun will start this run from scratch: %s", error)
    return warnings


def log_start(
    start: Start, schedule: ScheduleSetup, log: RunLog, record_every: int, in_steps: bool
) -> None:
    """Logs the step at which the run resumes, and missing records or remaining steps.

    Args:
        record_every: steps between two records of metrics.jsonl.
        in_steps: whether the length of the run is configured in steps.
    """
    if start.snapshot is not None:
        log.info(f"resumed from {start.path} after step {start.step}")
    for note in start.notes:
        log.info(note)
    if start.snapshot is None:
        return
    if (
        start.in_place
        and comm.is_main()
        and start.snapshot.step - log.recorded_step >= record_every
    ):
        log.warning(
            f"metrics.jsonl has no record of steps {log.recorded_step + 1} to "
            f"{start.snapshot.step}: they were lost on disk; the checkpoint is complete"
        )
    if start.snapshot.step >= schedule.total_steps:
        log.info(
            f"nothing left to train: this run ends after step {schedule.total_steps}; "
            f"`ppdist train --resume RUN {'--steps +1000' if in_steps else '--epochs +10'}` "
            f"extends it (with -c: train.{'steps' if in_steps else 'epochs'}, train.max_steps)"
        )


def _read_job_note() -> JobNote | None:
    """Reads this job's note on rank 0's host, or else the newest note of any host.  Collective.

    Returns: the note; None if no attempt wrote one, or the job does not run under fleetrun.
    """
    note = None if comm.local_rank() else read_note(RUN_NOTE)
    notes_W = [fields and JobNote(**fields) for fields in comm.all_gather_object(note)]
    # Another host has a note if only rank 0's fleetrun was restarted.
    return notes_W[0] or max(filter(None, notes_W), key=lambda note: note.saved, default=None)
