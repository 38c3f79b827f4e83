"""Where a run goes on: which checkpoint, whether it fits, and how every rank gets it.

Rank 0 alone reads and writes checkpoints; the others receive what it has read.  So output_dir need
not be on a file system that hosts share, and `--resume` means what it means on rank 0's host.

A run has an id, drawn where it begins and handed on by its checkpoints.  Once the folder of its
checkpoints holds none of other runs, the id is noted with the job on every host (see
`errors.JOB_DIR_VARIABLE`).  By that an attempt which fleetrun starts anew tells the checkpoints of
its own job from those that an earlier run has left in the same output_dir.
"""

import json
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist import dist
from ppdist.checkpoint import (
    Checkpoint,
    Snapshot,
    holds_any,
    newest_valid,
    path_of,
    read_checkpoint,
    set_aside,
    unpacked,
)
from ppdist.data.sample import DetectionSet
from ppdist.engine.config_changes import Change, Changes, require_same
from ppdist.engine.derived import Derived
from ppdist.engine.feed import fingerprint
from ppdist.engine.run_state import Run
from ppdist.errors import JOB_DIR_VARIABLE, CheckpointError
from ppdist.log import RunLog
from ppdist.models.weight_files import digest_of_weights

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

    head = dist.on_main(look)
    if head is None:
        return Start(job)
    state = head["state"]
    if state["world"] == dist.world_size():
        dist.resume_bucket(state.get("bucket_mb"))
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
    where = f" on rank 0's host {dist.host()}" if dist.world_size() > dist.local_size() else ""
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
    if world != dist.world_size():
        notes.append(f"ranks: {world} then, {dist.world_size()} now; each step has the same images")
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
    if dist.world_size() > 1:
        dist.barrier()  # each takes its time to unpack the file before, and gloo only 30 s
        parts = []
        for first in range(0, size, _CHUNK):
            part = np.zeros(min(_CHUNK, size - first), np.uint8)
            if dist.is_main():
                part[:] = np.frombuffer(data, np.uint8, len(part), first)
            tensor = paddle.to_tensor(part)
            dist.broadcast_tensors([tensor], 0)
            if not dist.is_main():
                parts.append(tensor.numpy().tobytes())
        data = data or b"".join(parts)
    return data


def settle_run(
    start: Start, derived: Derived, train_set: DetectionSet, config: Any, changed: bool
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
        now.id = dist.on_main(lambda: uuid.uuid4().hex)
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

    start.warnings += dist.on_main(clear)
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


def tell(start: Start, derived: Derived, log: RunLog) -> None:
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
    return next((each for each in dist.exchange(mine) if each), None)


def _id_in(note: Path) -> str | None:
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError):  # there is none; it appears whole or not at all
        return None


def _note() -> Path | None:
    """Where the first rank of a host keeps it."""
    folder = os.environ.get(JOB_DIR_VARIABLE)
    first = dist.local_rank() == 0
    return Path(folder) / _NOTE if folder and first and Path(folder).is_dir() else None
