"""A Slurm cluster of this machine alone, of Debian's programs, for as long as a test runs."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppdist.common.child import ends_with_this
from tests.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
# Jobs of the partition `urgent` push those of `normal` out, with 20 s to end.  A job that was
# queued again waits as long as a credential lives, 120 s unless the file says otherwise.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
SchedulerParameters=bf_interval=1,sched_interval=2
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=normal Nodes={host} Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes={host} MaxTime=60 State=UP PriorityTier=2
"""


@dataclass
class Cluster:
    """How to talk to it."""

    folder: Path
    environment: Mapping[str, str]
    cores: int

    def ask(self, *words: str) -> str:
        """Runs one of Slurm's programs and returns what it prints."""
        ended = subprocess.run(
            words, env=dict(self.environment), capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}{self.logs}"
        return ended.stdout.strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, ..."""
        shown = self.ask("scontrol", "--oneliner", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    @property
    def logs(self) -> str:
        names = ("munged.log", "slurmctld.log", "slurmd.log")
        files = [self.folder / name for name in names if (self.folder / name).is_file()]
        return "".join(f"\n{file.name}:\n{file.read_text()[-3000:]}" for file in files)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Skips the test where it cannot be had.  Args: folder: empty; a socket's path must fit."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing or os.geteuid() != 0:
        pytest.skip("needs root and slurmctld, slurmd, slurm-client and munge (apt-get install)")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    controller, daemon = free_ports(2)
    cores = len(os.sched_getaffinity(0))
    config = CONFIG.format(
        host=socket.gethostname(),
        folder=folder,
        controller=controller,
        daemon=daemon,
        cores=cores,
    )
    (folder / "slurm.conf").write_text(config)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    made = Cluster(folder, environment, cores)
    munge = [f"--{each}={folder}/munge.{each.split('-')[0]}" for each in ("key-file", "socket")]
    munge += [f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed"]
    commands = (
        ["munged", "--foreground", "--force", f"--log-file={folder}/munged.log", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    )
    daemons: list[subprocess.Popen] = []
    try:
        for command in commands:
            daemons.append(_started(command, environment, folder))
            time.sleep(1)
        _wait_until_it_answers(made, daemons)
        try:
            yield made
        finally:
            _end_jobs(made)
    finally:
        for process in reversed(daemons):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_jobs(made: Cluster) -> None:
    """Jobs would outlive the daemons."""

    def ran(*words: str) -> str:  # a failure here must not hide that of the test
        return subprocess.run(
            words, env=dict(made.environment), capture_output=True, text=True
        ).stdout

    deadline = time.monotonic() + 60  # KillWait is 30
    while time.monotonic() < deadline and (jobs := ran("squeue", "--noheader", "--format=%A")):
        ran("scancel", *jobs.split())
        time.sleep(1)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _started(
    command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> subprocess.Popen:
    with (folder / f"{command[0]}.out").open("w") as output:
        return subprocess.Popen(
            list(command),
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=ends_with_this(signal.SIGTERM),  # a killed test, too
        )


def _wait_until_it_answers(made: Cluster, daemons: Sequence[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 60
    while True:
        asked = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=dict(made.environment),
            capture_output=True, text=True,
        )  # fmt: skip
        if "idle" in asked.stdout:
            return
        dead = [process.args for process in daemons if process.poll() is not None]
        if dead or time.monotonic() > deadline:
            pytest.skip(f"Slurm does not run here: {dead} {asked.stdout}{asked.stderr}{made.logs}")
        time.sleep(0.5)
