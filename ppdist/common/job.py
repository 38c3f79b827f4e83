"""What fleetrun tells the ranks of a job: variables of the environment, files of its folder."""

import os
from pathlib import Path

EXIT_DIR_VARIABLE = "PPDIST_EXIT_DIR"  # set by our fleetrun: where each rank leaves why it ended
# Set by our fleetrun: a folder of this host that stays from one attempt of a job to the next.
JOB_DIR_VARIABLE = "PPDIST_JOB_DIR"
JOB_VARIABLE = "PPDIST_JOB"  # set by our fleetrun: the name of this attempt, for its ranks alone
# Set by our fleetrun where it starts a job anew: how many times it has; and the number, from 1, of
# a step at which the job ended twice and which is to be left out.
RESTART_VARIABLE, SKIP_STEP_VARIABLE = "PPDIST_RESTART", "PPDIST_SKIP_STEP"
STARTED_VARIABLE = "PPDIST_STARTED"  # set by our fleetrun: `boot_seconds` when it began
# Set by our fleetrun with --min_hosts: the run goes on without hosts that are lost.
MIN_HOSTS_VARIABLE = "PPDIST_MIN_HOSTS"
RUN_NOTE = "run.json"  # in the folder of a job: what one attempt leaves for the next
CHANGE_NOTE = "change.json"  # there, too: this attempt is stopped because hosts go or come
DIGESTS_NOTE = "digests.json"  # there, too: what rank 0 trains with (engine/digests.py)


def launcher_folder() -> Path | None:
    """Where fleetrun reads its ranks' reports; None without fleetrun."""
    folder = os.environ.get(EXIT_DIR_VARIABLE)
    return Path(folder) if folder and Path(folder).is_dir() else None


def launched_rank() -> int:
    """Rank assigned by Paddle's launcher; 0 without one."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def launched_ranks() -> int:
    """Number of processes started by Paddle's launcher; 1 without one."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
