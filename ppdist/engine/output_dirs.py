"""output_dir on several hosts: one that all share, or one each.

With one each, only rank 0's host has checkpoints, unless `checkpoint.on_every_host` makes the first
rank of each host write its own.  What other hosts know of a run, they note, so that `--resume auto`
never takes a lost host for a new run.
"""

import json
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppdist.common.errors import CheckpointError, ConfigError
from ppdist.common.files import read_json, replace_file
from ppdist.common.process import MIN_HOSTS_VARIABLE
from ppdist.distributed import comm

_NOTE = "elsewhere.json"  # in output_dir: which host has the newest checkpoint


@dataclass(frozen=True)
class OutputDirs:
    """Where the hosts of a run write.

    Attributes:
        shared: all hosts have the same output_dir; None: there is one host.
        copies: the first rank of each host writes checkpoints, into a folder of its own.
    """

    folder: Path
    shared: bool | None = None
    copies: bool = False

    @property
    def writes(self) -> bool:
        """Whether this rank writes checkpoints."""
        return comm.is_main() or (self.copies and comm.local_rank() == 0)

    def run(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on ranks that write; all get rank 0's result.  Collective."""
        if not self.copies:
            return comm.run_on_main(work)
        value = comm.run_on_all_ranks(lambda: work() if self.writes else None)
        return comm.run_on_main(lambda: value)

    def require_reachable(self) -> None:
        """Refuses a run without lost hosts, if those have all checkpoints.

        Raises: ConfigError.
        """
        if MIN_HOSTS_VARIABLE in os.environ and self.shared is False and not self.copies:
            raise ConfigError(
                "the hosts do not share output_dir, so without rank 0's host none could go on: it "
                "alone has the checkpoints",
                code="checkpoints_on_one_host",
                where="fleetrun --min_hosts",
                fix="set checkpoint.on_every_host: true, or an output_dir on storage that all "
                "hosts have",
            )

    def note_newest(self, step: int) -> None:
        """Notes, on hosts that have no checkpoints, that another has one.  Local."""
        if self.shared is False and not self.copies and comm.local_rank() == 0 and not self.writes:
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


def find_output_dirs(folder: Path, on_every_host: bool) -> OutputDirs:
    """Whether the hosts share an output_dir.  Collective.

    Args: on_every_host: `checkpoint.on_every_host`.
    """
    if comm.world_size() == comm.local_size():
        return OutputDirs(folder, copies=on_every_host)
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
    shared = all(seen_W)
    return OutputDirs(folder, shared, on_every_host and not shared)
