"""Supervisor of this host's ranks: starts, watches and ends all processes.

fleetrun starts a worker (worker.py) for each rank itself.  Paddle's launcher, which would load all
of Paddle first, is used only for features that it alone has, such as --master; it does not record
which rank failed first, and when it is killed its workers are orphaned.  So fleetrun itself polls
five times a second, and ends the peers of the rank that failed first.

Whatever an attempt starts has the attempt's own folder in its environment.  So a process
is found even after its parent and its process group are gone, and none outlives the attempt.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from ppdist.common import child
from ppdist.common.errors import LaunchError
from ppdist.common.files import read_json, replace_file
from ppdist.common.job import CHANGE_NOTE, EXIT_DIR_VARIABLE, RUN_NOTE
from ppdist.common.machine import is_alive
from ppdist.common.process import STOPPED, boot_seconds
from ppdist.launch import paddle_launcher, worker
from ppdist.launch.connection import wait_for_any
from ppdist.launch.console import say, say_end
from ppdist.launch.control_channel import ControlChannel
from ppdist.launch.options import Options
from ppdist.launch.outcome import (
    Attempt,
    Outcome,
    RankEnd,
    find_first_cause,
    judge,
    made_step,
    make_failure,
    make_start_failure,
    read_ends,
)
from ppdist.launch.signals import exit_code_of_kill, must_kill
from ppdist.launch.topology import LaunchPlan
from ppdist.launch.watchdog import Watch

_POLL_SECONDS = 0.2  # one poll takes 0.5 ms on a core that is also computing
_PEER_SECONDS = 3.0  # in which ranks that have lost a peer can report it by themselves
_TERM_SECONDS = 1.0  # before ranks get SIGTERM
_KILL_SECONDS = 10.0  # a killed process that waits for a dead disk may never end
_KILL_POLL_SECONDS = 0.02
_RESERVED_BYTES = 16 * 1024  # per rank: its reports, heartbeat and stacks, in pages
_PATH_LIMIT = 100  # a socket's path holds at most 108 bytes


def run_job(
    options: Options,
    plan: LaunchPlan,
    channel: ControlChannel | None,
    folder: Path,
    restarts: int,
    received: list[int],
) -> Outcome:
    """Runs this host's ranks to their end; leaves no process.

    With a channel to other hosts it also waits for their ranks, and all hosts end with the same
    outcome.

    The output of the ranks goes to options.log_dir.

    Args:
        folder: a new private folder, for this attempt only.
        restarts: number of restarts of the job so far.
        received: requests to stop (see `collect_signals`); those for a single rank are added.
    Returns: the outcome; its message is empty if it was already printed.
    Raises: LaunchError: log_dir or the private folder cannot be written.
    """
    log_dir = Path(options.log_dir).absolute()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"{error.strerror}", code="folder_unwritable", where=f"--log_dir {options.log_dir}"
        ) from error
    # Reports of an earlier job would be mistaken for those of this job.
    for rank in plan.ranks:
        (log_dir / f"rank-{rank['PADDLE_TRAINER_ID']}.json").unlink(missing_ok=True)
    python = [sys.executable, "-u"] if options.script.endswith(".py") else []
    job_file = {
        "command": [*python, options.script, *options.script_arguments],
        "log_dir": str(log_dir),
        "restart": restarts,
        "processes": plan.processes,
    }
    (folder.parent / CHANGE_NOTE).unlink(missing_ok=True)
    with private_files(folder):
        (folder / "job.json").write_text(json.dumps(job_file), encoding="utf-8")
        # Ranks that could not say how they ended would count as ranks that never began.
        reserve = folder / "room"
        reserve.write_bytes(bytes(_RESERVED_BYTES * (1 + plan.processes)))
        reserve.unlink()
    attempt = Attempt(folder, log_dir)
    logs = {local: attempt.log(local) for local in range(plan.processes)}
    sizes = {local: log.stat().st_size for local, log in logs.items() if log.is_file()}
    attempt = replace(attempt, offsets=sizes)
    job = _Job(attempt, plan, channel, received)
    outcome = job.run()
    outcome = replace(outcome, made_step=made_step(read_ends(folder), options.trains))
    show_reports(folder, log_dir)
    outcome = outcome if channel is None else channel.finish(outcome, received)
    return replace(outcome, message="") if outcome.message == job.printed_message else outcome


def show_reports(folder: Path, log_dir: Path) -> None:
    """Copies the ranks' reports of how they ended, with their error codes, into the log folder."""
    for report in folder.glob("rank-*.json"):
        # A full disk must not hide how the job ended.
        with suppress(OSError):
            replace_file(log_dir / report.name, report.read_bytes())


