"""Saving: the checkpoints of a run on disk.  Rank 0 writes them, while all ranks train on."""

import logging
import math
from collections.abc import Callable

from ppdist.common.errors import CheckpointError
from ppdist.common.eta import SAVING
from ppdist.common.files import is_lost, require_held
from ppdist.common.job import note_saved
from ppdist.common.process import WHOLE
from ppdist.distributed import comm, heartbeat
from ppdist.engine.checkpoint import (
    CheckpointWriter,
    Snapshot,
    check_room,
    newest_step,
    set_aside,
)
from ppdist.engine.output_dirs import OutputDirs
from ppdist.engine.parts import TrainLog
from ppdist.engine.state import TrainState

_LOGGER = logging.getLogger("ppdist.engine")


class Saving:
    """The checkpoints of a run: their interval, their folder, and their writer.

    Attributes:
        output_dir: the output folder of the run.
        folder: the folder of the checkpoints.
        saved_step: the last saved step; -1 if this process has saved none.
    """

    def __init__(
        self, writer: CheckpointWriter, every: int, last: int, dirs: OutputDirs, log: TrainLog
    ) -> None:
        """
        Args:
            every: steps from one checkpoint to the next; 0 saves only the best and the last.
            last: the last step of the run.
        """
        self.output_dir, self.folder = dirs.folder, dirs.folder / "checkpoints"
        self.writer = writer
        self.saved_step = -1
        self._every, self._last = every, last
        self._owed = False  # a checkpoint was due amid bad steps, and is still to be made
        self._dirs = dirs
        self._log = log

    def is_due(self, state: TrainState) -> bool:
        """Returns True if the run saves now; one due amid bad steps waits for their end."""
        is_last = state.step == self._last
        self._owed |= is_last or (self._every > 0 and state.step % self._every == 0)
        return self._owed and (is_last or not state.bad_steps)

    def save(self, step: int, capture: Callable[[], Snapshot]) -> Snapshot | None:
        """Takes a snapshot, which rank 0 writes while training continues.

        No rank waits for the disk.

        Returns: the snapshot; None if this step is saved already.
        """
        self._owed = False
        if self.saved_step == step:
            return None
        heartbeat.beat("save", step)
        with self._log.spending(SAVING, step):
            self.writer.make_room()  # first, because the copy needs memory
            snapshot = capture()
            if comm.is_main():
                self.writer.hand_over(snapshot)
            self._dirs.note_newest(step)
        self.saved_step = step
        return snapshot

    def resume(self, state: TrainState) -> None:
        """Continues in the folder that already contains the run's checkpoints.  Collective."""
        self.saved_step = state.step
        comm.run_on_main(lambda: self._mend_links(state))

    def mend_best(self, step: int) -> None:
        """Makes `best` point to a checkpoint that is on disk already.  Collective."""
        comm.run_on_main(lambda: self.writer.mend_links(best_step=step))

    def go_back(self, state: TrainState) -> None:
        """Moves aside checkpoints beyond the step of a rollback, which the run will save again.

        Collective.
        """

        def move_aside() -> str:
            require_held(self._dirs.folder)
            self.writer.drop_beyond(state.step)
            try:
                aside = set_aside(self.folder, state.step)
                self._mend_links(state)
                note_saved(newest_step(self.folder))  # a restart would wait for one that was moved
            except (CheckpointError, OSError, ValueError) as error:
                return f"{error}; they hold steps that this run makes again"
            moved = f"checkpoints beyond step {state.step} are now in {aside}"
            return moved if aside else ""

        message = comm.run_on_main(move_aside)
        if message:
            self._log.warning(message)
        self.saved_step, self._owed = -1, False

    def require_room(self, snapshot: Snapshot, moments: int) -> None:
        """Checks that the checkpoints fit on the disk; warns if only few do.  Collective.

        Args: moments: see `check_room`.
        Raises: CheckpointError, on every rank: not even one checkpoint fits.
        """
        saves = math.ceil(self._last / self._every) if self._every else 2
        count = min(self.writer.keep + 2, saves)  # with the best and the one being written
        warning = comm.run_on_main(lambda: check_room(self.folder, snapshot, count, moments))
        if warning and comm.is_main():
            _LOGGER.warning(warning, extra=WHOLE)

    def warn_of_troubles(self) -> None:
        """Logs a warning if writes have failed since the last call."""
        for trouble in self.writer.troubles():
            warn = self._log.warning if comm.is_main() else _LOGGER.warning
            warn(f"{trouble}; training continues and will retry; free disk space")

    def is_lost(self) -> bool:
        """Returns True if another training run has taken the folder; only rank 0 detects this."""
        return is_lost(self._dirs.folder)

    def finish(self, step: int) -> None:
        """Waits until the last checkpoint is on disk.  Collective.

        Raises: on every rank, CheckpointError: the newest or the best checkpoint could not be
            written; ConfigError: another training run has taken the folder meanwhile.
        """
        heartbeat.beat("save", step)
        with self._log.spending(SAVING, step):
            comm.run_on_main(self._write_last)

    def _write_last(self) -> None:
        require_held(self._dirs.folder)
        trouble = self.writer.finish()
        for line in dict.fromkeys(self.writer.troubles()):
            if line != f"{trouble}":
                self._log.warning(f"at the end of the run: {line}")
        if isinstance(trouble, CheckpointError):
            raise CheckpointError(
                f"{trouble}; the steps since the newest one in {self.folder} are lost",
                code="checkpoint_lost",
                fix="free disk space (or make it writable) and rerun with --resume to repeat them",
            )
        if trouble is not None:
            raise trouble

    def _mend_links(self, state: TrainState) -> None:
        self.writer.mend_links(last_step=state.step, best_step=state.best_step)
