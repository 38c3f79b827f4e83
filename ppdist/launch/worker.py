"""What Paddle's launcher starts for each rank: runs the training script as a child and watches it.

It stands between the two because Paddle's launcher, as it is,
  * gives every rank a file as its output and copies rank 0's to the terminal up to 2 s late, so a
    progress bar never sees a terminal: here the first rank of a host gets fleetrun's own;
  * forgets which rank failed first and how: here each leaves that in the folder of the run;
  * leaves its workers running when it is killed: here they end with it.

A script, run by its path: only the standard library, nothing of ppdist.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

FOLDER_VARIABLE = "PPDIST_EXIT_DIR"
GRACE_SECONDS = 30  # for a clean checkpoint once the launcher is gone, as Paddle's launcher gives
_PR_SET_PDEATHSIG = 1


def main() -> int:
    folder = Path(os.environ[FOLDER_VARIABLE])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    rank, local = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_LOCAL_RANK"])
    child: subprocess.Popen | None = None
    parent = os.getppid()

    def stop(number: int, frame: FrameType | None) -> None:
        # Paddle's launcher signals the whole process group, so the child has it already, unless
        # the signal says that the launcher itself is gone.
        if child is None:
            sys.exit(128 + number)
        if os.getppid() != parent:
            os.kill(child.pid, signal.SIGTERM)
            signal.alarm(GRACE_SECONDS)

    def kill(number: int, frame: FrameType | None) -> None:
        if child is not None:
            os.kill(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, kill)
    end_with_parent(signal.SIGTERM, parent)
    leave(folder, rank, local, None)
    output, errors = streams(folder, local, Path(job["log_dir"]), job)
    child = subprocess.Popen(
        job["command"],
        stdout=output,
        stderr=errors,
        env=environment(job["log_dir"]),
        preexec_fn=lambda: end_with_parent(signal.SIGKILL, None),
    )
    code = child.wait()
    leave(folder, rank, local, code)
    return code if code >= 0 else 128 - code


def end_with_parent(number: int, parent: int | None) -> None:
    """Asks Linux to send this process a signal when its parent dies; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
        if parent is not None and os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), number)


def leave(folder: Path, rank: int, local: int, code: int | None) -> None:
    """Writes how the script ended (None: it has begun) to exit-RANK.json, atomically."""
    report = folder / f"exit-{rank}.json"
    draft = report.with_suffix(f".{os.getpid()}")
    state = {"rank": rank, "local": local, "pid": os.getpid(), "code": code, "time": time.time()}
    draft.write_text(json.dumps(state), encoding="utf-8")
    draft.replace(report)


def streams(
    folder: Path, local: int, log_dir: Path, job: dict[str, Any]
) -> tuple[BinaryIO | int, BinaryIO | int]:
    """stdout and stderr of the script: fleetrun's own for the host's first rank, else its log."""
    log = open(log_dir / f"workerlog.{local}", "wb" if job["log_overwrite"] else "ab")  # noqa: SIM115
    log.write(f"--- {time.strftime('%F %T')}: {' '.join(job['command'])}\n".encode())
    log.flush()
    if local == 0:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.connect(str(folder / "terminal"))
                _, descriptors, _, _ = socket.recv_fds(line, 1, 2)
        except OSError as error:
            log.write(f"fleetrun's terminal cannot be reached ({error}); writing here\n".encode())
        else:
            if len(descriptors) == 2:
                log.write(b"the first process of a host writes to the terminal of fleetrun\n")
                log.close()
                return descriptors[0], descriptors[1]
    log.flush()
    return log, log


def environment(log_dir: str) -> dict[str, str]:
    """The environment of the script."""
    variables = dict(os.environ)
    variables["PADDLE_LOG_DIR"] = log_dir
    if variables.pop("PPDIST_CPU", None):
        for name in ("FLAGS_selected_gpus", "FLAGS_selected_cpus"):
            variables.pop(name, None)
        if "CUDA_VISIBLE_DEVICES" in variables:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        variables["PADDLE_DISTRI_BACKEND"] = "gloo"
    return variables


if __name__ == "__main__":
    sys.exit(main())
