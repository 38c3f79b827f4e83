"""Runs Paddle's launcher as a child, hands the terminal to the first rank, passes signals on."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ppdist.errors import EXIT_DIR_VARIABLE, LaunchError
from ppdist.launch import worker
from ppdist.launch.line import Line
from ppdist.launch.options import Options
from ppdist.launch.outcome import Outcome, judge
from ppdist.launch.plan import LaunchPlan

_POLL_SECONDS = 0.1
_PATH_LIMIT = 100  # a socket's path holds at most 108 bytes


def run_job(options: Options, plan: LaunchPlan, line: Line | None) -> Outcome:
    """Starts the processes of this host and waits for their end; the outcome is not printed.

    With a line to other hosts it waits for theirs as well, and all hosts end alike.

    Paddle's launcher writes the whole environment, secrets too, into its log directory.  It gets a
    private one that is removed in the end; what the ranks print is in options.log_dir.

    Raises: LaunchError: log_dir cannot be written.
    """
    log_dir = Path(options.log_dir).absolute()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--log_dir {options.log_dir}: {error.strerror}") from error
    with _private_folder() as folder:
        job = {
            "command": _command(options),
            "log_dir": str(log_dir),
            "log_overwrite": options.log_overwrite,
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        offsets = {
            local: 0 if options.log_overwrite else _size(log_dir / f"workerlog.{local}")
            for local in range(plan.processes)
        }
        launcher_log = folder / "launcher.log"
        with _signals_noted() as received:
            code = _run_launcher(plan, folder, launcher_log, received, line)
            stopped = received[0] if received else None
            if line is not None and stopped is None:
                stopped = line.stopped_by
            outcome = judge(folder, log_dir, offsets, code, stopped, launcher_log)
            return outcome if line is None else line.finish(outcome, received)


def _run_launcher(
    plan: LaunchPlan, folder: Path, log: Path, received: Sequence[int], line: Line | None
) -> int:
    """Exit code of Paddle's launcher, which is stopped by each new signal in `received`."""
    command = [sys.executable, "-m", "paddle.distributed.launch", *plan.arguments]
    command += ["--log_dir", str(folder / "paddle"), worker.__file__]
    terminal = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    parent = os.getpid()
    with terminal, log.open("wb") as output:
        terminal.bind(str(folder / "terminal"))
        terminal.listen()
        launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=plan.environment | {EXIT_DIR_VARIABLE: str(folder)},
            start_new_session=True,  # Ctrl-C reaches us alone, and is forwarded once
            preexec_fn=lambda: worker.end_with_parent(signal.SIGTERM, parent),
        )
        signals, stop_sent = 0, False
        while launcher.poll() is None:
            if select.select([terminal], [], [], _POLL_SECONDS)[0]:
                _hand_over_terminal(terminal)
            others_stop = line is not None and line.watch(received)
            if len(received) > signals or (others_stop and not stop_sent):
                signals, stop_sent = len(received), True
                launcher.send_signal(signal.SIGTERM)
    return launcher.returncode


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Yields the list to which each SIGTERM, SIGINT and SIGHUP is added; nothing else happens."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in numbers
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hand_over_terminal(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        sys.stdout.flush()
        sys.stderr.flush()
        socket.send_fds(connection, [b"t"], [1, 2])


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder that only this user can read, removed in the end, with a path fit for a socket."""
    base = tempfile.gettempdir()
    if len(base) > _PATH_LIMIT - 30:
        base = "/tmp"
    with tempfile.TemporaryDirectory(
        prefix="ppdist-", dir=base, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _command(options: Options) -> list[str]:
    if options.script.endswith(".py"):
        return [sys.executable, "-u", options.script, *options.script_arguments]
    return [options.script, *options.script_arguments]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
