"""The interface between fleetrun and the ranks of a job: variables, and files of its folder.

Also the keys of a configuration that are left out where the hosts of a job are compared.
"""

import json
import os
from pathlib import Path
from typing import Any

from ppdist.common import files

EXIT_DIR_VARIABLE = "PPDIST_EXIT_DIR"  # set by our fleetrun: folder of the reports of the ranks
# Set by our fleetrun: a folder of this host that stays from one attempt of a job to the next.
JOB_DIR_VARIABLE = "PPDIST_JOB_DIR"
JOB_VARIABLE = "PPDIST_JOB"  # set by our fleetrun: the name of this attempt, for its ranks alone
# Set by our fleetrun when it restarts a job: the number of restarts; and the number, from 1, of a
# step at which the job failed twice and which is skipped.
RESTART_VARIABLE, SKIP_STEP_VARIABLE = "PPDIST_RESTART", "PPDIST_SKIP_STEP"
STARTED_VARIABLE = "PPDIST_STARTED"  # set by our fleetrun: `boot_seconds` when it began
# Set by our fleetrun with --min_hosts: the run goes on without hosts that are lost.
MIN_HOSTS_VARIABLE = "PPDIST_MIN_HOSTS"
RUN_NOTE = "run.json"  # in the folder of a job: notes of one attempt for the next
CHANGE_NOTE = "change.json"  # also there: this attempt is stopped because hosts leave or join
DIGESTS_NOTE = "digests.json"  # as well: digests of what rank 0 trains with (engine/digests.py)
LAYOUT_NOTE = "layout.json"  # as well: the layout of DATA, as the first attempt found it
# Keys that may differ between the hosts of a run: they say where files lie, not what is computed.
PER_HOST_KEYS = (
    "output_dir",  # only rank 0 writes
    "data.root",  # the data themselves are compared: ppdist.engine.data
    "data.workers",
    "data.worker_timeout_seconds",
    "model.pretrained",  # the content of the file is compared: preflight.flat_config
)


def launcher_folder() -> Path | None:
    """Returns the folder in which fleetrun reads its ranks' reports; None without fleetrun."""
    folder = os.environ.get(EXIT_DIR_VARIABLE)
    return Path(folder) if folder and Path(folder).is_dir() else None


def launched_rank() -> int:
    """Returns the rank assigned by Paddle's launcher; 0 without one."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def launched_ranks() -> int:
    """Returns the number of processes started by Paddle's launcher; 1 without one."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def read_note(name: str) -> Any:
    """Reads a note that an earlier attempt of this job left on this host; None without one."""
    folder = os.environ.get(JOB_DIR_VARIABLE)  # of fleetrun
    return files.read_json(Path(folder) / name) if folder else None


def write_note(name: str, content: Any) -> None:
    """Writes a note for the next attempt of this job.

    Raises: OSError: the folder of the job cannot be written to.
    """
    folder = os.environ.get(JOB_DIR_VARIABLE)
    if folder and Path(folder).is_dir():
        files.replace_file(Path(folder) / name, json.dumps(content).encode())


def note_saved(step: int) -> None:
    """Records for the job, on rank 0's host, that a checkpoint is saved.

    Raises: OSError: the record cannot be replaced.
    """
    if (note := read_note(RUN_NOTE)) is not None:
        write_note(RUN_NOTE, {**note, "saved": step})


def hosts_change() -> bool:
    """Returns True if fleetrun stops this attempt only because hosts leave or join.

    Only rank 0's host knows this.
    """
    return bool(read_note(CHANGE_NOTE))
