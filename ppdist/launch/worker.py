"""Worker: the process that fleetrun, or Paddle's launcher on its behalf, starts for each rank.

It runs the training script as a child, and stays until that has ended:
  * the first rank of a host gets fleetrun's own terminal, which a progress bar wants to see; the
    others get a file;
  * it records in the folder of the run how and when the script ended;
  * when fleetrun is killed, it asks the script to stop, and kills it soon after.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, cast

if __name__ == "__main__":  # run by path: modules in this file's folder must not hide others
    _own, _root = Path(__file__).resolve().parent, str(Path(__file__).resolve().parents[2])
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != _own]
    if _root not in sys.path:  # a checkout that was never installed
        sys.path.insert(0, _root)

from ppdist.common.child import Process, end_with_parent, start
from ppdist.common.files import open_own, replace_file
from ppdist.common.job import EXIT_DIR_VARIABLE
from ppdist.common.process import boot_seconds
from ppdist.common.signals import hold_signals, release_signals

BACKUP_VARIABLE = "PADDLE_BACKUP_ENV_PATH"  # Paddle's file of values too long for variables
CPU_VARIABLE = "PPDIST_CPU"  # set for ranks that must see no card
# Time for a clean checkpoint.  If Paddle's launcher started this process, it kills it after 30 s,
# and then no process would be left to end the script's children.
GRACE_SECONDS = 28
_RECORD_BYTES = 200  # size of a report: more than its numbers can take


@dataclass(frozen=True)
class Report:
    """The state of a rank as its worker last reported it."""

    rank: int
    local: int  # local rank on this host
    pid: int  # of the worker
    code: int | None  # exit code of the script; None: it runs
    time: float  # when this report was written, according to `boot_seconds`
    child: int = 0  # process id of the script; 0: not yet started, or ended
    seconds: float | None = None  # how long the script ran; None: still running, or end missed


def main() -> int:
    """Runs the script of this rank, and reports how it ended; returns its exit code."""
    folder = Path(os.environ[EXIT_DIR_VARIABLE])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    rank, local = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_LOCAL_RANK"])
    child: Process | None = None
    parent = os.getppid()

    def stop(number: int, frame: FrameType | None) -> None:
        if child is None:
            sys.exit(128 + number)
        # Launchers signal the whole process group, so the child has already received the signal; a
        # signal to this process alone is forwarded to all ranks by fleetrun, which finds this file.
        with contextlib.suppress(OSError):
            (folder / f"stop-{rank}").write_text(str(int(number)), encoding="utf-8")
        # The launcher is gone, so nothing else signals the child.
        if os.getppid() != parent:
            os.kill(child.pid, signal.SIGTERM)
        signal.alarm(GRACE_SECONDS)

    def kill(number: int, frame: FrameType | None) -> None:
        if child is not None:
            os.kill(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGALRM, kill)
    end_with_parent(signal.SIGTERM, parent)
    begin_report(folder, rank, local)
    forget_environment(folder)
    output, errors = open_streams(folder, local, Path(job["log_dir"]), job)
    # A signal that arrives while the script starts would reach neither process.
    hold_signals()
    began = time.monotonic()
    child = start(
        job["command"],
        stdout=output,
        stderr=errors,
        env=make_environment(job["log_dir"]),
        start_new_session=False,
        # A forked child would run this process's `stop`.
        default=(signal.SIGTERM, signal.SIGINT),
    )
    # A signal to the process group may have come before the child existed.
    if signal.sigpending() & {signal.SIGTERM, signal.SIGINT}:
        child.terminate()
    release_signals()
    begin_report(folder, rank, local, child.pid)
    code = child.wait()
    end_report(folder, rank, local, code, time.monotonic() - began)
    # The script's own children may have left its process group and its session.
    for pid in find_processes(folder, rank):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def forget_environment(folder: Path) -> None:
    """Deletes the copies of the environment, with secrets, that Paddle's launcher has written.

    The folder stays behind if fleetrun is killed.
    """
    for pattern in ("envlog.*", "backup_env.*.json", "*.log"):
        for path in (folder / "paddle").glob(pattern):
            path.unlink(missing_ok=True)


def find_processes(folder: Path, rank: int | None = None) -> list[int]:
    """Lists the processes of an attempt (or of one rank), found by their environment.

    Zombies have no environment and are not found; without /proc no process is.
    """
    of_attempt = os.fsencode(f"{EXIT_DIR_VARIABLE}={folder}")
    of_rank = None if rank is None else f"PADDLE_TRAINER_ID={rank}".encode()
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # the process has ended, or is another user's
            continue
        if (
            of_attempt in variables
            and (of_rank is None or of_rank in variables)
            and int(process.name) != os.getpid()
        ):
            pids.append(int(process.name))
    return pids


def begin_report(folder: Path, rank: int, local: int, child: int = 0) -> None:
    """Writes exit-RANK.json when the script begins.

    This reserves space for the final report: a full disk must not turn success into failure.

    Args: child: the process of the script, 0 before there is one.
    """
    # If fleetrun has ended, the folder is gone.
    with contextlib.suppress(OSError):
        content = _record(rank, local, child, None) + b" " * _RECORD_BYTES
        replace_file(folder / f"exit-{rank}.json", content)


def end_report(
    folder: Path, rank: int, local: int, code: int, seconds: float | None = None
) -> None:
    """Writes how the script ended, into the space that `begin_report` has reserved."""
    with contextlib.suppress(OSError):
        report = os.open(folder / f"exit-{rank}.json", os.O_WRONLY)
        os.pwrite(report, _record(rank, local, 0, code, seconds), _RECORD_BYTES)
        os.close(report)


def _record(
    rank: int, local: int, child: int, code: int | None, seconds: float | None = None
) -> bytes:
    report = Report(rank, local, os.getpid(), code, boot_seconds(), child, seconds)
    return json.dumps(asdict(report)).ljust(_RECORD_BYTES - 1).encode() + b"\n"


def read_reports(folder: Path) -> list[Report]:
    """Reads the last report of each rank that has begun."""
    latest = {}
    for path in folder.glob("exit-*.json"):
        with contextlib.suppress(OSError):
            for line in path.read_bytes().splitlines():
                # The space for the final report may be empty, or is just being written.
                with contextlib.suppress(ValueError):
                    report = Report(**json.loads(line))
                    latest[report.rank] = report
    return [latest[rank] for rank in sorted(latest)]


def open_streams(
    folder: Path, local: int, log_dir: Path, job: dict[str, Any]
) -> tuple[BinaryIO | int, BinaryIO | int]:
    """Returns stdout and stderr for the script: fleetrun's terminal, or the log."""
    log = cast(BinaryIO, open_own(log_dir / f"workerlog.{local}", "ab"))
    prefix = f"restart {job['restart']}: " if job["restart"] else ""
    log.write(f"--- {time.strftime('%F %T')}: {prefix}{' '.join(job['command'])}\n".encode())
    log.flush()
    if local == 0:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(str(folder / "terminal"))
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
        except OSError as error:
            log.write(f"fleetrun's terminal cannot be reached ({error}); writing here\n".encode())
        else:
            if len(descriptors) == 2:
                log.write(b"the first process of a host writes to the terminal of fleetrun\n")
                log.close()
                return descriptors[0], descriptors[1]
    log.flush()
    return log, log


def make_environment(log_dir: str) -> dict[str, str]:
    """Returns the environment of the script."""
    variables = dict(os.environ)
    variables["PADDLE_LOG_DIR"] = log_dir
    # `forget_environment` has removed the file that this variable names.
    variables.pop(BACKUP_VARIABLE, None)
    if variables.pop(CPU_VARIABLE, None):
        for name in ("FLAGS_selected_gpus", "FLAGS_selected_cpus"):
            variables.pop(name, None)
        if "CUDA_VISIBLE_DEVICES" in variables:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        variables["PADDLE_DISTRI_BACKEND"] = "gloo"
    return variables


if __name__ == "__main__":
    sys.exit(main())