class _Job:
    """The ranks of this host in one attempt, from their start to their end.

    Attributes:
        printed_message: the failure that was printed while other ranks still ran, or "".
    """

    def __init__(
        self,
        attempt: Attempt,
        plan: LaunchPlan,
        channel: ControlChannel | None,
        received: list[int],
    ) -> None:
        self._attempt, self._folder, self._plan = attempt, attempt.folder, plan
        self._watch = Watch(attempt, channel is not None, say)
        self._channel, self._received = channel, received
        self._processes: list[child.Process] = []  # the workers by local rank, or the launcher
        self._sigterm_sent = False  # whether SIGTERM was sent to all ranks
        self._stop_sent = False
        self._left = False  # a rank has stopped by itself, and the others follow
        self._ending: float | None = None  # when a rank failed, which ends all ranks
        self._verdict: Outcome | None = None  # set if it does not depend on how ranks ended
        self.printed_message = ""

    def run(self) -> Outcome:
        """Starts the ranks, waits until all have ended, and judges the outcome."""
        terminal = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with terminal, self._attempt.launcher_log.open("wb") as output:
            terminal.bind(str(self._folder / "terminal"))
            terminal.listen()
            try:
                self._start_processes(output)
                # A list, not a generator: `_check_processes` reads the exit code of every process.
                while any([process.poll() is None for process in self._processes]):
                    # A worker asks for the terminal itself, see `worker.open_streams`.
                    if wait_for_any([terminal], _POLL_SECONDS):
                        connection, _ = terminal.accept()
                        with connection:
                            socket.send_fds(connection, [b"t"], [1, 2])
                    self._poll()
                self._check_processes()
            finally:
                self._kill_all()
        if self._verdict is not None:
            return self._verdict
        stopped = self._received[0] if self._received else None
        if self._channel is not None and stopped is None:
            stopped = self._channel.stopped_by
        # Without Paddle's launcher the outcome depends on the ranks alone.
        code = 0 if self._plan.ranks else self._processes[0].returncode
        return judge(self._attempt, code, stopped)

    def _start_processes(self, output: BinaryIO) -> None:
        """Starts all processes.

        Args: output: log of Paddle's launcher, or of the workers until they open their own logs.
        """
        command, ranks = [sys.executable, worker.__file__], self._plan.ranks
        if not ranks:
            # Paddle's launcher writes the whole environment, including secrets, into its log
            # directory, so this is a private one.
            options = self._plan.paddle_options | {"--log_dir": str(self._folder / "paddle")}
            words = [word for option in options.items() for word in option]
            command = [sys.executable, paddle_launcher.__file__, *words, worker.__file__]
        environment = self._plan.environment | {EXIT_DIR_VARIABLE: str(self._folder)}
        for variables in ranks or ({},):
            try:
                process = child.start(
                    command,
                    stdout=output,
                    stderr=output,
                    env=environment | variables,
                    ends_by=signal.SIGTERM,
                    # Schedulers send these signals to all processes of a job.  Ranks learn of them
                    # from fleetrun, or once they have handlers; a rank asked for its stacks too
                    # early writes none.
                    ignored=(signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
                )
            except OSError as error:
                # For example, the user's limit on processes has been reached.
                self._verdict = make_failure(f"a rank cannot be started: {error.strerror}")
                return self._kill_all()
            self._processes.append(process)

    def _poll(self) -> None:
        """Checks for all events since the last poll, and acts on them."""
        others_stop = others_failed = others_wait = False
        if self._channel is not None:
            if not self._stop_sent:
                self._channel.take_in(lambda: _read_saved_step(self._folder.parent))
            others_stop = self._channel.watch(self._received)
            others_failed = others_stop and self._channel.stopped_by is None
            others_wait = others_failed and not self._channel.cause_known
        self._watch.look(others_wait)
        self._check_processes()
        if self._verdict is not None:
            return
        if not self._stop_sent and not self.printed_message:
            self._check_ends()
        if others_failed and self._ending is None:
            self._ending = time.monotonic()
        if must_kill(self._received):
            name = signal.Signals(self._received[-1]).name
            message = f"{name} again: the ranks were killed at once; older checkpoints are intact"
            code, first = exit_code_of_kill(self._received), self._received[0]
            self._verdict = Outcome(
                code, message, first, message, is_consequence=True, time=boot_seconds()
            )
            self._kill_all()
        elif self._ending is not None:
            seconds = time.monotonic() - self._ending
            if seconds > _TERM_SECONDS:
                self._send_sigterm()
            if seconds > _PEER_SECONDS:
                self._kill_all()
        elif not self._stop_sent:
            self._forward_stop(others_stop)

    def _check_processes(self) -> None:
        """Notices a lost launcher, and workers that ended without a report."""
        if self._verdict is not None or self._ending is not None:
            return
        if not self._plan.ranks:
            launcher = self._processes[0]
            if (launcher.returncode or 0) < 0:
                launcher_name = f"Paddle's launcher (process {launcher.pid})"
                name = signal.Signals(-launcher.returncode).name
                self._verdict = make_failure(
                    f"{launcher_name} was killed by {name}, its ranks were ended"
                )
        elif not self._stop_sent and any(process.returncode for process in self._processes):
            begun = {report.rank for report in worker.read_reports(self._folder)}
            for process, variables in zip(self._processes, self._plan.ranks):
                rank = int(variables["PADDLE_TRAINER_ID"])
                if process.returncode and rank not in begun:
                    self._verdict = make_start_failure(self._attempt, f"rank {rank} did not begin")
                    return self._kill_all()

    def _check_ends(self) -> None:
        """Judges the ranks that have ended; a failure ends the other ranks."""
        ends = _read_ended(self._folder, self._ending is None)
        if any(end.failed for end in ends):
            cause = find_first_cause(self._attempt, ends)
            if cause is not None:
                self.printed_message = cause.message
                say_end(cause)
                if self._channel is not None:
                    self._channel.tell_failure(cause)
            # The host whose rank was lost may need a moment to notice, and may know more.
            self._ending = self._ending or time.monotonic()
        elif any(end.exit_code == STOPPED for end in ends):
            self._left = True

    def _forward_stop(self, others_stop: bool) -> None:
        """Forwards a signal that one process received to all ranks."""
        if self._received:
            name = signal.Signals(self._received[0]).name
            say(f"got {name}: stopping all ranks after their step; a second signal kills them")
        for path in sorted(self._folder.glob("stop-*")):
            if self._received or others_stop:
                break
            with suppress(ValueError, OSError):
                number = signal.Signals(int(path.read_text()))
                rank = path.name.removeprefix("stop-")
                say(f"rank {rank} got {number.name}: stopping all ranks")
                self._received.append(number)
        if self._received or others_stop or self._left:
            self._stop_sent = True
            if self._channel is not None and self._channel.hosts_change:
                replace_file(self._folder.parent / CHANGE_NOTE, b"true")
            self._send_sigterm()

    def _send_sigterm(self) -> None:
        """Sends SIGTERM to all ranks' process groups, once."""
        if self._sigterm_sent:
            return
        self._sigterm_sent = True
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)

    def _kill_all(self) -> None:
        """Kills all remaining processes of this attempt."""
        for process in self._processes:
            if process.poll() is None:
                # Paddle's launcher has to die before its workers, or it would react to their end.
                process.kill()
                process.wait()
        unkillable = _kill_processes(self._folder)
        if unkillable:
            ids = ", ".join(str(pid) for pid in unkillable)
            say(f"processes {ids} were killed but do not exit: blocked by a disk or a driver")


