"""output_dir on several hosts: one that all share, or one each.

With one each, only rank 0's host has checkpoints.  What other hosts know of a run, they note, so
that `--resume auto` never takes a lost host for a new run.
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
    """Where the hosts of a run write.

    Attributes:
        shared: all hosts have the same output_dir; None: there is one host.
    """

    folder: Path
    shared: bool | None = None

    def note_newest(self, step: int) -> None:
        """Notes, on hosts that have no checkpoints, that another has one.  Local."""
        if self.shared is False and comm.local_rank() == 0 and not comm.is_main():
            note = {"step": step, "host": comm.addresses()[0]}
            with suppress(OSError):  # it is only for who loses that host
                self.folder.mkdir(parents=True, exist_ok=True)
                replace_file(self.folder / _NOTE, json.dumps(note).encode())

    def require_no_other(self) -> None:
        """Refuses to begin anew where a host knows a checkpoint.  Collective.

        Raises: CheckpointError.
        """
        found = None if comm.local_rank() else read_json(self.folder / _NOTE)
        noting = [
            (each["step"], each["host"], host)
            for each, host in comm.all_gather_object((found, comm.host()))
            if isinstance(each, dict) and each.keys() >= {"step", "host"}
        ]
        if noting:
            step, holder, host = max(noting)
            raise CheckpointError(
                f"this run has a checkpoint of step {step} on host {holder}, as host {host} knows; "
                "rank 0's host has none",
                code="checkpoint_elsewhere",
                where="--resume auto",
                fix=f"bring host {holder} back or copy its {self.folder} to rank 0's host; to "
                "begin anew, start without --resume",
            )

    def forget(self) -> None:
        """A new run begins.  Local."""
        if comm.local_rank() == 0:
            with suppress(OSError):
                (self.folder / _NOTE).unlink(missing_ok=True)


def find_output_dirs(folder: Path) -> OutputDirs:
    """Whether the hosts share an output_dir.  Collective."""
    if comm.world_size() == comm.local_size():
        return OutputDirs(folder)
    own = folder.absolute()

    def put() -> tuple[str, str]:
        """A file in the nearest existing folder, and the path to ours."""
        there = next(each for each in (own, *own.parents) if each.is_dir())
        name = f".ppdist-{uuid.uuid4().hex}"
        with suppress(OSError):  # whoever cannot write there says so later
            (there / name).touch()
        return name, f"{own.relative_to(there)}"

    name, below = comm.run_on_main(put)
    probes = [each / name for each in (own, *own.parents) if f"{own.relative_to(each)}" == below]
    seen_W = comm.all_gather_object(any(probe.exists() for probe in probes))
    if comm.is_main():
        with suppress(OSError):
            probes[0].unlink()
    return OutputDirs(folder, all(seen_W))
