"""Checkpoints: one directory each, written atomically, beside training.

    checkpoints/step-00001200/
        model.safetensors      weights and statistics of the model
        ema.safetensors        their average (absent when EMA is off)
        optimizer.safetensors  `<parameter key>/<accumulator>`
        averaging.safetensors  residuals of compressed gradients (absent without compression)
        state.json             step, epoch, best metric, scaler, ...
        config.yml             the resolved configuration
        model_card.json        classes, preprocessing, licence (ppdist/models/model_card.py)
        manifest.json          size and SHA-256 of every file above
    checkpoints/last, best     links to one of them

A directory appears under its name only when everything in it is on disk (written beside, fsync,
rename), and is renamed before it is deleted, so whenever a process is killed, the checkpoints are
whole and the links point at one.  Nothing here is pickled; ppdist convert makes a .pdparams of a
checkpoint for programs that read nothing else.

One thread of rank 0 (`CheckpointWriter`) writes them while training continues.  Storage that is
slower than checkpoints are due never stalls a step: the newest `Snapshot` waits, and replaces one
that waits already, unless that is the best so far.  So at most two are held, and the best as a
third while it waits.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from ppdist.common.drafts import remove_drafts
from ppdist.common.errors import CheckpointError, ConfigError, WeightsError
from ppdist.common.files import draft_of, is_disk_full, require_held, sync_path
from ppdist.common.machine import free_disk
from ppdist.common.manifest import CARD_FILE, CARD_NOTE, MANIFEST, checked_files

_NAME = re.compile(r"^step-(\d+)$")
_DRAFTS = r"step-\d+|last|best"
# Files of a run in its output_dir, including its report and its export.  Not run.lock, which the
# current run holds, nor recipe.yml, from which it may have been started.
FILES_OF_A_RUN = (
    "bad_steps.jsonl",
    "checkpoints",
    "config.yml",
    "environment.json",
    "evaluation.json",
    "export",
    "metrics.jsonl",
    "plots",
    "report.html",
    "tensorboard",
    "trackers",
    "train.log",
    "vdl",
)
DRAFTS_OF_A_RUN = "|".join(map(re.escape, FILES_OF_A_RUN))  # see `remove_drafts`
_BLOCK_BYTES = 1 << 20
_BESIDE_BYTES = 50e6  # logs and pictures of a run: the demo writes 4 MB
# Pauses before retries of a run's last checkpoint: the disk may be full only briefly.
_RETRY_SECONDS = (1.0, 4.0, 10.0)
# safetensors' names of numpy dtypes.
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16",
    "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """A copy of a run's state after one step; training may continue."""

    step: int
    groups: dict[str, dict[str, np.ndarray]]  # `model`, `optimizer`, ...: one file each
    state: dict[str, Any]  # JSON values, for state.json


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums were verified."""

    path: Path
    state: dict[str, Any]
    files: dict[str, bytes]  # name -> verified content


def save_checkpoint(
    folder: Path,
    step: int,
    groups: Mapping[str, Mapping[str, np.ndarray]],
    state: dict[str, Any],
    config_yaml: str,
    model_card: str = "",
) -> Path:
    """Writes `folder/step-N` atomically and points `last` at it.

    Called by a single thread of rank 0.  `last` is left alone if it already points at a later step:
    a best checkpoint that could not be written at first is written late.

    Args:
        step: optimizer step, without a checkpoint in `folder` so far; see `set_aside`.
        groups: name -> arrays; each group gets a .safetensors file.
        state: JSON values, for state.json.
        model_card: text of the model card, which is also stored in the weights file; "": none.
    Raises:
        CheckpointError: the write failed (disk full or read-only); older checkpoints are untouched.
        ConfigError: another training run now holds the folder (`require_held`).
    """
    final = path_of(folder, step)
    draft = draft_of(final)
    texts = {"state.json": json.dumps(state, indent=1), "config.yml": config_yaml}
    texts |= {CARD_FILE: model_card} if model_card else {}
    notes = {name: {CARD_NOTE: model_card} for name in ("model", "ema") if model_card}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_drafts(folder, _DRAFTS)  # first, because they may fill the disk
        draft.mkdir()
        files = {
            f"{name}.safetensors": _write_durably(
                draft / f"{name}.safetensors", _safetensors(arrays, notes.get(name))
            )
            for name, arrays in groups.items()
        }
        for name, text in texts.items():
            files[name] = _write_durably(draft / name, [text.encode()])
        manifest = json.dumps({"step": step, "files": files}, indent=1)
        _write_durably(draft / MANIFEST, [manifest.encode()])
        # In this order, so that after a power cut the directory has its final name only if its
        # files are complete.
        sync_path(draft)
        require_held(folder.parent)  # late: another run may have taken the folder
        draft.rename(final)
        sync_path(folder)
    except ConfigError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"failed to write the checkpoint: {error.strerror or error} (needs "
            f"{_count_bytes(groups) / 1e6:.1f} MB and {len(groups) + len(texts) + 2} inodes, "
            f"{_describe_free_space(folder)})",
            code="disk_full" if is_disk_full(error) else "checkpoint_unwritable",
            where=f"{final}",
            fix="older checkpoints are untouched",
        ) from error
    with contextlib.suppress(OSError):  # a file system without links; the checkpoint is complete
        last = folder / "last"
        if not (last.is_dir() and _parse_step(last.readlink()) > step):
            point(last, final)
    return final


def _safetensors(
    arrays: Mapping[str, np.ndarray], notes: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Yields a .safetensors file in pieces: its header, then the arrays.

    The library's own `save` copies everything while holding the GIL, which training needs.
    Source: github.com/huggingface/safetensors, README, section Format.
    """
    header: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    at = 0
    # Largest item sizes first, as in the library, so that each array is aligned.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    for key, array in ordered:
        place = [at, at := at + array.nbytes]
        kind = _DTYPES[array.dtype.name]
        header[key] = {"dtype": kind, "shape": list(array.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Arrays begin at multiples of 8 bytes, as in the library's files.
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, array in ordered:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _write_durably(path: Path, pieces: Iterable[Any]) -> dict[str, Any]:
    """Writes bytes durably to disk; returns the file's manifest entry.

    Writes in blocks, without a Python buffer: hashing and writing a block release the GIL to
    training, and a loader worker forked meanwhile inherits no unwritten bytes.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece)
            for begin in range(0, len(view), _BLOCK_BYTES):
                block = view[begin : begin + _BLOCK_BYTES]
                digest.update(block)
                size += len(block)
                while block:
                    block = block[file.write(block) :]
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def check_room(folder: Path, snapshot: Snapshot, count: int, moments: int = 0) -> str:
    """Checks the free space for the checkpoints of a run, before its first step.

    Args:
        count: number of checkpoints that the folder holds at the same time.
        moments: number of model-sized sets of arrays that the first step adds to the snapshot.
    Returns: a warning if older checkpoints will have to be deleted early; else "".
    Raises: CheckpointError: not even one checkpoint fits.
    """
    size = _count_bytes(snapshot.groups) + moments * _count_bytes({"": snapshot.groups["model"]})
    needed = count * size + _BESIDE_BYTES
    try:
        checkpoints = _list_checkpoints(folder)
        used_bytes = {
            path: sum(file.stat().st_size for file in path.iterdir()) for path in checkpoints
        }
        linked_paths = {(folder / name).resolve() for name in ("best", "last")}
        free = free_disk(folder)
    except OSError:  # a run must not end because an estimate fails
        return ""
    # The checkpoints that `prune_to_newest` would delete.
    spare = sum(used_bytes[path] for path in checkpoints[1:] if path.resolve() not in linked_paths)
    if free + spare < size:
        raise CheckpointError(
            f"{free / 1e6:.0f} MB are free, and one checkpoint takes {size / 1e6:.0f} MB",
            code="disk_full",
            where=f"{folder.parent}",
            fix="delete files there, or write to another disk: -o output_dir=PATH",
        )
    if free + sum(used_bytes.values()) >= needed:
        return ""
    return (
        f"{folder.parent}: {free / 1e6:.0f} MB are free, and {count} checkpoints of "
        f"{size / 1e6:.0f} MB, logs and pictures take {needed / 1e6:.0f} MB: old checkpoints will "
        "go early; delete files, or lower checkpoint.keep"
    )


def _count_bytes(groups: Mapping[str, Mapping[str, np.ndarray]]) -> int:
    return sum(array.nbytes for arrays in groups.values() for array in arrays.values())


def _describe_free_space(folder: Path) -> str:
    try:
        free, status = free_disk(folder), os.statvfs(folder)
    except OSError as error:
        return f"free space unknown: {error.strerror}"
    inodes = f" and {status.f_favail} inodes" if status.f_files else ""  # some systems count none
    return f"{free / 1e6:.1f} MB{inodes} free"


def path_of(folder: Path, step: int) -> Path:
    """Returns the path of a step's checkpoint, whether or not it exists."""
    return folder / f"step-{step:08d}"


def point(link: Path, target: Path) -> None:
    """Points `link` at a checkpoint in the same folder, as a relative link, atomically."""
    draft = draft_of(link)
    draft.symlink_to(target.name)
    draft.replace(link)


def point_at_step(link: Path, step: int) -> None:
    """Points `link` at a step's checkpoint in the same folder, if there is one.

    If a run is killed between writing a checkpoint and its links, the links are outdated.
    """
    path = path_of(link.parent, step)
    if path.is_dir() and not (link.is_symlink() and link.resolve() == path.resolve()):
        point(link, path)


def prune(folder: Path, *, keep: int, best_step: int = 0) -> None:
    """Deletes old checkpoints and abandoned drafts.

    Keeps the newest `keep` checkpoints, the best, and the targets of the links `best` and `last`.
    """
    remove_drafts(folder, _DRAFTS)
    _delete(_list_checkpoints(folder)[keep:], folder, best_step)


def prune_to_newest(folder: Path, best_step: int) -> bool:
    """Deletes all but the newest valid checkpoint of a folder, to free space.

    Also keeps the best checkpoint and those that links point at.

    Returns: True if any was deleted.
    """
    newest, _ = newest_valid(folder)
    if newest is None:
        return False
    old_paths = [path for path in _list_checkpoints(folder) if path != newest.path]
    return _delete(old_paths, folder, best_step)


def _delete(paths: Sequence[Path], folder: Path, best_step: int) -> bool:
    """Deletes checkpoints other than the best and those that links point at.

    Returns: True if any was deleted.
    Raises: ConfigError: another training run now holds the folder (`require_held`).
    """
    require_held(folder.parent)
    links = [folder / name for name in ("best", "last")]
    linked_paths = {link.resolve() for link in links if link.is_symlink()}
    old_paths = [
        path
        for path in paths
        if path.resolve() not in linked_paths and _parse_step(path) != best_step
    ]
    if old_paths:
        sync_path(folder)  # or a power loss might keep the deletion and lose the new `best`
    for path in old_paths:
        draft = draft_of(path)
        path.rename(draft)  # first: an incomplete checkpoint must not keep its name
        shutil.rmtree(draft, ignore_errors=True)
    return bool(old_paths)


def set_aside(folder: Path, step: int) -> Path | None:
    """Moves checkpoints beyond a step aside; only rank 0 calls it.

    The run starts at that step, so these checkpoints belong to another run (with step 0: all of
    them), or are damaged.  If left in place, they would pass for this run's newest checkpoints:
    `prune` would keep them and delete the run's own, and `newest_valid` would resume from them.

    Returns: the new directory they were moved to, beside `folder`, or inside it if `folder` is a
        link; None: there were no such checkpoints.
    Raises: CheckpointError: the files could not be moved.
    """
    later_paths = [path for path in _list_checkpoints(folder) if _parse_step(path) > step]
    if not later_paths:
        return None
    # If the folder is a link, move them inside it: beside the link may be another disk.
    linked = folder.is_symlink()
    aside = _find_unused_name(
        folder.resolve() / "old" if linked else folder.with_name(f"{folder.name}-old")
    )
    moved = {path.name for path in later_paths}
    links = {
        link: link.readlink().name
        for link in (folder / "best", folder / "last")
        if link.is_symlink() and link.readlink().name in moved
    }
    try:
        aside.mkdir()
        for link in links:  # before their targets, so that they never dangle
            link.unlink()
        for path in later_paths:
            path.rename(aside / path.name)
        for link, name in links.items():
            (aside / link.name).symlink_to(name)
    except OSError as error:
        raise CheckpointError(
            f"failed to move older checkpoints: {error}",
            code="checkpoint_unwritable",
            where=f"{folder}",
        ) from error
    return aside


def set_run_aside(output_dir: Path) -> Path | None:
    """Moves the files of an earlier run to `old-N` in its folder.

    Only rank 0 calls it.  Files not written by a run stay where they are.  Checkpoints in a linked
    folder stay on its disk, and `old-N` gets a link to them.

    Returns: the folder they were moved to; None: there was no earlier run, or it had not trained a
        step.
    Raises: CheckpointError: the files could not be moved.
    """
    metrics = output_dir / "metrics.jsonl"
    try:
        if not newest_step(output_dir / "checkpoints") and not (
            metrics.is_file() and metrics.stat().st_size
        ):
            return None
        old_folder = _find_unused_name(output_dir / "old")
        old_folder.mkdir()
        for name in FILES_OF_A_RUN:
            path = output_dir / name
            if name == "checkpoints" and path.is_symlink():  # the new run uses the link, too
                if (aside := set_aside(path, -1)) is not None:
                    (old_folder / name).symlink_to(aside)
            elif os.path.lexists(path):
                path.rename(old_folder / name)
    except OSError as error:
        raise CheckpointError(
            f"failed to move the earlier run: {error}",
            code="checkpoint_unwritable",
            where=f"{output_dir}",
        ) from error
    return old_folder


def _find_unused_name(path: Path) -> Path:
    """Returns the first of `PATH-1`, `PATH-2`, ... that does not exist."""
    names = (path.with_name(f"{path.name}-{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint directory and checks it against the manifest.

    Each file is read once.  Files that are not in the manifest are ignored.
    Raises: CheckpointError: the checkpoint is missing, incomplete or altered; the message names the
        file.
    """
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"not a checkpoint (it has no {MANIFEST})",
            code="not_a_checkpoint",
            where=f"{path}",
        )
    try:
        files = checked_files(path)
        state = json.loads(files["state.json"])
        if not isinstance(state["step"], int):
            raise ValueError("state.json: step is not a number")
    except (WeightsError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"unreadable checkpoint: {error}",
            code="checkpoint_damaged",
            where=f"{path}",
            fix="use an older checkpoint",
        ) from error
    return Checkpoint(path=path, state=state, files=files)


def unpack_arrays(data: bytes, file: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a .safetensors file.

    Args: file: path of the file, for the error message.
    Raises: CheckpointError: the file is damaged.
    """
    try:
        return safetensors.numpy.load(data)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:  # the last: types of arrays
        raise CheckpointError(
            f"cannot be read as .safetensors: {error}",
            code="checkpoint_damaged",
            where=f"{file}",
        ) from error


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Reads the newest checkpoint that passes its checks.

    Returns: the checkpoint, or None; the reasons why newer ones were skipped.
    """
    reasons: list[str] = []
    for path in _list_checkpoints(folder):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        step = checkpoint.state["step"]
        if path == path_of(folder, step):
            return checkpoint, reasons
        reasons.append(f"{path}: holds step {step} (renamed, or a copy)")
    return None, reasons


def newest_step(folder: Path) -> int:
    """Returns the step of the newest checkpoint in a folder, valid or not; 0 if there is none."""
    return next(map(_parse_step, _list_checkpoints(folder)), 0)


def _list_checkpoints(folder: Path) -> list[Path]:
    """Lists the checkpoint directories in a folder, newest step first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    numbered_paths = [(_parse_step(path), path) for path in entries]
    return [path for step, path in sorted(numbered_paths, reverse=True) if step >= 0]


def _parse_step(path: Path) -> int:
    """Parses the step from a checkpoint's name; -1: it is not the name of a checkpoint."""
    match = _NAME.match(path.name)
    return int(match[1]) if match else -1


class CheckpointWriter:
    """A writer that saves, in its own thread, the snapshots that rank 0's main thread submits."""

    def __init__(
        self,
        folder: Path,
        config_yaml: str,
        keep: int,
        on_saved: Callable[[int], None] = lambda step: None,
        card_of: Callable[[Mapping[str, Any]], str] = lambda state: "",
        sync_records: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            folder: folder of the run's checkpoints.
            config_yaml: the resolved configuration, stored in each checkpoint.
            keep: how many of the newest checkpoints to keep; best and last are always kept.
            on_saved: called with the step of each checkpoint once it is on disk.
            card_of: returns the model card for a state; "": none.
            sync_records: flushes the run's records to disk; returns False if that failed.  After a
                power cut, a checkpoint must not include steps that are missing from metrics.jsonl.
        """
        self.folder = folder
        self.config_yaml = config_yaml
        self._card_of = card_of
        self.keep = keep
        self._on_saved = on_saved
        self._sync_records = sync_records
        self._lock = threading.Lock()  # guards everything below
        self._thread: threading.Thread | None = None  # while there is something to write
        self._waiting: list[Snapshot] = []  # oldest first
        self._refused: list[tuple[Snapshot, Exception]] = []  # not written, and why; newest last
        self._troubles: list[str] = []
        self._unsynced = -1  # step whose records could not be flushed to disk

    def make_room(self) -> None:
        """Drops snapshots that wait or could not be written, except the best, to free memory."""
        with self._lock:
            self._waiting = [snapshot for snapshot in self._waiting if _is_best(snapshot)]
            self._refused = [
                (snapshot, reason) for snapshot, reason in self._refused if _is_best(snapshot)
            ]

    def hand_over(self, snapshot: Snapshot) -> None:
        """Writes a snapshot, now or after the one being written.

        A best snapshot that is waiting, or could not be written, is written before it.
        """
        with self._lock:
            older = [*(candidate for candidate, _ in self._refused), *self._waiting]
            bests = [candidate for candidate in older if _is_needed(candidate, [snapshot])]
            self._begin([*bests[-1:], snapshot])

    def drop_beyond(self, step: int) -> None:
        """Discards snapshots beyond a step, for a rollback to that step.

        After this call, no snapshot beyond the step will be written.
        """
        with self._lock:
            self._waiting = [snapshot for snapshot in self._waiting if snapshot.step <= step]
            self._refused = [
                (snapshot, reason) for snapshot, reason in self._refused if snapshot.step <= step
            ]
        self._wait()
        with self._lock:  # the snapshot that was being written
            self._refused = [
                (snapshot, reason) for snapshot, reason in self._refused if snapshot.step <= step
            ]

    def troubles(self) -> list[str]:
        """Returns descriptions of the failures since the last call, for the log."""
        if not self._troubles:  # called in every step, so without the lock
            return []
        with self._lock:
            troubles, self._troubles = self._troubles, []
        return troubles

    def finish(self) -> Exception | None:
        """Waits until nothing is left to write.

        Returns: the error that kept the newest or the best snapshot from being written, a
            CheckpointError if the write failed; None: both are on disk.
        """
        self._wait()
        for seconds in _RETRY_SECONDS:
            # ConfigError: another training run has taken the folder; waiting does not help.
            if not self._refused or isinstance(self._refused[-1][1], ConfigError):
                break
            time.sleep(seconds)
            with self._lock:
                self._begin([snapshot for snapshot, _ in self._refused])
            self._wait()
        return self._refused[-1][1] if self._refused else None

    def _begin(self, snapshots: list[Snapshot]) -> None:
        """Starts writing snapshots; the caller holds the lock."""
        self._waiting, self._refused = snapshots, []
        if self._thread is None:
            # Not a daemon thread: a run that ends with an error still finishes its current write.
            self._thread = threading.Thread(target=self._write_all, name="checkpoints")
            self._thread.start()

    def _wait(self) -> None:
        while (thread := self._thread) is not None:
            thread.join(1.0)  # in pieces, so that signals are handled meanwhile

    def _write_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                snapshot = self._waiting.pop(0)
            trouble = self._write(snapshot)
            with self._lock:
                self._refused = [
                    refusal for refusal in self._refused if _is_needed(refusal[0], [snapshot])
                ]
                if trouble is not None:
                    self._troubles.append(f"{trouble}")
                    if not self._waiting or _is_needed(snapshot, self._waiting):
                        self._refused.append((snapshot, trouble))

    def _write(self, snapshot: Snapshot) -> Exception | None:
        """Writes a snapshot, links the best, deletes old checkpoints; returns the error, if any."""
        failed = f"the checkpoint of step {snapshot.step} was not written"
        try:
            self._save(snapshot)
        except ConfigError as error:  # another training run owns the folder
            return error
        except CheckpointError as error:
            return CheckpointError(f"{failed}: {error}", code="checkpoint_unwritable")
        except Exception as error:  # out of memory, or our own bug: training must outlive it
            return RuntimeError(f"{failed}: {error!r}")
        try:
            self._on_saved(snapshot.step)
            best_step = snapshot.state["best_step"]
            try:
                self.mend_links(best_step=best_step)
            finally:
                prune(self.folder, keep=self.keep, best_step=best_step)
        except Exception as error:  # the thread must live: `_wait` waits for it
            with self._lock:
                self._troubles.append(f"failed to link the best or delete old checkpoints: {error}")
        return None

    def mend_links(self, *, last_step: int = 0, best_step: int = 0) -> None:
        """Points `last` and `best` at the checkpoints of these steps.

        Raises: ConfigError: another training run now holds the folder (`require_held`).
        """
        require_held(self.folder.parent)
        point_at_step(self.folder / "last", last_step)
        point_at_step(self.folder / "best", best_step)

    def _save(self, snapshot: Snapshot) -> None:
        """Writes a snapshot; if the disk is full, deletes older checkpoints first.

        All but the newest are deleted: a disk may have room for `keep` checkpoints but not for one
        more.
        """
        step = snapshot.step
        if self._unsynced != step and not self._sync_records():  # once: a stuck disk takes 30 s
            self._unsynced = step
        save = partial(
            save_checkpoint, self.folder, step, snapshot.groups, snapshot.state,
            self.config_yaml, self._card_of(snapshot.state),
        )  # fmt: skip
        try:
            save()
        except CheckpointError as error:
            best_step = snapshot.state["best_step"]
            if error.code != "disk_full" or not prune_to_newest(self.folder, best_step):
                raise
            save()
            with self._lock:
                self._troubles.append(
                    f"{self.folder}: the disk is full; of the older checkpoints only the newest "
                    f"and the best were kept, to make room for that of step {step}"
                )


def _is_best(snapshot: Snapshot) -> bool:
    return bool(snapshot.state["best_step"] == snapshot.step)


def _is_needed(older: Snapshot, newer: Sequence[Snapshot]) -> bool:
    """Returns True if a snapshot is worth writing even though newer ones are written."""
    return _is_best(older) and not any(_is_best(snapshot) for snapshot in newer)
