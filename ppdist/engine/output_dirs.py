"""output_dir on several hosts: one that all share, or one each.

With one each, only rank 0's host has checkpoints.  The other hosts note which host has the newest
one, so that `--resume auto` never starts a new run because that host is lost.
"""

import json
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ppdist.common.errors import CheckpointError
from ppdist.common.files import read_json, replace_file
from ppdist.distributed import comm

_NOTE = "elsewhere.json"  # in output_dir: which host has the newest checkpoint


@dataclass(frozen=True)
class OutputDirs:
    """The output folders of a run's hosts.

    Attributes:
        shared: whether all hosts use the same output_dir; None if there is only one host.
    """

    folder: Path
    shared: bool | None = None

    def note_newest(self, step: int) -> None:
        """Records, on hosts without checkpoints, that rank 0's host has one.  Local."""
        if self.shared is False and comm.local_rank() == 0 and not comm.is_main():
            note = {"step": step, "host": comm.addresses()[0]}
            with suppress(OSError):  # the note only matters if that host is lost
                self.folder.mkdir(parents=True, exist_ok=True)
                replace_file(self.folder / _NOTE, json.dumps(note).encode())

    def require_no_other(self) -> None:
        """Refuses to start a new run if a host has a note of a checkpoint.  Collective.

        Raises: CheckpointError, on every rank: a host has such a note.
        """
        note = None if comm.local_rank() else read_json(self.folder / _NOTE)
        notes = [
            (rank_note["step"], rank_note["host"], host)
            for rank_note, host in comm.all_gather_object((note, comm.host()))
            if isinstance(rank_note, dict) and rank_note.keys() >= {"step", "host"}
        ]
        if notes:
            step, holder, host = max(notes)
            raise CheckpointError(
                f"this run has a checkpoint of step {step} on host {holder}, as host {host} knows; "
                "rank 0's host has none",
                code="checkpoint_elsewhere",
                where="--resume auto",
                fix=f"bring host {holder} back or copy its {self.folder} to rank 0's host; to "
                "begin anew, start without --resume",
            )

    def forget(self) -> None:
        """Deletes the note, because a new run starts.  Local."""
        if comm.local_rank() == 0:
            with suppress(OSError):
                (self.folder / _NOTE).unlink(missing_ok=True)


def find_output_dirs(folder: Path) -> OutputDirs:
    """Finds out whether the hosts share an output_dir.  Collective.

    Rank 0 creates a file in it, and the other ranks look for this file.
    """
    if comm.world_size() == comm.local_size():
        return OutputDirs(folder)
    path = folder.absolute()

    def put() -> tuple[str, str]:
        """Creates a file in the nearest existing folder.

        Returns: the file's name; the path of our folder relative to the existing folder.
        """
        existing = next(parent for parent in (path, *path.parents) if parent.is_dir())
        name = f".ppdist-{uuid.uuid4().hex}"
        with suppress(OSError):  # a folder that cannot be written is reported later
            (existing / name).touch()
        return name, f"{path.relative_to(existing)}"

    # On other hosts the folder may not exist yet, or lie below another mount point: they look in
    # every parent from which the folder has the same relative path.
    name, below = comm.run_on_main(put)
    probes = [
        parent / name for parent in (path, *path.parents) if f"{path.relative_to(parent)}" == below
    ]
    seen_W = comm.all_gather_object(any(probe.exists() for probe in probes))
    if comm.is_main():
        with suppress(OSError):
            probes[0].unlink()
    return OutputDirs(folder, all(seen_W))