def _read_saved_step(job_folder: Path) -> int:
    """Reads the step of this job's newest checkpoint on this host; 0 if there is none.

    Args: job_folder: the folder of the job.
    """
    note = read_json(job_folder / RUN_NOTE)
    return int(note["saved"]) if note else 0


def _read_ended(folder: Path, by_themselves: bool) -> list[RankEnd]:
    """Reads which ranks of this host have ended, and how.

    Args:
        by_themselves: no rank is being terminated.  In this case a rank whose watcher (worker.py)
            is gone without a report was killed, and its report is written here.
    """
    ends = read_ends(folder)
    lost = [
        end for end in ends if by_themselves and end.exit_code is None and not is_alive(end.pid)
    ]
    if lost:
        # One of these ranks may have reported meanwhile.
        ends = read_ends(folder)
        ends_by_rank = {end.rank: end for end in ends}
        for end in lost:
            if ends_by_rank[end.rank].exit_code is None:
                worker.end_report(folder, end.rank, end.local, -signal.SIGKILL)
        ends = read_ends(folder)
    return [end for end in ends if end.exit_code is not None]


def _kill_processes(folder: Path) -> list[int]:
    """Kills all processes of the attempt and waits for them.

    Returns: ids of the processes that do not end.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while pids := worker.find_processes(folder):
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return pids
        time.sleep(_KILL_POLL_SECONDS)
    return []


@contextmanager
def private_files(folder: Path) -> Iterator[None]:
    """Converts an error in writing to the private folder into an error for the user.

    Raises: LaunchError: a write inside the block failed.
    """
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"{folder} cannot be written ({error.strerror}); fleetrun keeps reports of ranks there",
            code="temporary_folder_unwritable",
            fix="free disk space, or set TMPDIR to a folder that has some",
        ) from error


@contextmanager
def private_folder() -> Iterator[Path]:
    """Creates a temporary folder with mode 700 whose path is short enough for a socket."""
    with private_files(Path(os.environ.get("TMPDIR", "/tmp"))):
        base = tempfile.gettempdir()
        if len(base) > _PATH_LIMIT - 30:
            base = "/tmp"
        temporary = tempfile.TemporaryDirectory(
            prefix="ppdist-", dir=base, ignore_cleanup_errors=True
        )
    wanted = os.environ.get("TMPDIR", "")
    # Python silently uses another folder if it cannot write to TMPDIR.
    if wanted and tempfile.gettempdir() != os.path.abspath(wanted):
        say(f"note: TMPDIR={wanted} is full or cannot be written; using {base}")
    with temporary as folder:
        yield Path(folder)
