"""Checkpoints written beside training: one thread of rank 0, one checkpoint at a time.

A step's state is copied into arrays of its own (`Snapshot`), handed over, and training goes on.
Storage that is slower than checkpoints are due never stalls a step: the newest snapshot waits, and
takes the place of one that waits already, unless that is the best so far.  So at most two are held,
and the best as a third while it waits.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ppdist.checkpoint import Snapshot, point_at_step, prune, save_checkpoint
from ppdist.errors import CheckpointError

# When the last one of a run is tried again: a disk may be full, a share away, for a moment.
_AGAIN_SECONDS = (1.0, 4.0, 10.0)


class CheckpointWriter:
    """Writes the checkpoints of a run; the main thread of rank 0 hands them over."""

    def __init__(self, folder: Path, config_yaml: str, keep: int) -> None:
        """
        Args:
            folder: of the checkpoints of the run.
            config_yaml: the resolved configuration, for each of them.
            keep: how many of the newest stay; best and last always do.
        """
        self.folder = folder
        self.config_yaml = config_yaml
        self.keep = keep
        self._lock = threading.Lock()  # of everything below
        self._thread: threading.Thread | None = None  # while there is something to write
        self._waiting: list[Snapshot] = []  # oldest first
        self._refused: list[tuple[Snapshot, str]] = []  # by the disk, and why; newest last
        self._troubles: list[str] = []

    def make_room(self) -> None:
        """Drops what waits, or was refused, and the next one will replace, before that is made."""
        with self._lock:
            self._waiting = [each for each in self._waiting if _is_best(each)]
            self._refused = [(each, why) for each, why in self._refused if _is_best(each)]

    def hand_over(self, snapshot: Snapshot) -> None:
        """Has a snapshot written, now or when the one being written is on disk.

        A best one that waits, or was refused, is written before it.
        """
        with self._lock:
            older = [*(each for each, _ in self._refused), *self._waiting]
            bests = [each for each in older if _is_needed(each, [snapshot])]
            self._begin([*bests[-1:], snapshot])

    def drop_beyond(self, step: int) -> None:
        """For a run that goes back to a step: afterwards nothing beyond it will be written."""
        with self._lock:
            self._waiting = [each for each in self._waiting if each.step <= step]
            self._refused = [(each, why) for each, why in self._refused if each.step <= step]
        self._wait()
        with self._lock:  # the one that was being written
            self._refused = [(each, why) for each, why in self._refused if each.step <= step]

    def troubles(self) -> list[str]:
        """What went wrong since it was last asked, for the log."""
        if not self._troubles:  # asked in every step
            return []
        with self._lock:
            told, self._troubles = self._troubles, []
        return told

    def finish(self) -> str:
        """Waits until nothing is left to write.

        Returns: why the newest snapshot, or the best, could not be written; "": they are on disk.
        """
        self._wait()
        for seconds in _AGAIN_SECONDS:
            if not self._refused:
                break
            time.sleep(seconds)
            with self._lock:
                self._begin([each for each, _ in self._refused])
            self._wait()
        return self._refused[-1][1] if self._refused else ""

    def _begin(self, snapshots: list[Snapshot]) -> None:
        """With the lock held."""
        self._waiting, self._refused = snapshots, []
        if self._thread is None:
            # No daemon: a run that ends with an error still finishes what it has begun to write.
            self._thread = threading.Thread(target=self._write_all, name="checkpoints")
            self._thread.start()

    def _wait(self) -> None:
        while (thread := self._thread) is not None:
            thread.join(1.0)  # in pieces, so that signals are heard

    def _write_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                snapshot = self._waiting.pop(0)
            trouble = self._write(snapshot)
            with self._lock:
                self._refused = [each for each in self._refused if _is_needed(each[0], [snapshot])]
                if trouble:
                    self._troubles.append(trouble)
                    if not self._waiting or _is_needed(snapshot, self._waiting):
                        self._refused.append((snapshot, trouble))

    def _write(self, snapshot: Snapshot) -> str:
        """Writes it, names the best, and deletes old ones; returns why it is not there."""
        try:
            save_checkpoint(
                self.folder, snapshot.step, snapshot.groups, snapshot.state, self.config_yaml
            )
        except Exception as error:  # out of memory, too, or our own bug: training must outlive it
            said = f"{error}" if isinstance(error, CheckpointError) else repr(error)
            return f"THE CHECKPOINT OF STEP {snapshot.step} IS NOT WRITTEN: {said}"
        try:
            point_at_step(self.folder / "best", snapshot.state["best_step"])
            prune(self.folder, self.keep)
        except Exception as error:  # a thread that dies would be waited for until the end of time
            with self._lock:
                self._troubles.append(f"naming the best or deleting old checkpoints: {error}")
        return ""


def _is_best(snapshot: Snapshot) -> bool:
    return bool(snapshot.state["best_step"] == snapshot.step)


def _is_needed(older: Snapshot, newer: Sequence[Snapshot]) -> bool:
    """Whether a snapshot is worth writing when newer ones are."""
    return _is_best(older) and not any(_is_best(each) for each in newer)
